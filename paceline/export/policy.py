"""A run's policy as a Hugging Face folder, or its LoRA adapters as a folder that PEFT, transformers and vLLM load."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from paceline.config import LearnerConfig
from paceline.models.config import ModelConfig
from paceline.models.save import save_model
from paceline.models.weights import load_model
from paceline.rl.adapters import write_adapter


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
    write_adapter(adapters, config, settings, base, folder)
