"""The table of architectures: one row per class name in Hugging Face's `config.json`. A row says how the file's keys become a
`ModelConfig` with one `LayerSpec` per layer, and the names of its tensors. docs/architectures.md shows how to add one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.models.spec import ExpertsSpec, LayerSpec, read_rope

if TYPE_CHECKING:
    from paceline.models.config import ModelConfig

Raw = Mapping[str, Any]
"""The contents of a `config.json`."""

_CLAMPED = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
"""Constants of the activation `clamped_silu`; the kernels know no others."""


class TensorNames(NamedTuple):
    """Names of a layer's tensors in a checkpoint where architectures differ, without the prefix of the layer."""

    experts: str = "mlp"
    """Module of router and experts."""
    router: str = "gate"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """The matrices of one expert."""
    interleaved: bool = False
    """Whether all experts are one tensor with transposed matrices, in which gate and up columns alternate (gpt-oss)."""
    mlp_norm: str = "post_attention_layernorm"
    post_attention_norm: str = ""
    post_mlp_norm: str = ""


class Architecture(NamedTuple):
    """A row of the table."""

    kind: str
    """The architecture's name in `ModelConfig`, in GGUF files, and `model_type` of `config.json` unless that is given."""
    model_type: str = ""
    layers: Callable[[Raw, int], tuple[LayerSpec, ...]] = lambda raw, count: (LayerSpec(),) * count
    """The records of all layers, from the configuration and the number of layers."""
    write: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}
    """The keys of `config.json` that only this architecture has."""
    names: TensorNames = TensorNames()
    qk_norm: bool = False
    tied: bool = False
    """Whether embedding and head are one tensor if the configuration does not say."""
    hidden_act: str = "silu"
    """The only activation that is supported, by Hugging Face's name."""
    rope: Callable[[Raw], Raw] = lambda raw: raw
    """The part of the configuration that holds the rotary embedding of most layers."""
    extras: Callable[[Raw], dict[str, Any]] = lambda raw: {}
    """Further fields of `ModelConfig`."""


# -- readers of layers


def _windows(raw: Raw, count: int, window: int | None) -> list[int]:
    """The sliding window of each layer (0: none), by `layer_types` if the configuration has it."""
    window, kinds = window or 0, raw.get("layer_types")
    if kinds is None:
        return [window] * count
    if not isinstance(kinds, list) or len(kinds) < count or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise ValueError(f"layer_types: {kinds!r} are not {count} times full_attention or sliding_attention")
    return [window if kind == "sliding_attention" else 0 for kind in kinds[:count]]


def _every_layer(raw: Raw, count: int) -> tuple[LayerSpec, ...]:
    """Mistral: every layer has the window."""
    return tuple(LayerSpec(window=window) for window in _windows(raw, count, raw.get("sliding_window")))


def _upper_layers(raw: Raw, count: int) -> tuple[LayerSpec, ...]:
    """Qwen2, Qwen3: layers from `max_window_layers` on have the window, if it is switched on."""
    if not raw.get("use_sliding_window"):
        return (LayerSpec(),) * count
    first = raw.get("max_window_layers", count) if raw.get("layer_types") is None else 0
    windows = _windows(raw, count, raw.get("sliding_window"))
    return tuple(LayerSpec(window=window if index >= first else 0) for index, window in enumerate(windows))


def _qwen3_moe(raw: Raw, count: int) -> tuple[LayerSpec, ...]:
    """Every `decoder_sparse_step`-th layer is sparse, unless `mlp_only_layers` names it."""
    dense, step = set(raw.get("mlp_only_layers") or ()), raw.get("decoder_sparse_step") or 1
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    experts = ExpertsSpec(_num_experts(raw), raw["num_experts_per_tok"], raw["moe_intermediate_size"],
                          normalised=bool(raw.get("norm_topk_prob")))
    return tuple(LayerSpec(window=w, experts=experts if i not in dense and (i + 1) % step == 0 else None)
                 for i, w in enumerate(_windows(raw, count, window)))


def _mixtral(raw: Raw, count: int) -> tuple[LayerSpec, ...]:
    experts = ExpertsSpec(_num_experts(raw), raw["num_experts_per_tok"], raw["intermediate_size"])
    return tuple(LayerSpec(window=window, experts=experts) for window in _windows(raw, count, raw.get("sliding_window")))


