"""Copying weights into and out of a decoder under Hugging Face's tensor names.

The decoder fuses q, k, v into `attention.qkv` and gate, up into `mlp.gate_up`, so a checkpoint tensor is a slice of a parameter
along dimension 0. This module maps names and shapes; reading files is left to `huggingface` and `gguf`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder

_PREFIXES = ("model.", "module.", "_orig_mod.")
_SHOWN = 4  # most names listed in an error message

_GGUF_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
_GGUF_TOP = {
    "token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class ParamSlice(NamedTuple):
    """Rows start .. start + length of a parameter of the decoder."""

    param_name: str
    start: int
    length: int


def hf_layout(config: ModelConfig) -> dict[str, ParamSlice]:
    """The parameter slice of every tensor of a Hugging Face checkpoint. Without `lm_head` if the embeddings are tied."""
    slots = {"model.embed_tokens.weight": ParamSlice("embed.weight", 0, config.vocab_size)}
    for index in range(config.num_layers):
        slots |= _layer_layout(config, index)
    slots["model.norm.weight"] = ParamSlice("norm", 0, config.hidden_size)
    if not config.tie_embeddings:
        slots["lm_head.weight"] = ParamSlice("head.weight", 0, config.vocab_size)
    return slots


def _layer_layout(config: ModelConfig, index: int) -> dict[str, ParamSlice]:
    theirs, ours = f"model.layers.{index}.", f"layers.{index}."
    slots: dict[str, ParamSlice] = {}

    def linear(param: str, block: str, parts: dict[str, int], bias: bool) -> None:
        for kind in ("weight", "bias") if bias else ("weight",):
            start = 0
            for part, rows in parts.items():
                slots[f"{theirs}{block}.{part}.{kind}"] = ParamSlice(f"{ours}{param}.{kind}", start, rows)
                start += rows

    def vector(param: str, name: str, rows: int) -> None:
        slots[f"{theirs}{name}.weight"] = ParamSlice(f"{ours}{param}", 0, rows)

    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    vector("attention_norm", "input_layernorm", config.hidden_size)
    linear("attention.qkv", "self_attn", {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}, config.qkv_bias)
    linear("attention.o", "self_attn", {"o_proj": config.hidden_size}, config.o_bias)
    if config.qk_norm:
        vector("attention.q_norm", "self_attn.q_norm", config.head_dim)
        vector("attention.k_norm", "self_attn.k_norm", config.head_dim)
    vector("mlp_norm", "post_attention_layernorm", config.hidden_size)
    inner = config.intermediate_size
    linear("mlp.gate_up", "mlp", {"gate_proj": inner, "up_proj": inner}, config.mlp_bias)
    linear("mlp.down", "mlp", {"down_proj": config.hidden_size}, config.mlp_bias)
    return slots


def gguf_to_hf(name: str) -> str:
    """Hugging Face's name of a llama.cpp tensor. Unknown names are returned unchanged."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match and match[2] in _GGUF_LAYER:
        return f"model.layers.{match[1]}.{_GGUF_LAYER[match[2]]}.{match[3]}"
    return _GGUF_TOP.get(name, name)


def load_state(model: Decoder, named_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], strict: bool = True,
               source: str = "weights") -> None:
    """Copy tensors into the model in place, as `StateLoader.load` does."""
    StateLoader(model, strict, source).load(named_tensors)


