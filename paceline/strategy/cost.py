"""What a step costs: milliseconds by rows, requests, context and the drafter's levels. Profiled once, corrected by every step
that is read, and honest about what it has not seen. No torch, no clock."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.types import DrafterName, StepOutcome, Strategy

_DRAFTERS: tuple[DrafterName, ...] = ("none", "suffix", "eagle", "both")
_SPEED_STEP, _DRAFTER_STEP = 0.05, 0.01
"""How much, as logarithms, the machine's speed and a drafter's correction change from one step to the next …"""
_DRAFTER_OFF, _NOISE = (0.05, 0.2, 0.1, 0.2), 0.15
"""… how wrong the profile may be about each drafter (what the host does was not profiled), and how much steps scatter."""
_KEEP_ERROR, _KNOWN = 0.97, 8
_FOLLOW_HOST = 0.2
_MERGE_MS = 0.02
"""Per node: trees are merged on the host."""
_OUTLIER = 3.0
"""A step that took so many times what was expected is somebody else's doing, unless it goes on."""


class Points(NamedTuple):
    """A monotone line through measured points; beyond the last it goes on with the last slope, never less than in proportion to
    half of it."""

    x: NDArray[np.float64]
    y: NDArray[np.float64]
    slope: float
    """Beyond the last."""

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]]) -> Points:
        found = sorted(points)
        x = np.array([a for a, _ in found], float)
        y = np.array([b for _, b in found], float)
        y = np.minimum.accumulate(y[::-1])[::-1].copy()  # what disturbs a measurement makes it longer, never shorter
        slope = 0.5 * float(y[-1] / x[-1])
        if len(x) > 1:
            slope = max(float((y[-1] - y[-2]) / (x[-1] - x[-2])), slope)
        return cls(x, y, slope)

    def at(self, x: Any) -> Any:
        """A number or an array of them."""
        if isinstance(x, (int, float)) and x <= self.x[-1]:  # numpy is slow on single numbers
            return _between(self.x, self.y, x)
        return np.interp(x, self.x, self.y) + np.maximum(x - self.x[-1], 0.0) * self.slope


def _between(x: NDArray[np.float64], y: NDArray[np.float64], at: float) -> float:
    after = int(x.searchsorted(at))
    if x[after] == at or after == 0:
        return float(y[after])
    share = (at - x[after - 1]) / (x[after] - x[after - 1])
    return float(y[after - 1] + share * (y[after] - y[after - 1]))


class Trees(NamedTuple):
    """Of one drafter, several shapes side by side [S]."""

    drafter: DrafterName
    depth: NDArray[np.int64]
    width: NDArray[np.int64]


class _Corrections:
    """Logarithms of measured over profiled: of the machine, whose speed strikes all steps alike and changes quickly, and of each
    drafter, which hardly changes. A Kalman filter tells them apart: when another drafter comes, the machine is still the same."""

    def __init__(self) -> None:
        size = 1 + len(_DRAFTERS)
        self._mean = [0.0] * size
        self._covariance = [[0.0] * size for _ in range(size)]
        self._drift = [_SPEED_STEP**2] + [_DRAFTER_STEP**2] * len(_DRAFTERS)
        for i, off in enumerate((1.0, *_DRAFTER_OFF)):
            self._covariance[i][i] = off**2

    def of(self, drafter: DrafterName) -> float:
        return self._mean[0] + self._mean[1 + _DRAFTERS.index(drafter)]

    def learn(self, drafter: DrafterName, new: float, steps: int) -> None:
        """new: how far a step was from what was expected, of so many that passed. (Numpy is slower on matrices this small.)"""
        which, covariance = 1 + _DRAFTERS.index(drafter), self._covariance
        for i, drift in enumerate(self._drift):
            covariance[i][i] += steps * drift
        towards = [a + b for a, b in zip(covariance[0], covariance[which], strict=True)]
        scale = 1 / (towards[0] + towards[which] + _NOISE**2)
        for i, t in enumerate(towards):
            self._mean[i] += t * scale * new
            covariance[i] = [c - t * scale * u for c, u in zip(covariance[i], towards, strict=True)]


