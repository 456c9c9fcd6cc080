"""Dummy steps: steps of padding requests only, which change no request. Warm-up, graph capture and profiling run them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch

from paceline.engine.batch import BatchBuilder
from paceline.engine.drafting import Drafting
from paceline.engine.runner import Runner
from paceline.engine.scheduler import Scheduler
from paceline.strategy import MAX_ROWS, drafts_at
from paceline.types import Strategy

logger = logging.getLogger(__name__)
_CATCH_UP_ROWS, _CATCH_UP_ALL = (8, 16, 32, 64, 128), (2, 4, 16, 64)
"""What the learned drafter catches up with when an engine is warmed up: so many tokens of one request (each the largest of a
range of row counts that share compiled kernels), and so many tokens of every request of a full batch."""


class DummySteps:
    """Runs the policy and the learned drafter on padding requests."""

    def __init__(self, runner: Runner, batches: BatchBuilder, drafting: Drafting, scheduler: Scheduler) -> None:
        self._runner, self._batches, self._drafting, self._graphs = runner, batches, drafting, runner.graphs
        self.device = runner.state.device
        self.max_batch, self.max_rows, self.max_length = scheduler.max_batch, scheduler.max_rows, scheduler.max_length
        self.page_size = runner.state.tensors.page_size

    @property
    def tree_sizes(self) -> tuple[int, ...]:
        """Numbers of rows that steps with draft trees are padded to."""
        return self._graphs.tree_sizes

    @property
    def has_learned_drafter(self) -> bool:
        return self._drafting.eagle is not None

    @torch.inference_mode()
    def run_step(self, num_requests: int, strategy: Strategy, padded: bool = True) -> None:
        """Run the policy once for so many requests with draft trees of the strategy's size; nothing is drafted. `padded`: pad
        to a row size."""
        self._runner.run(self._batches.dummy(num_requests, strategy, padded), capture_now=True)

    def lent_slots(self, num_requests: int, context: int) -> AbstractContextManager[list[int]]:
        """Slots for `run_with_context`."""
        return self._runner.state.lent_slots(num_requests, context)

    @torch.inference_mode()
    def run_with_context(self, slots: list[int], strategy: Strategy, context: int) -> None:
        """Like `run_step`, for requests in `lent_slots` that read so many tokens of context. Each has pages of its own: pages in
        common would stay in the caches of the device."""
        self._runner.state.tensors.context[: len(slots)] = context
        self._runner.run(self._batches.dummy(len(slots), strategy, slots=slots), capture_now=True)

    @torch.inference_mode()
    def run_drafter(self, num_requests: int, strategy: Strategy) -> None:
        """Run the learned drafter once for so many requests, if the strategy uses it."""
        self._drafting.draft_dummy(num_requests, strategy)

    @torch.inference_mode()
    def run_catch_up(self, num_requests: int, missing: int) -> None:
        """Let the learned drafter process so many tokens of each of so many requests."""
        self._drafting.catch_up_dummy(num_requests, missing)

    @torch.inference_mode()
    def compile_ahead(self) -> None:
        """Compile the Triton kernels of steps and drafts of all sizes in parallel, without running anything on the device. If
        that fails, they are compiled when they are first launched, one after the other."""
        if self._runner.ops.name != "triton":
            return
        logger.info("compiling kernels, up to a minute, once per model and machine", extra={"is_progress": True})
        began = time.perf_counter()
        try:
            from paceline.kernels.triton.compile_ahead import compiling_ahead, shapes_only

            with compiling_ahead():
                for run in self._steps_to_compile():
                    with shapes_only():
                        run()
        except Exception:
            logger.info("kernels could not be compiled ahead of their first use", exc_info=True)
        logger.info("kernels were compiled in %.1f s", time.perf_counter() - began)

    def _steps_to_compile(self) -> Iterator[Callable[[], object]]:
        """Steps and drafts that together launch nearly all kernels, the largest sizes first, which take the longest."""
        sizes = [size for size in self.tree_sizes if size <= MAX_ROWS]
        for rows in reversed(sizes):
            yield partial(self._runner.run_uncaptured, self._batches.dummy(rows, Strategy.OFF))
            if rows > 1 and self._drafting.available:
                yield partial(self._runner.run_uncaptured, self._batches.dummy(rows // 2, Strategy("eagle", 1, 1, 1)))
        if self.has_learned_drafter:
            for requests in (size for size in sizes[::-2] if size <= self.max_batch):
                for strategy in drafts_at(requests):
                    yield self._drafting.dummy_draft(requests, strategy)

    def capture(self, strategies: Iterable[Strategy], batches: Sequence[int], padded: bool = True) -> None:
        """Capture the graphs that these strategies need at these batch sizes."""
        if self._graphs.enabled:
            for strategy in strategies:
                for num_requests in batches:
                    self.run_drafter(num_requests, strategy)
                    self.run_step(num_requests, strategy, padded)

    def captures(self, max_requests: int) -> Sequence[Callable[[], None]]:
        """Return functions that each capture one of the graphs that `auto` may need for so many requests, if it is not captured
        yet."""
        if not self._graphs.enabled:
            return []
        batches, trees = self._graphs.row_sizes, self._graphs.tree_sizes
        largest = next((size for size in batches if size >= max_requests), self.max_batch)
        jobs = [partial(self.run_step, rows, Strategy.OFF) for rows in batches if rows <= largest]
        if self._drafting.available:
            jobs += [partial(self.run_step, rows // 2, Strategy("eagle", 1, 1, 1)) for rows in trees if 1 < rows <= MAX_ROWS]
        if self.has_learned_drafter:
            jobs += [partial(self.run_drafter, requests, strategy) for requests in trees if requests <= largest
                     for strategy in drafts_at(requests)]
            jobs += [partial(self.run_catch_up, *size) for size in (*((1, rows) for rows in _CATCH_UP_ROWS),
                                                                    *((largest, missing) for missing in _CATCH_UP_ALL))]
        return jobs
