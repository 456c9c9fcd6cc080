"""The reference backend with hand-written gradients for training: fewer passes over memory and fewer saved tensors than autograd
needs. Methods and results are those of `TorchOps`; a parity test compares values and gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.reference.ops import TorchOps, at_least_float32


class TrainOps(TorchOps):
    """`TorchOps` with hand-written gradients of RMS norm and gated activation."""

    name = "train"

    def __init__(self, narrow: bool = False) -> None:
        """`narrow`: the activation is computed in the dtype of its input. In half precision that rounds once more and moves a
        third of the bytes."""
        self._narrow = narrow

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _RmsNorm.apply(x, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return _SiluMul.apply(gate_up, self._narrow)

    def token_logprobs(self, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """(log-probability of each row's target [N], entropy of each row [N]) of logits [N, V] at a temperature, in float32 or
        better. Only the log-probabilities have a gradient."""
        scaled = at_least_float32(logits)
        logprobs = (scaled if temperature == 1 else scaled / temperature).log_softmax(dim=-1)
        chosen = logprobs.gather(1, targets[:, None])[:, 0]  # first: a checkpoint recomputes only up to here
        with torch.no_grad():
            entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
        return chosen, entropy


class _RmsNorm(torch.autograd.Function):
    """RMS norm over the last dimension: y = w u with u = x r and r = 1 / sqrt(mean(x²) + eps)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = at_least_float32(x)
        r = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return (wide * r).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:  # type: ignore[override]
        """dw = sum over rows of dy u;  dx = r (dy w - u mean(dy w u))."""
        x, weight, r = ctx.saved_tensors
        wide, unit = at_least_float32(grad), at_least_float32(x) * r
        scale, product = weight.to(unit.dtype), wide * unit
        d_weight = product.flatten(0, -2).sum(dim=0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        mean = (product @ scale).div_(x.shape[-1]).unsqueeze(-1)
        return (wide * scale).addcmul_(unit, mean, value=-1).mul_(r).to(x.dtype), d_weight, None


class _SiluMul(torch.autograd.Function):
    """silu(gate) * up of an input [..., gate | up]. Only the input is saved for the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, narrow: bool) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.narrow = narrow
        gate, up = (gate_up if narrow else at_least_float32(gate_up)).chunk(2, dim=-1)
        return F.silu(gate).mul_(up).to(gate_up.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (gate_up,) = ctx.saved_tensors
        grad, both = (grad, gate_up) if ctx.narrow else (at_least_float32(grad), at_least_float32(gate_up))
        gate, up = both.chunk(2, dim=-1)
        out = torch.empty_like(both)
        d_gate, d_up = out.chunk(2, dim=-1)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=d_gate)
        torch.mul(grad, F.silu(gate), out=d_up)
        return out.to(gate_up.dtype), None
