"""Dummy steps: steps of padding requests only, which change no request. Warm-up, graph capture and profiling run them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from paceline.engine.command import (
    DummyCatchUp,
    DummyDraft,
    DummyStep,
    HostDrafts,
    LendSlots,
    ReturnSlots,
    StepCommand,
    no_copies,
    no_pages,
    no_slots,
)
from paceline.engine.executor import Executor
from paceline.engine.scheduler import Scheduler
from paceline.strategy import MAX_ROWS, drafts_at
from paceline.types import Strategy

logger = logging.getLogger(__name__)
_CATCH_UP_ROWS, _CATCH_UP_ALL = (8, 16, 32, 64, 128), (2, 4, 16, 64)
"""What the learned drafter catches up with when an engine is warmed up: so many tokens of one request (each the largest of a
range of row counts that share compiled kernels), and so many tokens of every request of a full batch."""
_FORCED_ROWS = (4, 1024)
"""Range of the rows of steps with forced rows that are captured when an engine is warmed up."""


class DummySteps:
    """Runs the policy and the learned drafter on padding requests."""

    def __init__(self, executor: Executor, scheduler: Scheduler, can_speculate: bool) -> None:
        """`can_speculate`: whether there is a drafter."""
        self._executor, self._graphs, self._can_speculate = executor, executor.graphs, can_speculate
        self.device = executor.device
        self.max_batch, self.max_rows, self.max_length = scheduler.max_batch, scheduler.max_rows, scheduler.max_length
        self.page_size = scheduler.pages.page_size

    @property
    def tree_sizes(self) -> tuple[int, ...]:
        """Numbers of rows that steps with draft trees or forced rows are padded to."""
        return self._graphs.tree_sizes

    @property
    def has_learned_drafter(self) -> bool:
        return self._executor.learned is not None

    def run_step(self, num_requests: int, strategy: Strategy) -> None:
        """Run the policy once for so many requests with draft trees of the strategy's size; nothing is drafted."""
        self._executor.execute(DummyStep(self._command([self._padding] * num_requests, strategy)))

    def run_forced(self, num_rows: int, num_requests: int, strategy: Strategy) -> None:
        """Run the policy once on so many rows of so many requests, all but one of which feed their last tokens, with draft trees
        of the strategy's size; the other rows are forced."""
        self._executor.execute(DummyStep(self._forced_command(num_rows, num_requests, strategy)))

    @contextmanager
    def lent_slots(self, num_requests: int, context: int) -> Iterator[list[int]]:
        """Slots for `run_with_context`, of requests with so many tokens of context."""
        try:
            self._executor.execute(LendSlots(num_requests, context))
            yield list(range(num_requests))
        finally:
            self._executor.execute(ReturnSlots())

    def run_with_context(self, slots: list[int], strategy: Strategy, context: int) -> None:
        """Like `run_step`, for requests in `lent_slots` that read so many tokens of context. Each has pages of its own: pages in
        common would stay in the caches of the device."""
        self._executor.execute(DummyStep(self._command(slots, strategy), context=context))

    def run_drafter(self, num_requests: int, strategy: Strategy) -> None:
        """Run the learned drafter once for so many requests, if the strategy uses it."""
        self._executor.execute(DummyDraft(num_requests, strategy))

    def run_catch_up(self, num_requests: int, missing: int) -> None:
        """Let the learned drafter process so many tokens of each of so many requests."""
        self._executor.execute(DummyCatchUp(num_requests, missing))

    @property
    def _padding(self) -> int:
        return self._executor.state.padding

    def _command(self, slots: list[int], strategy: Strategy) -> StepCommand:
        """Return a step of requests that feed their last tokens. A draft tree is one path of full depth, and leaves."""
        none, count = np.zeros(0, np.int64), len(slots)
        zeros, draft = np.zeros(count, np.int64), None
        if strategy.budget:
            node = np.tile(np.arange(strategy.budget), (count, 1))
            on_path, empty = node < strategy.depth, np.zeros_like(node)
            nodes = np.stack([empty, np.where(on_path, node - 1, -1), np.where(on_path, node + 1, 1)])
            draft = HostDrafts(np.arange(count), nodes, empty.astype(np.float32))
        return StepCommand(np.array(slots, np.int64), zeros + strategy.budget, zeros, np.ones(count, bool), none, zeros - 1,
                           zeros, no_slots(), no_pages(), no_copies(), draft, min(strategy.depth, strategy.budget))

    def _forced_command(self, num_rows: int, num_requests: int, strategy: Strategy) -> StepCommand:
        """Return a step of `num_requests` - 1 requests that feed their last tokens, and requests with forced rows, the last of
        which is sampled from."""
        decode = self._command([self._padding] * (num_requests - 1), strategy)
        left, lengths = num_rows - (num_requests - 1) * (1 + strategy.budget), []
        while left > 0:
            lengths.append(min(left, self.max_length - 1))
            left -= lengths[-1]
        forced = np.append(decode.forced, lengths)
        zeros, samples = np.zeros_like(forced), forced == 0
        samples[-1] = True
        return decode._replace(slots=zeros + self._padding, num_nodes=np.append(decode.num_nodes, [0] * len(lengths)),
                               forced=forced, samples=samples, tokens=np.zeros(sum(lengths), np.int64), next_token=zeros - 1,
                               starts=zeros)

    @torch.inference_mode()
    def compile_ahead(self) -> None:
        """Compile the Triton kernels of steps and drafts of all sizes in parallel, without running anything on the device. If
        that fails, they are compiled when they are first launched, one after the other."""
        if self._executor.ops.name != "triton":
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
            yield self._uncaptured(self._command([self._padding] * rows, Strategy.OFF))
            if rows > 1 and self._can_speculate:
                yield self._uncaptured(self._command([self._padding] * (rows // 2), Strategy("eagle", 1, 1, 1)))
        for size in self._forced_sizes(self.max_batch):
            yield self._uncaptured(self._forced_command(*size))
        learned = self._executor.learned
        if learned is not None:
            for requests in (size for size in sizes[::-2] if size <= self.max_batch):
                for strategy in drafts_at(requests):
                    yield learned.dummy_draft(requests, strategy)

    def _uncaptured(self, command: StepCommand) -> Callable[[], object]:
        return partial(self._executor.runner.run_uncaptured, self._executor.dummy_rows(DummyStep(command)), [])

    def _forced_sizes(self, max_requests: int) -> list[tuple[int, int, Strategy]]:
        """Arguments of `run_forced` for usual steps: with so many requests, with one, and beside draft trees."""
        largest = min(self._graphs.max_rows, _FORCED_ROWS[1])
        sizes = [rows for rows in self.tree_sizes if _FORCED_ROWS[0] <= rows <= largest]
        found = [(rows, n, Strategy.OFF) for n in sorted({1, max_requests}) for rows in sizes if rows > n]
        if self._can_speculate:
            found += [(rows, 2, Strategy("eagle", 1, 1, 1)) for rows in sizes]
        return found

    def load_kernels(self) -> None:
        """Run each kind of step once where no graphs are captured, so that no step of a request has to load kernels."""
        if self._graphs.enabled or not self.has_learned_drafter:
            return
        for strategy in (Strategy("eagle", 4, 1, 4), Strategy("eagle", 6, 4, 16)):
            self.run_drafter(1, strategy)
            self.run_step(1, strategy)
        self.run_catch_up(1, _CATCH_UP_ALL[0])

    def captures(self, max_requests: int) -> Sequence[Callable[[], None]]:
        """Return functions that each capture one of the graphs that `auto` may need for so many requests, if it is not captured
        yet."""
        if not self._graphs.enabled:
            return []
        batches, trees = self._graphs.row_sizes, self._graphs.tree_sizes
        largest = next((size for size in batches if size >= max_requests), self.max_batch)
        jobs = [partial(self.run_step, rows, Strategy.OFF) for rows in batches if rows <= largest]
        jobs += [partial(self.run_forced, *size) for size in self._forced_sizes(largest)]
        if self._can_speculate:
            jobs += [partial(self.run_step, rows // 2, Strategy("eagle", 1, 1, 1)) for rows in trees if 1 < rows <= MAX_ROWS]
        if self.has_learned_drafter:
            jobs += [partial(self.run_drafter, requests, strategy) for requests in trees if requests <= largest
                     for strategy in drafts_at(requests)]
            jobs += [partial(self.run_catch_up, *size) for size in (*((1, rows) for rows in _CATCH_UP_ROWS),
                                                                    *((largest, missing) for missing in _CATCH_UP_ALL))]
        return jobs
