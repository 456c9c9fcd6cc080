"""Policies from disk or hub into the one decoder, and back: Hugging Face folders (safetensors) and GGUF files.

A checkpoint says its shapes first, so everything is checked before the first byte is copied; then its tensors come one
at a time into parameters that already exist, so the peak is the weights plus one tensor.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from paceline.models.config import ARCHITECTURES, ModelConfig, RopeConfig
from paceline.models.decoder import Decoder
from paceline.models.names import check_shapes, export_state, gguf_to_hf, load_state
from paceline.models.rope import inverse_frequencies

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor
    from transformers import PreTrainedTokenizerBase

_DTYPES = {
    "float32": torch.float32, "fp32": torch.float32, "float64": torch.float64, "fp64": torch.float64,
    "bfloat16": torch.bfloat16, "bf16": torch.bfloat16, "float16": torch.float16, "fp16": torch.float16,
}
_SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_HUB_PATTERNS = ["*.json", "model*.safetensors", "tokenizer*", "*.jinja", "merges.txt", "vocab.txt"]
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD_BYTES = 2 << 30


class Checkpoint(Protocol):
    """What `load_model` asks of a source."""

    path: Path
    config: ModelConfig

    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]: ...

    def own_dtype(self, device: torch.device) -> torch.dtype: ...

    def tokenizer(self) -> PreTrainedTokenizerBase | None: ...


def load_model(source: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype | str = "auto",
               max_context: int | None = None) -> tuple[Decoder, PreTrainedTokenizerBase | None]:
    """A policy from a Hugging Face folder, a `.gguf` file or a hub id, without gradients; None: no tokenizer there.

    `dtype` "auto" is the checkpoint's own; GGUF becomes float32 on a CPU and bfloat16 elsewhere. `max_context` lowers
    the longest sequence the model says it can take.
    """
    device = torch.device(device)
    wanted = parse_dtype(dtype)
    checkpoint = open_checkpoint(source)
    config = _limit_context(checkpoint.config, max_context)
    model = empty_model(config, wanted or checkpoint.own_dtype(device), device)
    check_shapes(model, checkpoint.shapes(), source=str(checkpoint.path))
    load_state(model, checkpoint.tensors(), source=str(checkpoint.path))
    return model, checkpoint.tokenizer()


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Reads the configuration, no weights yet."""
    path = Path(source).expanduser()
    if path.is_dir():
        return FolderCheckpoint(path)
    if path.suffix == ".gguf":
        return GgufCheckpoint(path)
    if path.exists():
        raise ValueError(f"{path}: neither a model folder nor a .gguf file")
    return FolderCheckpoint(_from_hub(str(source)))


def parse_dtype(dtype: torch.dtype | str) -> torch.dtype | None:
    """None for "auto"."""
    if dtype == "auto":
        return None
    found = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found not in _DTYPES.values():
        raise ValueError(f"dtype: {dtype} is not supported; known: auto, {', '.join(_DTYPES)}")
    return found


def empty_model(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> Decoder:
    """Parameters allocated once and not initialised; tied ones stay one tensor."""
    with torch.device("meta"):
        model = Decoder(config)
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if old not in made:
                made[old] = nn.Parameter(torch.empty(old.shape, dtype=dtype, device=device), requires_grad=False)
            setattr(module, name, made[old])
    return model


def _limit_context(config: ModelConfig, max_context: int | None) -> ModelConfig:
    if max_context is None:
        return config
    if not 0 < max_context <= config.max_context:
        raise ValueError(f"max_context: {max_context} is not within 1 .. {config.max_context}, what the model takes")
    return replace(config, max_context=max_context)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
        raise ValueError(f"{name}: no such folder or file, and not a hub id")
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_PATTERNS, ignore_patterns=["*/*"]))
    except GatedRepoError:
        raise ValueError(f"{name}: this hub repository asks for a licence to be accepted and for a login") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise ValueError(f"{name}: no such folder here and no such repository on the hub") from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, ConnectionError):
        raise ValueError(f"{name}: no such folder here, not in the hub's cache, and the hub is not reached "
                         "(offline, or HF_HUB_OFFLINE is set)") from None


# --- Hugging Face folders


