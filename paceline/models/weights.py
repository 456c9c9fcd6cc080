"""Loading a policy from a Hugging Face folder, the Hugging Face hub or a GGUF file.

The shapes of a checkpoint are checked before any tensor is read. Then its tensors are copied one at a time into parameters that
are already allocated, so peak memory is the model plus one tensor.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from paceline.bundled import resolve_model
from paceline.manifest import check_part
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.gguf import GgufCheckpoint
from paceline.models.huggingface import FolderCheckpoint, check_hub_model, download_from_hub
from paceline.models.partition import Part
from paceline.models.state_dict import CutTensor, Region, check_shapes, load_state, region_of
from paceline.models.state_layout import state_layout
from paceline.names import suggest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_DTYPES = {
    "float32": torch.float32, "fp32": torch.float32, "float64": torch.float64, "fp64": torch.float64,
    "bfloat16": torch.bfloat16, "bf16": torch.bfloat16, "float16": torch.float16, "fp16": torch.float16,
}
_DEVICES = ("auto", "cpu", "cuda")
_CACHED_BYTES = 32 << 20
"""Models whose float32 weights are smaller than this (they fit into the CPU's cache) run in float32 on a CPU: half precision only
saves memory traffic, and without any its conversions make a step two to three times as long."""


MakeDecoder = Callable[[ModelConfig], Decoder]
"""Makes a decoder of this shape, on the meta device."""


class Checkpoint(Protocol):
    """A checkpoint that `load_model` can read."""

    path: Path
    config: ModelConfig

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors under Hugging Face's names."""
        ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors under Hugging Face's names, one at a time."""
        ...

    def cut_tensors(self, regions: Mapping[str, Region]) -> Iterator[tuple[str, Tensor | CutTensor]]:
        """All tensors, of those in `regions` only that part."""
        ...

    def own_dtype(self, device: torch.device) -> torch.dtype:
        """The dtype that "auto" selects on this device."""
        ...

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer stored with the weights, if there is one."""
        ...


def load_model(source: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype | str = "auto",
               max_context: int | None = None, quiet: bool = False, check_manifest: bool = True,
               make: MakeDecoder = Decoder) -> tuple[Decoder, PreTrainedTokenizerBase | None]:
    """Load a policy from a Hugging Face folder, a `.gguf` file or a hub id. Returns the model, whose parameters require no
    gradients, and its tokenizer (None if the checkpoint has none).

    Args:
        source: Folder, `.gguf` file or hub id; `default` is the small policy bundled with the package.
        device: Device of the parameters; `auto` is a GPU if there is one.
        dtype: Dtype of the parameters. "auto" takes the checkpoint's own, but float32 for a small model on a CPU; GGUF files
            become float32 on a CPU and bfloat16 elsewhere.
        max_context: Reduces the longest sequence that the model accepts.
        quiet: Do not log that it is loaded.
        check_manifest: Whether the policy of a run's checkpoint is compared with the checkpoint's manifest. A policy that is not
            as it was written is a DamagedFile.
        make: Makes a decoder of this shape on the meta device; `parallel.split_decoder` makes one rank's part of it, for which
            only that part of every tensor is read.
    """
    device = torch.device(resolve_device(device))
    wanted = parse_dtype(dtype)
    checkpoint = open_checkpoint(source)
    if check_manifest and checkpoint.path.is_dir():
        check_part(checkpoint.path)
    if not quiet:
        logger.info("loading %s on %s", source, describe_device(device), extra={"is_notice": True})
    config = _limit_context(checkpoint.config, max_context)
    shapes = checkpoint.shapes()
    if wanted is None:
        wanted = checkpoint.own_dtype(device)
        if device.type == "cpu" and wanted.itemsize < 4 and 4 * sum(map(math.prod, shapes.values())) < _CACHED_BYTES:
            wanted = torch.float32
    with torch.device("meta"):
        check_shapes(Decoder(config), shapes, source=str(checkpoint.path))
    model = empty_model(config, wanted, device, make)
    tensors = checkpoint.tensors() if model.parts is None else checkpoint.cut_tensors(_regions(model, model.parts))
    load_state(model, tensors, source=str(checkpoint.path))
    return model, checkpoint.tokenizer()


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Open a checkpoint and read its configuration, but no weights."""
    path = Path(resolve_model(source)).expanduser()
    if path.is_dir():
        return FolderCheckpoint(path)
    if path.suffix == ".gguf":
        return GgufCheckpoint(path)
    if path.exists():
        raise ValueError(f"{path}: neither a model folder nor a .gguf file")
    return FolderCheckpoint(download_from_hub(str(source)))


def check_model(source: str | Path) -> ModelConfig:
    """The shape of a model. Raises a ValueError unless it can be loaded, as far as its configuration and file headers tell. Of a
    hub repository only the configuration is downloaded."""
    path = Path(resolve_model(source)).expanduser()
    if path.exists() or path.suffix == ".gguf":
        return open_checkpoint(source).config
    return check_hub_model(str(source))


def parse_dtype(dtype: torch.dtype | str) -> torch.dtype | None:
    """The dtype of a name such as "bfloat16" or "bf16"; None for "auto"."""
    if dtype == "auto":
        return None
    found = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found not in _DTYPES.values():
        near = suggest(str(dtype), _DTYPES)
        raise ValueError(f"dtype: {dtype} is not supported; known: auto, {', '.join(_DTYPES)}{near}")
    return found


def resolve_device(device: torch.device | str) -> str:
    """The name of a device that this machine has, such as `cpu` or `cuda:1`. `auto` is a GPU if there is one. Other names are a
    ValueError."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    check_device(device)
    return str(device)


def describe_device(device: torch.device | str) -> str:
    """The device in words, such as `GPU 0 (NVIDIA H200)` or `CPU (2 threads)`."""
    found = torch.device(resolve_device(device))
    if found.type == "cuda":
        return f"GPU {found.index or 0} ({torch.cuda.get_device_name(found)})"
    return f"CPU ({torch.get_num_threads()} threads)"


def check_device(device: torch.device | str) -> None:
    """Raises a ValueError if `device` is neither the CPU nor a CUDA device that this machine has."""
    if device == "auto":
        return
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        near = "; did you mean cuda?" if str(device).startswith("gpu") else suggest(str(device), _DEVICES)
        raise ValueError(f"device {device}: not a device, such as auto, cpu or cuda{near}") from None
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"device {device}: not supported; there are cpu and cuda")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device}: no CUDA device is available")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {device}: this machine has {torch.cuda.device_count()} CUDA device(s)")


def _regions(model: Decoder, parts: Mapping[str, list[Part]]) -> dict[str, Region]:
    """What a split policy needs of a checkpoint's tensors."""
    found = {name: region_of(slot, parts) for name, slot in state_layout(model.config).saved.items()}
    return {name: region for name, region in found.items() if region is not None}


def empty_model(config: ModelConfig, dtype: torch.dtype, device: torch.device | str,
                make: MakeDecoder = Decoder) -> Decoder:
    """A decoder with uninitialised parameters on `device`. Tied parameters stay one tensor. `make`: see `load_model`."""
    with torch.device("meta"):
        model = make(config)
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
