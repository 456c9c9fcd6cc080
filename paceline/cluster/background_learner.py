"""The policy's training in this process while the workers generate (`rollout.max_staleness` without `cluster.shard_training`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor

from paceline.cluster.coordinator import Coordinator
from paceline.rl.batch import Sample
from paceline.rl.learner import Learner

T = TypeVar("T")
_ROUND_S = 0.02
"""Longest time that the coordinator waits for news of the workers before the learner is looked at again."""


class BackgroundLearner:
    """Computes in a thread of its own, while the calling thread leads the workers. Its methods are those of `Learner` of the same
    names."""

    def __init__(self, learner: Learner, coordinator: Coordinator) -> None:
        self._learner, self._coordinator = learner, coordinator
        self.algorithm, self.sample_dtype, self.device = learner.algorithm, learner.sample_dtype, learner.device
        self.has_reward_model = learner.has_reward_model
        self._thread = ThreadPoolExecutor(1, "learner")
        self.overlap_s = 0.0
        """Seconds that the learner has computed while answers were under way, since the caller last set it to 0."""

    def scores(self, samples: Sequence[Sample]) -> list[float]:
        return self._run(lambda: self._learner.scores(samples))

    def infer(self, samples: Sequence[Sample]) -> None:
        self._run(lambda: self._learner.infer(samples))

    def update(self, samples: Sequence[Sample], step: int) -> dict[str, float]:
        return self._run(lambda: self._learner.update(samples, step))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._learner.weights()

    def _run(self, work: Callable[[], T]) -> T:
        """Compute, and carry out rounds of the coordinator until that has ended. Answers that finish meanwhile are returned by
        its next `step`."""
        future = self._thread.submit(work)
        while not future.done():
            began = time.perf_counter()
            self._coordinator.advance(_ROUND_S)
            if len(self._coordinator.book):
                self.overlap_s += time.perf_counter() - began
        return future.result()
