"""Log-probabilities with the engine's bits (`learner.exact_logprobs`).

The values of a forward pass are those of the engine's own code: its decoder, kernels and sampler over the packed sequences, as if
each were a prompt, with the weights in the engine's data type. The engine's results do not depend on what else is in a step, so
they are the same as when the tokens were sampled. Gradients are those of the trainer's operations: the backward pass recomputes
one layer after the other from the engine's hidden states, as gradient checkpointing does. If the policy is sharded, layers run in
the forward pass, where FSDP gathers their weights, and their results are replaced by the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.kernels import Ops, PagedCache, SamplingTensors, Segments, ops_for
from paceline.kernels.upload import upload
from paceline.models.attend import PagedAttend
from paceline.models.decoder import Decoder, Rope, product_weights
from paceline.models.routing import Routing
from paceline.rl.batch import MicroBatch

_PAGE_SIZE = 64
"""Tokens per page of the KV cache of a forward pass. It has no influence on the result."""


class ExactForward:
    """Forward passes of a policy by the engine's deterministic kernels, without gradients."""

    def __init__(self, model: Decoder, ops: Ops | None = None) -> None:
        """`model`: a plain decoder in the engine's data type. `weights_changed` must be called after every change of it. `ops`:
        deterministic kernels; None: those of an engine on the model's device."""
        self.model = model
        self.ops = ops or ops_for(model.norm.device, model.norm.dtype, True, model.config.max_context)
        self._is_prepared = False

    def weights_changed(self) -> None:
        """The weights will be laid out anew for the kernels."""
        self._is_prepared = False

    @torch.no_grad()
    def hidden(self, batch: MicroBatch, rope: Rope, routing: Routing | None = None) -> tuple[Tensor, ...]:
        """The hidden states [R, H] at the input of every layer, and those after the final norm. `routing` takes note of the
        experts that the engine's routers choose."""
        config, weight = self.model.config, self.model.norm
        if not self._is_prepared:
            self.ops.prepare(product_weights([self.model]))
            self._is_prepared = True
        pages, segments, write = _layout(batch.lengths, weight.device)
        k, v = (weight.new_zeros(int(pages.max() + 1) * _PAGE_SIZE, config.num_kv_heads, config.head_dim) for _ in range(2))
        cache = PagedCache(k, v, upload(pages, weight.device), _PAGE_SIZE)  # for every layer in turn
        chunks = [(slot, 0, length) for slot, length in enumerate(batch.lengths)]
        plan = self.ops.plan_step(segments, len(batch.tokens), config.num_heads, cache, chunks)
        attend = PagedAttend(self.ops, [cache] * config.num_layers, rope.cos, rope.sin, write, segments, plan,
                             batch.positions, rope.others, routing)
        found = self.model(batch.tokens, attend, tuple(range(config.num_layers)))
        assert found.features is not None
        return (*found.features.chunk(config.num_layers, dim=-1), found.final)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """The logits [R, V] of hidden states [R, H]."""
        return self.model.logits(hidden, self.ops)

    @torch.no_grad()
    def logprobs(self, logits: Tensor, targets: Tensor, temperature: float, filters: tuple[int, float, float]) -> Tensor:
        """Log-probabilities of the targets [R] as the sampler computes them; filters: top_k, top_p, min_p."""
        row, (top_k, top_p, min_p) = torch.zeros(len(logits), device=logits.device), filters
        params = SamplingTensors(row.long(), row.long(), row + temperature, row.int() + top_k, row + top_p, row + min_p)
        return self.ops.logprobs_of(logits, targets, params)


def _layout(lengths: Sequence[int], device: torch.device) -> tuple[np.ndarray, Segments, Tensor]:
    """Page table [S, pages] int32 of sequences that follow each other, the segments of their rows, and the cache index of each
    row."""
    rows = np.array(lengths)
    starts, counts = np.cumsum(rows) - rows, -(-rows // _PAGE_SIZE)
    first = np.cumsum(counts) - counts  # page of each sequence
    pages = np.minimum(first[:, None] + np.arange(counts.max()), counts.sum() - 1).astype(np.int32)
    write = np.arange(rows.sum()) + np.repeat(first * _PAGE_SIZE - starts, rows)
    row, length, slot, context = upload(
        np.stack([starts, rows, np.arange(len(rows)), np.zeros_like(rows)]).astype(np.int32), device)
    causal = torch.ones(len(rows), dtype=torch.bool, device=device)
    mask = torch.zeros(len(write), 2, dtype=torch.int64, device=device)
    return pages, Segments(row, length, slot, context, causal, mask), upload(write, device)


def with_gradient_of(function: Callable[[Tensor], tuple[Tensor, ...]], at: Tensor, values: tuple[Tensor, ...], x: Tensor,
                     parameters: Sequence[Tensor], now: bool) -> tuple[Tensor, ...]:
    """`values`, with the gradient of `function` at the point `at`. x: What the gradient flows on to; its own value does not
    matter. parameters: All others that `function` depends on. now: Call `function` now; otherwise in the backward pass."""
    if not now:
        return _Recomputed.apply(function, at, values, x, *parameters)
    results = function(_Replaced.apply(x, at))
    return tuple(_Replaced.apply(result, value) for result, value in zip(results, values, strict=True))


class _Replaced(torch.autograd.Function):
    """`value` in the data type of x, with the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        return value.to(x.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], tuple[Tensor, ...]], at: Tensor, values: tuple[Tensor, ...], x: Tensor,
                *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.function, ctx.dtype = function, x.dtype
        ctx.save_for_backward(at, *parameters)
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        at, *parameters = ctx.saved_tensors
        needed = ctx.needs_input_grad[3:]
        with torch.enable_grad():
            x = at.to(ctx.dtype).detach().requires_grad_(needed[0])
            outputs = [(out, grad.to(out.dtype)) for out, grad in zip(ctx.function(x), grads, strict=True) if out.requires_grad]
        wanted = [tensor for tensor, is_needed in zip((x, *parameters), needed, strict=True) if is_needed]
        found = iter(torch.autograd.grad([out for out, _ in outputs], wanted, [grad for _, grad in outputs], allow_unused=True))
        return None, None, None, *(next(found) if is_needed else None for is_needed in needed)
