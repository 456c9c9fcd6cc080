"""Numbers of parameters by the shape of a policy; no weights are made."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import torch

from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder


@lru_cache
def num_parameters(shape: ModelConfig, num_layers: int | None = None) -> int:
    """Number of parameters of a decoder of this shape, or of one with so many layers."""
    with torch.device("meta"):
        model = Decoder(shape if num_layers is None else replace(shape, num_layers=num_layers))
    return sum(parameter.numel() for parameter in model.parameters())


def num_active_parameters(shape: ModelConfig) -> int:
    """Number of parameters that process one token: all but those of the experts that its routers do not choose."""
    idle = 0
    for index in range(shape.num_layers):
        experts = shape.layer(index).experts
        if experts is not None:
            each = 3 * shape.hidden_size * experts.size + experts.bias * (2 * experts.size + shape.hidden_size)
            idle += (experts.count - experts.active) * each
    return num_parameters(shape) - idle


def layer_parameters(shape: ModelConfig) -> int:
    """Number of parameters of the last layer."""
    return num_parameters(shape) - num_parameters(shape, shape.num_layers - 1)


def num_adapter_parameters(shape: ModelConfig, rank: int, targets: tuple[str, ...]) -> int:
    """Number of parameters of LoRA adapters of this rank."""
    return sum(rank * sum(size) for size in adapted_matrices(shape, targets))


def num_adapted_parameters(shape: ModelConfig, targets: tuple[str, ...]) -> int:
    """Number of parameters that LoRA adapters are merged into."""
    return sum(math.prod(size) for size in adapted_matrices(shape, targets))


@lru_cache
def adapted_matrices(shape: ModelConfig, targets: tuple[str, ...]) -> list[torch.Size]:
    """Shapes of the matrices that have LoRA adapters."""
    with torch.device("meta"):
        model = Decoder(shape)
    found = (module.weight for name, module in model.named_modules() if name.split(".")[-1] in targets)
    return [matrix.shape for matrix in found]  # type: ignore[union-attr]
