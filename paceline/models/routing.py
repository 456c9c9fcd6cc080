"""What the routers of one forward pass do: their choices, how even the load of the experts is, and the loss that evens it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


class Routing:
    """Watches, and if asked dictates, the routers of one forward pass over some rows."""

    def __init__(self, given: Mapping[int, Tensor] | None = None, balance: float = 0.0) -> None:
        """`given`: experts [R, k] of every sparse layer by its index, which its router does not choose then. `balance`: weight of
        the load-balancing loss, whose gradient is added in the backward pass."""
        self.given, self.balance = given, balance
        self.chosen: dict[int, Tensor] = {}
        """Experts [R, k] of every sparse layer, by its index."""
        self.counts: dict[int, Tensor] = {}
        """Rows [E] that chose each expert, by layer."""
        self.losses: dict[int, Tensor] = {}
        """The load-balancing loss of each layer, which is `active` if all experts have the same load."""

    def follow(self, other: Routing) -> None:
        """Choose the experts that another forward pass over the same rows has chosen, whose figures these are, too."""
        self.given, self.counts, self.losses = other.chosen, other.counts, other.losses

    def observe(self, layer: int, x: Tensor, logits: Tensor, chosen: Tensor) -> Tensor:
        """Note what a layer's router chose for its input x [R, H]. Returns x, to which the gradient of the balancing loss is
        attached."""
        self.chosen[layer] = chosen
        loss, counts = load_balancing_loss(logits, chosen)
        if self.given is None:
            self.counts[layer], self.losses[layer] = counts, loss.detach()
        if self.balance == 0 or not (torch.is_grad_enabled() and logits.requires_grad):
            return x
        return _WithLoss.apply(x, loss, self.balance)


def load_balancing_loss(logits: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """E * sum over experts of f P, the load-balancing loss of Switch Transformer and of transformers for one layer, and the
    number of rows [E] of each expert. f: rows that chose the expert, per row; P: mean of its probability. The choice has no
    gradient."""
    count = logits.shape[-1]
    rows = torch.zeros(count, dtype=torch.float32, device=logits.device)
    rows.index_add_(0, chosen.flatten(), torch.ones_like(chosen, dtype=torch.float32).flatten())
    wide = logits if logits.dtype == torch.float64 else logits.float()
    share = rows.to(wide.dtype) / max(1, len(logits))
    return count * (share * wide.softmax(dim=-1).mean(dim=0)).sum(), rows


class RoutingTotals:
    """Routing figures of the micro-batches of an update."""

    def __init__(self) -> None:
        self._rows = 0
        self._counts: dict[int, Tensor] = {}
        self._loss = 0.0

    def add(self, routing: Routing, num_rows: int) -> None:
        """Add what the routers did in a forward pass over so many rows."""
        if not routing.counts:
            return
        self._rows += num_rows
        self._loss += num_rows * float(torch.stack([loss.double() for loss in routing.losses.values()]).mean())
        for layer, counts in routing.counts.items():
            self._counts[layer] = self._counts[layer] + counts if layer in self._counts else counts

    def metrics(self, total: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """`router/aux_loss`: mean load-balancing loss of a layer. `router/max_load`: rows of the busiest expert over their mean.
        `router/unused`: share of experts that no row chose. `total` sums over ranks; there is nothing to report without experts,
        which is the same on all of them."""
        if not self._counts:
            return {}
        flat = torch.stack([self._counts[layer] for layer in sorted(self._counts)]).cpu().double()
        sums = total(torch.cat([flat.flatten(), torch.tensor([self._loss, float(self._rows)], dtype=torch.float64)]))
        loads = sums[:-2].view_as(flat)
        return {"router/aux_loss": float(sums[-2] / sums[-1]), "router/unused": float((loads == 0).double().mean()),
                "router/max_load": float((loads.amax(dim=1) / loads.mean(dim=1)).max())}


class _WithLoss(torch.autograd.Function):
    """x itself. In the backward pass, the loss gets the gradient `weight`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, weight: float) -> Tensor:
        ctx.weight, ctx.like = weight, loss.new_ones(())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        return grad, ctx.weight * ctx.like, None
