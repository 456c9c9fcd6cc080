"""Reading Hugging Face checkpoints: folders with safetensors files, and the hub. Every failure becomes a ValueError of one line
that names the file."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.files import one_line, require_shallow
from paceline.models.config import ModelConfig
from paceline.models.state_dict import CutTensor, Region
from paceline.names import suggest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_HUB_PATTERNS = ("*.json", "model*.safetensors", "tokenizer*", "*.jinja", "merges.txt", "vocab.txt")
_CONNECT_S = 3.0
"""Seconds after which the hub counts as not reachable."""
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


class FolderCheckpoint:
    """A Hugging Face folder with `config.json` and safetensors files as a `weights.Checkpoint`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        raw = read_json(path / "config.json")
        if raw.get("quantization_config"):
            raise ValueError(f"{path / 'config.json'}: quantization_config: quantised folders are not read, only GGUF")
        self.config = _with_generation_eos(with_file_name(path / "config.json", ModelConfig.from_hf, raw), path)
        self._files = _tensor_files(path)

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

    def cut_tensors(self, regions: Mapping[str, Region]) -> Iterator[tuple[str, Tensor | CutTensor]]:
        for file, names in self._files.items():
            with _opened(file) as tensors:
                for name in names:
                    if name in regions:
                        part = tensors.get_slice(name)
                        yield name, CutTensor(regions[name].of(part), regions[name], tuple(part.get_shape()))
                    else:
                        yield name, tensors.get_tensor(name)

    def own_dtype(self, device: torch.device) -> torch.dtype:
        """The dtype in which the first matrix is stored."""
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


def read_folder(path: Path) -> dict[str, Tensor]:
    """All tensors in the safetensors files of a folder, on the host. The folder needs no `config.json`."""
    found: dict[str, Tensor] = {}
    for file, names in _tensor_files(path).items():
        with _opened(file) as tensors:
            found |= {name: tensors.get_tensor(name) for name in names}
    return found


def _tensor_files(path: Path) -> dict[Path, list[str]]:
    """The names of the tensors in each safetensors file of a folder."""
    single, index = path / SINGLE_FILE, path / INDEX_FILE
    if single.is_file():
        with _opened(single) as tensors:
            return {single: list(tensors.keys())}
    if not index.is_file():
        raise ValueError(f"{path}: neither {SINGLE_FILE} nor {INDEX_FILE} is there; only safetensors are read")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index}: weight_map is missing")
    files: dict[Path, list[str]] = {}
    for name, file in weight_map.items():
        files.setdefault(path / Path(file).name, []).append(name)
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
    """Add the end-of-sequence tokens of `generation_config.json`, which may list more than `config.json`."""
    file = path / "generation_config.json"
    eos = read_json(file).get("eos_token_id") if file.is_file() else None
    more = [] if eos is None else eos if isinstance(eos, list) else [eos]
    return with_file_name(file, lambda: replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *more)))))


def download_from_hub(name: str, patterns: Sequence[str] = _HUB_PATTERNS) -> Path:
    """Download the files of a repository of the Hugging Face hub that match one of the patterns, or find them in the cache, and
    return their folder."""
    from huggingface_hub import snapshot_download

    with _hub_errors(name):
        return Path(snapshot_download(name, allow_patterns=list(patterns), ignore_patterns=["*/*"],
                                      local_files_only=not _is_hub_reachable()))


def check_hub_model(name: str) -> ModelConfig:
    """The shape of a model on the hub, of which only the configuration is downloaded. Raises a ValueError if there is no such
    repository on the hub or in its cache, or its model is not supported."""
    file = download_hub_config(name)
    return with_file_name(file, ModelConfig.from_hf, read_json(file))


def download_hub_config(name: str) -> Path:
    """Download `config.json` of a hub repository, or find it in the cache, and return the file."""
    from huggingface_hub import hf_hub_download

    with _hub_errors(name):
        return Path(hf_hub_download(name, "config.json", local_files_only=not _is_hub_reachable()))


def _is_hub_reachable() -> bool:
    """Whether the hub's server accepts connections. Its client would try again for half a minute. Behind a proxy, only the client
    can tell."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    server = urlsplit(constants.ENDPOINT)
    if getproxies():
        return True
    try:
        socket.create_connection((server.hostname, server.port or (80 if server.scheme == "http" else 443)), _CONNECT_S).close()
    except OSError:
        return False
    return True


@contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    """Turns whatever the hub's client raises into a ValueError of one line."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
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
        yield
    except GatedRepoError:
        raise ValueError(f"{name}: this hub repository asks for a licence to be accepted and for a login") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise ValueError(f"{name}: no such folder here and no such repository on the hub"
                         f"{suggest(name, ('default',))}") from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError):
        raise ValueError(f"{name}: no such folder here, not in the hub's cache, and the hub is not reached "
                         f"(offline, or HF_HUB_OFFLINE is set){suggest(name, ('default',))}") from None
    except EntryNotFoundError:
        raise ValueError(f"{name}: this hub repository has no config.json, so it is neither a model nor a drafter") from None
    except HfHubHTTPError as error:
        raise ValueError(f"{name}: the hub refuses it ({one_line(error)[:80]})") from None


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    if not file.is_file():
        raise ValueError(f"{file}: no such file")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not JSON ({one_line(error)})") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{file}: not a JSON object")
    require_shallow(raw, str(file))
    return raw


def load_tokenizer(folder: Path, **options: str) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder; `options` are passed to `AutoTokenizer.from_pretrained`."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, **options)
    except Exception as error:  # a damaged file raises whatever the tokenizer's code meets first, also a bare Exception
        raise ValueError(f"{folder}: the tokenizer does not load ({one_line(error)})") from None


def with_file_name(file: Path, make: Any, *args: Any) -> Any:
    """Call make(*args) and put the name of the file in front of its error messages."""
    try:
        return make(*args)
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{file}: {one_line(error).removeprefix(f'{file.name}: ')}") from None
