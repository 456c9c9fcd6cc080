"""What a worker measures of its engine's steps for the metrics, alarms and charts of a run, and the sum over all workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from paceline.engine import Engine
from paceline.report import RolloutTrace
from paceline.spot.initialization import is_untrained
from paceline.strategy import AutoSelector
from paceline.strategy.cost import CostCurve
from paceline.trainer.drafter_gain import BatchSteps, RolloutProfile, predicted_costs
from paceline.trainer.monitor import DrafterSums
from paceline.types import StepResult


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """What one worker has measured since it was asked last."""

    trace: Mapping[str, Any]
    """Engine steps by batch size and by position (`RolloutTrace.take_engine_steps`)."""
    drafter: DrafterSums
    profile: dict[int, BatchSteps]
    """Engine steps by batch size (`RolloutProfile.take`)."""
    costs: CostCurve | None
    """The cost curve that the engine chooses strategies by."""
    selection: tuple[float, float, float] | None
    """How wrong the selector's predictions of time and of progress are, and its credit; None if it predicts nothing."""
    drafter_version: int
    """Version of the policy that the engine's drafter was trained for."""
    is_mismatched: bool
    """Whether the drafter was trained for another policy."""


class FiguresCollector:
    """Collects a worker's figures."""

    def __init__(self, engine: Engine, max_new_tokens: int) -> None:
        self._engine, self._trace, self._drafter = engine, RolloutTrace(max_new_tokens), DrafterSums()
        self._profile = RolloutProfile(lambda: None)
        self.has_steps = False
        """Whether there were engine steps since the last `take`."""
        self._untrained: bool | None = None  # None: to be looked up

    def begin_request(self, request: int, num_tokens: int) -> None:
        """The engine has got a request that has so many tokens of its answer already."""
        if num_tokens:
            self._trace.reached[request] = num_tokens

    def drafter_replaced(self) -> None:
        """The engine has another drafter."""
        self._untrained = None

    def on_engine_step(self, result: StepResult) -> None:
        """Adds one engine step."""
        self.has_steps = True
        self._trace.add(result, 0)
        self._drafter.add(result, self._is_untrained)
        self._profile.on_engine_step(result)

    def take(self) -> WorkerFigures:
        """The figures since the last call."""
        engine, self.has_steps = self._engine, False
        drafter, self._drafter = self._drafter, DrafterSums()
        auto = engine.selector
        selection = (auto.cost_error, auto.progress_error, auto.credit) if isinstance(auto, AutoSelector) else None
        return WorkerFigures(self._trace.take_engine_steps(), drafter, self._profile.take(), predicted_costs(engine), selection,
                             engine.drafter_version, engine.drafter_mismatch is not None)

    def _is_untrained(self) -> bool:
        if self._untrained is None:
            eagle = self._engine.eagle
            self._untrained = eagle is None or is_untrained(eagle.module)
        return self._untrained


@dataclass(slots=True)
class ClusterFigures:
    """The figures of all workers."""

    found: list[WorkerFigures] = field(default_factory=list)
    costs: CostCurve | None = None
    """The newest cost curve of a worker; all workers are taken to be alike."""

    def add(self, figures: WorkerFigures) -> None:
        self.found.append(figures)
        self.costs = figures.costs or self.costs

    def take(self) -> list[WorkerFigures]:
        """What workers have reported since the last call."""
        found, self.found = self.found, []
        return found


def selection_metrics(found: list[WorkerFigures]) -> dict[str, float]:
    """Errors of the selectors' predictions and their credits, as means over the workers that predict."""
    known = [each.selection for each in found if each.selection is not None]
    names = ("select/cost_error", "select/progress_error", "select/credit")
    return {name: fmean(values) for name, values in zip(names, zip(*known, strict=True), strict=True)} if known else {}
