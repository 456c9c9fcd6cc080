"""Saving a policy as a Hugging Face folder that transformers, vLLM and SGLang load."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.files import os_errors, save_tensors
from paceline.models.architectures import architecture_of, hf_name_of
from paceline.models.config import ModelConfig, RopeConfig
from paceline.models.decoder import Decoder
from paceline.models.huggingface import INDEX_FILE, SINGLE_FILE
from paceline.models.state_dict import export_state

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHARD_BYTES = 2 << 30


def save_model(model: Decoder, tokenizer: PreTrainedTokenizerBase | None, folder: str | Path,
               max_shard_bytes: int = _SHARD_BYTES, overwrite: bool = False) -> None:
    """Save a model and its tokenizer as a Hugging Face folder. The folder is written next to its destination and renamed, so it
    is never incomplete."""
    folder = Path(folder).absolute()
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not overwrite):
        raise ValueError(f"{folder}: exists and is not an empty folder")
    raw = hf_config(model.config, model.embed.weight.dtype)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        fresh = scratch / "new"  # a subfolder, because the temporary folder itself is readable by its owner only
        fresh.mkdir()
        _write_folder(model, tokenizer, fresh, raw, max_shard_bytes)
        _put_in_place(fresh, folder, scratch / "old")
    finally:
        shutil.rmtree(scratch)


def _put_in_place(fresh: Path, folder: Path, old: Path) -> None:
    if folder.exists():
        os.rename(folder, old)
    try:
        os.rename(fresh, folder)
    except OSError:
        if old.exists():
            os.rename(old, folder)
        raise


def _write_folder(model: Decoder, tokenizer: PreTrainedTokenizerBase | None, folder: Path, raw: dict[str, Any],
                  max_shard_bytes: int) -> None:
    _write_json(folder / "config.json", raw)
    if raw["eos_token_id"] is not None:
        _write_json(folder / "generation_config.json", {"eos_token_id": raw["eos_token_id"]})
    if tokenizer is not None:
        with os_errors():
            tokenizer.save_pretrained(folder)
    state = export_state(model)
    shards = list(_shards(state, max_shard_bytes))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_tensors(folder / file, {name: state[name] for name in names}, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        size_bytes = sum(tensor.nbytes for tensor in state.values())
        _write_json(folder / INDEX_FILE, {"metadata": {"total_size": size_bytes}, "weight_map": weight_map})


def _shards(state: Mapping[str, Tensor], max_shard_bytes: int) -> Iterator[list[str]]:
    """The tensor names of each shard, in order. A tensor larger than the limit gets a shard of its own."""
    names: list[str] = []
    size_bytes = 0
    for name, tensor in state.items():
        if names and size_bytes + tensor.nbytes > max_shard_bytes:
            yield names
            names, size_bytes = [], 0
        names.append(name)
        size_bytes += tensor.nbytes
    yield names


def hf_config(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The `config.json` of a model, with the rotary embedding in the spelling of transformers 5 and in the one before."""
    architecture, row = hf_name_of(config), architecture_of(config)
    rope = hf_rope(config.rope)
    eos = list(config.eos_token_ids)
    raw = {
        "architectures": [architecture], "model_type": row.model_type or row.kind, "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim, "hidden_act": row.hidden_act,
        "rms_norm_eps": config.rms_eps, "rope_theta": config.rope.theta, "rope_parameters": rope,
        "rope_scaling": None if config.rope.kind == "default" else rope,
        "attention_bias": config.o_bias, "mlp_bias": config.mlp_bias, "tie_word_embeddings": config.tie_embeddings,
        # A model that was loaded with a lower max_context keeps the context length it was trained for.
        "max_position_embeddings": max(config.max_context, config.rope.original_context),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None, "torch_dtype": str(dtype).removeprefix("torch."),
        **row.write(config),
    }
    read = ModelConfig.from_hf(raw)
    for flag in ("qkv_bias", "o_bias", "mlp_bias", "qk_norm", "embed_scale", "norm_offset", "logit_cap", "layers"):
        if getattr(read, flag) != getattr(config, flag):
            raise ValueError(f"{flag}: {architecture} cannot say {getattr(config, flag)}")
    return raw


def hf_rope(rope: RopeConfig) -> dict[str, Any]:
    """Parameters of the rotary embedding. Only those of its scaling method, since transformers warns about others."""
    keys = {
        "default": (), "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    }[rope.kind]
    values = {key: getattr(rope, key) for key in keys}
    raw = {"rope_type": rope.kind, "rope_theta": rope.theta} | {k: v for k, v in values.items() if v is not None}
    if rope.kind in ("llama3", "yarn"):
        raw["original_max_position_embeddings"] = rope.original_context
    return raw


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
