"""What the coordinator and the workers send each other. Plain data, which any runtime can carry.

Every stay of a request on a worker has a number, its epoch. A request that is moved, or that starts again after its worker died,
has a larger epoch than before, so that a late message about an earlier stay is recognized.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.cluster.figures import WorkerFigures
from paceline.cluster.spot_group import TrainingRound
from paceline.cluster.types import WorkerState
from paceline.drafters.fingerprint import PolicyFingerprint
from paceline.engine.migration import KvPages, RequestState
from paceline.spot.budget import Comparison
from paceline.types import FinishReason, Rollout

Ints = NDArray[np.int64]
Outputs = tuple[Sequence[int], Sequence[float], Sequence[float], Sequence[int]]
"""Tokens, log-probabilities, raw log-probabilities (or none) and versions of consecutive tokens of an answer."""

# -- coordinator to worker


@dataclass(frozen=True, slots=True)
class Add:
    """Generate a request."""

    request: int
    epoch: int
    state: RequestState
    is_held_out: bool = False
    """Whether what training the drafter gained is measured on the answer, before it is trained on."""


@dataclass(frozen=True, slots=True)
class MoveOut:
    """Send a request to another worker. Its stay there has the number `epoch`. `shares_gpu`: both workers are on the same GPU."""

    request: int
    epoch: int
    target: int
    shares_gpu: bool = False


@dataclass(frozen=True, slots=True)
class Cancel:
    """Drop a request, or the room that is reserved for it, if its stay is not newer than `epoch`."""

    request: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Resume:
    """Continue a request behind the reply to its last turn. Without effect unless it is paused with so many tokens."""

    request: int
    num_tokens: int
    """Number of tokens of the answer before the reply."""
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class End:
    """End a paused request, whose rollout the coordinator has."""

    request: int


@dataclass(frozen=True, slots=True)
class SetPolicy:
    """Replace the policy's weights. The payload is a safetensors file."""

    version: int


@dataclass(frozen=True, slots=True)
class SetDrafter:
    """There is a newer drafter. The payload is a `TrainedDrafter`."""

    version: int
    is_used: bool
    """Whether to draft with it; otherwise it is compared with the one in use first (`MeasureDrafter`)."""


@dataclass(frozen=True, slots=True)
class StartTraining:
    """Train the drafter between requests, together with the other members of the round; or, if this worker trains already, go on
    with these members. The payload is the newest `TrainedDrafter`, or None to start from the current one."""

    round: TrainingRound
    frequent_tokens: tuple[int, ...] = ()
    """Tokens of the run's answers, most frequent first: a new drafter's reduced vocabulary is chosen from them."""


@dataclass(frozen=True, slots=True)
class EndTraining:
    """Stop after the current micro-batch and report the drafter."""


@dataclass(frozen=True, slots=True)
class DrafterSettings:
    """What holds for the drafter's training from now on."""

    number: int
    """Reports say which ones a worker has, and thus which messages it has handled."""
    keeps_answers: bool
    """Whether answers are trained on; those of evaluations are not."""
    max_passes: float | None
    """Number of passes over its answers after which a worker waits for more of them; None: no limit."""


@dataclass(frozen=True, slots=True)
class MeasureDrafter:
    """Compare the newest drafter with the one in use on the held-out answers (`DrafterMeasured`); then train on these."""


@dataclass(frozen=True, slots=True)
class UseDrafter:
    """Draft with the newest drafter from now on."""


@dataclass(frozen=True, slots=True)
class DistrustDrafter:
    """Do not use the learned drafter until there is a new one."""


@dataclass(frozen=True, slots=True)
class LearnText:
    """Answers that other workers generated, for the suffix drafter's history of their prompts."""

    answers: list[tuple[list[int], list[int]]]
    """Prompt and answer of each, as token ids."""


@dataclass(frozen=True, slots=True)
class UseEngine:
    """Generate with the second engine from now on, which does not speculate (`compare_off`), or with the first one again.
    Whatever the worker still holds is dropped."""

    baseline: bool


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
    shares_gpu: bool


@dataclass(frozen=True, slots=True)
class PagesReady:
    """Answer to `FirstPages`: the pages are stored, and the request may follow; or there is no room."""

    request: int
    epoch: int
    target: int
    policy_version: int
    """As in `FirstPages`: pages of older weights do not fit to what follows them."""
    num_tokens: int
    accepted: bool
    shares_gpu: bool


@dataclass(frozen=True, slots=True)
class Arrive:
    """Stage two of a migration: the request itself."""

    request: int
    epoch: int
    state: RequestState
    sent_at: float
    """Time of the source when the request stopped there."""
    is_held_out: bool = False
    """Whether the drafter is measured on the answer before it is trained on it (`Add.is_held_out`)."""


Message = (Add | MoveOut | Cancel | Resume | End | SetPolicy | SetDrafter | StartTraining | EndTraining | DrafterSettings
           | MeasureDrafter | UseDrafter | DistrustDrafter | LearnText | UseEngine | FirstPages | PagesReady | Arrive)


# -- worker to coordinator


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
    epoch: Ints
    generated: Ints
    """Number of tokens of the answer."""


@dataclass(frozen=True, slots=True, eq=False)
class NewTokens:
    """New tokens of a worker's requests: one array [N] per column, and the tokens of all requests one after the other."""

    request: Ints
    epoch: Ints
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
        """From the requests' numbers, epochs, starts, and outputs (`Migration.outputs`)."""
        outputs = [each for *_, each in found]
        request, epoch, start, count, raw_count = np.array(
            [(*stay, len(each[0]), len(each[2])) for *stay, each in found], np.int64).reshape(-1, 5).T
        ids, logprobs, raw, versions = ([value for each in outputs for value in each[kind]] for kind in range(4))  # type: ignore[attr-defined]
        return cls(request, epoch, start, count, raw_count, np.array(ids, np.int64), np.array(logprobs), np.array(raw),
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
    epoch: int
    rollout: Rollout


@dataclass(frozen=True, slots=True)
class Paused:
    """A turn has ended, and the request waits for a `Resume` or `End`. Also reported of one that has moved here meanwhile."""

    request: int
    epoch: int
    start: int
    """Position in the answer of the turn's first token."""
    outputs: Outputs
    """The turn."""
    reason: FinishReason


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


Event = Finished | Paused | Arrived | Stayed | DrafterTrained | TrainingPreempted | DrafterMeasured | TrainingFailed


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
    trained_s: float = 0.0
    """Seconds of drafter training."""
    trained_tokens: int = 0
    """Number of rows that the drafter was trained on."""
    max_micro_batch_s: float = 0.0
    """Duration of the longest micro-batch of drafter training."""

    def add(self, new: StepSums) -> None:
        """Add everything but `pace`, which is learned from report by report."""
        for name in ("steps", "tokens", "prompt_tokens", "drafted", "accepted", "verifications", "preemptions", "trained_s",
                     "trained_tokens"):
            setattr(self, name, getattr(self, name) + getattr(new, name))
        self.max_micro_batch_s = max(self.max_micro_batch_s, new.max_micro_batch_s)
        for strategy, steps in new.strategies.items():
            self.strategies[strategy] = self.strategies.get(strategy, 0) + steps


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


def to_payload(data: bytes) -> np.ndarray:
    """Bytes as an array, which object stores share between processes without a copy."""
    return np.frombuffer(data, np.uint8)
