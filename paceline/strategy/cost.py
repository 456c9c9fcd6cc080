"""What a step costs: milliseconds by rows, requests, context and the drafter's levels. Profiled once, corrected by every step
that is read, and honest about what it has not seen. No torch, no clock."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.types import DrafterName, StepOutcome, Strategy

_KEEP = 0.9
"""Of a correction's weight with each step that follows."""
_PRIOR = 2.0
"""Steps that the profile counts as against measured ones."""
_SPEED, _KNOWN = 0.2, 7.0
"""How quickly the machine's own speed is followed: it strikes all strategies alike."""
_MERGE_MS = 0.02
"""Per node: trees are merged on the host."""
_OUTLIER = 3.0
"""A step that took so many times what was expected is somebody else's doing, unless it goes on."""


class Points(NamedTuple):
    """A monotone line through measured points; beyond the last it goes on with the last slope, never less than in proportion to
    half of it."""

    x: NDArray[np.float64]
    y: NDArray[np.float64]

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]]) -> Points:
        found = sorted(points)
        x = np.array([a for a, _ in found], float)
        return cls(x, np.maximum.accumulate(np.array([b for _, b in found], float)))

    def at(self, x: Any) -> Any:
        """A number or an array of them."""
        slope = 0.5 * self.y[-1] / self.x[-1]
        if len(self.x) > 1:
            slope = max((self.y[-1] - self.y[-2]) / (self.x[-1] - self.x[-2]), slope)
        return np.interp(x, self.x, self.y) + np.maximum(x - self.x[-1], 0.0) * slope


@dataclass(slots=True)
class _Fading:
    """A mean of logarithms of measured over expected, the older the less."""

    total: float = 0.0
    weight: float = 0.0
    outliers: int = 0

    def add(self, value: float) -> None:
        if self.weight > 4 and abs(value - self.mean) > math.log(_OUTLIER) and self.outliers < 3:
            self.outliers += 1
            return
        self.outliers = 0
        self.total, self.weight = _KEEP * self.total + value, _KEEP * self.weight + 1

    @property
    def mean(self) -> float:
        return self.total / self.weight if self.weight else 0.0


