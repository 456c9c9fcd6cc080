"""Workers that train the drafter together: every one on answers of its own, with gradients averaged over all of them.

A group lives until a worker joins or leaves; then the others form a new one, and continue from the state of its first member.
Nothing here blocks: exchanges run in threads of their own and are asked about, so that a worker can stop between any two
micro-batches, whatever the others do. What a group that was left is still waiting for ends with its time limit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.cluster.rendezvous import open_store

T = TypeVar("T")
_TIMEOUT = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class TrainingRound:
    """Which workers train the drafter together."""

    number: int
    members: tuple[int, ...]
    """Workers; the first one's state is where all continue."""
    rendezvous: str
    """Where the members meet to form their process group (`rendezvous.open_store`); empty if one worker trains alone."""


class Trainers:
    """The coordinator's list of the workers that train the drafter, those that began first in front."""

    def __init__(self) -> None:
        self._since: dict[int, int] = {}  # worker → number of the first round that it was told of
        self._number, self._has_changed = 0, False

    def add(self, worker: int) -> None:
        """The worker takes part from the next round on."""
        if worker not in self._since:
            self._since[worker], self._has_changed = self._number + 1, True

    def remove(self, worker: int, number: int | None = None) -> None:
        """The worker takes no part any more. `number`: the newest round it knew when it said so; it may be added again since."""
        if worker in self._since and (number is None or number >= self._since[worker]):
            del self._since[worker]
            self._has_changed = True

    def clear(self) -> list[int]:
        """No worker takes part any more. Returns those that did."""
        members, self._since, self._has_changed = list(self._since), {}, False
        return members

    def new_rounds(self, new_rendezvous: Callable[[], str]) -> list[tuple[int, TrainingRound]]:
        """If workers have joined or left: the new round for each of them. `new_rendezvous`: makes one for
        several members."""
        if not self._has_changed:
            return []
        self._has_changed, self._number = False, self._number + 1
        members = tuple(self._since)
        found = TrainingRound(self._number, members, new_rendezvous() if len(members) > 1 else "")
        return [(worker, found) for worker in members]


class SpotGroup:
    """One member's view of a group."""

    def __init__(self, training: TrainingRound, worker: int) -> None:
        self.rank, self.size = training.members.index(worker), len(training.members)
        self._rendezvous = training.rendezvous
        self._group: Any = None  # a ProcessGroupGloo, whose stubs lack its methods

    def begin(self, state: Callable[[], bytes]) -> Future[bytes]:
        """Form the group. `state`: makes this member's state, in the background. The result is the first member's."""
        return in_background(lambda: self._begin(state()))

    def _begin(self, state: bytes) -> bytes:
        self._group = dist.ProcessGroupGloo(open_store(self._rendezvous, self.size), self.rank, self.size, _TIMEOUT)
        size = torch.tensor([len(state)])
        self._group.broadcast([size], self._root()).wait()
        content = torch.empty(int(size), dtype=torch.uint8)
        if self.rank == 0:
            content.copy_(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        self._group.broadcast([content], self._root()).wait()
        return content.numpy().tobytes()

    def average(self, values: Tensor) -> Future[Tensor]:
        """The mean of all members' values [N], which are on the host."""
        return in_background(lambda: self._average(values))

    def _average(self, values: Tensor) -> Tensor:
        assert self._group is not None, "`begin` comes first"
        self._group.allreduce([values]).wait()
        return values / self.size

    @staticmethod
    def _root() -> dist.BroadcastOptions:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        return options


def in_background(work: Callable[[], T]) -> Future[T]:
    """Runs a function in a thread of its own, which does not keep the process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="spot-group", daemon=True).start()
    return future
