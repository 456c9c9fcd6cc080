"""Models that the benchmarks run: random weights in known shapes, and model folders that every compared engine can load."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.lib.results import ROOT
from paceline.models.config import ExpertsSpec, LayerSpec, ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.huggingface import INDEX_FILE
from paceline.models.save import hf_config, save_model
from paceline.models.weights import empty_model, load_model

SMALL, SMOLLM2 = "12x256", "SmolLM2-135M"
SMALL_SHAPE = ModelConfig("qwen3", 4096, 256, 704, 12, 4, 2, 64, qk_norm=True, tie_embeddings=True, max_context=1024)
"""12 layers of 256 in the form of Qwen3: 9.9 million parameters. Its samples are close to uniform, so its text never repeats."""
QWEN_SHAPES = {
    "7B": ModelConfig("qwen2", 152064, 3584, 18944, 28, 28, 4, 128, qkv_bias=True, max_context=4096),
    "1.5B": ModelConfig("qwen2", 151936, 1536, 8960, 28, 12, 2, 128, qkv_bias=True, tie_embeddings=True, max_context=4096),
    "0.5B": ModelConfig("qwen2", 151936, 896, 4864, 24, 14, 2, 64, qkv_bias=True, tie_embeddings=True, max_context=4096),
}
"""Shapes of Qwen2.5, with a short context."""
DECODE_SHAPES = QWEN_SHAPES | {
    "30B-A3B": ModelConfig("qwen3_moe", 151936, 2048, 6144, 48, 32, 4, 128, qk_norm=True, max_context=4096,
                           layers=(LayerSpec(experts=ExpertsSpec(128, 8, 768)),) * 48),
}
"""Those, and that of Qwen3-30B-A3B, a mixture of experts."""
QWEN_32B = ModelConfig("qwen2", 152064, 5120, 27648, 64, 40, 8, 128, qkv_bias=True, max_context=32768)
QWEN_7B = replace(QWEN_SHAPES["7B"], max_context=32768)
TINY = ModelConfig("qwen2", 128, 48, 96, 2, 4, 2, 16, qkv_bias=True, tie_embeddings=True, max_context=512)
"""Shape of the random policy in smoke runs."""
TINY_TWIN = ModelConfig("qwen2", 128, 80, 128, 2, 12, 4, 16, qkv_bias=True, max_context=512)
"""Larger shape into which `upscale` lays `TINY` in smoke runs."""
H200_BANDWIDTH = 4.22e12
"""Bytes per second that an H200 reads from its memory (measured)."""
SMOLLM2_FILE = ROOT / ".models" / "smollm2.gguf"
"""Where scripts/get_smollm2.py puts SmolLM2-135M."""
MODEL_FOLDERS = ROOT / ".models" / "bench"
"""Where the benchmarks write models as folders."""


def write_shape(shape: ModelConfig, folder: Path) -> Path:
    """`folder`, with the configuration of a model and no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(shape, torch.bfloat16)), encoding="utf-8")
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {}}), encoding="utf-8")
    return folder


def random_model(shape: ModelConfig, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> Decoder:
    """A decoder with random weights. Unlike `Decoder.random` it needs no memory beyond its own, whatever the dtype."""
    model = empty_model(shape, dtype, device)
    fill_random(model, seed)
    return model


def fill_random(module: nn.Module, seed: int = 0, std: float = 0.02) -> None:
    """Fills matrices with normal values; biases become zero, and norms one."""
    generator = torch.Generator(next(module.parameters()).device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, std, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith(".bias") else 1.0)


def model_folder(model: str, folder: Path, smollm2: str | Path = SMOLLM2_FILE) -> Path:
    """`folder`, with the model in float32 as Hugging Face stores it; every engine casts it to the dtype of the run."""
    if not (folder / "config.json").is_file():
        if model == SMALL:
            save_model(Decoder.random(SMALL_SHAPE, seed=0), None, folder)
        else:
            save_model(*load_model(smollm2, dtype="float32"), folder)
    return folder


def word_tokenizer(size: int) -> Any:
    """A tokenizer in which token i is the word "t<i>"."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel({f"t{i}": i for i in range(size)}, unk_token="t2"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="t0", pad_token="t1", unk_token="t2")


def bytes_read_per_step(config: ModelConfig) -> int:
    """Bytes of bfloat16 weights that one decode step reads: all matrices, the embedding only as the head, and of experts those
    of one token."""
    layer = config.hidden_size * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
    layer += 3 * config.hidden_size * config.mlp_width
    return 2 * (config.num_layers * layer + config.vocab_size * config.hidden_size)
