"""LoRA adapters in PEFT's format, merged into the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from paceline.models.huggingface import read_json
from paceline.models.state_dict import bare_name

_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none",), "use_dora": (False,), "fan_in_fan_out": (False,), "modules_to_save": (None, []),
    "rank_pattern": ({},), "alpha_pattern": ({},), "lora_bias": (False,)}
"""Values of an adapter's configuration without which it is more than A and B."""


class Adapter:
    """The adapter in a folder with `adapter_config.json` and `adapter_model.safetensors`."""

    def __init__(self, path: Path) -> None:
        config = read_json(path / "adapter_config.json")
        for name, plain in _PLAIN.items():
            if name in config and config[name] not in plain:
                raise ValueError(f"{path.name}: {name}={config[name]} is not supported")
        rank, alpha = config.get("r"), config.get("lora_alpha")
        if not (isinstance(rank, int) and rank > 0 and isinstance(alpha, int | float)):
            raise ValueError(f"{path.name}: r={rank}, lora_alpha={alpha}: not a rank and a factor")
        self._scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        file = path / "adapter_model.safetensors"
        if not file.is_file():
            raise ValueError(f"{path.name}: adapter_model.safetensors is missing; only safetensors are read")
        try:
            tensors = load_file(file)
        except SafetensorError as error:
            raise ValueError(f"{path.name}: {error}") from None
        self._factors: dict[str, dict[str, Tensor]] = {}  # weight -> lora_A, lora_B
        for name, tensor in tensors.items():
            layer, _, factor = name.removeprefix("base_model.").removesuffix(".weight").rpartition(".")
            self._factors.setdefault(f"{bare_name(layer)}.weight", {})[factor] = tensor

    def merged(self, base: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights `base` with the adapter: W + scale · B A."""
        found, left = {}, dict(self._factors)
        for name, weight in base.items():
            factors = left.pop(bare_name(name), None)
            if factors is None:
                found[name] = weight
                continue
            try:
                delta = factors["lora_B"].float() @ factors["lora_A"].float()
                found[name] = (weight.float() + self._scale * delta.to(weight.device)).to(weight.dtype)
            except (KeyError, RuntimeError) as error:
                raise ValueError(f"the adapter's factors of {name} do not fit: {error}") from None
        if left:
            raise ValueError(f"the adapter changes {next(iter(left))}, which the model does not have")
        return found
