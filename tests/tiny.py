"""Tiny seeded models for tests: small enough to run thousands of steps, random enough that every token is in play."""

from __future__ import annotations

from functools import cache

import torch

from paceline.drafters.eagle import Eagle, EagleConfig, Form
from paceline.models.config import ModelConfig, RopeConfig
from paceline.models.decoder import Decoder

VOCAB = 61

CONFIGS = {
    "llama": ModelConfig("llama", VOCAB, 32, 48, 2, 4, 2, 8, max_context=256, tie_embeddings=True,
                         rope=RopeConfig(kind="llama3", factor=4.0, original_context=64)),
    "qwen2": ModelConfig("qwen2", VOCAB, 24, 40, 2, 6, 2, 4, max_context=256, qkv_bias=True),
    "qwen3": ModelConfig("qwen3", VOCAB, 32, 48, 3, 4, 1, 16, max_context=256, qk_norm=True),
}


@cache
def model(kind: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float64) -> Decoder:
    decoder = Decoder.random(CONFIGS[kind], seed, std=0.35, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():  # biases and norms that do something
        for parameter in decoder.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=dtype) * 0.2)
    return decoder


@cache
def eagle(kind: str = "llama", form: Form = "eagle", seed: int = 1, dtype: torch.dtype = torch.float64,
          draft_vocab: int = 0) -> Eagle:
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:draft_vocab] if draft_vocab else None
    return Eagle.random(EagleConfig.for_policy(CONFIGS[kind], form), seed, 0.2, dtype, draft_ids=ids)
