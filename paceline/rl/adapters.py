"""LoRA adapters of the policy: adding, merging and switching them off, and saving them in PEFT's format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline.config import LearnerConfig
from paceline.files import save_tensors
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.state_dict import hf_layout


def add_lora(model: Decoder, config: LearnerConfig, seed: int) -> None:
    """Adds LoRA adapters to the configured projections, in place. Only the adapters are trained; they are in float32 even if the
    frozen weights are in bfloat16."""
    from peft import LoraConfig, inject_adapter_in_model  # takes seconds to import

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha,
                                           target_modules=list(config.lora_targets), bias="none"), model)
    for name, parameter in model.named_parameters():
        if ".lora_" in name and parameter.dtype == torch.bfloat16:
            parameter.data = parameter.data.float()


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Context in which a model with adapters is the one that it was before they were added."""
    from peft.tuners.lora import LoraLayer

    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and values of the plain decoder's parameters, with adapters merged, for the engine and for checkpoints."""
    adapted = {plain_name(name): module for name, module in model.named_modules() if ".base_layer" not in name}
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        owner, wrapped, kind = plain_name(name).partition(".base_layer.")
        if not wrapped:
            yield owner, parameter.detach()
        elif kind == "weight":
            yield f"{owner}.weight", (parameter + adapted[owner].get_delta_weight("default")).detach()  # type: ignore[operator]
        else:
            yield f"{owner}.{kind}", parameter.detach()


def plain_name(name: str) -> str:
    """A parameter's name without the prefix that activation checkpointing adds."""
    return name.replace("_checkpoint_wrapped_module.", "")


def save_adapter(adapters: Mapping[str, Tensor], model: ModelConfig, config: LearnerConfig, base_model: str,
                 folder: Path) -> None:
    """Writes the adapters of a decoder, given by their names there, as PEFT does, under Hugging Face's names:
    `PeftModel.from_pretrained(base, folder)` loads them. A projection that is fused here shares one A, and each of its parts gets
    its rows of B."""
    from peft import LoraConfig

    own = {plain_name(name): tensor for name, tensor in adapters.items()}
    tensors, targets = {}, set()
    for name, part in hf_layout(model).items():
        owner = part.param_name.removesuffix(".weight")
        if not name.endswith("_proj.weight") or f"{owner}.lora_A.default.weight" not in own:
            continue
        rows = own[f"{owner}.lora_B.default.weight"][part.start : part.start + part.length]
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{prefix}.lora_A.weight"] = own[f"{owner}.lora_A.default.weight"].contiguous().clone()
        tensors[f"{prefix}.lora_B.weight"] = rows.contiguous().clone()
        targets.add(name.split(".")[-2])
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / "adapter_model.safetensors", tensors)
    LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules=sorted(targets), bias="none",
               task_type="CAUSAL_LM", base_model_name_or_path=base_model, inference_mode=True).save_pretrained(str(folder))
