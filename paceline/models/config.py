"""The shape of a policy: one frozen record for all architectures, read from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.models.architectures import ARCHITECTURES, Architecture, hf_name_of
from paceline.models.spec import (
    MAX_LAYERS,
    MAX_SIZE,
    ExpertsSpec,
    LayerSpec,
    RopeConfig,
    is_int,
    read_rope,
    require_positive,
    require_size,
)

__all__ = ["ARCHITECTURES", "Architecture", "ExpertsSpec", "LayerSpec", "ModelConfig", "RopeConfig", "hf_name_of"]

_PLAIN, _ROPE = LayerSpec(), RopeConfig()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and features of a decoder."""

    architecture: str
    """Kind of architecture, one of those in `ARCHITECTURES`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float = 1e-6
    rope: RopeConfig = _ROPE
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    max_context: int = 2048
    eos_token_ids: tuple[int, ...] = ()
    layers: tuple[LayerSpec, ...] = ()
    """Records of the layers, of which the first `num_layers` are used; none: all layers are `LayerSpec()`."""
    embed_scale: float = 1.0
    """Factor of the embeddings."""
    norm_offset: float = 0.0
    """What is added to the weights of norms when they are read from a checkpoint, and subtracted when they are written."""
    logit_cap: float = 0.0
    """Bound c of the logits, which become c tanh(logit / c); 0: none."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "max_context"):
            require_size(name, getattr(self, name), MAX_SIZE)
        require_size("num_layers", self.num_layers, MAX_LAYERS, least=0)  # 0: only what a drafter shares with its policy
        require_positive("rms_eps", self.rms_eps)
        if not all(is_int(token) and token >= 0 for token in self.eos_token_ids):
            raise ValueError(f"eos_token_ids: {list(self.eos_token_ids)} are not all token ids")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads: {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim: {self.head_dim} is odd, rotary embedding needs pairs")
        if self.layers and len(self.layers) < self.num_layers:
            raise ValueError(f"layers: {len(self.layers)} are described of {self.num_layers}")
        require_positive("embed_scale", self.embed_scale)
        if self.logit_cap:
            require_positive("final_logit_softcapping", self.logit_cap)

    def layer(self, index: int) -> LayerSpec:
        """The record of a layer."""
        return self.layers[index] if self.layers else _PLAIN

    @property
    def has_experts(self) -> bool:
        """Whether any layer is a mixture of experts."""
        return self.num_sparse_layers > 0

    @property
    def num_sparse_layers(self) -> int:
        """Number of layers with experts."""
        return sum(layer.experts is not None for layer in self.layers[: self.num_layers])

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary embeddings of all layers, the model's own first."""
        return tuple(dict.fromkeys((self.rope, *(layer.rope or self.rope for layer in self.layers[: self.num_layers]))))

    @property
    def mlp_width(self) -> int:
        """Number of intermediate activations of one token in the widest layer: of its dense MLP, or of its active experts."""
        layers = map(self.layer, range(self.num_layers))
        return max((self.intermediate_size if s.experts is None else s.experts.active * s.experts.size for s in layers),
                   default=self.intermediate_size)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """The configuration in the contents of a `config.json`, with either `rope_scaling` (old) or `rope_parameters` (new)."""
        names = raw.get("architectures") or [f"(model_type {raw.get('model_type')})"]
        if not isinstance(names, list) or not isinstance(names[0], str):
            raise ValueError(f"architectures: {names} is not a list of names")
        row = ARCHITECTURES.get(names[0])
        if row is None:
            raise ValueError(f"architectures: {names[0]} is not supported; known: {', '.join(ARCHITECTURES)}")
        activation = raw.get("hidden_activation") or raw.get("hidden_act", "silu")
        if activation != row.hidden_act:
            raise ValueError(f"hidden_act: {activation} is not supported, only {row.hidden_act}")
        try:
            heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
            kv_heads, head_dim = raw.get("num_key_value_heads"), raw.get("head_dim")
            context = raw.get("max_position_embeddings", 2048)
            eos = raw.get("eos_token_id")
            require_size("num_attention_heads", heads, MAX_SIZE)
            require_size("hidden_size", hidden, MAX_SIZE)
            require_size("max_position_embeddings", context, MAX_SIZE)
            require_size("num_hidden_layers", raw["num_hidden_layers"], MAX_LAYERS)
            if head_dim is None and hidden % heads:
                raise ValueError(f"hidden_size: {hidden} is not a multiple of num_attention_heads {heads}; head_dim is missing")
            bias = _flag(raw, "attention_bias")
            layers = row.layers(raw, raw["num_hidden_layers"])
            return cls(
                architecture=row.kind, vocab_size=raw["vocab_size"], hidden_size=hidden,
                intermediate_size=raw["intermediate_size"], num_layers=raw["num_hidden_layers"], num_heads=heads,
                num_kv_heads=heads if kv_heads is None else kv_heads,
                head_dim=hidden // heads if head_dim is None else head_dim,
                rms_eps=raw.get("rms_norm_eps", 1e-6), rope=read_rope(row.rope(raw), context),
                qkv_bias=row.kind == "qwen2" or bias, o_bias=row.kind != "qwen2" and bias,
                mlp_bias=_flag(raw, "mlp_bias"), qk_norm=row.qk_norm,
                tie_embeddings=_flag(raw, "tie_word_embeddings", row.tied), max_context=context,
                eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (eos,),
                layers=() if all(layer == _PLAIN for layer in layers) else layers, **row.extras(raw),
            )
        except KeyError as error:
            raise ValueError(f"config.json: key {error} is missing") from None


def _flag(raw: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key}: {value!r} is neither true nor false")
    return default if value is None else value
