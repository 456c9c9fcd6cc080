"""Models of a training step, built on the decoder: the policy, and a scorer (critic, reward model) with a single output per
row. They process packed micro-batches and hold no optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.utils.checkpoint import checkpoint

from paceline.kernels import SamplingTensors, choose_backend
from paceline.kernels.reference.ops import thresholds
from paceline.kernels.reference.training import TrainOps
from paceline.models.attend import PackedAttend
from paceline.models.decoder import Decoder, Layer, Rope
from paceline.models.routing import Routing
from paceline.models.state_dict import load_state
from paceline.models.weights import empty_model, open_checkpoint
from paceline.rl.batch import MicroBatch
from paceline.rl.exact import ExactForward, with_gradient_of

HEAD_ROWS = 1024
"""Maximum number of rows whose logits exist at the same time: with a vocabulary of 150,000 they would otherwise fill the
memory."""
_SCORE = "score.weight"


class SamplingFilters(NamedTuple):
    """Which tokens the engine samples from, as in `SamplingParams`."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def apply(self, scaled: Tensor, targets: Tensor) -> Tensor:
        """Logits [N, V], divided by the temperature, with -inf for the tokens that the engine would not sample. The sampled
        tokens `targets` [N] always stay: one at the edge may be outside by a rounding error, or since the policy has changed."""
        if self == SamplingFilters():
            return scaled
        row = torch.zeros(len(scaled), device=scaled.device)
        params = SamplingTensors(row.long(), row.long(), row + 1, row.int() + self.top_k, row + self.top_p, row + self.min_p)
        kept = scaled.detach() >= thresholds(scaled.detach(), params)[:, None]
        return scaled.masked_fill(~kept.scatter(1, targets[:, None], True), -torch.inf)


@lru_cache
def train_ops(device_type: str) -> TrainOps:
    """Operations of a forward pass with gradients on such a device: fused kernels on a GPU, if Triton is installed."""
    if device_type != "cuda" or choose_backend(device_type, torch.bfloat16).name != "triton":
        return TrainOps()
    from paceline.kernels.triton.training import TritonTrainOps

    return TritonTrainOps()


class Trunk(nn.Module):
    """A decoder over packed rows. With `compute` bfloat16 its weights stay in float32 and matrix products run in bfloat16."""

    def __init__(self, model: Decoder, compute: torch.dtype) -> None:
        super().__init__()
        self.model, self.compute = model, compute
        self.keeps_casts = True
        """Whether weights that were cast to `compute` are kept for the rest of a forward pass, which is faster. If activations
        are recomputed, that would hold a second copy of all weights for nothing."""
        self._rope: Rope | None = None

    @property
    def ops(self) -> TrainOps:
        """The operations for the device that the model is on now; sharding may move it."""
        return train_ops(self.model.norm.device.type)

    def hidden(self, batch: MicroBatch, routing: Routing | None = None) -> Tensor:
        """Final hidden states of all rows [R, H]."""
        return self.model(batch.tokens, self.attend(batch, routing)).final

    def attend(self, batch: MicroBatch, routing: Routing | None = None) -> PackedAttend:
        """Attention within the sequences of a micro-batch. `routing` watches the routers of layers with experts."""
        rope = self.rope(batch)
        cos, sin = rope(batch.positions)
        return PackedAttend(self.ops, cos, sin, batch.lengths, rope.others_at(batch.positions), routing)

    def rope(self, batch: MicroBatch) -> Rope:
        """The rotary embedding's tables, which are long enough for a micro-batch."""
        longest, weight = max(batch.lengths), self.model.norm
        if self._rope is None or len(self._rope.cos) < longest:
            self._rope = Rope(self.model.config, max(1024, 2 * longest), weight.dtype, weight.device)
        return self._rope

    def precision(self) -> AbstractContextManager[object]:
        """Context in which matrix products run in `compute`."""
        device = self.model.norm.device.type
        if self.compute != torch.bfloat16:
            return nullcontext()
        return torch.autocast(device, self.compute, cache_enabled=self.keeps_casts)


