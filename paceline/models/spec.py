"""Records that describe parts of a decoder: the rotary embedding, the experts of a layer, and the layer itself. A new kind of
layer is a new value here, read from `config.json` by a row of `architectures`, and not a branch in the decoder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from paceline.kernels.records import Activation

MAX_LAYERS, MAX_SIZE = 2**16, 2**31 - 1
"""Larger numbers are mistakes, and what has so many parts is never built."""


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def require_size(name: str, value: object, most: int, least: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name}: {value!r} is not an integer in {least}..{most}")


def require_positive(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{name}: {value!r} is not a positive number")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Parameters of the rotary position embedding, named as in Hugging Face's `rope_parameters`."""

    theta: float = 10000.0
    """Base of the frequencies (`rope_theta`)."""
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    """Scaling method (`rope_type`)."""
    factor: float = 1.0
    """Context extension factor of the scaling."""
    original_context: int = 0
    """Context length of the model before scaling (`original_max_position_embeddings`; llama3 and yarn)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """Factor on cos and sin (yarn); None derives it from `factor`."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        for name in ("theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
            require_positive(f"rope: {name}", getattr(self, name))
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(self, name) is not None:
                require_positive(f"rope: {name}", getattr(self, name))
        if self.original_context or self.kind in ("llama3", "yarn"):
            require_size("rope: original_context", self.original_context, MAX_SIZE)
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(f"rope: low_freq_factor: {self.low_freq_factor} is not below high_freq_factor")


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """The experts of a layer. A router chooses some of them for every token."""

    count: int
    """Number of experts of the layer."""
    active: int
    """Number of experts that process one token."""
    size: int
    """Intermediate size of one expert."""
    normalised: bool = True
    """Whether the weights of a token's experts sum to one; otherwise they are the router's probabilities over all experts."""
    bias: bool = False
    """Whether the router and the experts have biases."""

    def __post_init__(self) -> None:
        for name in ("count", "active", "size"):
            require_size(f"experts: {name}", getattr(self, name), MAX_SIZE)
        if self.active > self.count:
            raise ValueError(f"experts: {self.active} are active of {self.count}")


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one decoder layer has besides the sizes and flags of its `ModelConfig`. The defaults are a Llama layer."""

    window: int = 0
    """Number of positions that a token attends to, its own included (sliding window); 0: all before it."""
    sinks: bool = False
    """Whether every head has a learned logit that takes part in the softmax and stands for no key."""
    soft_cap: float = 0.0
    """Bound c of the attention scores, which become c tanh(score / c); 0: none."""
    scale: float | None = None
    """Factor of the attention scores; None: 1 / sqrt(head_dim)."""
    rope: RopeConfig | None = None
    """Rotary embedding of this layer; None: the model's."""
    experts: ExpertsSpec | None = None
    """The experts of a sparse layer; None: a dense MLP."""
    activation: Activation = "silu"
    post_norms: bool = False
    """Whether the outputs of attention and MLP are normalised as well, before they are added to the residual stream."""

    def __post_init__(self) -> None:
        require_size("sliding_window", self.window, MAX_SIZE, least=0)
        if self.soft_cap:
            require_positive("attn_logit_softcapping", self.soft_cap)
        if self.scale is not None:
            require_positive("query_pre_attn_scalar", self.scale)


def read_rope(raw: Mapping[str, Any], context: int) -> RopeConfig:
    """The rotary embedding in `rope_scaling` (old) or `rope_parameters` (new) of a `config.json`."""
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping):
        raise ValueError(f"rope_scaling: {scaling!r} is not an object")
    theta = scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ValueError(f"rope_scaling: {kind} is not supported; known: default, linear, llama3, yarn")
    if scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) not in (None, 1.0):
        raise ValueError("partial_rotary_factor: partial rotary embedding is not supported")
    return RopeConfig(
        theta=theta, kind=kind,  # type: ignore[arg-type]
        factor=scaling.get("factor", 1.0),
        original_context=scaling.get("original_max_position_embeddings") or context,
        low_freq_factor=scaling.get("low_freq_factor", 1.0), high_freq_factor=scaling.get("high_freq_factor", 4.0),
        beta_fast=scaling.get("beta_fast") or 32.0, beta_slow=scaling.get("beta_slow") or 1.0,
        attention_factor=scaling.get("attention_factor"), mscale=scaling.get("mscale"),
        mscale_all_dim=scaling.get("mscale_all_dim"), truncate=scaling.get("truncate", True),
    )
