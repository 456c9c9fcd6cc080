"""Mixtures of experts in plain torch, differentiable: the router's choice, and the experts' products, expert by expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.records import Activation, ExpertWeights

if TYPE_CHECKING:
    from paceline.kernels.reference.ops import TorchOps

CLAMP, SHARPNESS = 7.0, 1.702
"""Constants of the activation `clamped_silu`."""


def activate(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """The gated activations, see `base.Activation`."""
    if activation == "silu":
        return F.silu(gate) * up
    if activation == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    gate = gate.clamp(max=CLAMP)
    return (up.clamp(-CLAMP, CLAMP) + 1) * gate * torch.sigmoid(SHARPNESS * gate)


def route(logits: Tensor, num_active: int, normalised: bool, given: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `base.Ops.route`; logits in at least float32."""
    chosen = given
    if chosen is None:
        chosen = logits.detach().sort(dim=-1, descending=True, stable=True).indices[:, :num_active].contiguous()
    picked = logits.gather(1, chosen)
    if normalised:
        return picked.softmax(dim=-1), chosen
    return (picked - logits.logsumexp(dim=-1, keepdim=True)).exp(), chosen


def experts(ops: TorchOps, x: Tensor, weights: ExpertWeights, shares: Tensor, chosen: Tensor) -> Tensor:
    """See `base.Ops.experts`. Rows are sorted by expert, so that every expert is one product; the numbers of rows are read back
    to the host."""
    (num_rows, num_active), count = chosen.shape, len(weights.gate_up)
    order = chosen.flatten().argsort(stable=True)  # pairs of a row and one of its experts
    sizes = torch.bincount(chosen.flatten(), minlength=count).tolist()
    rows = x.index_select(0, torch.div(order, num_active, rounding_mode="floor"))
    gate_up, down = weights.gate_up.unbind(), weights.down.unbind()
    parts = []
    for e, part in enumerate(rows.split(sizes)):
        if len(part):
            inner = F.linear(part, gate_up[e], None if weights.gate_up_bias is None else weights.gate_up_bias[e])
            out = F.linear(ops.gated(inner, weights.activation), down[e],
                           None if weights.down_bias is None else weights.down_bias[e])
            parts.append(out)
    if not parts:
        return x
    places = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
    each = torch.cat(parts).index_select(0, places).view(num_rows, num_active, -1)
    return (each.to(shares.dtype) * shares[..., None]).sum(dim=1).to(x.dtype)