@dataclass(slots=True)
class CostCurve:
    """ms = (policy(rows) + draft) * speed * correction + context; draft = start(requests) + (depth - 1) * level(rows of a level);
    speed: of the machine, quickly followed; correction: by drafter and batch size, slowly."""

    policy: Points
    """Rows of a step → ms, without context."""
    start: Points
    """Requests → ms until the learned drafter has its first children …"""
    level: Points
    """… and rows of a level → ms of each level more."""
    row_sizes: tuple[int, ...] = ()
    """What rows are padded to; empty: not at all."""
    profiled: bool = True
    """False: made up, until steps have been seen."""
    _by_place: dict[tuple[DrafterName, int], _Fading] = field(default_factory=dict)
    _by_drafter: dict[DrafterName, _Fading] = field(default_factory=dict)
    _context_ms: float = 0.0
    """Per request and thousand tokens of context."""
    _speed: float = 0.0
    """Logarithm: how much slower the machine is than when it was profiled."""
    _met: set[tuple[DrafterName, int]] = field(default_factory=set)
    """Places whose first step has been seen: it compiles and allocates, and is no measure."""
    _error: _Fading = field(default_factory=_Fading)

    @classmethod
    def unknown(cls, row_sizes: tuple[int, ...] = ()) -> CostCurve:
        """A guess that steps correct: a row costs a tenth of a step, a drafter's level as much."""
        rows = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
        return cls(Points.through([(n, 4.0 + 0.4 * n) for n in rows]), Points.through([(n, 0.4 + 0.04 * n) for n in rows]),
                   Points.through([(n, 0.4 + 0.04 * n) for n in rows]), row_sizes, profiled=False)

    def ms(self, strategy: Strategy, requests: int, rows: Any, context: float = 0.0) -> Any:
        """Of a step; rows: roots and nodes, a number or an array of them."""
        base = self.base_ms(strategy, requests, rows)
        correction = math.exp(self._correction(strategy.drafter, bucket_of(requests)))
        return base * correction + self._context_ms * requests * context / 1e3

    def base_ms(self, strategy: Strategy, requests: int, rows: Any) -> Any:
        """As profiled."""
        draft = 0.0
        if strategy.drafter in ("eagle", "both"):
            draft = float(self.start.at(requests)) + (strategy.depth - 1) * float(self.level.at(requests * strategy.width))
        if strategy.drafter == "both":
            draft = draft + _MERGE_MS * (rows - requests)
        return self.policy.at(self.padded(rows)) + draft

    def padded(self, rows: Any) -> Any:
        if not self.row_sizes:
            return rows
        place = np.searchsorted(self.row_sizes, rows)
        return np.where(place < len(self.row_sizes), np.take(self.row_sizes, place, mode="clip"), rows)

    def learn(self, last: StepOutcome) -> None:
        """A step without prompts has been read."""
        if last.num_requests == 0 or last.num_prefill_rows or last.ms <= 0 or last.num_rows <= 0:
            return
        place = last.strategy.drafter, bucket_of(last.num_requests)
        if place not in self._met:
            self._met.add(place)
            return
        here = self._by_place.setdefault(place, _Fading())
        if here.weight > _KNOWN and last.step % 4:  # a known place need not be looked at every time
            return
        size = last.num_requests * last.context / 1e3
        base = float(self.base_ms(last.strategy, last.num_requests, last.num_rows))
        own = self._correction(*place)
        expected = base * math.exp(own) + self._context_ms * size
        self._error.add(min(2.0, abs(math.log(last.ms / expected))))
        ratio = math.log(max(last.ms - self._context_ms * size, 0.2 * last.ms) / base)
        self._by_drafter.setdefault(place[0], _Fading()).add(ratio - self._speed)
        if here.weight > _KNOWN:  # what is new about a place that is known is the machine's doing
            self._speed += _SPEED * min(max(ratio - own, -0.3), 0.3)
        here.add(ratio - self._speed)
        if place[0] == "none" and size > 0:  # a small step towards explaining what is left by the context
            wanted = 0.998 * self._context_ms + 0.005 * (last.ms - expected) / size
            self._context_ms = min(max(0.0, wanted), 0.5 * base / size)

    def num_seen(self, strategy: Strategy, requests: int) -> float:
        """Steps like this one that it has learned from, the older the less: 0 is a guess."""
        seen = self._by_place.get((strategy.drafter, bucket_of(requests)))
        return seen.weight if seen is not None else 0.0

    @property
    def num_off(self) -> float:
        """Steps without speculation that it has learned from, at any batch size."""
        return self._by_drafter["none"].weight if "none" in self._by_drafter else 0.0

    @property
    def error(self) -> float:
        """How far off it was lately: 0.05 is five per cent."""
        return math.exp(self._error.mean) - 1

    def _correction(self, drafter: DrafterName, bucket: int) -> float:
        """Logarithm. What was seen here, as far as it was; else with this drafter at other sizes; else with none."""
        far = self._by_drafter.get(drafter) or self._by_drafter.get("none") or _Fading()
        here = self._by_place.get((drafter, bucket)) or _Fading()
        prior = far.mean * far.weight / (far.weight + _PRIOR)
        return self._speed + (here.total + _PRIOR * prior) / (here.weight + _PRIOR)

    def dumps(self) -> str:
        """What was profiled, as JSON."""
        parts = {name: list(zip(points.x.tolist(), points.y.tolist(), strict=True))
                 for name, points in (("policy", self.policy), ("start", self.start), ("level", self.level))}
        return json.dumps({**parts, "row_sizes": self.row_sizes}, indent=1)

    @classmethod
    def loads(cls, text: str) -> CostCurve:
        found = json.loads(text)
        policy, start, level = (Points.through(tuple(pair) for pair in found[name]) for name in ("policy", "start", "level"))
        return cls(policy, start, level, tuple(found["row_sizes"]))


def bucket_of(requests: int) -> int:
    """Batch sizes that are measured together: powers of two."""
    return max(0, requests).bit_length()
