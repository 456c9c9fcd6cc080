"""Weights out of the device's memory and back, without anyone's reference to them breaking."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def park(modules: Iterable[nn.Module]) -> None:
    """Parameters go to pinned host memory. They stay the same objects, tied ones stay tied; new values may be loaded there."""
    for parameter in _parameters(modules):
        if parameter.device.type == "cuda":
            parameter.data = torch.empty_like(parameter, device="cpu", pin_memory=True).copy_(parameter)


def unpark(modules: Iterable[nn.Module], device: torch.device) -> None:
    for parameter in _parameters(modules):
        if parameter.device != device:
            parameter.data = parameter.data.to(device, non_blocking=True)


def _parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    return list({id(p): p for module in modules for p in module.parameters()}.values())
