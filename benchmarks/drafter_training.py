"""Trains a one-layer EAGLE drafter on answers the engine captured features of: enough to measure speculation on a real policy.

Row i combines the policy's features at i with the token at i + 1 and predicts the features at i + 1, and through the policy's
head the token at i + 2. Training goes several steps deep on the drafter's own outputs (as HASS and EAGLE-3 do): at step j row i
gets the output of step j - 1 at row i - 1 instead of features, and attends as it will when drafting, to true features up to row
i - j and to its own path since.

Inputs are divided by their root mean square (an embedding's is far smaller than a final state's: plain weights would spend long
on that alone) and the scales are folded into the weights at the end, so what comes out is a plain drafter.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.drafters.eagle import Eagle, EagleConfig
from paceline.kernels import TorchOps, apply_rope
from paceline.models.attend import AttentionShape
from paceline.models.decoder import Decoder, Rope
from paceline.types import RolloutGroup

_CHUNK = 2048
"""Rows whose logits exist at once."""


@dataclass(frozen=True, slots=True)
class TrainOptions:
    seconds: float = 160.0
    max_steps: int | None = None
    depth: int = 4
    """Steps on own outputs, the first (on the policy's) included."""
    batch: int = 16
    """Answers per update."""
    lr: float = 5e-4
    hidden_weight: float = 1.0
    """Of SmoothL1 between own output and the policy's next features, both divided by the features' root mean square."""
    cross_weight: float = 0.1
    """Of the cross-entropy to the policy's softmax."""
    draft_vocab: int = 32768
    """Tokens the drafter can guess: those most frequent in the answers. 0: all."""
    max_length: int = 1024
    """Answers are cut behind so many tokens, their prompts included."""
    seed: int = 0


class Answer(NamedTuple):
    tokens: Tensor  # [N] int64 prompt and answer
    features: Tensor  # [N - 1, H] final-norm outputs
    prompt_length: int
    seed: int
    temperature: float


class Trained(NamedTuple):
    drafter: Eagle
    """In the policy's dtype, ready for an engine."""
    log: list[dict[str, float]]
    steps: int
    seconds: float


def answers_of(groups: Sequence[RolloutGroup], temperature: float = 1.0, max_length: int = 1024) -> list[Answer]:
    """Of an engine with `capture=(-1,)`. Answers of a token or two teach nothing and are left out."""
    found = []
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        record = rollout.features
        if record is None or len(record.token_ids) < len(rollout.prompt_ids) + 3:
            continue
        assert record.layers == (-1,), "EAGLE reads the final norm's output"
        size = min(len(record.token_ids), max_length)
        features = record.features[: size - 1]
        tokens = torch.tensor(record.token_ids[:size], device=features.device)
        found.append(Answer(tokens, features, record.prompt_length, rollout.seed, temperature))
    return found


def train(policy: Decoder, answers: Sequence[Answer], options: TrainOptions, say: Any = print) -> Trained:
    """Until `options.seconds` (or `max_steps`) are over; the learning rate follows."""
    began = time.perf_counter()
    scales = Scales.of(policy, answers)
    module = _fresh(policy, answers, scales, options)
    optimizer = torch.optim.AdamW(module.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.01,
                                  fused=policy.norm.device.type == "cuda")
    rope = Rope(policy.config, options.max_length, torch.float32, policy.norm.device)
    head = policy.head.weight if module.draft_ids is None else policy.head.weight[module.draft_ids].contiguous()
    batches = batches_of(answers, options)
    log: list[dict[str, float]] = []
    step, progress = 0, 0.0
    while progress < 1:
        for group in optimizer.param_groups:
            group["lr"] = options.lr * min(1.0, progress / 0.03 + 0.03) * (0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2)
        losses = losses_of(module, policy, head, scales, rope, next(batches), options)
        (options.hidden_weight * losses.hidden.mean() + options.cross_weight * losses.cross.mean()).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 10 == 0 or options.max_steps is not None:  # reading a loss waits for the device, so the clock is right
            entry = {"step": step, "seconds": time.perf_counter() - began, "hidden": float(losses.hidden.detach().mean()),
                     **{f"excess_{j + 1}": x for j, x in enumerate((losses.cross - losses.entropy).detach().tolist())}}
            if not log or entry["seconds"] - log[-1]["seconds"] >= options.seconds / 12:
                log.append(entry)
                say("  ".join(f"{key} {value:.4g}" for key, value in entry.items()))
        progress = (time.perf_counter() - began) / options.seconds
        if options.max_steps is not None:
            progress = max(progress, step / options.max_steps)
    return Trained(_folded(module, policy, scales), log, step, time.perf_counter() - began)


# --- batches


class Batch(NamedTuple):
    """Answers side by side, padded to L rows. Row i: features at i, token at i + 1."""

    follow: Tensor  # [B, L] int64 the token at i + 1
    features: Tensor  # [B, L + 1, H] of the policy at i; one row more, so that row i + 1 is row i's target
    predicted: Tensor  # [B, L] int64 the token at i + 2
    first: Tensor  # [B] row that predicts the answer's first token
    length: Tensor  # [B] rows that are real
    seed: Tensor  # [B] int64
    temperature: Tensor  # [B] float32

    def rows(self, step: int) -> Tensor:
        """[B, L] bool: rows that a path of `step` own outputs, begun within the answer, can have reached."""
        row = torch.arange(self.follow.shape[1], device=self.follow.device)
        return (row >= self.first[:, None] + step) & (row < self.length[:, None])


def collate(answers: Sequence[Answer]) -> Batch:
    device = answers[0].tokens.device
    longest, hidden = max(len(a.tokens) for a in answers) - 2, answers[0].features.shape[1]
    follow = torch.zeros(len(answers), longest, dtype=torch.int64, device=device)
    predicted = torch.zeros_like(follow)
    features = answers[0].features.new_zeros(len(answers), longest + 1, hidden)
    for i, answer in enumerate(answers):
        size = len(answer.tokens)
        follow[i, : size - 2], predicted[i, : size - 2] = answer.tokens[1:-1], answer.tokens[2:]
        features[i, : size - 1] = answer.features
    return Batch(
        follow, features, predicted, first=torch.tensor([max(0, a.prompt_length - 2) for a in answers], device=device),
        length=torch.tensor([len(a.tokens) - 2 for a in answers], device=device),
        seed=torch.tensor([(a.seed + 2**63) % 2**64 - 2**63 for a in answers], device=device),  # the same 64 bits, signed
        temperature=torch.tensor([a.temperature for a in answers], device=device))


def batches_of(answers: Sequence[Answer], options: TrainOptions) -> Iterator[Batch]:
    """For ever; answers of similar length together, so that little is padding."""
    draw, size = random.Random(options.seed), options.batch
    while True:
        order = draw.sample(range(len(answers)), len(answers))
        pools = [sorted(order[i : i + 16 * size], key=lambda a: len(answers[a].tokens)) for i in range(0, len(order), 16 * size)]
        cuts = [pool[i : i + size] for pool in pools for i in range(0, len(pool), size)]
        for cut in draw.sample(cuts, len(cuts)):
            yield collate([answers[a] for a in cut])


# --- the drafter's passes


class Scales(NamedTuple):
    """Root mean squares that a drafter in training divides by."""

    embedding: float
    features: float

    @classmethod
    def of(cls, policy: Decoder, answers: Sequence[Answer]) -> Scales:
        some = torch.cat([answer.features for answer in answers[:64]])
        tokens = torch.cat([answer.tokens for answer in answers[:64]])
        embedded = policy.embed(tokens)
        return cls(*(float(x.float().square().mean().sqrt()) for x in (embedded, some)))


class PathAttend:
    """Attention of one training step after the other over a padded batch; remembers the steps' keys and values.

    Row l of step j sees step 0 (true features) up to row l - j, and of step m = 1..j the one row l - j + m: its own path."""

    def __init__(self, rope: Rope, batch: int, length: int) -> None:
        self.ops = TorchOps()
        self._cos, self._sin = (x.repeat(batch, 1) for x in rope(torch.arange(length, device=rope.cos.device)))
        self._shape = (batch, length)
        self._steps: list[tuple[Tensor, Tensor]] = []

    def __call__(self, layer: AttentionShape, qkv: Tensor) -> Tensor:
        """[B L, (H + 2 Hkv) D] -> [B L, H D]."""
        heads, kv_heads, dim = layer.num_heads, layer.num_kv_heads, layer.head_dim
        q, k, v = qkv.unflatten(-1, (-1, dim)).split((heads, kv_heads, kv_heads), dim=1)
        q, k = (apply_rope(x, self._cos, self._sin).to(qkv.dtype) for x in (q, k))
        q, k, v = (x.unflatten(0, self._shape).transpose(1, 2) for x in (q, k, v))  # [B, heads, L, D]
        q = q.unflatten(1, (kv_heads, -1)) * dim**-0.5  # [B, Hkv, G, L, D]
        self._steps.append((k, v))
        j, length = len(self._steps) - 1, self._shape[1]
        place = torch.arange(length, device=q.device)
        true_k, true_v = self._steps[0]
        scores = torch.einsum("bhgld,bhmd->bhglm", q, true_k).masked_fill(place > (place - j)[:, None], -torch.inf)
        own = [(_down(k, j - m), _down(v, j - m)) for m, (k, v) in enumerate(self._steps) if m > 0]
        path = [(q * k[:, :, None]).sum(-1, keepdim=True) for k, _ in own]
        weights = torch.cat([scores, *path], dim=-1).softmax(-1, dtype=torch.promote_types(torch.float32, q.dtype)).to(q.dtype)
        out = torch.einsum("bhglm,bhmd->bhgld", weights[..., :length], true_v)
        for index, (_, v) in enumerate(own):
            out = out + weights[..., length + index, None] * v[:, :, None]
        return out.flatten(1, 2).transpose(1, 2).flatten(0, 1).flatten(1)


def outputs(module: Eagle, policy: Decoder, scales: Scales, rope: Rope, batch: Batch, depth: int) -> list[Tensor]:
    """The drafter's outputs [B, L, H] at steps 0..depth-1 along the tokens that were really drawn."""
    size, length = batch.follow.shape
    attend = PathAttend(rope, size, length)
    embedded = (policy.embed(batch.follow) / scales.embedding).flatten(0, 1)
    state = batch.features[:, :-1] / scales.features
    found = []
    for _ in range(depth):
        found.append(module(embedded, state.flatten(0, 1), attend).unflatten(0, (size, length)))
        state = _down(found[-1], 1)
    return found


def _down(x: Tensor, rows: int) -> Tensor:
    """[B, …, L, D]: row l takes what row l - rows had; zeros come in."""
    return x if rows == 0 else F.pad(x[..., : x.shape[-2] - rows, :], (0, 0, rows, 0))


# --- losses


class Losses(NamedTuple):
    hidden: Tensor  # [depth]
    cross: Tensor  # [depth]
    entropy: Tensor  # [depth] of the policy: what cross-entropy cannot go below


def losses_of(module: Eagle, policy: Decoder, head: Tensor, scales: Scales, rope: Rope, batch: Batch,
              options: TrainOptions) -> Losses:
    narrow = policy.norm.dtype
    with torch.autocast(policy.norm.device.type, dtype=narrow, enabled=narrow in (torch.bfloat16, torch.float16)):
        out = outputs(module, policy, scales, rope, batch, options.depth)
    keep = batch.rows(0)
    own = torch.stack([x[keep] for x in out]).to(torch.promote_types(torch.float32, out[0].dtype))  # [J, R, H]
    wanted = batch.features[:, 1:][keep]  # [R, H]
    weight = torch.stack([batch.rows(j)[keep] for j in range(options.depth)]).to(own.dtype)
    weight = weight / weight.sum(1, keepdim=True).clamp_min(1)  # [J, R]
    distance = F.smooth_l1_loss(own, (wanted / scales.features).to(own.dtype).expand_as(own), reduction="none").mean(-1)
    cross, entropy = SoftCrossEntropy.apply(own * scales.features, wanted, head, weight)
    return Losses((distance * weight).sum(1), cross, entropy)


class SoftCrossEntropy(torch.autograd.Function):
    """Of the drafter's outputs against the policy's softmax, both through the policy's frozen head. Logits exist for a chunk of
    rows at a time, and their gradient is worked out on the spot: the backward pass needs no second product."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, wanted: Tensor, head: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """own [J, R, H], wanted [R, H], head [V, H], weight [J, R] -> (cross-entropy, entropy), each [J] weighted sums."""
        gradient = torch.empty_like(own)
        cross, entropy = (weight.new_zeros(len(own)) for _ in range(2))
        for first in range(0, len(wanted), _CHUNK):
            rows = slice(first, first + _CHUNK)
            log_p = torch.log_softmax((wanted[rows].to(head.dtype) @ head.T).to(own.dtype), dim=-1)
            p = log_p.exp()
            entropy -= weight[:, rows] @ (p * log_p).sum(-1)
            for j in range(len(own)):
                log_q = torch.log_softmax((own[j, rows].to(head.dtype) @ head.T).to(own.dtype), dim=-1)
                cross[j] -= (weight[j, rows] * (p * log_q).sum(-1)).sum()
                difference = log_q.exp_().sub_(p).mul_(weight[j, rows, None])
                gradient[j, rows] = (difference.to(head.dtype) @ head).to(own.dtype)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(entropy)
        return cross, entropy

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0][:, None, None], None, None, None


# --- a fresh drafter, and its scales folded in


def _fresh(policy: Decoder, answers: Sequence[Answer], scales: Scales, options: TrainOptions) -> Eagle:
    """At first it says: the next features are these. float32, gradients on."""
    config = EagleConfig.for_policy(policy.config)
    shape = replace(config.model, rms_eps=config.model.rms_eps / scales.features**2)  # of a stream divided by the scale
    ids = draft_vocabulary(answers, options.draft_vocab, policy.config.vocab_size)
    hidden, device = shape.hidden_size, policy.norm.device
    dtype = torch.promote_types(torch.float32, policy.norm.dtype)
    module = Eagle.random(replace(config, model=shape), options.seed, hidden**-0.5, dtype, device,
                          None if ids is None else ids.to(device))
    with torch.no_grad():
        module.fc.weight[:, :hidden] *= 0.5
        module.fc.weight[:, hidden:] = torch.eye(hidden, dtype=dtype, device=device)
        module.attention.o.weight.zero_()
        module.mlp.down.weight.zero_()
    return module.requires_grad_(True)


def _folded(module: Eagle, policy: Decoder, scales: Scales) -> Eagle:
    """The same drafter on plain embeddings and features, in the policy's dtype."""
    hidden = policy.config.hidden_size
    plain = Eagle(EagleConfig.for_policy(policy.config), module.draft_ids).to(policy.norm.device, torch.float64)
    plain.load_state_dict(module.state_dict())
    with torch.no_grad():
        plain.fc.weight[:, :hidden] *= scales.features / scales.embedding
        plain.attention.qkv.weight /= scales.features
        plain.attention.o.weight *= scales.features
        plain.mlp.down.weight *= scales.features
    return plain.to(policy.norm.dtype).requires_grad_(False)


def draft_vocabulary(answers: Sequence[Answer], size: int, vocabulary: int) -> Tensor | None:
    """Ids in order: the most frequent here, then the lowest (merges were learnt in the order of their use). None: all."""
    if size == 0 or size >= vocabulary:
        return None
    counts = Counter(token for answer in answers for token in answer.tokens.tolist())
    best = [token for token, _ in counts.most_common(size)]
    rest = (token for token in range(vocabulary) if token not in counts)
    return torch.tensor(sorted([*best, *(next(rest) for _ in range(size - len(best)))]))
