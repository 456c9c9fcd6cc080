"""The architecture of a policy: one frozen record for Llama, Qwen2 and Qwen3, read from a Hugging Face `config.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

ARCHITECTURES = {
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3",
    # Reward models: the same decoder with a scalar head.
    "LlamaForSequenceClassification": "llama", "Qwen2ForSequenceClassification": "qwen2",
    "Qwen3ForSequenceClassification": "qwen3",
}

_MAX_LAYERS, _MAX_SIZE = 2**16, 2**31 - 1
"""Larger numbers are mistakes, and what has so many parts is never built."""


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require_size(name: str, value: object, most: int, least: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name}: {value!r} is not an integer in {least}..{most}")


def _require_positive(name: str, value: object) -> None:
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
            _require_positive(f"rope: {name}", getattr(self, name))
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(self, name) is not None:
                _require_positive(f"rope: {name}", getattr(self, name))
        if self.original_context or self.kind in ("llama3", "yarn"):
            _require_size("rope: original_context", self.original_context, _MAX_SIZE)
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(f"rope: low_freq_factor: {self.low_freq_factor} is not below high_freq_factor")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and features of a decoder."""

    architecture: Literal["llama", "qwen2", "qwen3"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    max_context: int = 2048
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "max_context"):
            _require_size(name, getattr(self, name), _MAX_SIZE)
        _require_size("num_layers", self.num_layers, _MAX_LAYERS, least=0)  # 0: only what a drafter shares with its policy
        _require_positive("rms_eps", self.rms_eps)
        if not all(_is_int(token) and token >= 0 for token in self.eos_token_ids):
            raise ValueError(f"eos_token_ids: {list(self.eos_token_ids)} are not all token ids")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads: {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim: {self.head_dim} is odd, rotary embedding needs pairs")

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """The configuration in the contents of a `config.json`, with either `rope_scaling` (old) or `rope_parameters` (new)."""
        names = raw.get("architectures") or [f"(model_type {raw.get('model_type')})"]
        if not isinstance(names, list) or not isinstance(names[0], str):
            raise ValueError(f"architectures: {names} is not a list of names")
        kind = ARCHITECTURES.get(names[0])
        if kind is None:
            raise ValueError(f"architectures: {names[0]} is not supported; known: {', '.join(ARCHITECTURES)}")
        if raw.get("use_sliding_window") or (names[0] == "MistralForCausalLM" and raw.get("sliding_window")):
            raise ValueError("use_sliding_window: sliding-window attention is not supported")
        if raw.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act: {raw['hidden_act']} is not supported, only silu")
        try:
            heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
            kv_heads, head_dim = raw.get("num_key_value_heads"), raw.get("head_dim")
            context = raw.get("max_position_embeddings", 2048)
            eos = raw.get("eos_token_id")
            _require_size("num_attention_heads", heads, _MAX_SIZE)
            _require_size("hidden_size", hidden, _MAX_SIZE)
            _require_size("max_position_embeddings", context, _MAX_SIZE)
            _require_size("num_hidden_layers", raw["num_hidden_layers"], _MAX_LAYERS)
            if head_dim is None and hidden % heads:
                raise ValueError(f"hidden_size: {hidden} is not a multiple of num_attention_heads {heads}; head_dim is missing")
            bias = _flag(raw, "attention_bias")
            return cls(
                architecture=kind,  # type: ignore[arg-type]
                vocab_size=raw["vocab_size"], hidden_size=hidden, intermediate_size=raw["intermediate_size"],
                num_layers=raw["num_hidden_layers"], num_heads=heads,
                num_kv_heads=heads if kv_heads is None else kv_heads,
                head_dim=hidden // heads if head_dim is None else head_dim,
                rms_eps=raw.get("rms_norm_eps", 1e-6), rope=_rope(raw, context),
                qkv_bias=kind == "qwen2" or bias, o_bias=kind != "qwen2" and bias,
                mlp_bias=_flag(raw, "mlp_bias"), qk_norm=kind == "qwen3",
                tie_embeddings=_flag(raw, "tie_word_embeddings"), max_context=context,
                eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (eos,),
            )
        except KeyError as error:
            raise ValueError(f"config.json: key {error} is missing") from None


def _flag(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key}: {value!r} is neither true nor false")
    return bool(value)


def _rope(raw: Mapping[str, Any], context: int) -> RopeConfig:
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
