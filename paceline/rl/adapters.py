"""LoRA adapters of the policy: adding, merging and switching them off, and saving them in PEFT's format."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.config import LearnerConfig
from paceline.files import atomic_write, save_tensors
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.parallel import split_decoder
from paceline.models.partition import Partition
from paceline.models.state_dict import load_state
from paceline.models.state_layout import hf_layout
from paceline.models.weights import MakeDecoder, empty_model
from paceline.rl.ranks import full, local, put_together


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
            yield f"{owner}.weight", _merged(adapted[owner], parameter)
        else:
            yield f"{owner}.{kind}", parameter.detach()


@torch.no_grad()
def _merged(module: Any, weight: nn.Parameter) -> Tensor:
    """In float32 or better."""
    if not isinstance(weight, DTensor):
        return module.get_delta_weight("default").add_(weight)
    down, up = module.lora_A["default"].weight, local(module.lora_B["default"].weight)  # `up` has the rows that `weight` has here
    return put_together((up @ full(down)).mul_(module.scaling["default"]).add_(local(weight)), weight)


def unadapted_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Parameters of the plain decoder that no adapter changes, by name. They share memory with the model's."""
    found = {}
    for name, parameter in model.named_parameters():
        owner, wrapped, kind = plain_name(name).partition(".base_layer.")
        if ".lora_" not in name and kind != "weight":
            found[f"{owner}.{kind}" if wrapped else owner] = parameter.detach()
    return found


def decoder_of(shape: ModelConfig, tensors: dict[str, Tensor], make: MakeDecoder = Decoder) -> Decoder:
    """A decoder whose parameters are these tensors. Nothing is copied: it shares memory with whoever else has them."""
    with torch.device("meta"):
        model = make(shape).requires_grad_(False)
    tied = {"head.weight": tensors["embed.weight"]} if shape.tie_embeddings else {}
    model.load_state_dict({**tensors, **tied}, assign=True)
    if shape.tie_embeddings:
        model.head.weight = model.embed.weight
    return model


def plain_copy(policy: Decoder, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, shared: Mapping[str, Tensor],
               num_shares: int = 1) -> Decoder:
    """A decoder of the policy's shape, on its device, with a copy of these weights in a data type. The tensors in `shared`, by
    name, are not copied. `num_shares`: see `EngineConfig.reduction_shares`."""
    make = Decoder if num_shares == 1 else partial(split_decoder, partition=Partition(0, 1, num_shares), group=None)
    empty, device = dict(empty_model(policy.config, dtype, "meta", make).named_parameters()), policy.norm.device
    found = {name: shared[name] if name in shared else torch.empty_like(p, device=device) for name, p in empty.items()}
    model = decoder_of(policy.config, found, make)
    load_state(model, weights)
    return model


def plain_name(name: str) -> str:
    """A parameter's name without the prefix that activation checkpointing adds."""
    return name.replace("_checkpoint_wrapped_module.", "")


def adapter_matrices(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """LoRA matrices among named parameters, by the decoder's names, like `layers.0.attention.qkv.lora_A`."""
    return {plain_name(name).removesuffix(".default.weight"): tensor.detach() for name, tensor in named if ".lora_" in name}


def write_adapter(adapters: dict[str, Tensor], shape: ModelConfig, settings: LearnerConfig, base: str, folder: Path) -> None:
    """Writes LoRA adapters in PEFT's format, under Hugging Face's names: `PeftModel.from_pretrained(model, folder)` loads them.
    `adapters`: see `adapter_matrices`. `base`: the policy that they were trained on."""
    tensors: dict[str, Tensor] = {}
    for name, (parameter, start, length, *_) in hf_layout(shape).items():
        module = parameter.removesuffix(".weight")
        if f"{module}.lora_A" not in adapters or not parameter.endswith(".weight"):
            continue
        theirs = f"base_model.model.{name.removesuffix('.weight')}"  # parts of a fused projection share A and split B
        tensors[f"{theirs}.lora_A.weight"] = adapters[f"{module}.lora_A"].clone()
        tensors[f"{theirs}.lora_B.weight"] = adapters[f"{module}.lora_B"][start : start + length].clone()
    if not tensors:
        raise ValueError("the checkpoint has no LoRA adapters")
    targets = sorted({name.split(".")[-3] for name in tensors})
    raw = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": settings.lora_rank,
           "lora_alpha": settings.lora_alpha, "target_modules": targets, "lora_dropout": 0.0, "bias": "none",
           "inference_mode": True}
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / "adapter_model.safetensors", tensors, {"format": "pt"})
    atomic_write(folder / "adapter_config.json", json.dumps(raw, indent=2) + "\n")