@dataclass(slots=True)
class CostCurve:
    """ms = (policy(rows) + draft + reading) * correction; draft = start(requests) + (depth - 1) * level(rows of a level) for the
    learned drafter, the host's work for the other; reading: in proportion to the context, for each request and each row;
    correction: of machine and drafter, followed online."""

    policy: Points
    """Rows of a step → ms, without context."""
    start: Points
    """Requests → ms until the learned drafter has its first children …"""
    level: Points
    """… and rows of a level → ms of each level more."""
    row_sizes: tuple[int, ...] = ()
    """What rows with trees are padded to; empty: not at all."""
    request_context_ms: float = 0.0
    """For each request and thousand tokens of context (where a request's rows read it together) …"""
    row_context_ms: float = 0.0
    """… and for each row."""
    host_ms: float = 0.0
    """Of the host's work on a step, lately: the suffix drafter must know how the last one ended, so its steps wait for that."""
    trees: Points | None = None
    """As `policy`, with nodes among the rows; None: they cost no more than others."""
    profiled: bool = True
    """False: made up, until steps have been seen."""
    _corrections: _Corrections = field(default_factory=_Corrections)
    _num_seen: dict[tuple[DrafterName, int], int] = field(default_factory=dict)
    """Steps by drafter and batch size; the first compiles and allocates, and is no measure."""
    _previous: DrafterName = "none"
    """That was learned of."""
    _num_passed: int = 0
    """Steps since then."""
    num_off: int = 0
    """Steps without speculation that it has learned from, at any batch size."""
    _num_outliers: int = 0
    """In a row."""
    _errors: tuple[float, float] = (0.0, 1e-9)
    """Their sum, and how many: the older the less."""

    @classmethod
    def unknown(cls, row_sizes: tuple[int, ...] = ()) -> CostCurve:
        """A guess that steps correct: a row costs a tenth of a step, a drafter's level as much."""
        rows = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
        return cls(Points.through([(n, 4.0 + 0.4 * n) for n in rows]), Points.through([(n, 0.4 + 0.04 * n) for n in rows]),
                   Points.through([(n, 0.4 + 0.04 * n) for n in rows]), row_sizes, profiled=False)

    def ms(self, strategy: Strategy, requests: int, rows: Any, context: float = 0.0) -> Any:
        """Of a step; rows: roots and nodes, a number or an array of them."""
        return self.base_ms(strategy, requests, rows, context) * math.exp(self._corrections.of(strategy.drafter))

    def base_ms(self, strategy: Strategy, requests: int, rows: Any, context: float = 0.0) -> Any:
        """As profiled."""
        beside, per_row = self._beside(strategy, requests, context)
        curve = self.policy.at(rows) if strategy.drafter == "none" else self.with_trees.at(self.padded(rows))
        return curve + beside + per_row * rows

    @property
    def with_trees(self) -> Points:
        return self.policy if self.trees is None else self.trees

    def of_rows(self, trees: Trees, requests: int, context: float) -> tuple[Any, ...]:
        """ms by rows, for loops: (curve + the first + the second * rows) * the third, and the curve's points and sizes."""
        return (*self._beside(trees, requests, context), math.exp(self._corrections.of(trees.drafter)), *self.with_trees,
                np.array(self.row_sizes, float))

    def _beside(self, strategy: Strategy | Trees, requests: int, context: float) -> tuple[Any, float]:
        """What comes to policy(rows): ms, and ms for each row."""
        draft: Any = 0.0 * strategy.depth
        per_row = self.row_context_ms * context / 1e3
        if strategy.drafter in ("eagle", "both"):
            draft = self.start.at(requests) + (strategy.depth - 1) * self.level.at(requests * strategy.width)
        if strategy.drafter in ("suffix", "both"):
            draft = draft + self.host_ms
        if strategy.drafter == "both":
            draft, per_row = draft - _MERGE_MS * requests, per_row + _MERGE_MS
        return draft + self.request_context_ms * requests * context / 1e3, per_row

    def padded(self, rows: Any) -> Any:
        if not self.row_sizes:
            return rows
        if isinstance(rows, (int, float)):
            place = bisect_left(self.row_sizes, rows)
            return self.row_sizes[place] if place < len(self.row_sizes) else rows
        sizes = np.array(self.row_sizes)
        return np.where(rows <= sizes[-1], sizes.take(sizes.searchsorted(rows), mode="clip"), rows)

    def learn(self, last: StepOutcome) -> None:
        """A step without prompts has been read."""
        if last.num_requests == 0 or last.num_prefill_rows or last.ms <= 0 or last.num_rows <= 0:
            return
        drafter = last.strategy.drafter
        place = drafter, bucket_of(last.num_requests)
        seen = self._num_seen[place] = self._num_seen.get(place, 0) + 1
        self._num_passed += 1
        if drafter != "both":  # which waits for the device on the way
            self.host_ms += _FOLLOW_HOST * (last.host_ms - self.host_ms)
        if seen == 1 or (seen > _KNOWN and drafter == self._previous and seen % 4):  # what is known is looked at now and then
            return
        self._previous = drafter
        base = float(self.base_ms(last.strategy, last.num_requests, last.num_rows, last.context))
        new = math.log(last.ms / base) - self._corrections.of(drafter)
        if abs(new) > math.log(_OUTLIER) and self._errors[1] > 4 and self._num_outliers < 3:
            self._num_outliers += 1
            return
        self._num_outliers = 0
        self._errors = _KEEP_ERROR * self._errors[0] + min(2.0, abs(new)), _KEEP_ERROR * self._errors[1] + 1
        self._corrections.learn(drafter, new, self._num_passed)
        self._num_passed = 0
        self.num_off += drafter == "none"

    def num_seen(self, strategy: Strategy, requests: int) -> int:
        """Steps like this one that it has learned from: 0 is a guess."""
        return max(0, self._num_seen.get((strategy.drafter, bucket_of(requests)), 0) - 1)

    @property
    def error(self) -> float:
        """How far off it was lately: 0.05 is five per cent."""
        return math.exp(self._errors[0] / self._errors[1]) - 1

    def dumps(self) -> str:
        """What was profiled, as JSON."""
        parts = {name: list(zip(points.x.tolist(), points.y.tolist(), strict=True))
                 for name, points in (("policy", self.policy), ("start", self.start), ("level", self.level),
                                      ("trees", self.with_trees))}
        return json.dumps({**parts, "row_sizes": self.row_sizes, "context": [self.request_context_ms, self.row_context_ms]},
                          indent=1)

    @classmethod
    def loads(cls, text: str) -> CostCurve:
        found = json.loads(text)
        policy, start, level, trees = (Points.through(tuple(pair) for pair in found[name])
                                       for name in ("policy", "start", "level", "trees"))
        request_ms, row_ms = found["context"]
        return cls(policy, start, level, tuple(found["row_sizes"]), request_ms, row_ms, trees=trees)


def bucket_of(requests: int) -> int:
    """Batch sizes that are measured together: powers of two."""
    return max(0, requests).bit_length()
