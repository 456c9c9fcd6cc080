"""Policies from disk or hub into the one decoder: Hugging Face folders (safetensors), hub ids and GGUF files.

A checkpoint says its shapes first, so everything is checked before the first byte is copied; then its tensors come one
at a time into parameters that already exist, so the peak is the weights plus one tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.files import load_tokenizer, named, one_line, read_json
from paceline.models.gguf import GgufCheckpoint
from paceline.models.names import check_shapes, load_state

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DTYPES = {
    "float32": torch.float32, "fp32": torch.float32, "float64": torch.float64, "fp64": torch.float64,
    "bfloat16": torch.bfloat16, "bf16": torch.bfloat16, "float16": torch.float16, "fp16": torch.float16,
}
_SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_CACHED_BYTES = 32 << 20
"""Half precision saves reading weights from memory; where none are read it only costs conversions: two to three times as long."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_HUB_PATTERNS = ["*.json", "model*.safetensors", "tokenizer*", "*.jinja", "merges.txt", "vocab.txt"]
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


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

    `dtype` "auto" is the checkpoint's own, but float32 on a CPU for a model that fits into its cache either way; GGUF becomes
    float32 on a CPU and bfloat16 elsewhere. `max_context` lowers the longest sequence the model says it can take.
    """
    device = torch.device(device)
    wanted = parse_dtype(dtype)
    checkpoint = open_checkpoint(source)
    config = _limit_context(checkpoint.config, max_context)
    shapes = checkpoint.shapes()
    if wanted is None:
        wanted = checkpoint.own_dtype(device)
        if device.type == "cpu" and wanted.itemsize < 4 and 4 * sum(map(math.prod, shapes.values())) < _CACHED_BYTES:
            wanted = torch.float32
    model = empty_model(config, wanted, device)
    check_shapes(model, shapes, source=str(checkpoint.path))
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


def check_device(device: str) -> None:
    """Raises a ValueError if `device` is not the name of a device, or names a CUDA device on a machine without one."""
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ValueError(f"device {device}: not a device, such as cpu or cuda") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device}: no CUDA device is available")


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


class FolderCheckpoint:
    def __init__(self, path: Path) -> None:
        self.path = path
        raw = read_json(path / "config.json")
        if raw.get("quantization_config"):
            raise ValueError(f"{path / 'config.json'}: quantization_config: quantised folders are not read, only GGUF")
        self.config = _with_generation_eos(named(path / "config.json", ModelConfig.from_hf, raw), path)
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
        return load_tokenizer(self.path)

    def _find_files(self) -> dict[Path, list[str]]:
        """File -> names of its tensors."""
        single, index = self.path / SINGLE_FILE, self.path / INDEX_FILE
        if single.is_file():
            with _opened(single) as tensors:
                return {single: list(tensors.keys())}
        if not index.is_file():
            raise ValueError(f"{self.path}: neither {SINGLE_FILE} nor {INDEX_FILE} is there; only safetensors are read")
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{index}: weight_map is missing")
        files: dict[Path, list[str]] = {}
        for name, file in weight_map.items():
            files.setdefault(self.path / Path(file).name, []).append(name)
        for file in files:
            if not file.is_file():
                raise ValueError(f"{file}: this shard is named in {INDEX_FILE} and missing")
        return files


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            yield tensors
    except SafetensorError as error:
        raise ValueError(f"{file}: truncated, or not what its index says ({one_line(error)})") from None


def _with_generation_eos(config: ModelConfig, path: Path) -> ModelConfig:
    file = path / "generation_config.json"
    eos = read_json(file).get("eos_token_id") if file.is_file() else None
    more = [] if eos is None else eos if isinstance(eos, list) else [eos]
    return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *more))))
