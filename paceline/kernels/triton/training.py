# mypy: allow-untyped-defs
"""Operations of a forward pass with gradients: RMS norm, the gated activation, and the log-probabilities of sampled tokens, each
direction in one kernel that reads and writes every element once; and products in one pass over K. The torch reference is
`reference.training.TrainOps`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.reference.training import TrainOps
from paceline.kernels.triton import elementwise, exact

_BLOCK = 1024
_VOCABULARY_BLOCK = 4096
_NORM_PROGRAMS = 528
"""Number of programs in the backward pass of a norm, each with a partial sum of the weight's gradient: four per multiprocessor of
an H200."""


class TritonTrainOps(TrainOps):
    """`TrainOps` with fused kernels on a GPU. What is in float64 stays with the reference."""

    name = "triton train"

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """In one pass over K, so that log-probabilities do not depend on how answers are packed into micro-batches. So are the
        engine's deterministic products, except that it adds those of the down projections in a few fixed shares of K. The
        backward pass sums as the library likes."""
        if not x.is_cuda or x.dtype == torch.float64:
            return super().linear(x, weight, bias)
        return exact.library_linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype == torch.float64:
            return super().rms_norm(x, weight, eps)
        return _RmsNorm.apply(x, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return super().silu_mul(gate_up) if gate_up.dtype == torch.float64 else _SiluMul.apply(gate_up)

    def token_logprobs(self, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        if logits.dtype == torch.float64:
            return super().token_logprobs(logits, targets, temperature)
        return _TokenLogprobs.apply(logits, targets, temperature)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        out, width = torch.empty_like(x), x.shape[-1]
        if x.numel():
            _rms_norm[(x.numel() // width,)](x, weight, out, width, eps, **_norm_launch(width))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        width, grad, wanted = x.shape[-1], grad.contiguous(), ctx.needs_input_grad[1]
        rows = x.numel() // width
        programs, out = min(rows, _NORM_PROGRAMS), torch.empty_like(x)
        sums = torch.empty(programs if wanted else 1, width, dtype=torch.float32, device=x.device)
        if rows:
            _rms_norm_backward[(programs,)](x, weight, grad, out, sums, triton.cdiv(rows, programs), rows, width, ctx.eps,
                                            SUMS=wanted, **_norm_launch(width))
        return out, sums.sum(dim=0).to(weight.dtype) if wanted else None, None


def _norm_launch(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}


@triton.jit
def _rms_norm(x, weight, out, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    tl.store(out + row * width + column, (value * factor * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["turns", "rows"])  # they differ from batch to batch, and each variant would be compiled
def _rms_norm_backward(x, weight, grad, out, sums, turns, rows, width, eps, SUMS: tl.constexpr, BLOCK: tl.constexpr):
    """dx = r (dy w - u mean(dy w u)) with u = x r; sums[program] = sum of dy u over the program's rows."""
    first = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for turn in range(turns):
        row = first + turn * tl.num_programs(0)
        at, here = row * width + column, inside & (row < rows)
        value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
        pull = tl.load(grad + at, mask=here, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
        unit = value * factor
        mean = tl.sum(pull * scale * unit, axis=0) / width
        tl.store(out + at, (factor * (pull * scale - unit * mean)).to(out.dtype.element_ty), mask=here)
        total += pull * unit
    if SUMS:
        tl.store(sums + first * width + column, total, mask=inside)


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        return elementwise.silu_mul(gate_up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (gate_up,) = ctx.saved_tensors
        width, grad, out = gate_up.shape[-1] // 2, grad.contiguous(), torch.empty_like(gate_up)
        if grad.numel():
            _silu_mul_backward[(grad.numel() // width, triton.cdiv(width, _BLOCK))](gate_up, grad, out, width, BLOCK=_BLOCK,
                                                                                    num_warps=4)
        return out


@triton.jit
def _silu_mul_backward(gate_up, grad, out, width, BLOCK: tl.constexpr):
    """d gate = dy up s (1 + gate (1 - s)) and d up = dy gate s, with s = sigmoid(gate)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    pull = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    d_gate, d_up = pull * up * share * (1.0 + gate * (1.0 - share)), pull * gate * share
    tl.store(out + row * 2 * width + column, d_gate.to(out.dtype.element_ty), mask=inside)
    tl.store(out + row * 2 * width + width + column, d_up.to(out.dtype.element_ty), mask=inside)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logits, targets = logits.contiguous(), targets.contiguous()
        rows, vocabulary = logits.shape
        logprobs, entropy, norms = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(3))
        if rows:
            _token_logprobs[(rows,)](logits, targets, logprobs, entropy, norms, vocabulary, 1.0 / temperature,
                                     BLOCK=_VOCABULARY_BLOCK, num_warps=8)
        ctx.save_for_backward(logits, targets, norms)
        ctx.scale = 1.0 / temperature
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        logits, targets, norms = ctx.saved_tensors
        out = torch.empty_like(logits)
        rows, vocabulary = logits.shape
        if rows:
            grid = (rows, triton.cdiv(vocabulary, _VOCABULARY_BLOCK))
            _token_logprobs_backward[grid](logits, targets, norms, grad.contiguous(), out, vocabulary, ctx.scale,
                                           BLOCK=_VOCABULARY_BLOCK, num_warps=8)
        return out, None, None


@triton.jit
def _token_logprobs(logits, targets, logprobs, entropy, norms, vocabulary, scale, BLOCK: tl.constexpr):
    """One row: log p(target) = x[target] - n and the entropy n - sum of p x, where n is the log of the sum of exp(x). Sums are
    relative to the running maximum of their lane."""
    row = tl.program_id(0).to(tl.int64)
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    total, weighted = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * vocabulary + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32) * scale
        new = tl.maximum(most, x)
        shift = tl.where(new == float("-inf"), 0.0, new)
        kept, added = tl.exp(most - shift), tl.exp(x - shift)
        total = total * kept + added
        weighted = weighted * kept + tl.where(added > 0.0, added * x, 0.0)
        most = new
    largest = tl.max(most, 0)
    factor = tl.exp(most - largest)
    whole = tl.sum(total * factor, 0)
    norm = largest + tl.log(whole)
    target = tl.load(logits + row * vocabulary + tl.load(targets + row)).to(tl.float32) * scale
    tl.store(norms + row, norm)
    tl.store(logprobs + row, target - norm)
    tl.store(entropy + row, norm - tl.sum(weighted * factor, 0) / whole)


@triton.jit
def _token_logprobs_backward(logits, targets, norms, grad, out, vocabulary, scale, BLOCK: tl.constexpr):
    """d x[v] = g ([v is the target] - p(v)) / temperature."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocabulary
    x = tl.load(logits + row * vocabulary + at, mask=inside, other=float("-inf")).to(tl.float32) * scale
    chance = tl.exp(x - tl.load(norms + row))
    pull = tl.load(grad + row) * scale
    value = pull * (tl.where(at == tl.load(targets + row), 1.0, 0.0) - chance)
    tl.store(out + row * vocabulary + at, value.to(out.dtype.element_ty), mask=inside)
