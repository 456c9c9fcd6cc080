"""What workers report to the coordinator. Plain data, which any runtime can carry; assignments are those of `messages.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.cluster.figures import WorkerFigures
from paceline.cluster.types import WorkerState
from paceline.drafters.fingerprint import PolicyFingerprint
from paceline.engine.stats import Counters
from paceline.spot.budget import Comparison
from paceline.types import FinishReason, Rollout

Ints = NDArray[np.int64]
Outputs = tuple[Sequence[int], Sequence[float], Sequence[float], Sequence[int]]
"""Tokens, log-probabilities, raw log-probabilities (or none) and versions of consecutive tokens of an answer."""


@dataclass(frozen=True, slots=True)
class TrainedDrafter:
    """The complete state of a drafter's training (`spot.Snapshot`) in two parts, so that engines need not read all of it."""

    drafter: bytes
    """Tensors that the drafter is made from (`spot.drafter_of`), as a safetensors file."""
    training: bytes
    """All other tensors of the training's state, such as moments, as a safetensors file."""
    snapshot_metadata: dict[str, Any]

    @property
    def fingerprint(self) -> PolicyFingerprint:
        """The fingerprint of the policy that the drafter was trained for."""
        found = PolicyFingerprint.from_json(self.snapshot_metadata["policy"])
        assert found is not None, "snapshots have one"
        return found

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps that the drafter has been trained for."""
        return int(self.snapshot_metadata["progress"]["step"])


@dataclass(frozen=True, slots=True, eq=False)
class Progress:
    """How far a worker's requests are, one array [N] per column: at thousands of requests objects would be too slow."""

    request: Ints
    assignment: Ints
    generated: Ints
    """Number of tokens of the answer."""


@dataclass(frozen=True, slots=True, eq=False)
class NewTokens:
    """New tokens of a worker's requests: one array [N] per column, and the tokens of all requests one after the other."""

    request: Ints
    assignment: Ints
    start: Ints
    """Position in the answer of the request's first token in here."""
    count: Ints
    """Number of the request's tokens in here."""
    raw_count: Ints
    """Number of its raw log-probabilities: as many as tokens, or none."""
    token_ids: Ints
    logprobs: NDArray[np.float64]
    raw_logprobs: NDArray[np.float64]
    versions: Ints

    @classmethod
    def of(cls, found: Sequence[tuple[int, int, int, Outputs]]) -> NewTokens:
        """Make the report from the requests' numbers, their assignments, where their new tokens start, and their outputs
        (`Migration.outputs`)."""
        outputs = [each for *_, each in found]
        request, assignment, start, count, raw_count = np.array(
            [(*numbers, len(each[0]), len(each[2])) for *numbers, each in found], np.int64).reshape(-1, 5).T
        ids, logprobs, raw, versions = ([value for each in outputs for value in each[kind]] for kind in range(4))  # type: ignore[attr-defined]
        return cls(request, assignment, start, count, raw_count, np.array(ids, np.int64), np.array(logprobs), np.array(raw),
                   np.array(versions, np.int64))

    def outputs(self) -> list[Outputs]:
        """Each request's outputs."""
        ends, raw_ends = np.cumsum(self.count)[:-1], np.cumsum(self.raw_count)[:-1]
        parts = (np.split(self.token_ids, ends), np.split(self.logprobs, ends), np.split(self.raw_logprobs, raw_ends),
                 np.split(self.versions, ends))
        return list(zip(*parts, strict=True))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Finished:
    """A request has ended."""

    request: int
    assignment: int
    rollout: Rollout


@dataclass(frozen=True, slots=True)
class Paused:
    """A turn has ended, and the request waits for a `Resume` or `End`. Also reported of one that has moved here meanwhile."""

    request: int
    assignment: int
    start: int
    """Position in the answer of the turn's first token."""
    outputs: Outputs
    """The turn."""
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request that was moved continues here. `pause_s`: time between its last step there and its first here."""

    request: int
    assignment: int
    pause_s: float
    prefilled: bool
    """Whether its pages found no room, so that it has to be prefilled."""


@dataclass(frozen=True, slots=True)
class MoveRefused:
    """A request was not moved: the target had no room. `assignment`: the one that did not begin."""

    request: int
    assignment: int


@dataclass(frozen=True, slots=True)
class DrafterTrained:
    """This worker has trained a newer drafter."""

    drafter: TrainedDrafter


@dataclass(frozen=True, slots=True)
class TrainingPreempted:
    """Drafter training has ended for work, because generation is over, or because another member of the round is gone; or it did
    not start. `wait_s`: how long the current micro-batch took."""

    wait_s: float
    round: int


@dataclass(frozen=True, slots=True)
class DrafterMeasured:
    """Answer to `MeasureDrafter`. `found` is None without a newer drafter, or without held-out answers."""

    found: Comparison | None


@dataclass(frozen=True, slots=True)
class TrainingFailed:
    """The drafter's weights or gradients are not finite."""

    reason: str


Event = Finished | Paused | Arrived | MoveRefused | DrafterTrained | TrainingPreempted | DrafterMeasured | TrainingFailed


@dataclass(slots=True)
class StepSums:
    """Sums over the engine steps since the last report."""

    counters: Counters = field(default_factory=Counters)
    preemptions: int = 0
    pace: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Decode steps without prefill: batch size → tokens and request-seconds."""
    trained_s: float = 0.0
    """Seconds of drafter training."""
    trained_tokens: int = 0
    """Number of rows that the drafter was trained on."""
    max_micro_batch_s: float = 0.0
    """Duration of the longest micro-batch of drafter training."""

    def add(self, new: StepSums) -> None:
        """Add everything but `pace`, which is learned from report by report."""
        self.counters.add(new.counters)
        self.preemptions += new.preemptions
        self.trained_s += new.trained_s
        self.trained_tokens += new.trained_tokens
        self.max_micro_batch_s = max(self.max_micro_batch_s, new.max_micro_batch_s)


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What a worker's engine holds."""

    max_batch: int
    """Largest number of requests that run at the same time."""
    kv_tokens: int
    """Number of tokens of the KV cache."""
    max_length: int
    """Largest number of tokens of one request."""
    gpu: str = ""
    """Which GPU the worker is on, unique over all nodes; empty if it is on none."""


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
    progress: Progress
    tokens: NewTokens | None
    """What the coordinator needs if the worker dies. None in most reports, since it is large."""
    sums: StepSums
    figures: Sequence[WorkerFigures] = ()
    """Figures of the engine's steps, whenever the worker has had no requests left or got a new policy."""
    owes_drafter: bool = False
    """Whether a drafter that was trained is about to be reported."""
    settings: int = 0
    """Number of the newest `DrafterSettings` that the worker has."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker is dead or unreachable."""

    worker: int
    reason: str
