"""Small random models of every family that is supported, and comparisons of two models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.kernels.reference.ops import TorchOps
from paceline.models.attend import PackedAttend
from paceline.models.config import ModelConfig, RopeConfig
from paceline.models.decoder import Decoder, Rope
from paceline.models.weights import load_model

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4,
         "num_kv_heads": 2, "head_dim": 8, "max_context": 256}
CONFIGS = {
    "llama": ModelConfig("llama", **SIZES, eos_token_ids=(3, 5)),
    "llama-tied": ModelConfig("llama", **SIZES, tie_embeddings=True, rms_eps=1e-5),
    "llama-bias": ModelConfig("llama", **SIZES, qkv_bias=True, o_bias=True, mlp_bias=True),
    "llama3": ModelConfig("llama", **(SIZES | {"head_dim": 16}), rope=RopeConfig(5000.0, "llama3", 8.0, 64)),
    "qwen2": ModelConfig("qwen2", **SIZES, qkv_bias=True, rope=RopeConfig(1e6)),
    "qwen2-tied-yarn": ModelConfig("qwen2", **SIZES, qkv_bias=True, tie_embeddings=True,
                                   rope=RopeConfig(10000.0, "yarn", 4.0, 64)),
    "qwen3": ModelConfig("qwen3", **(SIZES | {"head_dim": 16}), qk_norm=True, eos_token_ids=(7,)),
    "qwen3-128": ModelConfig("qwen3", **(SIZES | {"head_dim": 128}), qk_norm=True),
    "qwen3-linear": ModelConfig("qwen3", **SIZES, qk_norm=True, rope=RopeConfig(10000.0, "linear", 2.0)),
}


def make(name: str) -> Decoder:
    """Random in every parameter, vectors too."""
    model = Decoder.random(CONFIGS[name], seed=1, std=0.2)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


@torch.no_grad()
def logits_of(model: Decoder, tokens: Tensor, last: int = 0) -> Tensor:
    """Return the logits of all positions of a sequence, or of its `last` positions."""
    rope = Rope(model.config, model.config.max_context, model.embed.weight.dtype, "cpu")
    positions = torch.arange(len(tokens))
    attend = PackedAttend(TorchOps(), *rope(positions), (len(tokens),), rope.others_at(positions))
    return model.logits(model(tokens, attend).final[-last:], attend.ops)


@torch.no_grad()
def their_logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    return model.eval()(tokens[None]).logits[0]


def some_tokens(vocab_size: int = SIZES["vocab_size"], length: int = 100) -> Tensor:
    return torch.randint(0, vocab_size, (length,), generator=torch.Generator().manual_seed(3))


def assert_same(model: Decoder, other: Decoder) -> None:
    for (name, ours), (_, theirs) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def refused(source: Path | str, message: str, **options: object) -> None:
    """Refused with exactly one line."""
    with pytest.raises(ValueError, match=message) as info:
        load_model(source, **options)
    assert "\n" not in str(info.value)