class FolderCheckpoint:
    def __init__(self, path: Path) -> None:
        self.path = path
        raw = _read_json(path / "config.json")
        if raw.get("quantization_config"):
            raise ValueError(f"{path / 'config.json'}: quantization_config: quantised folders are not read, only GGUF")
        self.config = _with_generation_eos(_named(path / "config.json", ModelConfig.from_hf, raw), path)
        self._files = self._find_files()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for file, names in self._files.items():
            with _opened(file) as tensors:
                shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
        return shapes

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for file, names in self._files.items():
            with _opened(file) as tensors:
                for name in names:
                    yield name, tensors.get_tensor(name)

    def own_dtype(self, device: torch.device) -> torch.dtype:
        """As the first matrix is stored."""
        for file, names in self._files.items():
            with _opened(file) as tensors:
                for part in map(tensors.get_slice, names):
                    if len(part.get_shape()) == 2 and part.get_dtype() in _SAFETENSORS_DTYPES:
                        return _SAFETENSORS_DTYPES[part.get_dtype()]
        raise ValueError(f"{self.path}: no matrix of {', '.join(_SAFETENSORS_DTYPES)}; name the dtype")

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        if not any((self.path / name).is_file() for name in _TOKENIZER_FILES):
            return None
        return _tokenizer(self.path)

    def _find_files(self) -> dict[Path, list[str]]:
        """File -> names of its tensors."""
        single, index = self.path / _SINGLE, self.path / _INDEX
        if single.is_file():
            with _opened(single) as tensors:
                return {single: list(tensors.keys())}
        if not index.is_file():
            raise ValueError(f"{self.path}: neither {_SINGLE} nor {_INDEX} is there; only safetensors are read")
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{index}: weight_map is missing")
        files: dict[Path, list[str]] = {}
        for name, file in weight_map.items():
            files.setdefault(self.path / Path(file).name, []).append(name)
        for file in files:
            if not file.is_file():
                raise ValueError(f"{file}: this shard is named in {_INDEX} and missing")
        return files


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            yield tensors
    except SafetensorError as error:
        raise ValueError(f"{file}: truncated, or not what its index says ({_one_line(error)})") from None


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ValueError(f"{file}: no such file")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not JSON ({_one_line(error)})") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{file}: not a JSON object")
    return raw


def _with_generation_eos(config: ModelConfig, path: Path) -> ModelConfig:
    file = path / "generation_config.json"
    eos = _read_json(file).get("eos_token_id") if file.is_file() else None
    more = [] if eos is None else eos if isinstance(eos, list) else [eos]
    return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *more))))


def _tokenizer(folder: Path, **options: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, **options)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder}: the tokenizer does not load ({_one_line(error)})") from None


def _named(file: Path, make: Any, *args: Any) -> Any:
    """make(*args), with the file put before an error."""
    try:
        return make(*args)
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{file}: {_one_line(error).removeprefix(f'{file.name}: ')}") from None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


# --- GGUF files