def _gpt_oss(raw: Raw, count: int) -> tuple[LayerSpec, ...]:
    for key, value in _CLAMPED.items():
        if raw.get(key, value) != value:
            raise ValueError(f"{key}: {raw[key]} is not supported, only {value}")
    experts = ExpertsSpec(_num_experts(raw), raw["num_experts_per_tok"], raw["intermediate_size"], bias=True)
    kinds = raw.get("layer_types") or ["full_attention" if index % 2 else "sliding_attention" for index in range(count)]
    return tuple(LayerSpec(window=window, sinks=True, experts=experts, activation="clamped_silu")
                 for window in _windows({"layer_types": kinds}, count, raw.get("sliding_window", 128)))


def _gemma2(raw: Raw, count: int) -> tuple[LayerSpec, ...]:
    kinds = raw.get("layer_types") or ["full_attention" if index % 2 else "sliding_attention" for index in range(count)]
    scale, cap = raw.get("query_pre_attn_scalar", 256) ** -0.5, raw.get("attn_logit_softcapping", 50.0) or 0.0
    return tuple(LayerSpec(window=window, soft_cap=cap, scale=scale, activation="gelu_tanh", post_norms=True)
                 for window in _windows({"layer_types": kinds}, count, raw.get("sliding_window", 4096)))


def _gemma3(raw: Raw, count: int) -> tuple[LayerSpec, ...]:
    if raw.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention: only causal attention is supported")
    # `attn_logit_softcapping` is not applied by transformers, and null in all published models.
    pattern = raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or 6
    kinds = raw.get("layer_types") or ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(count)]
    local = read_rope(_gemma3_rope(raw, "sliding_attention"), raw.get("max_position_embeddings", 2048))
    scale = raw.get("query_pre_attn_scalar", 256) ** -0.5
    return tuple(LayerSpec(window=window, scale=scale, rope=local if kind == "sliding_attention" else None,
                           activation="gelu_tanh", post_norms=True)
                 for kind, window in zip(kinds, _windows({"layer_types": kinds}, count, raw.get("sliding_window", 4096)),
                                         strict=False))


def _gemma3_rope(raw: Raw, kind: str = "full_attention") -> Raw:
    """The rotary embedding of the layers with a window, or of the others, in the spelling of other models."""
    by_kind = raw.get("rope_parameters")
    if isinstance(by_kind, Mapping) and kind in by_kind:
        return {"rope_parameters": by_kind[kind]}
    if kind == "sliding_attention":
        return {"rope_theta": raw.get("rope_local_base_freq", 10000.0)}
    return {"rope_theta": raw.get("rope_theta", 1000000.0), "rope_scaling": raw.get("rope_scaling")}


def _gemma_extras(raw: Raw) -> dict[str, Any]:
    return {"embed_scale": math.sqrt(raw["hidden_size"]), "norm_offset": 1.0,
            "logit_cap": raw.get("final_logit_softcapping") or 0.0}


def _num_experts(raw: Raw) -> Any:
    return raw["num_experts"] if "num_experts" in raw else raw["num_local_experts"]


# -- writers of config.json


def _window_keys(config: ModelConfig) -> dict[str, Any]:
    specs = [config.layer(index) for index in range(config.num_layers)]
    return {"sliding_window": max((spec.window for spec in specs), default=0) or None,
            "layer_types": ["sliding_attention" if spec.window else "full_attention" for spec in specs]}


def _write_windows(config: ModelConfig) -> dict[str, Any]:
    keys = _window_keys(config)
    return {**keys, "use_sliding_window": True, "max_window_layers": 0} if keys["sliding_window"] else {}


