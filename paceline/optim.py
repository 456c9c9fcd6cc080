"""The optimizers, the learning-rate schedule and the check of the weights that policy training (`rl/`) and drafter training
(`spot/`) share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from paceline.extras import install_command

Schedule = Literal["constant", "linear", "cosine"]
_CODES, _SCALE = "codes", "scale"
"""Parts of a moment in 8 bits: one byte per value, and one float32 factor per block of values."""
_BLOCK = 256
"""Number of values in such a block."""


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
    groups = _parameter_groups(parameters, lr, weight_decay)
    fused = all(p.dtype == torch.float32 for group in groups for p in group["params"])
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=fused)


def make_adamw_8bit(parameters: Iterable[nn.Parameter], lr: float, betas: tuple[float, float], eps: float,
                    weight_decay: float) -> torch.optim.Optimizer:
    """Like `make_adamw`, with torchao's AdamW, whose moments take 8 bits instead of 32. It compiles one kernel for each shape of
    a parameter in its first step. ValueError if torchao is not installed."""
    try:
        from torchao.optim import AdamW8bit  # takes seconds to import
    except ImportError as error:
        raise ValueError(f"optimizer.kind: adamw_8bit needs the package torchao; {install_command('lowmem')}") from error
    return AdamW8bit(_parameter_groups(parameters, lr, weight_decay), lr=lr, betas=betas, eps=eps)


def _parameter_groups(parameters: Iterable[nn.Parameter], lr: float, weight_decay: float) -> list[dict[str, Any]]:
    trained = [p for p in parameters if p.requires_grad]
    groups = [{"params": [p for p in trained if p.dim() > 1], "weight_decay": weight_decay, "base_lr": lr},
              {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0, "base_lr": lr}]
    return [group for group in groups if group["params"]]


def set_learning_rate(group: dict[str, Any], lr: float) -> None:
    """Set the learning rate of a parameter group. torchao's optimizers keep it in a tensor, which their kernels read."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


def plain_state(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """An optimizer's state of one parameter as plain tensors, which files can hold: a moment in 8 bits becomes `NAME.codes` and
    `NAME.scale`, bit for bit."""
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        if _is_8bit(value):
            found |= {f"{name}.{_CODES}": value.codes, f"{name}.{_SCALE}": value.scale}
        else:
            found[name] = value
    return found


def fits_8bit(parameter: Tensor) -> bool:
    """Whether torchao keeps the moments of this parameter in 8 bits; those of small ones stay as they are."""
    return parameter.numel() >= 4096 and parameter.numel() % _BLOCK == 0


def is_8bit_state(states: Mapping[int, Mapping[str, Tensor]]) -> bool:
    """Whether plain states of an optimizer's parameters (`plain_state`) contain moments in 8 bits."""
    return any(name.endswith(f".{_CODES}") for state in states.values() for name in state)


def restored_state(plain: Mapping[str, Tensor], parameter: Tensor) -> dict[str, Tensor]:
    """The inverse of `plain_state`, on the device of the parameter that the state belongs to."""
    found: dict[str, Tensor] = {}
    for key, tensor in plain.items():
        name, _, part = key.partition(".")
        if not part:
            found[name] = tensor
        elif part == _CODES:
            scale = plain[f"{name}.{_SCALE}"]
            state = _zeros_8bit(name, tensor, parameter, tensor.numel() // scale.numel())
            state.codes.copy_(tensor)
            state.scale.copy_(scale)
            found[name] = state
    return found


def to_8bit(name: str, moment: Tensor) -> Tensor:
    """A moment in 8 bits. If it was in 8 bits before, in the same blocks, it has the same bits again."""
    found = _zeros_8bit(name, moment, moment, _BLOCK)
    return found.copy_(moment)


def from_8bit(moment: Tensor) -> Tensor:
    """A moment in the parameter's data type, whether it is in 8 bits or not."""
    return moment.dequantize(moment.dtype) if _is_8bit(moment) else moment  # type: ignore[call-arg]


def _zeros_8bit(name: str, like: Tensor, parameter: Tensor, block: int) -> Any:
    from torchao.optim.subclass_8bit import OptimState8bit

    signed = name == "exp_avg"  # only the first moment has a sign
    return OptimState8bit.zeros(like.shape, signed, block, parameter.device, dtype=parameter.dtype)


def _is_8bit(value: Any) -> bool:
    return type(value).__name__ == "OptimState8bit"  # by name, because torchao is loaded only if it is used


@contextmanager
def reproducible(enabled: bool) -> Iterator[None]:
    """Operations whose sums have no fixed order are replaced by those that have one, where PyTorch has them."""
    if not enabled:
        yield
        return
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = False  # every new tensor would be filled
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = fill
