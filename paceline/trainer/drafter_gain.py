"""How much of a rollout's time a drafter saves: predicted from the engine's cost curve and from the batch sizes of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from paceline.engine import Engine
from paceline.strategy import AutoSelector
from paceline.strategy.cost import CostCurve
from paceline.types import StepResult

TRAINED_ACCEPTANCE = 0.65
"""Chance that a draft token of a trained drafter is accepted if those before it were, as a minute of training gives at least."""
_MAX_DEPTH, _MAX_ROWS = 8, 512
"""Largest depth of a draft, and number of rows that a step with drafts has at most, unless it is one draft token per request."""


def predicted_costs(engine: Engine) -> CostCurve | None:
    """The cost curve by which the engine's selector chooses; None if a strategy is given, or if the curve is a guess."""
    return engine.costs if isinstance(engine.selector, AutoSelector) and engine.costs.profiled else None


class RolloutProfile:
    """Batch sizes of the engine's steps in a training step."""

    def __init__(self, costs: Callable[[], CostCurve | None]) -> None:
        """`costs`: the engine's cost curve (`predicted_costs`)."""
        self._costs = costs
        self._steps: Counter[int] = Counter()

    def begin_step(self) -> None:
        """A training step begins."""
        self._steps.clear()

    def on_engine_step(self, result: StepResult) -> None:
        """Counts an engine step as the number of steps that it would have taken without speculation."""
        if result.num_requests:
            self._steps[result.num_requests] += max(1, round(sum(map(len, result.tokens.values())) / result.num_requests))

    def take(self) -> Counter[int]:
        """The counts so far, by batch size, which start anew."""
        found, self._steps = self._steps, Counter()
        return found

    def add(self, steps: Mapping[int, int]) -> None:
        """Adds what another profile has taken."""
        self._steps.update(steps)

    def relative_time(self, accept_length: float, depth: int) -> float:
        """Generation time with a drafter relative to that without. `accept_length` is the drafter's number of tokens per
        verification for a chain of `depth` draft tokens. A strategy that is given speculates whatever it costs; only `auto` does
        without a drafter that does not pay."""
        costs = self._costs()
        if costs is None or not self._steps:
            return 1 / accept_length
        return relative_time(self._steps, costs, acceptance_of(accept_length, depth))


def relative_time(steps: Mapping[int, int], costs: CostCurve, acceptance: float) -> float:
    """Time of a rollout with a drafter relative to that without, if every step uses the chain that is fastest at its batch size,
    or none. steps: Number of steps without speculation, by batch size. acceptance: Chance that a draft token is accepted."""
    off = {size: float(costs.off_ms(size)) for size in steps}
    without = sum(count * off[size] for size, count in steps.items())
    return sum(count * min(off[size], _ms_per_token(size, costs, acceptance)) for size, count in steps.items()) / without


def _ms_per_token(size: int, costs: CostCurve, acceptance: float) -> float:
    """ms for each token of every request with the best chain."""
    depths = [depth for depth in range(1, _MAX_DEPTH + 1) if depth == 1 or size * (1 + depth) <= _MAX_ROWS]
    return min(float(costs.ms("eagle", depth, 1, size, size, size * (1 + depth))) / chain_length(acceptance, depth)
               for depth in depths)


def chain_length(acceptance: float, depth: int) -> float:
    """Expected number of tokens per verification of a chain, each of whose draft tokens is accepted with the same chance."""
    return sum(acceptance**k for k in range(depth + 1))


def acceptance_of(accept_length: float, depth: int) -> float:
    """The chance of acceptance at which a chain gives so many tokens per verification."""
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if chain_length(middle, depth) < accept_length else (low, middle)
    return low
