"""Policies that another library trains as transformers models: their configuration and their weights, for an engine."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from paceline.models.config import ModelConfig

_SHARED = ("embed_tokens", "lm_head")
"""Modules that are one and the same matrix in a model with tied embeddings."""

Gather = Callable[[list[nn.Parameter]], AbstractContextManager[None]]
"""Within its context, parameters that are sharded over processes are whole, as with `deepspeed.zero.GatheredParameters`."""


def policy_config(model: Any, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """The configuration of the decoder that computes what this transformers model (or peft model) computes."""
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    name = type(base).__name__
    if isinstance(base, FSDPModule):  # `fully_shard` derives a class with this prefix
        name = name.removeprefix("FSDP")
    raw = {**base.config.to_dict(), "architectures": [name]}
    return replace(ModelConfig.from_hf(raw), eos_token_ids=eos_token_ids)


def merged_weights(model: nn.Module,
                   gather: Gather = lambda parameters: nullcontext()) -> Generator[tuple[str, Tensor], None, None]:
    """The weights of a transformers model under the names of its checkpoints. LoRA adapters are merged into copies, one tensor at
    a time: the model itself, which goes on training, is not changed. ValueError if an adapter cannot be merged.

    A model that is sharded over processes (FSDP2, or DeepSpeed ZeRO-3 with its `gather`) is gathered tensor by tensor: a tensor
    is whole until the next one is asked for. All processes must take part, and must stop at the same tensor."""
    modules = dict(model.named_modules())
    if isinstance(model, PeftModel):
        _check_adapters(model, modules)
    for module in modules.values():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a pass without gradients some parameters are still whole, in the data type of that pass
    for name, parameter in model.named_parameters():
        parts = name.removeprefix("base_model.model.").split(".")
        if "original_module" in parts or any(part.startswith("lora_") for part in parts):
            continue
        layer: Any = None
        if "modules_to_save" in parts:  # a module that is trained as a whole, one copy per adapter
            at = parts.index("modules_to_save")
            if parts[at + 1] not in modules[name.partition(".modules_to_save")[0]].active_adapters:  # type: ignore[operator]
                continue
            del parts[at : at + 2]
        elif "base_layer" in parts:
            parts.remove("base_layer")
            found = modules[name.partition(".base_layer")[0]]
            layer = found if parts[-1] == "weight" and isinstance(found, LoraLayer) else None
        with gather([parameter] if layer is None else list(layer.parameters())):
            value = parameter.detach()
            yield ".".join(parts), _whole(value if layer is None else _merged(layer, value))


def _whole(value: Tensor) -> Tensor:
    """The whole tensor, where each process has a shard of it. Shards in host memory are gathered on the processes' devices."""
    if not isinstance(value, DTensor):
        return value
    return cast(DTensor, value.to(value.device_mesh.device_type)).full_tensor()


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
