"""What happened within each training step: which answers were live and which strategy was chosen over time, by batch size, and
accept lengths along the answer. One line of a few kilobytes per step in `trace.jsonl`, whatever the number of engine steps.

`RolloutTrace` collects a step's engine steps, `report.metrics` writes its record and reads it back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from paceline.types import RolloutGroup, StepResult, Strategy

_NUM_SAMPLES = 160
"""Number of equally spaced times at which the course of a step's generation is kept."""
_NUM_POSITIONS = 32
"""Number of parts that the longest possible answer is divided into."""
_MAX_LENGTHS = 256
"""Number of answer lengths that are kept per step; of more answers, as many quantiles."""


class Sums(NamedTuple):
    """Sums over engine steps."""

    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    """Number of generated tokens."""
    verifications: int = 0
    """Number of verifications, one per request and engine step."""
    drafted: int = 0
    """Number of draft tokens that were verified."""
    accepted: int = 0
    """Number of draft tokens that were accepted."""

    def __add__(self, other: tuple[Any, ...]) -> Sums:
        return Sums(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def accept_length(self) -> float:
        """Tokens per verification."""
        return self.tokens / max(1, self.verifications)


class _EngineStep(NamedTuple):
    """What is kept of an engine step until the training step ends: little, because it is taken while generation is timed."""

    ms: float
    num_live: int
    strategy: Strategy
    num_requests: int
    drafted: int
    accepted: int
    requests: tuple[int, ...]
    """Ids of the requests that got tokens."""
    counts: list[int] | None
    """Number of tokens of each; None: one each."""


class _Course:
    """The engine steps of one batch."""

    def __init__(self) -> None:
        self.steps: list[_EngineStep] = []
        self.total = 0
        """Largest number of live answers."""
        self._tally: dict[int, list[int]] = {}
        self._num_tallied = 0  # steps

    def add(self, result: StepResult, num_live: int) -> None:
        requests = tuple(result.tokens)
        if self.steps and requests == self.steps[-1].requests:
            requests = self.steps[-1].requests  # one tuple for many steps
        counts = list(map(len, result.tokens.values())) if result.accepted else None
        self.steps.append(_EngineStep(result.ms, num_live, result.strategy, result.num_requests, result.drafted, result.accepted,
                                      requests, counts))
        self.total = max(self.total, num_live + len(result.finished))

    def tally(self) -> dict[int, list[int]]:
        """Number of tokens and of accepted draft tokens by request. Counted only when it is asked for, by one thread."""
        new = self.steps[self._num_tallied :]
        for step in new:
            for request, count in zip(step.requests, step.counts or [1] * len(step.requests), strict=True):
                sums = self._tally.setdefault(request, [0, 0])
                sums[0] += count
                sums[1] += max(0, count - 1)
        self._num_tallied += len(new)
        return self._tally

    def record(self, strategies: bool = True) -> dict[str, Any]:
        """Live answers and strategies at equally spaced times."""
        steps = self.steps.copy()  # those so far: the course of a run is also recorded while it goes on
        ends = np.cumsum([step.ms for step in steps]) / 1e3
        seconds = float(ends[-1]) if len(ends) else 0.0
        if not seconds:
            return {}
        at = np.searchsorted(ends, (np.arange(_NUM_SAMPLES) + 0.5) * seconds / _NUM_SAMPLES)
        sampled = [steps[i] for i in at]
        record: dict[str, Any] = {"seconds": round(seconds, 4), "total": self.total, "live": [step.num_live for step in sampled]}
        if not strategies or not any(step.num_requests for step in steps):
            return record
        used = [str(step.strategy) if step.num_requests else "" for step in sampled]
        names = sorted(set(used))
        return {**record, "strategies": names, "strategy": [names.index(name) for name in used]}


class RolloutTrace:
    """Collects the engine steps of one training step."""

    def __init__(self, max_new_tokens: int, drafter_version: int | None = None) -> None:
        """`drafter_version` is that of the learned drafter; None: there is none."""
        self._drafter_version = drafter_version
        self._on, self._off = _Course(), _Course()
        self._others: list[Mapping[str, Any]] = []
        self.reached: dict[int, int] = {}
        """Number of tokens that requests had before the first step that is added here; requests that are not listed had none."""
        self._width = -(-max_new_tokens // _NUM_POSITIONS)

    def add(self, result: StepResult, num_live: int) -> None:
        """Adds a step of the engine that speculates; `num_live` answers are not finished after it."""
        self._on.add(result, num_live)

    def add_baseline(self, result: StepResult, num_live: int) -> None:
        """Adds a step of the engine that generates the same batch without speculation."""
        self._off.add(result, num_live)

    def course(self) -> dict[str, Any]:
        """The batch so far: `on` and `off` of `record`. May be called from another thread."""
        return {"on": self._on.record(), "off": self._off.record(strategies=False)}

    def tally(self) -> dict[int, list[int]]:
        """Number of tokens and of accepted draft tokens of each request so far, by request id, of the engine that speculates.
        May be called from one other thread."""
        return self._on.tally()

    def take_engine_steps(self) -> dict[str, Any]:
        """What `record` has of the engine's steps (`batch`, `position`), which start anew: a worker's part of a training step.
        Requests that go on are at the position that they have reached."""
        steps, self._on = [step for step in self._on.steps if step.requests], _Course()
        return {"batch": _by_batch(steps), "position": _by_position(steps, self._width, self.reached)} if steps else {}

    def add_engine_steps(self, found: Mapping[str, Any]) -> None:
        """Adds what another process has taken."""
        if found:
            self._others.append(found)

    def record(self, groups: Sequence[RolloutGroup]) -> dict[str, Any]:
        """The line of the training step, which trains on `groups`."""
        lengths = [len(rollout.token_ids) for group in groups for rollout in group.rollouts]
        record: dict[str, Any] = {"on": self._on.record(), "off": self._off.record(strategies=False),
                                  "lengths": _quantiles(lengths), "drafter_version": self._drafter_version}
        record["off_batch"] = _by_batch([step for step in self._off.steps if step.requests])
        steps = [step for step in self._on.steps if step.requests]
        if steps:
            record["batch"], record["position"] = _by_batch(steps), _by_position(steps, self._width, self.reached)
        elif self._others:
            record["batch"] = {str(bucket): {name: list(sums) for name, sums in cell.items()}
                               for bucket, cell in sums_by_batch(self._others).items()}
            record["position"] = _sum_of_positions([found["position"] for found in self._others])
        return {name: value for name, value in record.items() if value not in ({}, [], None)}


def _by_batch(steps: Sequence[_EngineStep]) -> dict[str, dict[str, list[float]]]:
    """Bit length of (batch size - 1) → drafter → `Sums`."""
    found: dict[int, dict[str, Sums]] = {}
    for step in steps:
        cell = found.setdefault((step.num_requests - 1).bit_length(), {})
        num_tokens = step.num_requests if step.counts is None else sum(step.counts)
        cell[step.strategy.drafter] = cell.get(step.strategy.drafter, Sums()) + (
            1, step.ms / 1e3, num_tokens, step.num_requests, step.drafted, step.accepted)
    return {str(bucket): {name: list(sums._replace(seconds=round(sums.seconds, 4))) for name, sums in cell.items()}
            for bucket, cell in sorted(found.items())}


def _by_position(steps: Sequence[_EngineStep], width: int, reached: dict[int, int]) -> dict[str, Any]:
    """Tokens and verifications by position in the answer: of all steps, and of those that verified drafts. `reached`: number of
    tokens that requests had before, by request; afterwards, those that they have now."""
    first = min(min(step.requests) for step in steps)
    position = np.zeros(max(max(step.requests) for step in steps) - first + 1, np.int64)  # tokens so far, by request
    for request, count in reached.items():
        if 0 <= request - first < len(position):
            position[request - first] = count
    sums = np.zeros((2, _NUM_POSITIONS, 2), np.int64)
    for step in steps:
        requests = np.array(step.requests) - first
        counts = np.ones(len(requests), np.int64) if step.counts is None else np.array(step.counts)
        part = np.minimum(position[requests] // width, _NUM_POSITIONS - 1)
        position[requests] += counts
        tokens = np.bincount(part, counts, _NUM_POSITIONS).astype(np.int64)
        added = np.stack([tokens, np.bincount(part, minlength=_NUM_POSITIONS)], axis=1)
        sums[: 2 if step.drafted else 1] += added
    reached.clear()
    reached.update((request, int(position[request - first])) for request in steps[-1].requests)
    used = int(np.flatnonzero(sums[0, :, 1]).max()) + 1
    return {"width": width, "all": sums[0, :used].tolist(), "drafted": sums[1, :used].tolist()}


def _sum_of_positions(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sum of what `_by_position` has found in several processes."""
    sums = np.zeros((2, max(len(each["all"]) for each in found), 2), np.int64)
    for each in found:
        for kind, name in enumerate(("all", "drafted")):
            sums[kind, : len(each[name])] += np.array(each[name], np.int64)
    return {"width": found[0]["width"], "all": sums[0].tolist(), "drafted": sums[1].tolist()}


def sums_by_batch(traces: Sequence[Mapping[str, Any]], key: str = "batch") -> dict[int, dict[str, Sums]]:
    """Bit length of (batch size - 1) → drafter → sums over all steps; with the key `off_batch`, over those of the engine that
    generates the same batches without speculation."""
    found: dict[int, dict[str, Sums]] = {}
    for trace in traces:
        for bucket, drafters in trace.get(key, {}).items():
            cell = found.setdefault(int(bucket), {})
            for name, sums in drafters.items():
                cell[name] = cell.get(name, Sums()) + tuple(sums)
    return dict(sorted(found.items()))


def _quantiles(lengths: Sequence[int]) -> list[int]:
    if len(lengths) <= _MAX_LENGTHS:
        return sorted(lengths)
    return [int(length) for length in np.quantile(lengths, np.linspace(0, 1, _MAX_LENGTHS), method="nearest")]