class Policy(Trunk):
    """A decoder with its language-model head."""

    def __init__(self, model: Decoder, compute: torch.dtype) -> None:
        super().__init__(model, compute)
        self.exact: ExactForward | None = None
        """Computes the log-probabilities with the engine's bits; None: they are computed by the trainer's own operations."""
        self.sharded = False
        """Whether the weights are sharded: they are whole only during the forward and backward pass of their layer."""

    def logprobs(self, batch: MicroBatch, temperature: float, filters: SamplingFilters | None = None,
                 entropy_gradient: bool = False, routing: Routing | None = None) -> tuple[Tensor, Tensor]:
        """(log-probability [A], entropy [A]) of every answer token in the distribution that the engine samples from: at its
        temperature and with its filters. The entropy has a gradient only with `entropy_gradient`. `routing` watches the routers
        of a mixture of experts."""
        options = temperature, filters or SamplingFilters(), entropy_gradient
        if self.exact is not None:
            parts = self._exact_parts(self.exact, batch, routing, *options)
        else:
            with self.precision():
                hidden = self.hidden(batch, routing)[batch.rows]
                parts = [self._chunk(h, t, *options)
                         for h, t in zip(hidden.split(HEAD_ROWS), batch.targets.split(HEAD_ROWS), strict=True)]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    def _chunk(self, hidden: Tensor, targets: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled():
            return checkpoint(self._head, hidden, targets, *options, use_reentrant=False)
        return self._head(hidden, targets, *options)

    def _head(self, hidden: Tensor, targets: Tensor, temperature: float, filters: SamplingFilters,
              entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        return self._of_logits(self.model.logits(hidden, self.ops), targets, temperature, filters, entropy_gradient)

    def _of_logits(self, logits: Tensor, targets: Tensor, temperature: float, filters: SamplingFilters,
                   entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        if filters == SamplingFilters() and not entropy_gradient:
            return self.ops.token_logprobs(logits, targets, temperature)
        scaled = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
        logprobs = filters.apply(scaled, targets).log_softmax(dim=-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy = -(logprobs.exp() * logprobs.masked_fill(logprobs == -torch.inf, 0)).sum(dim=-1)
        return logprobs.gather(1, targets[:, None])[:, 0], entropy

    # -- with the engine's bits

    def _exact_parts(self, exact: ExactForward, batch: MicroBatch, routing: Routing | None,
                     *options: Any) -> list[tuple[Tensor, Tensor]]:
        """(log-probabilities, entropy) of the answer tokens, HEAD_ROWS at a time. Gradients are of the experts that the engine's
        routers choose."""
        if self.model.config.has_experts:
            engines = Routing()
            states = exact.hidden(batch, self.rope(batch), engines)
            routing = Routing() if routing is None else routing
            routing.follow(engines)
        else:
            states = exact.hidden(batch, self.rope(batch))
        final = states[-1]
        carrier = self._with_gradient(batch, states, routing) if torch.is_grad_enabled() else final
        chunks = (tensor.split(HEAD_ROWS) for tensor in (final[batch.rows], carrier[batch.rows], batch.targets))
        return [self._exact_chunk(exact, *chunk, *options) for chunk in zip(*chunks, strict=True)]

    def _with_gradient(self, batch: MicroBatch, states: tuple[Tensor, ...], routing: Routing | None) -> Tensor:
        """The last of the hidden states `states` [R, H] with the gradient of the trainer's operations."""
        x, attend = self.model.embedded(batch.tokens), self.attend(batch, routing)
        layers = cast("list[Layer]", list(self.model.layers))
        for layer, at, after in zip(layers, states[:-1], states[1:], strict=True):
            norm = self.model.norm if layer is layers[-1] else None
            parameters = [p for p in (*layer.parameters(), norm) if p is not None]
            values = (after.to(x.dtype, copy=True),)
            (x,) = with_gradient_of(partial(self._layer, layer, attend, norm), at, values, x, parameters, self.sharded)
        return x

    def _layer(self, layer: Layer, attend: PackedAttend, norm: Tensor | None, x: Tensor) -> tuple[Tensor]:
        """The hidden states after a layer; norm: and after this final norm."""
        with self.precision():
            x, residual = layer(x, None, attend)
            return (x + residual if norm is None else self.ops.add_rms_norm(x, residual, norm, layer.eps)[0],)

    def _exact_chunk(self, exact: ExactForward, final: Tensor, carrier: Tensor, targets: Tensor, temperature: float,
                     filters: SamplingFilters, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        """final [N, H]: the engine's hidden states; carrier [N, H]: the same, with their gradient."""
        logits = exact.logits(final)
        logprobs = exact.logprobs(logits, targets, temperature, filters)
        with torch.no_grad():
            entropy = self._of_logits(logits, targets, temperature, filters, entropy_gradient)[1]
        if not torch.is_grad_enabled():
            return logprobs, entropy

        def head(x: Tensor) -> tuple[Tensor, Tensor]:
            compute = self._chunk if self.sharded else self._head  # which does not store the logits, or is recomputing them
            with self.precision():
                return compute(x, targets, temperature, filters, entropy_gradient)

        logprobs, differentiable = with_gradient_of(head, final, (logprobs, entropy), carrier,
                                                    list(self.model.head.parameters()), self.sharded)
        return logprobs, differentiable if entropy_gradient else differentiable.detach()


class Scorer(Trunk):
    """A decoder with one output per row: a critic's value of a state, or a reward model's score of a sequence."""

    def __init__(self, model: Decoder, compute: torch.dtype) -> None:
        super().__init__(model, compute)
        model.head = None  # type: ignore[assignment]  # a scorer has no vocabulary
        weight = model.norm
        dtype = torch.float32 if weight.dtype == torch.bfloat16 else weight.dtype  # scores are compared with each other
        self.score = nn.Linear(model.config.hidden_size, 1, bias=False).to(weight.device, dtype)
        nn.init.zeros_(self.score.weight)

    def values(self, batch: MicroBatch) -> Tensor:
        """Values of the states before each answer token [A]."""
        return self._scores(batch, batch.rows)

    def scores(self, batch: MicroBatch) -> Tensor:
        """Score of each sequence, taken at its last token [S]."""
        return self._scores(batch, batch.last)

    def _scores(self, batch: MicroBatch, rows: Tensor) -> Tensor:
        with self.precision():
            hidden = self.hidden(batch)[rows]
        return self.score(hidden.to(self.score.weight.dtype)).sum(dim=-1)  # of one element: not a view, which FSDP warns about


def load_reward_model(source: str | Path, device: torch.device | str, dtype: torch.dtype, compute: torch.dtype) -> Scorer:
    """Loads a frozen reward model from a folder or hub id of a `…ForSequenceClassification` model with one label."""
    found = open_checkpoint(source)
    if found.shapes().get(_SCORE) != (1, found.config.hidden_size):
        raise ValueError(f"reward_model: {source} is not a sequence classifier with one output ({_SCORE} [1, hidden])")
    model = empty_model(replace(found.config, tie_embeddings=True), dtype, device)  # tied: the checkpoint need not contain a head
    scorer: dict[str, Tensor] = {}

    def trunk() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in found.tensors():
            if name == _SCORE:
                scorer[name] = tensor
            else:
                yield name, tensor

    load_state(model, trunk(), source=str(source))
    reward_model = Scorer(model, compute)
    with torch.no_grad():
        reward_model.score.weight.copy_(scorer[_SCORE])
    return reward_model.requires_grad_(False)


def recompute_activations(trunk: Trunk) -> None:
    """Recomputes the activations of every layer in the backward pass instead of storing them."""
    apply_activation_checkpointing(trunk.model, check_fn=lambda module: isinstance(module, Layer))
    trunk.keeps_casts = False