class StateLoader:
    """Copies tensors into a decoder in place, converting device and dtype. Names may be Hugging Face's or those of the
    decoder."""

    def __init__(self, model: Decoder, strict: bool = True, source: str = "weights") -> None:
        """`strict` rejects missing and unknown tensors; tensors of the wrong shape are always rejected. Error messages begin
        with `source`."""
        self.model, self.strict, self.source = model, strict, source
        self.num_copied = 0
        """Number of tensors copied so far: if `load` raises and this is 0, the model is unchanged."""

    def load(self, named_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        """Copy all tensors. A mapping or a list is checked completely before anything is copied; any other iterable is checked
        tensor by tensor, so that only one of them is in memory at a time."""
        if isinstance(named_tensors, Mapping):
            named_tensors = list(named_tensors.items())
        if isinstance(named_tensors, Sequence):
            matcher = _TensorMatcher(self.model, self.strict, self.source)
            for name, tensor in named_tensors:
                matcher.place_tensor(name, tensor)
            matcher.raise_wrong()
            matcher.raise_missing()
        matcher = _TensorMatcher(self.model, self.strict, self.source)
        for name, tensor in named_tensors:
            slot = matcher.place_tensor(name, tensor)
            matcher.raise_wrong()
            if slot is not None:
                self.num_copied += 1
                with torch.no_grad():
                    matcher.params[slot.param_name][slot.start : slot.start + slot.length].copy_(tensor)
        matcher.raise_missing()


def check_shapes(model: Decoder, shapes: Mapping[str, Sequence[int]], strict: bool = True,
                 source: str = "weights") -> None:
    """Check names and shapes as `load_state` does, without tensors."""
    matcher = _TensorMatcher(model, strict, source)
    for name, shape in shapes.items():
        matcher.place(name, shape)
    matcher.raise_wrong()
    matcher.raise_missing()


def export_state(model: Decoder) -> dict[str, Tensor]:
    """The weights under Hugging Face's names as views of the parameters, for saving and for weight synchronisation."""
    params = {name: param.detach() for name, param in model.named_parameters()}
    return {
        name: params[slot.param_name][slot.start : slot.start + slot.length]
        for name, slot in hf_layout(model.config).items()
    }


class _TensorMatcher:
    """Matches incoming tensors to the parameters of one model and collects what is missing or wrong."""

    def __init__(self, model: Decoder, strict: bool, source: str) -> None:
        self.params = dict(model.named_parameters())
        self.strict, self.source = strict, source
        self._tied = model.config.tie_embeddings
        layout = hf_layout(model.config)
        self._slots = {bare_name(name): slot for name, slot in layout.items()}
        self._slots |= {name: ParamSlice(name, 0, param.shape[0]) for name, param in self.params.items()}
        self._awaited: dict[str, dict[str, ParamSlice]] = {}  # parameter -> checkpoint name -> slice, until it is loaded
        for name, slot in layout.items():
            self._awaited.setdefault(slot.param_name, {})[name] = slot
        self._unknown: list[str] = []
        self._wrong: list[str] = []
        self._twice: list[str] = []
        self._unusable: list[str] = []

    def place_tensor(self, name: str, tensor: Tensor) -> ParamSlice | None:
        """`place`, for a tensor that must have values to copy."""
        if not isinstance(tensor, Tensor):
            self._unusable.append(f"{name} is of type {type(tensor).__name__}")
        elif tensor.is_meta or not tensor.is_floating_point():
            self._unusable.append(f"{name} is {tensor.dtype} on {tensor.device}")
        else:
            return self.place(name, tensor.shape)
        return None

    def place(self, name: str, shape: Sequence[int]) -> ParamSlice | None:
        """The parameter slice that the tensor is copied to, or None if it is not copied (ignored, unknown or wrong)."""
        bare = bare_name(name)
        if bare.endswith("rotary_emb.inv_freq") or (self._tied and bare in ("lm_head.weight", "head.weight")):
            return None
        slot = self._slots.get(bare)
        if slot is None:
            self._unknown.append(f"{name} {list(shape)}")
            return None
        expected = (slot.length, *self.params[slot.param_name].shape[1:])
        if tuple(shape) != expected:
            self._wrong.append(f"{name} is {list(shape)}, expected {list(expected)}")
            return None
        awaited = self._awaited[slot.param_name]
        covered = [key for key, part in awaited.items() if slot.start <= part.start < slot.start + slot.length]
        for key in covered:
            del awaited[key]
        if not covered:
            self._twice.append(name)
        return slot if covered else None

    def raise_wrong(self) -> None:
        if self._wrong:
            raise ValueError(f"{self.source}: {len(self._wrong)} tensor(s) of the wrong shape: {_some(self._wrong)}")
        if self._twice:
            raise ValueError(f"{self.source}: {len(self._twice)} tensor(s) given twice: {_some(self._twice)}")
        if self._unusable:
            raise ValueError(f"{self.source}: {len(self._unusable)} tensor(s) without floating-point values: "
                             f"{_some(self._unusable)}")
        if self._unknown and self.strict:
            raise ValueError(f"{self.source}: {len(self._unknown)} unknown tensor(s): {_some(self._unknown)}")

    def raise_missing(self) -> None:
        names = [f"{name} {[slot.length, *self.params[slot.param_name].shape[1:]]}"
                 for awaited in self._awaited.values() for name, slot in awaited.items()]
        if names and self.strict:
            raise ValueError(f"{self.source}: {len(names)} tensor(s) missing: {_some(names)}")


def bare_name(name: str) -> str:
    """The name without the prefixes that wrappers add."""
    while name.startswith(_PREFIXES):
        name = name.split(".", 1)[1]
    return name


def _some(lines: list[str]) -> str:
    return "; ".join(lines[:_SHOWN]) + (" ..." if len(lines) > _SHOWN else "")
