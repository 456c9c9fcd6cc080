"""Policies that another library trains as transformers models: their configuration and their weights, for an engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from paceline.models.config import ModelConfig

_SHARED = ("embed_tokens", "lm_head")
"""Modules that are one and the same matrix in a model with tied embeddings."""


def policy_config(model: Any, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """The configuration of the decoder that computes what this transformers model (or peft model) computes."""
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    raw = {**base.config.to_dict(), "architectures": [type(base).__name__]}
    return replace(ModelConfig.from_hf(raw), eos_token_ids=eos_token_ids)


def merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights of a transformers model under the names of its checkpoints. LoRA adapters are merged into copies, one tensor at
    a time: the model itself, which goes on training, is not changed. ValueError if an adapter cannot be merged."""
    modules = dict(model.named_modules())
    if isinstance(model, PeftModel):
        _check_adapters(model, modules)
    for name, parameter in model.named_parameters():
        parts = name.removeprefix("base_model.model.").split(".")
        if "original_module" in parts or any(part.startswith("lora_") for part in parts):
            continue
        value = parameter.detach()
        if "modules_to_save" in parts:  # a module that is trained as a whole, one copy per adapter
            at = parts.index("modules_to_save")
            if parts[at + 1] not in modules[name.partition(".modules_to_save")[0]].active_adapters:  # type: ignore[operator]
                continue
            del parts[at : at + 2]
        elif "base_layer" in parts:
            parts.remove("base_layer")
            layer = modules[name.partition(".base_layer")[0]]
            if parts[-1] == "weight" and isinstance(layer, LoraLayer):
                value = _merged(layer, value)
        yield ".".join(parts), value


def _merged(layer: Any, weight: Tensor) -> Tensor:
    """The weight of a LoRA layer with its active adapters added, but for those that peft has merged already."""
    for adapter in layer.active_adapters:
        if adapter in layer.lora_A or adapter in layer.lora_embedding_A:
            weight = weight if adapter in layer.merged_adapters else weight + layer.get_delta_weight(adapter).detach()
    return weight


def _check_adapters(model: PeftModel, modules: dict[str, nn.Module]) -> None:
    config = model.peft_config[model.active_adapter]
    if getattr(config, "use_dora", False) or getattr(config, "lora_bias", False):
        raise ValueError("peft_config: DoRA and biases of LoRA adapters are not supported")
    if not getattr(model.get_base_model().config, "tie_word_embeddings", False):
        return
    for name, module in modules.items():
        if name.endswith(_SHARED) and (isinstance(module, LoraLayer) or hasattr(module, "modules_to_save")):
            raise ValueError(f"peft_config: {name.removeprefix('base_model.model.')} has an adapter, but the embeddings are tied")
