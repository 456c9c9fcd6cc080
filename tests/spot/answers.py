"""Answers of tiny policies with their features, as an engine captures them, without an engine."""

from __future__ import annotations

import random

import torch

from paceline.kernels import TorchOps
from paceline.models.attend import PackedAttend
from paceline.models.decoder import Decoder, Rope
from paceline.types import FeatureRecord

OPS = TorchOps()


def features_of(policy: Decoder, tokens: list[int], layers: tuple[int, ...]) -> torch.Tensor:
    rope = Rope(policy.config, len(tokens), policy.norm.dtype, "cpu")
    attend = PackedAttend(OPS, *rope(torch.arange(len(tokens) - 1)), (len(tokens) - 1,))
    found = policy(torch.tensor(tokens[:-1]), attend, layers).features
    assert found is not None
    return found


def record(policy: Decoder, tokens: list[int], layers: tuple[int, ...] = (-1,), prompt: int = 3) -> FeatureRecord:
    return FeatureRecord(tokens, features_of(policy, tokens, layers), layers, [0] * (len(tokens) - prompt), prompt)


def answers(policy: Decoder, lengths: list[int], layers: tuple[int, ...] = (-1,), seed: int = 0) -> list[FeatureRecord]:
    """Random texts of these lengths."""
    draw = random.Random(seed)
    return [record(policy, [draw.randrange(policy.config.vocab_size) for _ in range(n)], layers) for n in lengths]


def sampled(policy: Decoder, lengths: list[int], layers: tuple[int, ...] = (-1,), seed: int = 0,
            temperature: float = 1.0) -> list[FeatureRecord]:
    """Texts that the policy drew itself."""
    draw, found = torch.Generator().manual_seed(seed), []
    for n in lengths:
        tokens = torch.randint(policy.config.vocab_size, (3,), generator=draw).tolist()
        while len(tokens) < n:
            state = features_of(policy, [*tokens, 0], (-1,))[-1:]
            tokens.append(int((policy.logits(state, OPS) / temperature).softmax(-1).multinomial(1, generator=draw)))
        found.append(record(policy, tokens, layers))
    return found
