"""Training of a rollout server's learned drafter, between two steps of verl's trainer."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from paceline.config import TrainConfig
from paceline.engine import Engine
from paceline.trainer.drafter import make_drafter_trainer
from paceline.types import StepResult

logger = logging.getLogger(__name__)


class DrafterTraining:
    """Trains the drafter on the answers since the last weight update, before the engine sleeps or its weights change, because
    features belong to the weights that computed them. All methods are called in the engine's thread."""

    def __init__(self, engine: Engine, config: TrainConfig, folder: Path) -> None:
        """A checkpoint in `folder` is continued."""
        self._trainer = make_drafter_trainer(config, engine, folder)
        self._step, self._num_finished = 1, 0
        self._busy_s = 0.0  # of this step
        self._last_end: float | None = None
        self._trainer.begin_step(self._step)
        self.metrics: dict[str, float] = {}
        """What the last training reported."""

    def on_step(self, result: StepResult) -> None:
        """Take the features of the answers that an engine step has finished."""
        now = time.perf_counter()
        if self._last_end is not None:
            self._busy_s += now - self._last_end
        self._last_end = now
        self._num_finished += len(result.finished)
        self._trainer.on_engine_step(result, self._num_finished, self._num_finished)

    def train(self, engine: Engine) -> None:
        """Train for as long as the budget allows, and give the engine the result. Does nothing without new answers, or while
        requests are running."""
        if not self._num_finished or engine.has_work:
            return
        self.metrics = self._trainer.train([], self._step, self._busy_s)
        self._trainer.save()
        if self.metrics:
            logger.info("step %d: %s", self._step, ", ".join(f"{name} {value:.3g}" for name, value in self.metrics.items()))
        self._step, self._num_finished, self._busy_s, self._last_end = self._step + 1, 0, 0.0, None
        self._trainer.begin_step(self._step)

    def close(self, engine: Engine) -> None:
        """Wait for the last checkpoint."""
        self._trainer.close()
