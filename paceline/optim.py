"""The optimizer, the learning-rate schedule and the check of the weights that policy training (`rl/`) and drafter training
(`spot/`) share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor, nn

Schedule = Literal["constant", "linear", "cosine"]


class NonFiniteError(ValueError):
    """A loss, a gradient or a weight is NaN or infinite."""


@torch.no_grad()
def require_finite(weights: Iterable[tuple[str, Tensor]], what: str, total: Callable[[Tensor], Tensor] = lambda x: x) -> None:
    """NonFiniteError that names the first weight with a NaN or infinite value, or with values so large that their squares
    overflow. `what` says whose weights they are; `total` sums over processes, if each has only a part of every weight."""
    named = [(name, tensor) for name, tensor in weights if tensor.is_floating_point()]
    if not named:
        return
    norms = torch.stack([norm.float() for norm in torch._foreach_norm([tensor for _, tensor in named])])
    finite = torch.isfinite(total(norms)).tolist()
    if not all(finite):
        raise NonFiniteError(f"{what}: {named[finite.index(False)][0]} is not finite")


def learning_rate_factor(step: int, total_steps: int, schedule: Schedule = "constant", warmup_steps: int = 0,
                         min_ratio: float = 0.0) -> float:
    """Factor that the base learning rate is multiplied by at optimizer step `step`, counted from 0.

    The factor rises linearly during the warm-up, then stays at 1 (`constant`) or falls to `min_ratio` at `total_steps` and stays
    there (`linear`, `cosine`).
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return decay_factor((step - warmup_steps) / max(1, total_steps - warmup_steps), schedule, min_ratio)


def decay_factor(done: float, schedule: Schedule, min_ratio: float = 0.0) -> float:
    """Factor that the base learning rate is multiplied by after the share `done` of training, without a warm-up: 1 throughout
    (`constant`), or falling from 1 to `min_ratio` at the end and staying there (`linear`, `cosine`)."""
    if schedule == "constant":
        return 1.0
    done = min(1.0, done)
    remaining = 1 - done if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return min_ratio + (1 - min_ratio) * remaining


def make_adamw(parameters: Iterable[nn.Parameter], lr: float, betas: tuple[float, float], eps: float,
               weight_decay: float) -> torch.optim.AdamW:
    """AdamW over the parameters that require a gradient. Weight decay applies to matrices only, not to norms and biases.

    Every parameter group keeps its unscheduled learning rate as `base_lr`. The fused implementation is used when all parameters
    are float32.
    """
    trained = [p for p in parameters if p.requires_grad]
    groups = [{"params": [p for p in trained if p.dim() > 1], "weight_decay": weight_decay, "base_lr": lr},
              {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0, "base_lr": lr}]
    fused = all(p.dtype == torch.float32 for p in trained)
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, betas=betas, eps=eps, fused=fused)
