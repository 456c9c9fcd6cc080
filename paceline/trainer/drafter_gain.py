"""How much of a rollout's time a drafter saves: predicted from the engine's cost curve and from the batch sizes of a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from paceline.engine import Engine
from paceline.strategy import AutoSelector
from paceline.strategy.cost import CostCurve
from paceline.types import StepResult

TRAINED_ACCEPTANCE = 0.65
"""Chance that a draft token of a trained drafter is accepted if those before it were, as a minute of training gives at least."""
_MAX_DEPTH, _MAX_ROWS = 8, 512
"""Largest depth of a draft, and number of rows that a step with drafts has at most, unless it is one draft token per request."""

_LEVEL_STEPS, _MIN_VERIFICATIONS = 4, 100
"""Number of steps of an acceptance level, and of verifications below which a step is not counted: other problems alone move the
acceptance of a step by a fifth."""
_NOTABLE = 0.05
"""Share of the generation time that is worth mentioning."""


def predicted_costs(engine: Engine) -> CostCurve | None:
    """The cost curve by which the engine's selector chooses; None if a strategy is given, or if the curve is a guess."""
    return engine.costs if isinstance(engine.selector, AutoSelector) and engine.costs.profiled else None


class BatchSteps(NamedTuple):
    """Engine steps of one batch size, counted as the number of steps that they would have taken without speculation."""

    steps: int = 0
    """Number of all steps."""
    suffix_steps: int = 0
    """Number of those that suffix drafts were used in."""
    suffix_ms: float = 0.0
    """Milliseconds that those took."""
    drafted_tokens: int = 0
    """Number of tokens generated with the learned drafter."""
    verifications: int = 0
    """Number of verifications that those took, one per request and engine step."""

    def plus(self, other: BatchSteps) -> BatchSteps:
        """Returns the sum of both."""
        return BatchSteps(self.steps + other.steps, self.suffix_steps + other.suffix_steps, self.suffix_ms + other.suffix_ms,
                          self.drafted_tokens + other.drafted_tokens, self.verifications + other.verifications)


class RolloutProfile:
    """Batch sizes of the engine's steps in a training step."""

    def __init__(self, costs: Callable[[], CostCurve | None]) -> None:
        """`costs`: the engine's cost curve (`predicted_costs`)."""
        self._costs = costs
        self._steps: dict[int, BatchSteps] = {}

    def begin_step(self) -> None:
        """A training step begins."""
        self._steps.clear()

    def on_engine_step(self, result: StepResult) -> None:
        """Counts an engine step."""
        if result.num_requests:
            size, num_tokens = result.num_requests, sum(map(len, result.tokens.values()))
            count = max(1, round(num_tokens / size))
            is_suffix, is_learned = result.strategy.drafter == "suffix", result.strategy.drafter == "eagle"
            self.add({size: BatchSteps(count, count * is_suffix, result.ms * is_suffix, num_tokens * is_learned,
                                       size * is_learned)})

    def take(self) -> dict[int, BatchSteps]:
        """The counts so far, by batch size, which start anew."""
        found, self._steps = self._steps, {}
        return found

    def add(self, steps: Mapping[int, BatchSteps]) -> None:
        """Adds what another profile has taken."""
        for size, found in steps.items():
            self._steps[size] = self._steps.get(size, BatchSteps()).plus(found)

    @property
    def drafted(self) -> tuple[int, int]:
        """Number of tokens that were generated with the learned drafter, and of verifications that this took."""
        return (sum(found.drafted_tokens for found in self._steps.values()),
                sum(found.verifications for found in self._steps.values()))

    def relative_time(self, accept_length: float, depth: int) -> float:
        """Generation time with the learned drafter relative to that without. `accept_length` is its number of tokens per
        verification for a chain of `depth` draft tokens. A strategy that is given speculates whatever it costs; only `auto` does
        without a drafter that does not pay."""
        costs = self._costs()
        if costs is None or not self._steps:
            return 1 / accept_length
        return relative_time(self._steps, costs, acceptance_of(accept_length, depth))


def fallen_share(profile: RolloutProfile, level: AcceptanceLevel, depth: int) -> tuple[float, str]:
    """Share of the generation time that a drafter with the best acceptance so far would save against the present one, and why."""
    found = level.observe(*profile.drafted)
    if found is None:
        return 0.0, ""
    best, now = (profile.relative_time(each, depth) for each in found)
    return 1 - best / now, f"its tokens per verification fell from {found[0]:.2f} to {found[1]:.2f}"


class AcceptanceLevel:
    """Tokens per verification of the learned drafter over the last steps, and the highest level that it had."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, int]] = deque(maxlen=_LEVEL_STEPS)
        self._best = 0.0

    def observe(self, tokens: int, verifications: int) -> tuple[float, float] | None:
        """Takes the sums of one step. Returns the highest level and the present one, if the drafter was used in enough steps."""
        if verifications < _MIN_VERIFICATIONS:
            return None
        self._recent.append((tokens, verifications))
        if len(self._recent) < _LEVEL_STEPS:
            return None
        now = sum(count for count, _ in self._recent) / sum(count for _, count in self._recent)
        self._best = max(self._best, now)
        return self._best, now


def relative_time(steps: Mapping[int, BatchSteps], costs: CostCurve, acceptance: float) -> float:
    """Time of a rollout with the learned drafter relative to that without, if every step uses the chain that is fastest at its
    batch size, or what is used without it. acceptance: Chance that a draft token is accepted."""
    others = {size: _ms_of_others(size, found, costs) for size, found in steps.items()}
    without = sum(found.steps * others[size] for size, found in steps.items())
    return sum(found.steps * min(others[size], _ms_per_token(size, costs, acceptance)) for size, found in steps.items()) / without


def expected_gain(costs: CostCurve, num_requests: int) -> list[str]:
    """What is said before the first step where a trained drafter hardly saves anything while all `num_requests` requests are
    running: one line, or none."""
    saved = {size: 1 - relative_time({size: BatchSteps(1)}, costs, TRAINED_ACCEPTANCE)
             for size in {num_requests, *(2**n for n in range(num_requests.bit_length()))}}
    if saved[num_requests] >= _NOTABLE:
        return []
    line = f"with {num_requests} requests at a time a learned drafter should save {saved[num_requests]:.0%} of generation"
    gaining = [size for size, share in saved.items() if share >= _NOTABLE]
    if not gaining:
        return [f"{line}, and hardly more with fewer: this run cannot gain by it"]
    return [f"{line}, with {max(gaining)} or fewer at least {saved[max(gaining)]:.0%}: this run gains while few answers are left"]


def _ms_of_others(size: int, found: BatchSteps, costs: CostCurve) -> float:
    """ms for each token of every request without the learned drafter: without speculation, or with suffix drafts as measured, if
    those were faster."""
    off = float(costs.off_ms(size))
    return min(off, found.suffix_ms / found.suffix_steps) if found.suffix_steps else off


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
