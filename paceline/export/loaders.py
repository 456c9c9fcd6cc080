"""What the loaders of vLLM, SGLang and speculators look for in a drafter's checkpoint. Most of them skip a tensor that they do
not find and run with random values, so `check_tensors` compares every name and shape before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

DrafterLoader = Literal["vllm", "sglang", "speculators"]
LOADERS: tuple[DrafterLoader, ...] = get_args(DrafterLoader)
Shapes = dict[str, tuple[int, ...]]


class LoaderTensors(NamedTuple):
    """The tensors that a loader reads."""

    required: Shapes
    optional: Shapes
    """Tensors that may be left out: the loader takes them from the policy, or does not use them."""


def check_tensors(loader: DrafterLoader, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError if a checkpoint with this `config.json` and tensors of these shapes is not what the loader looks for."""
    required, optional = expected_tensors(loader, config)
    for name, wanted in required.items():
        if name not in shapes:
            raise ValueError(f"{loader}: tensor {name} is missing")
        if shapes[name] != wanted:
            raise ValueError(f"{loader}: {name} has shape {list(shapes[name])}, the loader looks for {list(wanted)}")
    for name, shape in shapes.items():
        if name not in required and optional.get(name) != shape:
            raise ValueError(f"{loader}: the loader does not read {name} {list(shape)}")


def expected_tensors(loader: DrafterLoader, config: Mapping[str, Any]) -> LoaderTensors:
    """Return what the loader looks for, given the `config.json` of a one-layer drafter."""
    settings = config.get("transformer_layer_config", config)  # speculators keeps the layer's settings in a table of their own
    if "eagle3" in config["architectures"][0].lower():
        return _eagle3(loader, config, settings)
    hidden = settings["hidden_size"]
    required = {"fc.weight": (hidden, 2 * hidden), **_layer("layers.0", settings, hidden)}
    if loader == "sglang":
        required["fc.bias"] = (hidden,)  # its projection has a bias, which would stay random
    return LoaderTensors(required, {"embed_tokens.weight": (settings["vocab_size"], hidden)})


def _eagle3(loader: DrafterLoader, config: Mapping[str, Any], settings: Mapping[str, Any]) -> LoaderTensors:
    hidden, vocabulary, drafted = settings["hidden_size"], settings["vocab_size"], config["draft_vocab_size"]
    layer = "midlayer" if loader == "sglang" else "layers.0"
    num_features = 3 if loader == "sglang" else len(config["eagle_aux_hidden_state_layer_ids"])
    required = {"fc.weight": (hidden, num_features * hidden), "norm.weight": (hidden,), "lm_head.weight": (drafted, hidden),
                f"{layer}.input_layernorm.weight": (hidden,), f"{layer}.hidden_norm.weight": (hidden,),
                **_layer(layer, settings, 2 * hidden)}
    optional: Shapes = {"embed_tokens.weight": (vocabulary, hidden)}
    maps: Shapes = {"d2t": (drafted,), "t2d": (vocabulary,)}
    if drafted != vocabulary:
        required |= maps
    elif loader == "sglang":
        optional |= maps
    return LoaderTensors(required, optional)


def _layer(prefix: str, settings: Mapping[str, Any], input_size: int) -> Shapes:
    """The tensors of a decoder layer. `input_size`: number of columns of the attention's input projections."""
    hidden, inner, head = settings["hidden_size"], settings["intermediate_size"], settings["head_dim"]
    heads, kv_heads = settings["num_attention_heads"] * head, settings["num_key_value_heads"] * head
    attention = {"q_proj": (heads, input_size), "k_proj": (kv_heads, input_size), "v_proj": (kv_heads, input_size),
                 "o_proj": (hidden, heads)}
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    shapes: Shapes = {f"{prefix}.post_attention_layernorm.weight": (hidden,)}
    for block, products, bias in (("self_attn", attention, settings["attention_bias"]), ("mlp", mlp, settings["mlp_bias"])):
        for name, (rows, columns) in products.items():
            shapes[f"{prefix}.{block}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}.{block}.{name}.bias"] = (rows,)
    if settings["model_type"] == "qwen3":
        shapes |= {f"{prefix}.self_attn.{name}_norm.weight": (head,) for name in "qk"}
    return shapes
