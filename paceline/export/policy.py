"""A run's policy as a Hugging Face folder, or its LoRA adapters as a folder that PEFT, transformers and vLLM load."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from paceline.config import LearnerConfig
from paceline.files import atomic_write, save_tensors
from paceline.models.config import ModelConfig
from paceline.models.save import save_model
from paceline.models.state_dict import hf_layout
from paceline.models.weights import load_model


def export_policy(source: Path | str, folder: Path | str, dtype: torch.dtype | str = "auto") -> None:
    """Write a policy as a Hugging Face folder, in `dtype`. `source`: anything that `load_model` accepts. A run's checkpoints have
    their adapters merged already."""
    model, tokenizer = load_model(source, "cpu", dtype)
    save_model(model, tokenizer, folder)


def export_adapter(adapters: dict[str, Tensor], config: ModelConfig, settings: LearnerConfig, base: str,
                   folder: Path | str) -> None:
    """Write LoRA adapters in PEFT's format. `adapters`: matrices by the decoder's names, see `rl.checkpoint.read_adapters`.
    `base`: the policy that they were trained on."""
    folder = Path(folder)
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ValueError(f"{folder}: exists and is not an empty folder")
    tensors: dict[str, Tensor] = {}
    for name, (parameter, start, length) in hf_layout(config).items():
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
