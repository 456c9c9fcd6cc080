"""The drafter's training loss.

`DrafterLoss` computes the loss of one micro-batch: the drafter is unrolled over packed records, its hidden states are regressed
to the policy's features and its distribution to the policy's. Below it are the formulas as stateless functions, where p is the
policy's distribution and q the drafter's. Each objective exists twice: as a differentiable value, written like its formula, and
as value and gradient with respect to the drafter's logits computed together, which `target_loss` uses for a chunk of rows at a
time (on a GPU with one Triton kernel per chunk).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.drafters.eagle import Eagle
from paceline.kernels import Ops
from paceline.kernels.upload import upload
from paceline.models.decoder import Decoder, Rope
from paceline.spot.attention import UnrolledAttend
from paceline.spot.config import SpotConfig
from paceline.spot.packing import PackedRecords, align, answer_rows, unroll
from paceline.spot.scaling import Scales

MAX_LOGITS = {"cpu": 2**22, "cuda": 2**27}
"""Number of the drafter's logits that exist at the same time, by type of device."""


class LossSums(NamedTuple):
    """Loss of one or more micro-batches. Everything but `total` is a weighted sum over rows for each of J unroll steps, without
    gradient."""

    total: Tensor  # [] the loss, with gradient
    hidden: Tensor  # [J] SmoothL1 to the policy's features
    target: Tensor  # [J] the objective
    overlap: Tensor  # [J] overlap of the two distributions
    top1: Tensor  # [J] rows where both distributions have the same most likely token
    weight: Tensor  # [J] total weight of the rows

    def plus(self, other: LossSums | None) -> LossSums:
        """Returns the sum of both, without gradient."""
        total = self.total.detach()
        if other is None:
            return self._replace(total=total)
        return LossSums(total + other.total, *map(torch.add, self[1:], other[1:]))

    def means(self) -> dict[str, float]:
        """Returns the mean per row of each part, overlap and top-1 agreement by depth."""
        weight = self.weight.clamp_min(1e-30)
        found = {"hidden": float(self.hidden.sum() / weight.sum()), "target": float(self.target.sum() / weight.sum())}
        for name, values in (("overlap", self.overlap), ("top1", self.top1)):
            found |= {f"{name}/{depth}": value for depth, value in enumerate((values / weight).tolist(), start=1)}
        return found