def _write_every_layer(config: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": config.layer(0).window or None}


def _expert_keys(config: ModelConfig) -> dict[str, Any]:
    experts = next(spec.experts for spec in config.layers if spec.experts is not None)
    return {"num_experts": experts.count, "num_local_experts": experts.count, "num_experts_per_tok": experts.active,
            "moe_intermediate_size": experts.size, "norm_topk_prob": experts.normalised}


def _write_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    dense = [index for index in range(config.num_layers) if config.layer(index).experts is None]
    return {**_expert_keys(config), "decoder_sparse_step": 1, "mlp_only_layers": dense,
            "sliding_window": config.layer(0).window or None, "use_sliding_window": bool(config.layer(0).window)}


def _write_mixtral(config: ModelConfig) -> dict[str, Any]:
    keys = _expert_keys(config)
    return {name: keys[name] for name in ("num_local_experts", "num_experts_per_tok")} | _write_every_layer(config)


def _write_gpt_oss(config: ModelConfig) -> dict[str, Any]:
    keys = _expert_keys(config)
    return {name: keys[name] for name in ("num_local_experts", "num_experts_per_tok")} | _window_keys(config) | _CLAMPED


def _write_gemma2(config: ModelConfig) -> dict[str, Any]:
    scale, cap = config.layer(0).scale, config.layer(0).soft_cap
    assert scale is not None
    return {**_window_keys(config), "query_pre_attn_scalar": round(scale**-2), "hidden_activation": "gelu_pytorch_tanh",
            "attn_logit_softcapping": cap or None, "final_logit_softcapping": config.logit_cap or None}


def _write_gemma3(config: ModelConfig) -> dict[str, Any]:
    local = next((spec.rope for spec in config.layers if spec.rope is not None), config.rope)
    rope = {kind: {key: value for key, value in asdict(rope).items() if value is not None}
            for kind, rope in (("full_attention", config.rope), ("sliding_attention", local))}
    for parameters in rope.values():
        parameters["rope_type"], parameters["rope_theta"] = parameters.pop("kind"), parameters.pop("theta")
        if parameters["rope_type"] == "default":
            for key in set(parameters) - {"rope_type", "rope_theta"}:
                del parameters[key]
    return {**_write_gemma2(config), "rope_parameters": rope, "rope_scaling": None}


_MIXTRAL_NAMES = TensorNames("block_sparse_moe", "gate", ("w1", "w3", "w2"))
_GEMMA_NAMES = TensorNames(mlp_norm="pre_feedforward_layernorm", post_attention_norm="post_attention_layernorm",
                            post_mlp_norm="post_feedforward_layernorm")
_LLAMA = Architecture("llama")
_MISTRAL = Architecture("llama", "mistral", _every_layer, _write_every_layer)
_QWEN2 = Architecture("qwen2", layers=_upper_layers, write=_write_windows)
_QWEN3 = Architecture("qwen3", layers=_upper_layers, write=_write_windows, qk_norm=True)

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _MISTRAL,
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen3MoeForCausalLM": Architecture("qwen3_moe", layers=_qwen3_moe, write=_write_qwen3_moe, qk_norm=True),
    "MixtralForCausalLM": Architecture("mixtral", layers=_mixtral, write=_write_mixtral, names=_MIXTRAL_NAMES),
    "GptOssForCausalLM": Architecture("gpt_oss", layers=_gpt_oss, write=_write_gpt_oss,
                                      names=TensorNames("mlp", "router", interleaved=True)),
    "Gemma2ForCausalLM": Architecture("gemma2", layers=_gemma2, write=_write_gemma2, names=_GEMMA_NAMES, tied=True,
                                      hidden_act="gelu_pytorch_tanh", extras=_gemma_extras),
    "Gemma3ForCausalLM": Architecture("gemma3", "gemma3_text", _gemma3, _write_gemma3, _GEMMA_NAMES, qk_norm=True, tied=True,
                                      hidden_act="gelu_pytorch_tanh", rope=_gemma3_rope, extras=_gemma_extras),
    # Reward models: the same decoder with a scalar head.
    "LlamaForSequenceClassification": _LLAMA,
    "Qwen2ForSequenceClassification": _QWEN2,
    "Qwen3ForSequenceClassification": _QWEN3,
}

GGUF_KINDS = ("llama", "qwen2", "qwen3")
"""The architectures that are read from GGUF files."""


def hf_name_of(config: ModelConfig) -> str:
    """Hugging Face's class name for a model of this shape."""
    if config.architecture == "llama" and any(spec.window for spec in config.layers):
        return "MistralForCausalLM"
    return next(name for name, row in ARCHITECTURES.items() if row.kind == config.architecture)


def architecture_of(config: ModelConfig) -> Architecture:
    """The row of a model."""
    return ARCHITECTURES[hf_name_of(config)]
