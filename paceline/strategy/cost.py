"""What a step costs: milliseconds by rows, requests, context and the drafter's levels, as profiled. No torch, no clock."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.types import DrafterName, StepOutcome

_NUM_HOST_SAMPLES = 9
_HOST_FIXED = 8
"""Number of requests that take the host as long as what it does once per step."""


@dataclass(frozen=True, slots=True)
class Points:
    """A monotone line through measured points. Beyond the last point it continues with the last slope, but rises at least half
    as steeply as the line from the origin to the last point."""

    x: NDArray[np.float64]
    y: NDArray[np.float64]
    slope: float
    """Slope beyond the last point."""
    numbers: tuple[list[float], list[float]]
    """x and y as lists: numpy is slow on single numbers."""

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]]) -> Points:
        found = sorted(points)
        x = np.array([a for a, _ in found], float)
        y = np.array([b for _, b in found], float)
        y = np.minimum.accumulate(y[::-1])[::-1].copy()  # what disturbs a measurement makes it longer, never shorter
        slope = 0.5 * float(y[-1] / x[-1])
        if len(x) > 1:
            slope = max(float((y[-1] - y[-2]) / (x[-1] - x[-2])), slope)
        return cls(x, y, slope, (x.tolist(), y.tolist()))

    def at(self, x: Any) -> Any:
        """Value at a number or at an array of numbers."""
        if isinstance(x, (int, float)):
            return self._at_number(x)
        return np.interp(x, self.x, self.y) + np.maximum(x - self.x[-1], 0.0) * self.slope

    def inverse(self, y: float) -> float:
        """Largest x with a value of at most y; the first point's x if there is none."""
        xs, ys = self.numbers
        if y >= ys[-1]:
            return xs[-1] + (y - ys[-1]) / self.slope
        after = bisect_right(ys, y)
        if after == 0:
            return xs[0]
        return xs[after - 1] + (y - ys[after - 1]) / (ys[after] - ys[after - 1]) * (xs[after] - xs[after - 1])

    def _at_number(self, at: float) -> float:
        x, y = self.numbers
        if at >= x[-1]:
            return y[-1] + (at - x[-1]) * self.slope
        after = bisect_right(x, at)
        if after == 0:
            return y[0]
        share = (at - x[after - 1]) / (x[after] - x[after - 1])
        return y[after - 1] + share * (y[after] - y[after - 1])


@dataclass(slots=True)
class CostCurve:
    """ms = policy(rows) + draft + context. draft: start(requests) + (depth - 1) * level(rows of a level) for the learned drafter,
    the host's work for the suffix drafter. context: proportional to the context length, for each request and each row."""

    policy: Points
    """Rows of a step → ms, without context."""
    start: Points
    """Requests → ms until the learned drafter has its first level of draft tokens."""
    level: Points
    """Rows of a level → ms of each further level."""
    row_sizes: tuple[int, ...] = ()
    """Numbers of rows that steps with draft trees are padded to; empty: no padding."""
    request_context_ms: float = 0.0
    """ms for each request and thousand tokens of context."""
    row_context_ms: float = 0.0
    """ms for each row and thousand tokens of context."""
    trees: Points | None = None
    """Like `policy`, for steps with draft trees; None: they cost the same."""
    host_ms: float = 0.0
    """Recent ms of the host's work on a step, divided by the number of requests and `_HOST_FIXED`."""
    waits_for_host: bool = False
    """Whether all steps wait for the host's work, as on a CPU; otherwise only those with suffix drafts do, because the drafter
    needs the last tokens."""
    _host_samples: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_HOST_SAMPLES))
    profiled: bool = True
    """Whether the curve was measured; otherwise it is a guess."""

    @classmethod
    def unknown(cls, row_sizes: tuple[int, ...] = ()) -> CostCurve:
        """A guess: a row costs a tenth of a step, and so does a level of the drafter."""
        rows = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
        return cls(Points.through([(n, 4.0 + 0.4 * n) for n in rows]), Points.through([(n, 0.4 + 0.04 * n) for n in rows]),
                   Points.through([(n, 0.4 + 0.04 * n) for n in rows]), row_sizes, profiled=False)

    def off_ms(self, requests: Any, context: float = 0.0) -> Any:
        """ms of a step without speculation."""
        ms = self.policy.at(requests) + (self.request_context_ms + self.row_context_ms) * requests * context / 1e3
        return ms + self.host(requests, "none")

    def host(self, requests: Any, drafter: DrafterName) -> Any:
        """ms that a step waits for the host."""
        return self.host_ms * (_HOST_FIXED + requests) if self.waits_for_host or drafter == "suffix" else 0.0

    def ms(self, drafter: DrafterName, depth: Any, width: Any, requests: int, drafted: Any, rows: Any,
           context: float = 0.0) -> Any:
        """ms of a step with draft trees. `drafted`: number of requests that are drafted for. `rows`: last tokens and draft
        tokens of all requests."""
        return self.device_ms(drafter, depth, width, requests, drafted, rows, context) + self.host(requests, drafter)

    def device_ms(self, drafter: DrafterName, depth: Any, width: Any, requests: int, drafted: Any, rows: Any,
                  context: float) -> Any:
        """`ms` without what the step waits for the host: of numbers, or of arrays."""
        rows = self.padded(rows)
        ms = self.with_trees.at(rows) + (self.request_context_ms * requests + self.row_context_ms * rows) * context / 1e3
        if drafter == "eagle":
            ms = ms + self.start.at(drafted) + (depth - 1) * self.level.at(drafted * width)
        return ms

    def step_ms(self, outcome: StepOutcome) -> float:
        """Predicted ms of a completed step."""
        strategy, requests = outcome.decision.strategy, outcome.num_requests
        if strategy.drafter == "none":
            return self.off_ms(requests, outcome.context)
        return self.ms(strategy.drafter, strategy.depth, strategy.width, requests, outcome.num_drafted_for, outcome.num_rows,
                       outcome.context)

    @property
    def with_trees(self) -> Points:
        return self.policy if self.trees is None else self.trees

    def padded(self, rows: Any) -> Any:
        """Number of rows after padding."""
        if not self.row_sizes:
            return rows
        if isinstance(rows, int):
            place = bisect_left(self.row_sizes, rows)
            return self.row_sizes[place] if place < len(self.row_sizes) else rows
        sizes = np.array(self.row_sizes)
        return np.where(rows <= sizes[-1], sizes.take(sizes.searchsorted(rows), mode="clip"), rows)

    def observe_host(self, ms: float, requests: int) -> None:
        """Follow the host's work per step, as the median of the last ones: now and then it compiles, or collects garbage."""
        self._host_samples.append(ms / (_HOST_FIXED + requests))
        self.host_ms = median(self._host_samples)

    def dumps(self) -> str:
        """The profiled curve as JSON."""
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
        return cls(policy, start, level, tuple(found["row_sizes"]), request_ms, row_ms, trees)


def bucket_of(requests: int) -> int:
    """Batch sizes that are measured together: powers of two."""
    return max(0, requests).bit_length()
