"""What the coordinator and the workers send each other. Plain data, which any runtime can carry.

Every stay of a request on a worker has a number, its epoch. A request that is moved, or that starts again after its worker died,
has a larger epoch than before, so that a late message about an earlier stay is recognized.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.cluster.types import WorkerState
from paceline.drafters.fingerprint import PolicyFingerprint
from paceline.engine.migration import KvPages, RequestState
from paceline.types import Rollout

# -- coordinator to worker


@dataclass(frozen=True, slots=True)
class Add:
    """Generate a request."""

    request: int
    epoch: int
    state: RequestState


@dataclass(frozen=True, slots=True)
class MoveOut:
    """Send a request to another worker. Its stay there has the number `epoch`."""

    request: int
    epoch: int
    target: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Drop a request, or the room that is reserved for it, if its stay is not newer than `epoch`."""

    request: int
    epoch: int


@dataclass(frozen=True, slots=True)
class SetPolicy:
    """Replace the policy's weights. The payload is a safetensors file."""

    version: int


@dataclass(frozen=True, slots=True)
class SetDrafter:
    """Replace the drafter's weights. The payload is a `TrainedDrafter`."""

    version: int


@dataclass(frozen=True, slots=True)
class StartTraining:
    """Train the drafter between requests. The payload is the newest `TrainedDrafter`, or None to start from the current one."""


@dataclass(frozen=True, slots=True)
class EndTraining:
    """Stop after the current micro-batch and report the drafter."""


@dataclass(frozen=True, slots=True)
class LearnText:
    """An answer that another worker generated, for the suffix drafter's history of its prompt."""

    prompt_ids: list[int]
    token_ids: list[int]


# -- worker to worker


@dataclass(frozen=True, slots=True)
class FirstPages:
    """Stage one of a migration: the full pages of a request that keeps generating on `source`. None: it has none yet."""

    request: int
    epoch: int
    source: int
    policy_version: int
    """The target must have the same version: a worker that was just started may not have its weights yet."""
    pages: KvPages | None


@dataclass(frozen=True, slots=True)
class PagesReady:
    """Answer to `FirstPages`: the pages are stored, and the request may follow; or there is no room."""

    request: int
    epoch: int
    target: int
    num_tokens: int
    accepted: bool


@dataclass(frozen=True, slots=True)
class Arrive:
    """Stage two of a migration: the request itself."""

    request: int
    epoch: int
    state: RequestState
    sent_at: float
    """Time of the source when the request stopped there."""


Message = (Add | MoveOut | Cancel | SetPolicy | SetDrafter | StartTraining | EndTraining | LearnText | FirstPages | PagesReady
           | Arrive)


# -- worker to coordinator


@dataclass(frozen=True, slots=True)
class TrainedDrafter:
    """A drafter and the complete state of its training, as safetensors files."""

    weights: bytes
    fingerprint: PolicyFingerprint
    snapshot: bytes
    snapshot_metadata: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Progress:
    """New tokens of a request, from position `start` of its answer on."""

    request: int
    epoch: int
    start: int
    token_ids: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    versions: list[int]


@dataclass(frozen=True, slots=True)
class Finished:
    """A request has ended."""

    request: int
    epoch: int
    rollout: Rollout


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request that was moved continues here. `pause_s`: time between its last step there and its first here."""

    request: int
    epoch: int
    pause_s: float
    prefilled: bool
    """Whether its pages found no room, so that it has to be prefilled."""


@dataclass(frozen=True, slots=True)
class Stayed:
    """A request was not moved: the target had no room. `epoch`: that of the stay that did not begin."""

    request: int
    epoch: int


@dataclass(frozen=True, slots=True)
class DrafterTrained:
    """This worker has trained a newer drafter."""

    drafter: TrainedDrafter


@dataclass(frozen=True, slots=True)
class TrainingPreempted:
    """Drafter training has ended for work, or because generation is over. `wait_s`: how long the current micro-batch took."""

    wait_s: float


Event = Finished | Arrived | Stayed | DrafterTrained | TrainingPreempted


@dataclass(slots=True)
class StepSums:
    """Sums over the engine steps since the last report."""

    steps: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    verifications: int = 0
    preemptions: int = 0
    strategies: dict[str, int] = field(default_factory=dict)
    """Number of steps by strategy."""
    pace: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Decode steps without prefill: batch size → tokens and request-seconds."""


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What a worker's engine holds."""

    max_batch: int
    """Largest number of requests that run at the same time."""
    kv_tokens: int
    """Number of tokens of the KV cache."""
    max_length: int
    """Largest number of tokens of one request."""


@dataclass(frozen=True, slots=True)
class Report:
    """What has happened on a worker since its last report."""

    worker: int
    state: WorkerState
    limits: WorkerLimits
    policy_version: int
    drafter_version: int
    can_train: bool
    events: list[Event]
    progress: list[Progress]
    sums: StepSums


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker is dead or unreachable."""

    worker: int
    reason: str


def to_payload(data: bytes) -> np.ndarray:
    """Bytes as an array, which object stores share between processes without a copy."""
    return np.frombuffer(data, np.uint8)
