"""Expected answer lengths. The answers of one prompt resemble each other in length, so a finished answer tells how long its
siblings will be; so do the answers of earlier epochs, and an unfinished answer that has already become long.

Lengths are modelled as log-normal: a prompt has a mean of log lengths, known from its answers and drawn towards the mean over all
prompts, and its answers scatter around it. No torch, no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_PRIOR_WEIGHT = 16.0
"""Number of answers that the initial guess of mean and scatter counts for."""
_MAX_PROMPTS = 1 << 20
"""Number of prompts whose earlier answers are remembered, least recently used dropped first."""
_EARLIER_WEIGHT, _MAX_EARLIER = 0.5, 4.0
"""Weight of an earlier epoch's answer relative to one of the present policy, and largest weight of all earlier ones together."""


class LengthModel:
    """Learns from finished answers and predicts the remaining lengths of unfinished ones."""

    def __init__(self, typical: float = 512.0, scatter: float = 1.0, within: float = 0.5) -> None:
        """Initial guesses: `typical` length, and standard deviations of log lengths over all answers (`scatter`) and among the
        answers of one prompt (`within`)."""
        mean = float(np.log(typical))
        self._all = np.array([1.0, mean, scatter**2 + mean**2]) * _PRIOR_WEIGHT  # number, sum and sum of squares of log lengths
        self._within = np.array([1.0, within**2]) * _PRIOR_WEIGHT  # number and sum of squared deviations from the prompt's mean
        self._earlier: OrderedDict[str, tuple[float, float]] = OrderedDict()  # prompt → number and sum of log lengths
        self._keys: list[str] = []
        self._sums = np.zeros((2, 0))  # [2, groups]: number and sum of log lengths of finished answers

    def begin(self, keys: Sequence[str]) -> int:
        """Register new groups, one per prompt key, and return the number of the first one. What is known of the prompts from
        earlier epochs counts with a lower weight."""
        first = len(self._keys)
        earlier = np.array([self._earlier.get(key, (0.0, 0.0)) for key in keys]).reshape(-1, 2).T
        weight = np.minimum(_EARLIER_WEIGHT, _MAX_EARLIER / np.maximum(earlier[0], 1.0))
        self._keys += keys
        self._sums = np.concatenate([self._sums, weight * earlier], axis=1)
        return first

    def end_batch(self) -> None:
        """All answers are finished: group numbers start again at 0. What is known of the prompts stays."""
        self._keys, self._sums = [], np.zeros((2, 0))

    def observe(self, group: int, length: int) -> None:
        """An answer of a group is finished after so many tokens."""
        value = float(np.log(max(1, length)))
        count, total = self._sums[:, group]
        if count >= 1:
            self._within += (1.0, (value - total / count) ** 2 * count / (count + 1))
        self._all += (1.0, value, value**2)
        self._sums[:, group] += (1.0, value)
        key = self._keys[group]
        earlier = self._earlier.pop(key, (0.0, 0.0))
        self._earlier[key] = earlier[0] + 1, earlier[1] + value
        if len(self._earlier) > _MAX_PROMPTS:
            self._earlier.popitem(last=False)

    def is_known(self, groups: Ints) -> NDArray[np.bool_]:
        """Whether the length of any answer of these groups' prompts is known."""
        return self._sums[0, groups] > 0

    def remaining(self, groups: Ints, generated: Ints, limit: Ints) -> Floats:
        """Expected number of further tokens of unfinished answers, given their groups, the tokens that they have and the largest
        number that they may still get."""
        if not len(groups):
            return np.zeros(0)
        mean, deviation = self._group_means(groups, generated)
        expected = mean_residual(mean[groups], deviation[groups], generated.astype(float))
        return np.clip(expected, 1.0, np.maximum(limit, 1))

    def _group_means(self, groups: Ints, generated: Ints) -> tuple[Floats, Floats]:
        """Mean and standard deviation of log lengths of every group, given its finished answers, and its longest unfinished one
        as if it ended where it is expected to."""
        number, total, squares = self._all
        overall = total / number
        within = self._within[1] / self._within[0]
        between = max(squares / number - overall**2 - within, 0.05 * within)
        shrink = within / between  # so many answers weigh as much as what is known of all prompts
        longest = np.zeros(len(self._keys))
        order = np.argsort(groups, kind="stable")  # requests usually are in order: then this costs little
        present, first = np.unique(groups[order], return_index=True)
        longest[present] = np.maximum.reduceat(generated[order], first)
        count, logs = self._sums
        mean = (shrink * overall + logs) / (shrink + count)
        deviation = np.sqrt(within + within / (shrink + count))
        late = np.log(np.maximum(longest, 1.0)) > mean
        if late.any():
            seen = np.log(longest[late] + mean_residual(mean[late], deviation[late], longest[late]))
            mean[late] = (mean[late] * (shrink + count[late]) + seen) / (shrink + count[late] + 1)
        return mean, deviation


def mean_residual(mean: Floats, deviation: Floats, reached: Floats) -> Floats:
    """E[L - x | L > x] for log-normal lengths L:  exp(m + s²/2) · Φ((m + s² - ln x) / s) / Φ((m - ln x) / s) - x."""
    z = (mean - np.log(np.maximum(reached, 1e-9))) / deviation
    z = np.maximum(z, -5.0)  # further out the residual is taken to grow in proportion to x
    at = np.exp(mean - z * deviation)
    whole = np.exp(mean + deviation**2 / 2) * _normal_cdf(z + deviation) / _normal_cdf(z)
    return np.maximum(whole - at, 1.0) * np.maximum(1.0, reached / at)


def _normal_cdf(z: Floats) -> Floats:
    """Φ(z) with a relative error below 1e-3 for z >= -5: Abramowitz and Stegun, 26.2.17, which is exact to 7.5e-8 in absolute
    terms, and Mills' ratio below -3."""
    size = np.abs(z)
    density = np.exp(-(size**2) / 2) / np.sqrt(2 * np.pi)
    t = 1 / (1 + 0.2316419 * size)
    tail = density * t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    mills = density / size.clip(1) * (1 - 1 / size.clip(1) ** 2 + 3 / size.clip(1) ** 4 - 15 / size.clip(1) ** 6)
    tail = np.where(size > 4, mills, tail)
    return np.where(z > 0, 1 - tail, tail)
