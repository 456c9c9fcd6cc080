"""How the ranks of a tensor parallel engine exchange tensors: through memory that they share, on a CPU and where they share a
GPU, or with NCCL where every rank has a GPU. All ranks are on one machine."""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.kernels.cpu.counters import has_reached, increment

logger = logging.getLogger(__name__)

_CAPACITY = 4 << 20
"""Bytes that a rank leaves at once; larger tensors take several rounds."""
_LINE = 64
"""Bytes between two counters, so that each has a cache line of its own."""
_SPINS = 2000
"""Times that a rank looks at a counter before it offers its core to others."""
_PATIENCE_S = 0.05
"""A rank that has waited for longer sleeps between two looks."""
NOTICE_S = 30.0
"""Seconds after which a rank says that it waits."""


class RankTimeout(RuntimeError):
    """The other ranks did not come."""


class SharedMemoryGroup:
    """Ranks on one machine that exchange tensors through a file in memory.

    Every exchange has a number. A rank leaves its bytes in one of its two places, in turn, and counts them; the others wait for
    its counter. A rank that has counted exchange n has read all of exchange n - 1, so that the places of exchange n - 1 are free
    for n + 1 once all have counted n."""

    is_capturable = False
    """Whether exchanges can be part of a CUDA graph."""

    def __init__(self, path: Path, rank: int, size: int, timeout_s: float, check: Callable[[], None]) -> None:
        """`path`: a file that all ranks name. `check` is called while this rank waits, and raises if another one has died."""
        self.rank, self.size, self._timeout_s, self._check = rank, size, timeout_s, check
        length = size * (_LINE + 2 * _CAPACITY)
        with path.open("r+b") as file:
            file.truncate(length)  # to the same length, if another rank did it before
            self._memory = mmap.mmap(file.fileno(), length)
        whole = np.frombuffer(self._memory, np.uint8)
        self._counters = [whole.ctypes.data + each * _LINE for each in range(size)]
        self._places = whole[size * _LINE :].reshape(2, size, _CAPACITY)
        self._number = 0

    def gather(self, x: Tensor) -> Tensor:
        """See `partition.Group`."""
        found = self._exchange(x, senders=range(self.size), receives=True)
        assert found is not None
        return found

    def gather_first(self, x: Tensor) -> Tensor | None:
        """See `partition.Group`."""
        return self._exchange(x, senders=range(self.size), receives=self.rank == 0)

    def broadcast(self, x: Tensor) -> Tensor:
        """See `partition.Group`."""
        found = self._exchange(x, senders=range(1), receives=self.rank != 0)
        return x if found is None else found[0]

    def _exchange(self, x: Tensor, senders: range, receives: bool) -> Tensor | None:
        """The tensors of the senders [senders, ...], if this rank receives them."""
        own = x.detach().to("cpu").contiguous()
        sent = own.view(-1).view(torch.uint8).numpy() if own.numel() else np.zeros(0, np.uint8)
        out = torch.empty(len(senders), *own.shape, dtype=own.dtype)
        received = out.view(len(senders), -1).view(torch.uint8).numpy() if own.numel() else np.zeros((len(senders), 0), np.uint8)
        for start in range(0, len(sent), _CAPACITY):
            part = slice(start, min(start + _CAPACITY, len(sent)))
            self._round(sent[part], received[:, part], senders, receives)
        return out.to(x.device) if receives else None

    def _round(self, sent: np.ndarray, received: np.ndarray, senders: range, receives: bool) -> None:
        for rank in range(self.size):
            self._wait(rank, self._number)  # the others have read what was in this place
        self._number += 1
        places, size = self._places[self._number % 2], len(sent)
        if self.rank in senders:
            places[self.rank, :size] = sent
        increment(self._counters[self.rank])
        if receives:
            for rank in senders:
                self._wait(rank, self._number)
                received[rank] = places[rank, :size]

    def _wait(self, rank: int, number: int) -> None:
        """Wait until a rank has counted this exchange."""
        if has_reached(self._counters[rank], number, _SPINS):
            return
        began, said = time.monotonic(), False
        while not has_reached(self._counters[rank], number, _SPINS):
            waited = time.monotonic() - began
            time.sleep(0.0005 if waited > _PATIENCE_S else 0)
            self._check()
            if waited > min(NOTICE_S, self._timeout_s / 2) and not said:
                said = True
                logger.warning("tensor parallel: rank %d has waited %.0f s for rank %d; the engine ends after %.0f s", self.rank,
                               waited, rank, self._timeout_s)
            if waited > self._timeout_s:
                raise RankTimeout(f"rank {self.rank} has waited {self._timeout_s:.0f} s for rank {rank}")


class NcclGroup:
    """Ranks with a GPU each."""

    is_capturable = True

    def __init__(self, path: Path, rank: int, size: int, timeout_s: float) -> None:
        """`path`: a file that all ranks name and that does not exist yet."""
        self.rank, self.size = rank, size
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        self._group: Any = dist.ProcessGroupNCCL(dist.FileStore(str(path), size), rank, size, options)

    def abort(self) -> None:
        """Give up all exchanges that the device still waits for."""
        self._group.abort()

    def gather(self, x: Tensor) -> Tensor:
        """See `partition.Group`."""
        out = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device)
        self._group._allgather_base(out, x.contiguous()).wait()
        return out

    def gather_first(self, x: Tensor) -> Tensor | None:
        """See `partition.Group`."""
        found = self.gather(x)
        return found if self.rank == 0 else None

    def broadcast(self, x: Tensor) -> Tensor:
        """See `partition.Group`."""
        found, options = x.contiguous(), dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([found], options).wait()
        return found


RankGroup = SharedMemoryGroup | NcclGroup


def device_of(device: torch.device, rank: int) -> torch.device:
    """The device of a rank: a GPU of its own, or one that it shares where there are too few."""
    return device if device.type != "cuda" else torch.device("cuda", rank % torch.cuda.device_count())


def open_group(place: Path, device: torch.device, rank: int, size: int, timeout_s: float,
               check: Callable[[], None]) -> RankGroup:
    """The group of ranks that meet in this folder."""
    if device.type == "cuda" and torch.cuda.device_count() >= size:
        return NcclGroup(place / "nccl", rank, size, timeout_s)
    return SharedMemoryGroup(place / "exchange", rank, size, timeout_s, check)


def parent_watch() -> Callable[[], None]:
    """What a rank checks while it waits: whether the process that started it is still there."""
    parent = os.getppid()

    def check() -> None:
        if os.getppid() != parent:
            raise RuntimeError("the engine's process is gone")

    return check
