"""New weights for the policy: from a folder, from the body of a request, or broadcast by a trainer.

Weights that come in parts are collected until they are complete; then they replace the policy's between two engine steps, all
at once. Files are safetensors; nothing is ever unpickled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from paceline.engine import Engine
from paceline.engine.thread import EngineThread
from paceline.manifest import check_part
from paceline.models.huggingface import read_folder
from paceline.models.state_dict import bare_name, checkpoint_shapes, export_state
from paceline.server.control import Control
from paceline.server.rl.group import GroupRequest, WeightGroup, in_background
from paceline.server.rl.lora import Adapter

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Weights:
    """Replaces the weights of one engine. Its methods are called in the server's asyncio loop."""

    def __init__(self, engine: Engine, thread: EngineThread, control: Control, folder: Path | None) -> None:
        """`folder`: weights are read from folders below it only. None: from no folder."""
        self._engine, self._thread, self._control = engine, thread, control
        self._folder = None if folder is None else folder.resolve()
        self._shapes = checkpoint_shapes(engine.model)
        self._received: dict[str, Tensor] = {}
        self._groups: dict[str, WeightGroup] = {}
        self._base: dict[str, Tensor] | None = None  # on the host, while an adapter is merged into the weights
        self._one_at_a_time = asyncio.Lock()

    @property
    def max_bytes(self) -> int:
        """Largest size of weights in a request: all of them in float32, and their names."""
        return 4 * sum(map(_size, self._shapes.values())) + (1 << 20)

    @property
    def num_missing(self) -> int:
        """Number of tensors that an update in parts still waits for; 0 if there is none."""
        return len(self._shapes) - len(self._received) if self._received else 0

    def forget_parts(self) -> None:
        """Give up an update that is not complete."""
        if self._received:
            logger.warning("a weight update was given up: %d of %d tensors are missing", self.num_missing, len(self._shapes))
        self._received.clear()

    # Whole models

    async def load_folder(self, path: str, label: str | None = None) -> None:
        """Replace the weights by those in a folder. ValueError if it is not below the folder that was allowed, or is a damaged
        part of a checkpoint; then the old weights stay."""
        async with self._one_at_a_time:
            self.forget_parts()
            await self._replace(await asyncio.to_thread(_checked, read_folder, self._allowed(path)), label)

    async def load_adapter(self, path: str, name: str) -> None:
        """Merge a LoRA adapter in a folder into the weights, instead of the one that may be merged now. The model is then served
        under the adapter's name."""
        if self._engine.executor.ranks is not None:
            raise ValueError("tensor_parallel: no process has the whole policy, so that adapters are not merged; send weights")
        async with self._one_at_a_time:
            self.forget_parts()
            adapter = await asyncio.to_thread(_checked, Adapter, self._allowed(path))
            base = self._base
            if base is None:
                base = await self._thread.call(_copy_of_weights)
            await self._replace(await asyncio.to_thread(adapter.merged, base), name)
            self._base, self._control.adapter = base, name

    async def unload_adapter(self, name: str) -> bool:
        """Go back to the weights without adapter. Return whether the adapter was there."""
        async with self._one_at_a_time:
            if self._base is None or name != self._control.adapter:
                return False
            await self._replace(self._base, None)
            return True

    # Weights in parts

    async def receive_safetensors(self, data: bytes, label: str | None = None) -> None:
        """Take a safetensors file with some or all of the weights."""
        try:
            part = await asyncio.to_thread(load, data)
        except SafetensorError as error:
            raise ValueError(f"the tensors are not in the safetensors format, and nothing else is read ({error})") from None
        async with self._one_at_a_time:
            await self._receive(part, label)

    async def join_group(self, asked: GroupRequest) -> None:
        """Join the process group in which a trainer broadcasts weights. Returns when all others are there."""
        await self.leave_group(asked.group_name)
        self._groups[asked.group_name] = await in_background(lambda: WeightGroup(asked, self._engine.device))

    async def leave_group(self, name: str) -> bool:
        """Leave a process group. Return whether there was one."""
        group = self._groups.pop(name, None)
        if group is not None:
            await asyncio.to_thread(group.close)
        return group is not None

    async def leave_groups(self) -> None:
        """Leave all process groups."""
        for name in list(self._groups):
            await self.leave_group(name)

    async def receive_broadcast(self, group: str, names: list[str], dtypes: list[str], shapes: list[list[int]],
                                label: str | None = None) -> None:
        """Receive the tensors that the trainer broadcasts in a process group, in this order."""
        if group not in self._groups:
            raise ValueError(f"group_name: there is no group {group}; init_weights_update_group makes it")
        if not len(names) == len(dtypes) == len(shapes):
            raise ValueError("names, dtypes and shapes: not of the same length")
        for name, shape in zip(names, shapes, strict=True):
            self._check(name, shape)
        async with self._one_at_a_time:
            part = await in_background(lambda: self._groups[group].receive(names, dtypes, shapes))
            await self._receive(part, label)

    async def _receive(self, part: Mapping[str, Tensor], label: str | None) -> None:
        bare = {bare_name(name): tensor for name, tensor in part.items()}
        for name, tensor in bare.items():
            self._check(name, tensor.shape)
        known = {name: tensor for name, tensor in bare.items() if name in self._shapes}
        if self._received.keys() & known.keys():  # the trainer has begun again
            self.forget_parts()
        self._received |= known
        if not self.num_missing:
            received, self._received = self._received, {}
            await self._replace(received, label)

    def _check(self, name: str, shape: torch.Size | list[int]) -> None:
        """ValueError unless a tensor has a place in the model."""
        bare = bare_name(name)
        if bare not in self._shapes and not self._is_ignored(bare):
            raise ValueError(f"{name}: the model has no such tensor")
        if bare in self._shapes and tuple(shape) != self._shapes[bare]:
            raise ValueError(f"{name} is {list(shape)}, expected {list(self._shapes[bare])}")

    def _is_ignored(self, bare: str) -> bool:
        """Whether a tensor is none of the model's parameters, but checkpoints may have it: a head tied to the embeddings."""
        return self._engine.model.config.tie_embeddings and bare == "lm_head.weight"

    # Both

    async def _replace(self, state: Mapping[str, Tensor], label: str | None) -> None:
        def update(engine: Engine) -> None:
            version = int(label) if label is not None and label.isdecimal() and int(label) > engine.version else None
            engine.update_weights(state, version)
            if label is not None:
                self._control.name_weights(engine.version, label)

        await self._thread.call(update)
        self._base = self._control.adapter = None

    def _allowed(self, path: str) -> Path:
        """The folder that a request names, if weights may be read from it."""
        if self._folder is None:
            raise ValueError("no folder may be named: the server runs without --rl-weights-dir")
        found = Path(path).resolve() if Path(path).is_absolute() else (self._folder / path).resolve()
        if not found.is_relative_to(self._folder):
            raise ValueError(f"{path}: not below {self._folder} (--rl-weights-dir)")
        if not found.is_dir():
            raise ValueError(f"{path}: there is no such folder")
        outside = [file.name for file in found.iterdir() if not file.resolve().is_relative_to(self._folder)]
        if outside:
            raise ValueError(f"{path}: {outside[0]} is a link to outside of {self._folder} (--rl-weights-dir)")
        return found


def _checked(read: Callable[[Path], T], folder: Path) -> T:
    """What `read` finds in a folder. DamagedFile if the folder is part of a run's checkpoint, and not as it was written."""
    check_part(folder)
    return read(folder)


def _copy_of_weights(engine: Engine) -> dict[str, Tensor]:
    """The policy's weights on the host."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in export_state(engine.model).items()}


def _size(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
