"""Rotary position embedding: frequencies and cos/sin tables, with the scaling methods that published models use."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.models.config import RopeConfig


def rope_table(rope: RopeConfig, head_dim: int, length: int) -> tuple[Tensor, Tensor]:
    """The tables (cos, sin) for positions 0..length-1, each [length, head_dim / 2] float32."""
    inverse, factor = inverse_frequencies(rope, head_dim)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * inverse
    return angles.cos() * factor, angles.sin() * factor


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Returns the inverse frequencies [head_dim / 2] float32 and the factor that multiplies cos and sin."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / rope.theta**exponent
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, plain, head_dim)
    return plain, 1.0


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Llama 3 scaling: low frequencies are divided by the factor, high ones are kept, and those between are interpolated."""
    wavelength = 2 * math.pi / plain
    low, high = rope.original_context / rope.low_freq_factor, rope.original_context / rope.high_freq_factor
    share = (rope.original_context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - share) * plain / rope.factor + share * plain
    return torch.where(wavelength > low, plain / rope.factor, torch.where(wavelength < high, plain, blended))


def _yarn(rope: RopeConfig, plain: Tensor, head_dim: int) -> tuple[Tensor, float]:
    """YaRN (NTK-by-parts): dimensions with more than beta_fast rotations within the original context are kept, those with fewer
    than beta_slow are divided by the factor, and those between are interpolated."""

    def dimension(rotations: float) -> float:
        turns = rope.original_context / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    keep = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * (1 - keep) + plain * keep, _yarn_attention(rope)


def _yarn_attention(rope: RopeConfig) -> float:
    """The factor of YaRN on cos and sin."""

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
