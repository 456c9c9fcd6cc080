"""The rollouts of a run at one moment, for its live page. A snapshot is sent from the training process to the page's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class AnswerProgress(NamedTuple):
    """An answer that is being generated or finished."""

    request: int
    """Request id."""
    num_tokens: int
    """Number of tokens so far."""
    num_accepted: int
    """Number of these tokens that are accepted draft tokens."""
    is_running: bool
    """Whether it is not finished."""


class WorkerStatus(NamedTuple):
    """A worker of a cluster."""

    worker: int
    """Number of the worker."""
    state: str
    """What it does, for example `busy`, `training`, `idle` or `down`."""
    num_requests: int
    """Number of requests that it has."""


@dataclass(frozen=True, slots=True)
class RolloutSnapshot:
    """What a run is doing at the moment."""

    step: int
    """Number of the training step; 0 before the first one."""
    num_steps: int
    """Number of steps that the run is to have."""
    phase: str
    """Phase of the step, such as generate, generate_off or train."""
    num_finished: int = 0
    """Number of finished answers of the batch."""
    num_total: int = 0
    """Number of answers of the batch."""
    tokens_per_second: float = 0.0
    strategy: str = ""
    """Strategy of the last engine step; empty if there is none."""
    drafted: int = 0
    """Number of draft tokens of the batch that were verified."""
    accepted: int = 0
    """Number of draft tokens of the batch that were accepted."""
    accept_length: float = 0.0
    """Mean number of tokens per verification."""
    answers: tuple[AnswerProgress, ...] = ()
    """Answers of the batch, in the order in which they were requested."""
    texts: tuple[tuple[int, str], ...] = ()
    """Request id and the last characters of the longest answers that are being generated."""
    workers: tuple[WorkerStatus, ...] = ()
    """Workers of the cluster; empty without one."""
    course: Mapping[str, Any] = field(default_factory=dict)
    """The batch so far as in `trace.jsonl`: `on` and `off`."""
    eta_s: float | None = None
    """Estimated seconds to the end of the run; None before the first step has ended."""
