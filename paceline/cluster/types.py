"""Records of the cluster: what the coordinator sees (`ClusterView`) and what it may do (`Action`). No torch, no Ray."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

NOWHERE = -1
"""Worker of a request that waits in the coordinator's queue, and target of a request that is not being moved."""


class WorkerState(Enum):
    """What a worker is doing."""

    BUSY = "busy"
    """It generates."""
    IDLE = "idle"
    """It has no request and does not train."""
    TRAINING = "training"
    """It trains the drafter."""
    UPDATING = "updating"
    """It trains the policy, together with all other workers."""
    DOWN = "down"
    """It is dead or unreachable; its requests wait again."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker as the coordinator sees it."""

    id: int
    state: WorkerState
    max_batch: int
    """Largest number of requests that it runs at the same time."""
    kv_tokens: int
    """Number of tokens that its KV cache holds."""
    slowdown: float = 1.0
    """Measured duration of its steps relative to the cost curve."""
    policy_version: int = 0
    """Version of the policy's weights that it has."""
    drafter_version: int = 0
    """Version of the drafter that it has."""
    can_train: bool = False
    """Whether it has a drafter to train and data to train it on."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestTable:
    """All unfinished requests that do not wait for an environment, one array [N] per column: at 16,384 requests objects would be
    too slow."""

    id: NDArray[np.int64]
    worker: NDArray[np.int64]
    """Worker that holds the request; NOWHERE while it waits in the coordinator's queue."""
    target: NDArray[np.int64]
    """Worker that the request is being moved to; NOWHERE if it is not being moved."""
    group: NDArray[np.int64]
    """Number of the request's prompt."""
    probe: NDArray[np.bool_]
    """Whether this is the first answer to a prompt of which no answer's length is known: it tells how long the others will be."""
    context: NDArray[np.int64]
    """Number of tokens of prompt and answer so far."""
    remaining: NDArray[np.float64]
    """Expected number of tokens that are still to be generated, at least 1."""
    waited_s: NDArray[np.float64]
    """Seconds since the request was submitted."""
    suspect: NDArray[np.bool_]
    """Whether several workers died that had the request. A worker gets one such request at a time, so that the next death tells
    which one is to blame."""

    def __len__(self) -> int:
        return len(self.id)

    @classmethod
    def empty(cls) -> RequestTable:
        return cls(*(np.zeros(0, dtype) for dtype in (int, int, int, int, bool, int, float, float, bool)))


@dataclass(frozen=True, slots=True, eq=False)
class ClusterView:
    """Everything that the scheduling policy decides from."""

    workers: tuple[WorkerView, ...]
    requests: RequestTable
    token_s: NDArray[np.float64]
    """[max_batch + 1] predicted seconds until every request of a worker has one more token, by the worker's number of requests:
    cost curve over accept length. Entry 0 is unused."""
    interval_s: float = 0.0
    """Seconds until the next decision. Requests that are expected to end before are replaced in advance, so that no slot stays
    empty."""
    move_pause_s: float = 0.0
    """Seconds that a request pauses when it is moved."""
    move_token_s: float = 0.0
    """Seconds to copy the KV cache of one token to another worker."""
    policy_version: int = 0
    """Newest version of the policy. A worker with an older one must not generate."""
    drafter_version: int = 0
    """Newest version of the drafter."""
    paused_remaining: float = 0.0
    """Expected number of tokens that the longest of the requests that wait for an environment, which `requests` leaves out, still
    has to generate."""
    waits_for_drafter: bool = False
    """Whether the run waits for the drafter's training, after generation and before the policy's update."""


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """What the scheduling policy may do. The defaults do everything."""

    scheduling: bool = True
    """Assign requests as workers have room, first answers first, then longest expected first. False: all at once, by group."""
    reallocation: bool = True
    """Move running requests to less loaded workers."""
    min_gain: float = 0.08
    """Requests are moved if that shortens the finish of two workers by at least this share, and by more than it costs. At 5 %
    twice as many are moved for nothing, at 15 % large clusters gain nothing (benchmarks/cluster/reallocation.py)."""
    max_pairs: int = 8
    """Largest number of pairs of workers between which one decision moves requests."""
    max_trainers: int = 1
    """Largest number of idle workers that train the drafter at the same time. 0: none."""
    min_train_s: float = 0.1
    """Training starts only if generation is expected to go on for so many seconds."""


@dataclass(frozen=True, slots=True)
class Assign:
    """Give waiting requests to a worker, in this order."""

    worker: int
    requests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Migrate:
    """Move a running request, with its KV cache, to another worker."""

    request: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Publish:
    """Bring a worker's policy and drafter up to date."""

    worker: int


@dataclass(frozen=True, slots=True)
class TrainDrafter:
    """Start to train the drafter on an idle worker."""

    worker: int


@dataclass(frozen=True, slots=True)
class StopTraining:
    """End drafter training on a worker after its current micro-batch."""

    worker: int


Action = Assign | Migrate | Publish | TrainDrafter | StopTraining
