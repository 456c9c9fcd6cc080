"""What happened within each training step: which answers were live and which strategy was chosen over time, by batch size, and
accept lengths along the answer. One line of a few kilobytes per step in `trace.jsonl`, whatever the number of engine steps.

`RolloutTrace` collects a step's engine steps, `report.metrics` writes its record and reads it back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from paceline.types import RolloutGroup, StepResult

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


@dataclass(slots=True)
class _Course:
    """Live answers and strategy after each engine step."""

    ms: list[float] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    strategies: list[str] = field(default_factory=list)
    total: int = 0
    """Largest number of live answers."""

    def add(self, result: StepResult, num_live: int) -> None:
        self.ms.append(result.ms)
        self.live.append(num_live)
        self.total = max(self.total, num_live + len(result.finished))
        self.strategies.append(str(result.strategy) if result.num_requests else "")

    def record(self, strategies: bool = True) -> dict[str, Any]:
        ends = np.cumsum(self.ms) / 1e3
        seconds = float(ends[-1]) if len(ends) else 0.0
        if not seconds:
            return {}
        at = np.searchsorted(ends, (np.arange(_NUM_SAMPLES) + 0.5) * seconds / _NUM_SAMPLES)
        record: dict[str, Any] = {"seconds": round(seconds, 4), "total": self.total, "live": [self.live[i] for i in at]}
        if not strategies or not any(self.strategies):
            return record
        names = sorted({self.strategies[i] for i in at})
        return {**record, "strategies": names, "strategy": [names.index(self.strategies[i]) for i in at]}


class RolloutTrace:
    """Collects the engine steps of one training step."""

    def __init__(self, max_new_tokens: int, drafter_version: int | None = None) -> None:
        """`drafter_version` is that of the learned drafter; None: there is none."""
        self._drafter_version = drafter_version
        self._on, self._off = _Course(), _Course()
        self._batch: dict[int, dict[str, Sums]] = {}
        self._width = -(-max_new_tokens // _NUM_POSITIONS)
        self._positions: dict[int, int] = {}  # tokens so far, by request id
        self._all, self._drafted = ([[0, 0] for _ in range(_NUM_POSITIONS)] for _ in range(2))

    def add(self, result: StepResult, num_live: int) -> None:
        """Adds a step of the engine that speculates; `num_live` answers are not finished after it."""
        self._on.add(result, num_live)
        if not result.num_requests:
            return
        num_tokens, positions = 0, self._positions
        for request, tokens in result.tokens.items():
            at, num = positions.get(request, 0), len(tokens)
            positions[request] = at + num
            num_tokens += num
            part = min(at // self._width, _NUM_POSITIONS - 1)
            for sums in (self._all, self._drafted) if result.drafted else (self._all,):
                sums[part][0] += num
                sums[part][1] += 1
        bucket = self._batch.setdefault((result.num_requests - 1).bit_length(), {})
        bucket[result.strategy.drafter] = bucket.get(result.strategy.drafter, Sums()) + (
            1, result.ms / 1e3, num_tokens, result.num_requests, result.drafted, result.accepted)

    def add_baseline(self, result: StepResult, num_live: int) -> None:
        """Adds a step of the engine that generates the same batch without speculation."""
        self._off.add(result, num_live)

    def record(self, groups: Sequence[RolloutGroup]) -> dict[str, Any]:
        """The line of the training step, which trains on `groups`."""
        lengths = [len(rollout.token_ids) for group in groups for rollout in group.rollouts]
        record: dict[str, Any] = {"on": self._on.record(), "off": self._off.record(strategies=False),
                                  "lengths": _quantiles(lengths), "drafter_version": self._drafter_version}
        if self._batch:
            used = max(part for part, sums in enumerate(self._all) if sums[1]) + 1
            record["batch"] = {str(bucket): {name: _rounded(sums) for name, sums in found.items()}
                               for bucket, found in sorted(self._batch.items())}
            record["position"] = {"width": self._width, "all": self._all[:used], "drafted": self._drafted[:used]}
        return {name: value for name, value in record.items() if value not in ({}, [], None)}


def sums_by_batch(traces: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Sums]]:
    """Bit length of (batch size - 1) → drafter → sums over all steps."""
    found: dict[int, dict[str, Sums]] = {}
    for trace in traces:
        for bucket, drafters in trace.get("batch", {}).items():
            cell = found.setdefault(int(bucket), {})
            for name, sums in drafters.items():
                cell[name] = cell.get(name, Sums()) + tuple(sums)
    return dict(sorted(found.items()))


def _quantiles(lengths: Sequence[int]) -> list[int]:
    if len(lengths) <= _MAX_LENGTHS:
        return sorted(lengths)
    return [int(length) for length in np.quantile(lengths, np.linspace(0, 1, _MAX_LENGTHS), method="nearest")]


def _rounded(sums: Sums) -> list[float]:
    return list(sums._replace(seconds=round(sums.seconds, 4)))
