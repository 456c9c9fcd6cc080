"""How the learned drafter does in a run: figures of each RL step from the engine's, and the alarms they give reason for."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from dataclasses import dataclass, field

from paceline.engine import Engine
from paceline.spot.alarms import NAMES, Alarm, AlarmConfig, DrafterFigures, alarms
from paceline.strategy import ModelSelector
from paceline.types import StepResult

_MIN_VERIFICATIONS = 64
"""Fewer in a step say nothing about a drafter."""
_MIN_LOOKED_AT = 256
"""Verifications: fewer say nothing about its estimates, and wait for the next step's. (Nodes of a tree fall together.)"""


@dataclass(slots=True)
class _Sums:
    tokens: int = 0
    verifications: int = 0
    looked_at: int = 0
    """Of the verifications, those whose nodes were watched, and their nodes: all, expected to be accepted, accepted."""
    watched: int = 0
    expected: float = 0.0
    hits: int = 0
    ms: dict[tuple[int, bool], list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0]))
    """(power of two of the batch, with the learned drafter) → [milliseconds, steps]."""


class Watch:
    """Fed with every engine step; asked once an RL step. Alarms that call for it make the engine's selector do without the
    drafter until it gets a new one."""

    def __init__(self, engine: Engine, config: AlarmConfig, follows: bool) -> None:
        """follows: the drafter is trained on the way. One that is kept as it is on purpose grows old without being distrusted."""
        self.engine, self.config, self.follows = engine, config, follows
        self._history: deque[DrafterFigures] = deque(maxlen=config.window + 1)
        self._usual: deque[float] = deque(maxlen=config.window)  # nodes accepted over nodes expected
        self._sums = _Sums()

    def saw(self, result: StepResult) -> None:
        learned = result.strategy.drafter in ("eagle", "both")
        sums, decoding = self._sums, result.num_requests > 0 and not result.num_prefill_rows
        if decoding and result.strategy.drafter in ("none", "eagle"):
            cell = sums.ms[result.num_requests.bit_length(), learned]
            cell[0], cell[1] = cell[0] + result.ms, cell[1] + 1
        if not learned:
            return
        sums.tokens += sum(map(len, result.tokens.values()))
        sums.verifications += result.num_requests
        if result.expected > 0:  # the steps that were looked at closely
            sums.looked_at, sums.watched, sums.expected, sums.hits = (
                sums.looked_at + result.num_requests, sums.watched + result.drafted, sums.expected + self._expected(result),
                sums.hits + result.accepted)

    def _expected(self, result: StepResult) -> float:
        """Nodes that should be accepted: as the selector has calibrated it from earlier steps, or by the drafter's own word."""
        if result.watched is None or not isinstance(self.engine.select, ModelSelector):
            return result.expected
        return float(self.engine.select.survival_of(result.strategy.drafter).survival(result.watched).sum())

    def _shares(self, sums: _Sums) -> tuple[float, float]:
        """Of the nodes looked at: expected to be accepted, and accepted. The drafter's own word is taken as it has proved in the
        last steps."""
        expected, hits = sums.expected / sums.watched, sums.hits / sums.watched
        if isinstance(self.engine.select, ModelSelector):
            return expected, hits
        usual = statistics.median(self._usual or [hits / expected])
        if hits:
            self._usual.append(hits / expected)
        return expected * usual, hits

    def step_done(self) -> tuple[dict[str, float], list[Alarm]]:
        """Metrics of the RL step that has ended, and its alarms."""
        engine, sums, metrics = self.engine, self._sums, self._metrics(self._sums)
        self._sums = _Sums(looked_at=sums.looked_at, watched=sums.watched, expected=sums.expected, hits=sums.hits)
        found = self._age_only()
        if sums.verifications >= _MIN_VERIFICATIONS:
            expected, hits = 0.0, 0.0
            if sums.looked_at >= _MIN_LOOKED_AT:
                self._sums, (expected, hits) = _Sums(), self._shares(sums)
                metrics |= {"drafter/hits": hits, "drafter/expected_hits": expected}
            self._history.append(DrafterFigures(sums.tokens / sums.verifications, engine.version, engine.drafter_version,
                                                expected, hits, _cost(sums)))
            found = alarms(list(self._history), self.config)
        if any(alarm.distrust and (self.follows or alarm.name != "age") for alarm in found):
            engine.distrust("eagle")
            self._history.clear()  # what a new drafter is compared with is not this one
        raised = {alarm.name for alarm in found}
        return {**{f"alarm/{name}": float(name in raised) for name in NAMES}, **metrics}, found

    def _age_only(self) -> list[Alarm]:
        """It was hardly used: its age can still be told."""
        figures = DrafterFigures(1.0, self.engine.version, self.engine.drafter_version, 0.0, 0.0)
        return alarms([figures], self.config)

    def _metrics(self, sums: _Sums) -> dict[str, float]:
        engine = self.engine
        metrics = {"drafter/age": float(engine.version - engine.drafter_version),
                   "drafter/mismatch": float(engine.drafter_mismatch is not None)}
        if sums.verifications:
            metrics["drafter/accept_length"] = sums.tokens / sums.verifications
        return metrics


def _cost(sums: _Sums) -> float | None:
    """Mean over the batch sizes that were seen both with and without, by how often with."""
    sizes = [size for size, learned in sums.ms if learned and (size, False) in sums.ms]
    pairs = [(sums.ms[size, True], sums.ms[size, False]) for size in sizes]
    steps = sum(with_it[1] for with_it, _ in pairs)
    if not steps:
        return None
    return sum(with_it[0] / (without[0] / without[1]) for with_it, without in pairs) / steps
