"""A process group with a trainer, as SGLang and the frameworks that use it make one: the trainer is rank 0 and broadcasts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from paceline.server.rl.backend import Body

T = TypeVar("T")
_TIMEOUT = timedelta(minutes=10)
"""How long the group waits for its other members, and a broadcast for the trainer."""


class GroupRequest(Body):
    """Body of `POST /init_weights_update_group`."""

    master_address: str
    master_port: int
    rank_offset: int
    """Rank of this server."""
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"
    pp_rank: int | None = None
    """The server is a stage of its own in every pipeline."""


class WeightGroup:
    """One member of a process group that receives what rank 0 broadcasts."""

    def __init__(self, asked: GroupRequest, device: torch.device) -> None:
        """Returns when all members are there. `device`: where tensors are received with NCCL."""
        name, backend, rank, world_size = asked.group_name, asked.backend, asked.rank_offset, asked.world_size
        if backend not in ("gloo", "nccl"):
            raise ValueError(f"backend: {backend} is not supported; there are gloo and nccl")
        if not 0 < rank < world_size:
            raise ValueError(f"rank_offset: {rank} is not in 1..{world_size - 1}; rank 0 is the trainer")
        host = asked.master_address
        host = f"[{host}]" if ":" in host and not host.startswith("[") else host
        store, *_ = next(c10d.rendezvous(f"tcp://{host}:{asked.master_port}", rank, world_size, timeout=_TIMEOUT))
        store.set_timeout(_TIMEOUT)
        # NOTE: new_group would need a default process group that contains all members; trainers make theirs with this function.
        self._group, _ = c10d._new_process_group_helper(
            world_size, rank, [], c10d.Backend(backend), c10d.PrefixStore(name, store), group_name=c10d.GroupName(name),
            timeout=_TIMEOUT)
        c10d._world.pg_group_ranks[self._group] = {member: member for member in range(world_size)}
        self._device = device if backend == "nccl" else torch.device("cpu")

    def receive(self, names: list[str], dtypes: list[str], shapes: list[list[int]]) -> dict[str, Tensor]:
        """Receive tensors in this order."""
        received = {name: torch.empty(shape, dtype=_dtype(dtype), device=self._device)
                    for name, dtype, shape in zip(names, dtypes, shapes, strict=True)}
        works = [c10d.broadcast(tensor, 0, self._group, async_op=True) for tensor in received.values()]
        for work in works:
            work.wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the engine copies them in another thread, on another stream
        return received

    def close(self) -> None:
        """Leave the group."""
        c10d.destroy_process_group(self._group)


async def in_background(work: Callable[[], T]) -> T:
    """Call what waits for a trainer in a thread that does not keep the server from stopping. ValueError if the trainer is not
    there, or gone."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except RuntimeError as error:  # of torch.distributed
            future.set_exception(ValueError(f"the process group failed: {' '.join(str(error).split())}"))
        except BaseException as error:  # belongs to the caller
            future.set_exception(error)

    threading.Thread(target=run, name="paceline-weights", daemon=True).start()
    return await asyncio.wrap_future(future)


def _dtype(name: str) -> torch.dtype:
    found = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
    try:
        return found[f"torch.{name.removeprefix('torch.')}"]
    except KeyError:
        raise ValueError(f"dtypes: {name} is not supported; there are {', '.join(found)}") from None
