"""Reading GGUF checkpoints of llama.cpp: metadata, tensor names, and dequantisation, one tensor at a time."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.files import one_line
from paceline.models.architectures import GGUF_KINDS
from paceline.models.config import ModelConfig, RopeConfig
from paceline.models.gguf_metadata import check_gguf_metadata
from paceline.models.huggingface import load_tokenizer, with_file_name
from paceline.models.rope import inverse_frequencies
from paceline.models.state_dict import CutTensor, Region

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor
    from transformers import PreTrainedTokenizerBase

_LAYER_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class GgufCheckpoint:
    """A GGUF file as a `weights.Checkpoint`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = _read_gguf(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        metadata = with_file_name(path, GgufMetadata, self._reader)
        self.config = with_file_name(path, gguf_config, metadata, self._tensors)
        self._has_tokenizer = "tokenizer.ggml.tokens" in self._reader.fields
        factors = self._tensors.pop("rope_freqs.weight", None)
        if factors is not None:
            rope = with_file_name(path, llama3_rope, self.config, _dequantised(factors))
            self.config = replace(self.config, rope=rope)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {gguf_to_hf(name): tuple(int(n) for n in reversed(tensor.shape))
                for name, tensor in self._tensors.items()}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._tensors.items():
            yield gguf_to_hf(name), self._unpermuted(name, with_file_name(self.path, _dequantised, tensor))

    def cut_tensors(self, regions: Mapping[str, Region]) -> Iterator[tuple[str, Tensor | CutTensor]]:
        for name, tensor in self.tensors():
            region = regions.get(name)
            yield name, tensor if region is None else CutTensor(region.of(tensor), region, tuple(tensor.shape))

    def own_dtype(self, device: torch.device) -> torch.dtype:
        return torch.float32 if device.type == "cpu" else torch.bfloat16

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return load_tokenizer(self.path.parent, gguf_file=self.path.name) if self._has_tokenizer else None

    def _unpermuted(self, name: str, tensor: Tensor) -> Tensor:
        """Undo llama.cpp's permutation of q and k, which it applies to the llama architecture only: the two elements of a rotary
        pair are adjacent there."""
        part = name.split(".")[-2]
        if self.config.architecture != "llama" or part not in ("attn_q", "attn_k"):
            return tensor
        heads = self.config.num_heads if part == "attn_q" else self.config.num_kv_heads
        return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def gguf_to_hf(name: str) -> str:
    """Hugging Face's name of a llama.cpp tensor. Unknown names are returned unchanged."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    return _TOP_NAMES.get(name, name)


class GgufMetadata:
    """The metadata of a GGUF file by key. A key that starts with a dot is prefixed with the name of the architecture."""

    def __init__(self, reader: GGUFReader) -> None:
        self._fields, self.arch = reader.fields, ""
        self.arch = self.need("general.architecture")

    def get(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(self._full(key))
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ValueError(f"metadata {self._full(key)} is missing")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.need(key) if default is None else self.get(key, default)
        if not isinstance(value, int):
            raise ValueError(f"metadata {self._full(key)}: one integer is expected, the same for every layer")
        return value

    def number(self, key: str, default: float) -> float:
        """A float32 value as the shortest decimal number that it stands for: 1e-05 instead of 9.9999997e-06."""
        return float(f"{self.get(key, default):.7g}")

    def _full(self, key: str) -> str:
        return self.arch + key if key.startswith(".") else key


def gguf_config(metadata: GgufMetadata, tensors: Mapping[str, ReaderTensor]) -> ModelConfig:
    """The model configuration in the metadata of a GGUF file."""
    kind = metadata.arch
    if kind not in GGUF_KINDS:
        raise ValueError(f"general.architecture: {kind} is not supported; known: {', '.join(GGUF_KINDS)}")
    if metadata.get(".expert_count", 0):
        raise ValueError(f"metadata {kind}.expert_count: experts are read from Hugging Face folders only")
    if metadata.get("split.count", 0) > 1:
        raise ValueError("split.count: a GGUF in several files is not supported; merge it with llama-gguf-split")
    if metadata.integer(".block_count") < 1:
        raise ValueError(f"metadata {kind}.block_count: there are no layers")
    if "token_embd.weight" not in tensors:
        raise ValueError("tensor token_embd.weight is missing")
    hidden, heads = metadata.integer(".embedding_length"), metadata.integer(".attention.head_count")
    head_dim = metadata.integer(".attention.key_length", hidden // max(1, heads))
    if metadata.integer(".rope.dimension_count", head_dim) != head_dim:
        raise ValueError(f"{kind}.rope.dimension_count: partial rotary embedding is not supported")
    return ModelConfig(
        architecture=kind,
        vocab_size=int(tensors["token_embd.weight"].shape[-1]), hidden_size=hidden,
        intermediate_size=metadata.integer(".feed_forward_length"), num_layers=metadata.integer(".block_count"),
        num_heads=heads, num_kv_heads=metadata.integer(".attention.head_count_kv", heads), head_dim=head_dim,
        rms_eps=metadata.number(".attention.layer_norm_rms_epsilon", 1e-6), rope=_gguf_rope(metadata),
        qkv_bias=kind == "qwen2" or "blk.0.attn_q.bias" in tensors, o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors, qk_norm=kind == "qwen3",
        tie_embeddings="output.weight" not in tensors, max_context=metadata.integer(".context_length", 2048),
        eos_token_ids=_gguf_eos(metadata),
    )


def _gguf_rope(metadata: GgufMetadata) -> RopeConfig:
    theta, factor = metadata.number(".rope.freq_base", 10000.0), metadata.number(".rope.scaling.factor", 1.0)
    kind = metadata.get(".rope.scaling.type", "linear" if factor != 1.0 else "none")
    original = metadata.integer(".rope.scaling.original_context_length", metadata.integer(".context_length", 2048))
    if kind == "none":
        return RopeConfig(theta=theta, original_context=original)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor, original_context=original)
    if kind != "yarn":
        raise ValueError(f"{metadata.arch}.rope.scaling.type: {kind} is not supported; known: none, linear, yarn")
    # llama.cpp's attn_factor multiplies the value that yarn derives from the factor; Hugging Face's attention_factor replaces it.
    extra, derived = metadata.number(".rope.scaling.attn_factor", 1.0), 0.1 * math.log(max(factor, 1.0)) + 1.0
    return RopeConfig(
        theta=theta, kind="yarn", factor=factor, original_context=original,
        beta_fast=metadata.number(".rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=metadata.number(".rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=None if extra == 1.0 else extra * derived,
    )


def llama3_rope(config: ModelConfig, divisors: Tensor) -> RopeConfig:
    """Recover the llama3 scaling from `rope_freqs.weight`, which only holds the divisor d of each frequency.

    Between the low and high frequency bounds, 1/d = (1 - s)/factor + s with s = (original/wavelength - low)/(high - low).
    The divisors determine only original/low and original/high, so low = 1 and high = 4, as published, are assumed.
    """
    plain = replace(config.rope, kind="default", factor=1.0)
    frequencies, _ = inverse_frequencies(plain, config.head_dim)
    if divisors.shape != frequencies.shape:
        raise ValueError(f"rope_freqs.weight is {list(divisors.shape)}, expected {list(frequencies.shape)}")
    factor = round(float(divisors.max()), 4)
    if factor == 1.0:
        return plain
    blended = (divisors > 1.001) & (divisors < factor * 0.999)
    if not blended.any():
        raise ValueError("rope_freqs.weight: no frequency lies between the corners of the llama3 rule")
    share = ((1 / divisors - 1 / factor) / (1 - 1 / factor))[blended]
    original = round(float(((3 * share + 1) * 2 * math.pi / frequencies[blended]).median()))
    rope = replace(config.rope, kind="llama3", factor=factor, original_context=original)
    if not torch.allclose(inverse_frequencies(rope, config.head_dim)[0], frequencies / divisors, rtol=1e-3):
        raise ValueError("rope_freqs.weight does not follow the llama3 rule with corners 1 and 4")
    return rope


def _gguf_eos(metadata: GgufMetadata) -> tuple[int, ...]:
    found = (metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(token for token in found if token is not None))


def _read_gguf(path: Path) -> GGUFReader:
    from gguf import GGUFReader

    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        check_gguf_metadata(path)
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, struct.error) as error:
        raise ValueError(f"{path}: truncated, or not a GGUF file ({one_line(error)})") from None


def _dequantised(tensor: ReaderTensor) -> Tensor:
    import numpy
    from gguf import dequantize

    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        raise ValueError(f"tensor {tensor.name}: {tensor.tensor_type.name} is not supported") from None
    # Copies only if needed: float32 data is a read-only view of the file.
    return torch.from_numpy(numpy.require(values, numpy.float32, ["C", "W"]))
