"""Monitoring the learned drafter during a run: figures of each training step, collected from engine steps, and alarms."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.engine import Engine
from paceline.spot.alarms import NAMES, Alarm, AlarmConfig, DrafterFigures, alarms
from paceline.spot.initialization import is_untrained
from paceline.types import StepResult

_MIN_VERIFICATIONS = 64
"""Minimum number of verifications in a training step for its accept length to be meaningful."""
_MIN_OBSERVED = 256
"""Minimum number of verifications with observed nodes for the calibration to be meaningful; fewer are added to the next
step's. (The nodes of one tree are not independent, so verifications are counted and not nodes.)"""


@dataclass(slots=True)
class DrafterSums:
    """Sums over the engine steps of one training step that used the learned drafter."""

    tokens: int = 0
    """Number of tokens generated."""
    verifications: int = 0
    """Number of verifications, one per request and engine step."""
    observed: int = 0
    """Number of verifications whose draft nodes were observed."""
    nodes: int = 0
    """Number of observed draft nodes."""
    expected: float = 0.0
    """Number of observed draft nodes expected to be accepted."""
    hits: int = 0
    """Number of observed draft nodes accepted."""
    ms: dict[tuple[int, bool], tuple[float, int]] = field(default_factory=dict)
    """(bit length of the batch size, with the learned drafter?) → milliseconds, engine steps."""

    def add(self, result: StepResult, is_untrained: Callable[[], bool]) -> None:
        """Adds one engine step. `is_untrained`: whether the engine's learned drafter has not been trained yet."""
        learned = result.strategy.drafter == "eagle"
        decoding = result.num_requests > 0 and not result.num_prefill_rows
        if decoding and result.strategy.drafter in ("none", "eagle"):
            self._add_ms((result.num_requests.bit_length(), learned), result.ms, 1)
        if not learned or is_untrained():
            return
        self.tokens += sum(map(len, result.tokens.values()))
        self.verifications += result.num_requests
        if result.drafts is not None and result.drafted:
            self.observed += result.num_requests
            self.nodes += result.drafted
            self.expected += float(result.drafts.survival.sum())
            self.hits += result.accepted

    def merge(self, other: DrafterSums) -> None:
        """Adds the sums of another engine."""
        for name in ("tokens", "verifications", "observed", "nodes", "expected", "hits"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for key, (ms, steps) in other.ms.items():
            self._add_ms(key, ms, steps)

    def _add_ms(self, key: tuple[int, bool], ms: float, steps: int) -> None:
        before = self.ms.get(key, (0.0, 0))
        self.ms[key] = before[0] + ms, before[1] + steps


class DrafterMonitor:
    """Receives every engine step and is evaluated once per training step. If an alarm calls for it, the engine's selector
    stops using the drafter until it gets a new one. A drafter that has not been trained yet is not measured: nothing of it holds
    for the one that it becomes."""

    def __init__(self, engine: Engine, config: AlarmConfig) -> None:
        self.engine, self.config = engine, config
        self._history: deque[DrafterFigures] = deque(maxlen=config.window + 1)
        self._usual: deque[float] = deque(maxlen=config.window)  # accepted over expected nodes of recent training steps
        self._sums = DrafterSums()
        self._untrained: bool | None = None  # None: to be looked up in the next engine step, because the drafter may be replaced

    def on_engine_step(self, result: StepResult) -> None:
        """Adds one engine step to the figures."""
        self._sums.add(result, self._is_untrained)

    def merge(self, sums: DrafterSums) -> None:
        """Adds the engine steps of another process."""
        self._sums.merge(sums)

    def _is_untrained(self) -> bool:
        if self._untrained is None:
            learned = self.engine.eagle
            self._untrained = learned is None or is_untrained(learned.module)
        return self._untrained

    def _shares(self, sums: DrafterSums) -> tuple[float, float]:
        """Shares of the observed nodes that were expected to be accepted and that were accepted. Expectations are the drafter's
        own probabilities, corrected by the ratio of accepted to expected nodes in recent steps."""
        expected, hits = sums.expected / sums.nodes, sums.hits / sums.nodes
        usual = statistics.median(self._usual or [hits / expected])
        if hits:
            self._usual.append(hits / expected)
        return expected * usual, hits

    def end_step(self) -> tuple[dict[str, float], list[Alarm]]:
        """Metrics of the training step that has ended, and the alarms it gives reason for."""
        engine, sums, metrics = self.engine, self._sums, self._metrics(self._sums)
        self._untrained = None
        self._sums = DrafterSums(observed=sums.observed, nodes=sums.nodes, expected=sums.expected, hits=sums.hits)
        found = self._age_only()
        if sums.verifications >= _MIN_VERIFICATIONS:
            expected, hits = 0.0, 0.0
            if sums.observed >= _MIN_OBSERVED:
                self._sums, (expected, hits) = DrafterSums(), self._shares(sums)
                metrics |= {"drafter/hits": hits, "drafter/expected_hits": expected}
            self._history.append(DrafterFigures(sums.tokens / sums.verifications, engine.version, engine.drafter_version,
                                                expected, hits, _cost(sums)))
            found = alarms(list(self._history), self.config)
        if any(alarm.distrust for alarm in found):
            engine.distrust("eagle")
            self._history.clear()  # a new drafter must not be compared with this one
        raised = {alarm.name for alarm in found}
        return {**{f"alarm/{name}": float(name in raised) for name in NAMES}, **metrics}, found

    def _age_only(self) -> list[Alarm]:
        """The alarm about the drafter's age, which needs no engine steps."""
        figures = DrafterFigures(1.0, self.engine.version, self.engine.drafter_version, 0.0, 0.0)
        return alarms([figures], self.config)

    def _metrics(self, sums: DrafterSums) -> dict[str, float]:
        engine = self.engine
        metrics = {"drafter/age": float(engine.version - engine.drafter_version),
                   "drafter/mismatch": float(engine.drafter_mismatch is not None)}
        if sums.verifications:
            metrics["drafter/accept_length"] = sums.tokens / sums.verifications
        return metrics


def _cost(sums: DrafterSums) -> float | None:
    """Time of an engine step with the learned drafter divided by the time of one without, at equal batch sizes. None: no batch
    size occurred both with and without it."""
    sizes = [size for size, learned in sums.ms if learned and (size, False) in sums.ms]
    pairs = [(sums.ms[size, True], sums.ms[size, False]) for size in sizes]
    steps = sum(with_it[1] for with_it, _ in pairs)
    if not steps:
        return None
    return sum(with_it[0] / (without[0] / without[1]) for with_it, without in pairs) / steps