class DrafterLoss:
    """Loss of a micro-batch of packed records. It only reads the policy, of which it needs the embedding and the head."""

    def __init__(self, policy: Decoder, config: SpotConfig, scales: Scales, ops: Ops, rope: Rope) -> None:
        self.config, self.recipe, self.scales = config, config.recipe, scales
        self._policy, self._ops, self._rope = policy, ops, rope
        self._head: Tensor | None = None

    def policy_changed(self) -> None:
        """Must be called after the policy's weights changed: a reduced vocabulary gathers its rows of the head again."""
        self._head = None

    def row_weights(self, sizes: Sequence[tuple[int, int]]) -> list[float]:
        """Returns the weight of one row at each unroll step, given (number of tokens, prompt length) of all records of an
        optimizer step. All rows weigh the same, whatever micro-batch they are packed into."""
        weights = step_weights(self.recipe.unroll, self.recipe.decay)
        counts = [sum(answer_rows(tokens, prompt, k) for tokens, prompt in sizes) for k in range(self.recipe.unroll)]
        return [w / max(1, count) for w, count in zip(weights, counts, strict=True)]

    def __call__(self, module: Eagle, packed: PackedRecords, row_weights: Sequence[float],
                 generator: torch.Generator | None = None) -> LossSums:
        """Computes the loss of one micro-batch. generator: Source of the noise on the features; None adds none."""
        aligned = align(self._unroll(module, packed, generator), packed)
        outputs = aligned.outputs.to(torch.promote_types(torch.float32, aligned.outputs.dtype))  # [J, T, H]
        targets = packed.targets[aligned.rows]  # [T, H]
        weight = aligned.valid * upload(np.array(row_weights), outputs.device).to(outputs.dtype)[:, None]
        hidden = self._hidden(outputs, targets, weight)
        target = self._target(module, outputs, targets, weight)
        total = self.recipe.hidden_weight * hidden.sum() + self.recipe.target_weight * target.loss.sum()
        return LossSums(total, hidden.detach(), target.loss.detach(), target.overlap, target.top1, weight.sum(1))

    def _unroll(self, module: Eagle, packed: PackedRecords, generator: torch.Generator | None) -> list[Tensor]:
        narrow, scales = self._policy.norm.dtype, self.scales
        features = packed.features / scales.features.to(packed.features.dtype)  # powers of two: exact
        if generator is not None:
            noise = torch.rand(features.shape, generator=generator, device=features.device, dtype=torch.float32)
            features = features + ((2 * noise - 1) * self.config.feature_noise).to(features.dtype)
        with torch.autocast(features.device.type, dtype=narrow, enabled=narrow in (torch.bfloat16, torch.float16)):
            embedded = self._policy.embed(packed.next_tokens) / scales.embedding
            attend = UnrolledAttend(self._ops, self._rope, packed)
            return unroll(module, embedded, module.encode(features, self._ops), attend, packed.answers, self.recipe.unroll)

    def _hidden(self, outputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
        """Returns the weighted feature regression loss of each unroll step, [J]."""
        if self.recipe.hidden_weight == 0:
            return weight.new_zeros(len(outputs))
        return (hidden_distance(outputs, (targets / self.scales.residual).to(outputs.dtype)) * weight).sum(1)

    def _target(self, module: Eagle, outputs: Tensor, targets: Tensor, weight: Tensor) -> TargetLoss:
        outputs = outputs * self.scales.residual
        if module.norm is not None:
            outputs = self._ops.rms_norm(outputs, module.norm, module.config.model.rms_eps)
        policy_head = self._policy_head(module)
        heads = Heads(policy_head if module.head is None else module.head.weight, policy_head, self.config.temperature)
        return target_loss(outputs, targets, weight, heads, self.config.objective)

    def _policy_head(self, module: Eagle) -> Tensor:
        if self._head is None:
            weight = self._policy.head.weight.detach()
            self._head = weight if module.draft_ids is None else weight[module.draft_ids].contiguous()
        return self._head


# -- formulas


def step_weights(unroll: int, decay: float) -> list[float]:
    """Returns the weight of each unroll step: decay^k, normalised to a sum of 1."""
    raw = [decay**k for k in range(unroll)]
    return [x / sum(raw) for x in raw]


def hidden_distance(outputs: Tensor, targets: Tensor) -> Tensor:
    """SmoothL1, [..., H] -> [...]: the mean over H of d²/2 where |d| < 1 and of |d| - 1/2 elsewhere."""
    return F.smooth_l1_loss(outputs, targets.expand_as(outputs), reduction="none").mean(-1)


def cross_entropy(logits: Tensor, policy_logits: Tensor) -> Tensor:
    """Cross-entropy -Σ p log q, [..., V] -> [...]."""
    return -(policy_logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)


def overlap(logits: Tensor, policy_logits: Tensor) -> Tensor:
    """Overlap Σ min(p, q) = 1 - TV, [..., V] -> [...], where TV is the total variation distance. Two samplers that share their
    Gumbel noise draw the same token with a probability between (1 - TV) / (1 + TV) and 1 - TV, so a larger overlap means a
    higher acceptance."""
    return torch.minimum(policy_logits.softmax(-1), logits.softmax(-1)).sum(-1)


class ValueAndGradient(NamedTuple):
    """Value of an objective and its gradient with respect to the drafter's logits."""

    value: Tensor  # [...]
    gradient: Tensor  # [..., V]


def cross_entropy_and_gradient(log_q: Tensor, log_p: Tensor) -> ValueAndGradient:
    """The gradient of -Σ p log q with respect to the logits is q - p."""
    p = log_p.exp()
    return ValueAndGradient(-(p * log_q).sum(-1), log_q.exp() - p)


def disagreement_and_gradient(log_q: Tensor, log_p: Tensor) -> ValueAndGradient:
    """Negative log-overlap -log Σ min(p, q). Total variation itself has almost no gradient at tokens that q considers
    impossible; its logarithm does. Where the policy is certain, this is the cross-entropy.

    With r = min(p, q) / Σ min(p, q) and A = {v: q < p}, its gradient with respect to the logits is q Σ_A r - r on A and q Σ_A r
    elsewhere."""
    smaller = torch.minimum(log_p, log_q)
    total = smaller.logsumexp(-1, keepdim=True)
    rising = smaller.sub_(total).exp_().mul_(log_q < log_p)  # r on A
    return ValueAndGradient(-total[..., 0], log_q.exp().mul_(rising.sum(-1, keepdim=True)).sub_(rising))


OBJECTIVES: dict[str, Callable[[Tensor, Tensor], ValueAndGradient]] = {
    "cross_entropy": cross_entropy_and_gradient, "agreement": disagreement_and_gradient}


# -- the objective over a large vocabulary, without ever holding all logits


class Heads(NamedTuple):
    """Output projections from hidden states to logits over the drafter's vocabulary."""

    drafter: Tensor  # [V, H]
    policy: Tensor  # [V, H] the same tensor unless the drafter has a head of its own
    temperature: float


class TargetLoss(NamedTuple):
    """Weighted sums over rows for each unroll step, each [J]. Only `loss` has a gradient."""

    loss: Tensor
    overlap: Tensor
    top1: Tensor  # rows where both distributions have the same most likely token


def target_loss(own: Tensor, wanted: Tensor, weight: Tensor, heads: Heads, objective: str, max_logits: int | None = None,
                fused: bool | None = None) -> TargetLoss:
    """Computes the objective between the drafter's and the policy's distributions.

    Logits are computed for a chunk of rows at a time, so that a large vocabulary does not exhaust memory. Over a reduced
    vocabulary both distributions are conditional on the token being in it.

    Args:
        own: [J, R, H] hidden states of the drafter.
        wanted: [R, H] hidden states of the policy.
        weight: [J, R] weight of each row.
        heads: Output projections.
        objective: A key of `OBJECTIVES`.
        max_logits: Number of logits of the drafter per chunk; None chooses it by device.
        fused: Whether to use the Triton kernel; None uses it where it is available.
    """
    if max_logits is None:
        max_logits = MAX_LOGITS.get(own.device.type, MAX_LOGITS["cuda"])
    if fused is None:
        fused = own.is_cuda and heads.policy.dtype in (torch.bfloat16, torch.float16) and find_spec("triton") is not None
    compute = partial(_fused if fused else _plain, temperature=heads.temperature, objective=objective)
    return TargetLoss(*_ChunkedTargetLoss.apply(own, wanted, weight, heads.drafter, heads.policy, compute, max_logits))


class _ChunkedTargetLoss(torch.autograd.Function):
    """The forward pass computes the gradient together with the value, so the backward pass needs no second head projection."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, wanted: Tensor, weight: Tensor, head: Tensor, policy_head: Tensor,
                compute: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]],
                max_logits: int) -> tuple[Tensor, Tensor, Tensor]:
        gradient = torch.empty_like(own)
        head_gradient = torch.zeros_like(head) if ctx.needs_input_grad[3] else None
        loss, shared, top1 = (weight.new_zeros(len(own)) for _ in range(3))
        narrow, wide = head.to(policy_head.dtype), own.dtype
        size = max(1, max_logits // (len(own) * len(head)))
        for first in range(0, len(wanted), size):
            rows = slice(first, first + size)
            each = weight[:, rows]  # [J, c]
            p = wanted[rows].to(policy_head.dtype) @ policy_head.T
            q = own[:, rows].to(narrow.dtype) @ narrow.T
            logits_gradient, *sums = compute(q, p, each)
            for total, found in zip((loss, shared, top1), sums, strict=True):
                total += (each * found).sum(-1)
            gradient[:, rows] = (logits_gradient @ narrow).to(wide)
            if head_gradient is not None:
                head_gradient += (logits_gradient.flatten(0, 1).T @ own[:, rows].flatten(0, 1).to(narrow.dtype)).to(head.dtype)
        ctx.save_for_backward(gradient, head_gradient)
        ctx.mark_non_differentiable(shared, top1)
        return loss, shared, top1

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of a drafter's own head is summed over unroll steps, so the caller must weigh all steps equally."""
        gradient, head_gradient = ctx.saved_tensors
        head = None if head_gradient is None else head_gradient * outer[0].mean()
        return gradient * outer[0][:, None, None], None, None, head, None, None, None


def _plain(q: Tensor, p: Tensor, weight: Tensor, temperature: float, objective: str) -> tuple[Tensor, ...]:
    """Logits q [J, c, V] and p [c, V] -> gradient of weight * value with respect to q; value, overlap and top-1 [J, c]."""
    log_p, log_q = ((x.to(weight.dtype) / temperature).log_softmax(-1) for x in (p, q))
    shared = torch.minimum(log_p, log_q).exp_().sum(-1)
    top1 = log_q.argmax(-1) == log_p.argmax(-1)
    value, gradient = OBJECTIVES[objective](log_q, log_p.expand_as(log_q))
    return gradient.mul_(weight[..., None] / temperature).to(q.dtype), value, shared, top1


def _fused(q: Tensor, p: Tensor, weight: Tensor, temperature: float, objective: str) -> tuple[Tensor, ...]:
    """The same as `_plain` in one Triton kernel, which writes the gradient over q."""
    from paceline.kernels.triton.drafter_loss import drafter_loss_  # imported here because Triton may be missing

    return q, *drafter_loss_(q, p, weight, temperature, objective == "agreement")