class GgufCheckpoint:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = _read_gguf(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        metadata = _named(path, GgufMetadata, self._reader)
        self.config = _named(path, gguf_config, metadata, self._tensors)
        self._has_tokenizer = "tokenizer.ggml.tokens" in self._reader.fields
        factors = self._tensors.pop("rope_freqs.weight", None)
        if factors is not None:
            rope = _named(path, llama3_rope, self.config, _dequantised(factors))
            self.config = replace(self.config, rope=rope)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {gguf_to_hf(name): tuple(int(n) for n in reversed(tensor.shape))
                for name, tensor in self._tensors.items()}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._tensors.items():
            yield gguf_to_hf(name), self._unpermuted(name, _named(self.path, _dequantised, tensor))

    def own_dtype(self, device: torch.device) -> torch.dtype:
        return torch.float32 if device.type == "cpu" else torch.bfloat16

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return _tokenizer(self.path.parent, gguf_file=self.path.name) if self._has_tokenizer else None

    def _unpermuted(self, name: str, tensor: Tensor) -> Tensor:
        """llama.cpp interleaves the two halves of each rotary pair in its llama architecture, and only there."""
        part = name.split(".")[-2]
        if self.config.architecture != "llama" or part not in ("attn_q", "attn_k"):
            return tensor
        heads = self.config.num_heads if part == "attn_q" else self.config.num_kv_heads
        return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


class GgufMetadata:
    """Values of a GGUF header by name; a key that starts with a dot belongs to the architecture."""

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
        """Stored as float32: the short decimal that is meant, 1e-05 and not 9.9999997e-06."""
        return float(f"{self.get(key, default):.7g}")

    def _full(self, key: str) -> str:
        return self.arch + key if key.startswith(".") else key


def gguf_config(metadata: GgufMetadata, tensors: Mapping[str, ReaderTensor]) -> ModelConfig:
    kind = metadata.arch
    if kind not in ARCHITECTURES.values():
        known = ", ".join(dict.fromkeys(ARCHITECTURES.values()))
        raise ValueError(f"general.architecture: {kind} is not supported; known: {known}")
    if metadata.get("split.count", 0) > 1:
        raise ValueError("split.count: a GGUF in several files is not supported; merge it with llama-gguf-split")
    if "token_embd.weight" not in tensors:
        raise ValueError("tensor token_embd.weight is missing")
    hidden, heads = metadata.integer(".embedding_length"), metadata.integer(".attention.head_count")
    head_dim = metadata.integer(".attention.key_length", hidden // heads)
    if metadata.integer(".rope.dimension_count", head_dim) != head_dim:
        raise ValueError(f"{kind}.rope.dimension_count: partial rotary embedding is not supported")
    return ModelConfig(
        architecture=kind,  # type: ignore[arg-type]
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
    # llama.cpp's attn_factor multiplies what yarn derives from the factor; ours (Hugging Face's) replaces it.
    extra, derived = metadata.number(".rope.scaling.attn_factor", 1.0), 0.1 * math.log(max(factor, 1.0)) + 1.0
    return RopeConfig(
        theta=theta, kind="yarn", factor=factor, original_context=original,
        beta_fast=metadata.number(".rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=metadata.number(".rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=None if extra == 1.0 else extra * derived,
    )


def llama3_rope(config: ModelConfig, divisors: Tensor) -> RopeConfig:
    """The llama3 scaling behind `rope_freqs.weight`, which holds only what each frequency is divided by.

    Between its two corners the rule is 1/d = (1 - s)/factor + s with s = (original/wavelength - low)/(high - low).
    Only original/low and original/high can be told from it, so low = 1 and high = 4 (as published) fix `original`.
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
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise ValueError(f"{path}: truncated, or not a GGUF file ({_one_line(error)})") from None


def _dequantised(tensor: ReaderTensor) -> Tensor:
    import numpy
    from gguf import dequantize

    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        raise ValueError(f"tensor {tensor.name}: {tensor.tensor_type.name} is not supported") from None
    # A copy only where needed: float32 data is the file itself, read-only.
    return torch.from_numpy(numpy.require(values, numpy.float32, ["C", "W"]))


# --- writing


def save_model(model: Decoder, tokenizer: PreTrainedTokenizerBase | None, folder: str | Path,
               max_shard_bytes: int = _SHARD_BYTES, overwrite: bool = False) -> None:
    """A folder that transformers (and `load_model`) loads. It appears whole or not at all: written beside, renamed."""
    folder = Path(folder).absolute()
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not overwrite):
        raise ValueError(f"{folder}: exists and is not an empty folder")
    raw = hf_config(model.config, model.embed.weight.dtype)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        fresh = scratch / "new"  # not scratch itself, which only its owner may read
        fresh.mkdir()
        _write_folder(model, tokenizer, fresh, raw, max_shard_bytes)
        _put_in_place(fresh, folder, scratch / "old")
    finally:
        shutil.rmtree(scratch)


def _put_in_place(fresh: Path, folder: Path, old: Path) -> None:
    if folder.exists():
        os.rename(folder, old)
    try:
        os.rename(fresh, folder)
    except OSError:
        if old.exists():
            os.rename(old, folder)
        raise


def _write_folder(model: Decoder, tokenizer: PreTrainedTokenizerBase | None, folder: Path, raw: dict[str, Any],
                  max_shard_bytes: int) -> None:
    _write_json(folder / "config.json", raw)
    if raw["eos_token_id"] is not None:
        _write_json(folder / "generation_config.json", {"eos_token_id": raw["eos_token_id"]})
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    state = export_state(model)
    shards = list(_shards(state, max_shard_bytes))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = _SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: state[name] for name in names}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        size_bytes = sum(tensor.nbytes for tensor in state.values())
        _write_json(folder / _INDEX, {"metadata": {"total_size": size_bytes}, "weight_map": weight_map})


def _shards(state: Mapping[str, Tensor], max_shard_bytes: int) -> Iterator[list[str]]:
    """Names in order, cut where a file would pass the limit; a tensor larger than it gets its own."""
    names: list[str] = []
    size_bytes = 0
    for name, tensor in state.items():
        if names and size_bytes + tensor.nbytes > max_shard_bytes:
            yield names
            names, size_bytes = [], 0
        names.append(name)
        size_bytes += tensor.nbytes
    yield names


def hf_config(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The `config.json` of this model, rope in the new spelling and in the one before transformers 5."""
    architecture = next(name for name, kind in ARCHITECTURES.items() if kind == config.architecture)
    rope = _hf_rope(config.rope)
    eos = list(config.eos_token_ids)
    raw = {
        "architectures": [architecture], "model_type": config.architecture, "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim, "hidden_act": "silu",
        "rms_norm_eps": config.rms_eps, "rope_theta": config.rope.theta, "rope_parameters": rope,
        "rope_scaling": None if config.rope.kind == "default" else rope,
        "attention_bias": config.o_bias, "mlp_bias": config.mlp_bias, "tie_word_embeddings": config.tie_embeddings,
        # A model loaded with a lower max_context still is what it was trained to be.
        "max_position_embeddings": max(config.max_context, config.rope.original_context),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None, "torch_dtype": str(dtype).removeprefix("torch."),
    }
    read = ModelConfig.from_hf(raw)
    for flag in ("qkv_bias", "o_bias", "mlp_bias", "qk_norm"):
        if getattr(read, flag) != getattr(config, flag):
            raise ValueError(f"{flag}: {architecture} cannot say {getattr(config, flag)}")
    return raw


def _hf_rope(rope: RopeConfig) -> dict[str, Any]:
    """Only what the kind knows: transformers warns about the rest."""
    keys = {
        "default": (), "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    }[rope.kind]
    values = {key: getattr(rope, key) for key in keys}
    raw = {"rope_type": rope.kind, "rope_theta": rope.theta} | {k: v for k, v in values.items() if v is not None}
    if rope.kind in ("llama3", "yarn"):
        raw["original_max_position_embeddings"] = rope.original_context
    return raw


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
