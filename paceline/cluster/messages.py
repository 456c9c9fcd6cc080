"""What the coordinator sends to the workers, and these to each other. Plain data, which any runtime can carry.

The assignments of a request to workers are numbered. A request that is moved, or that starts again after its worker died, has a
larger number than before, so that a late message about an earlier assignment is recognized.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.cluster.spot_group import TrainingRound
from paceline.engine.migration import KvPages, RequestState

# -- coordinator to worker


@dataclass(frozen=True, slots=True)
class Add:
    """Generate a request."""

    request: int
    assignment: int
    state: RequestState
    is_held_out: bool = False
    """Whether what training the drafter gained is measured on the answer, before it is trained on."""


@dataclass(frozen=True, slots=True)
class MoveOut:
    """Send a request to another worker. `assignment`: its number there. `shares_gpu`: both workers are on the same GPU."""

    request: int
    assignment: int
    target: int
    shares_gpu: bool = False


@dataclass(frozen=True, slots=True)
class Cancel:
    """Drop a request, or the room that is reserved for it, unless its assignment is newer than this one."""

    request: int
    assignment: int


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
    assignment: int
    source: int
    policy_version: int
    """The target must have the same version: a worker that was just started may not have its weights yet."""
    pages: KvPages | None
    shares_gpu: bool


@dataclass(frozen=True, slots=True)
class PagesReady:
    """Answer to `FirstPages`: the pages are stored, and the request may follow; or there is no room."""

    request: int
    assignment: int
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
    assignment: int
    state: RequestState
    sent_at: float
    """Time of the source when the request stopped there."""
    is_held_out: bool = False
    """Whether the drafter is measured on the answer before it is trained on it (`Add.is_held_out`)."""


Message = (Add | MoveOut | Cancel | Resume | End | SetPolicy | SetDrafter | StartTraining | EndTraining | DrafterSettings
           | MeasureDrafter | UseDrafter | DistrustDrafter | LearnText | UseEngine | FirstPages | PagesReady | Arrive)


def to_payload(data: bytes) -> np.ndarray:
    """Bytes as an array, which object stores share between processes without a copy."""
    return np.frombuffer(data, np.uint8)
