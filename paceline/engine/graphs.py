"""CUDA graphs: which steps are captured, where captured steps read their inputs, and how much device memory they hold.

`CudaGraphs` is the only owner of captured graphs and of the fixed buffers that they read. A graph is keyed by what fixes its
tensor shapes, above all the padded number of rows, so that about a dozen graphs serve every strategy. All graphs share one memory
pool, and the least recently used ones are dropped when the pool grows too large. Capturing takes as long as about a dozen steps,
so a shape that is requested only once or twice (while the batch shrinks, or while a strategy is tried) runs uncaptured.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.garbage import no_garbage_collection

logger = logging.getLogger(__name__)

GRAPH_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768,
               896, 1024, 1280, 1536, 2048)
"""Numbers of rows that steps are padded to: a few sizes per doubling, so that padding costs little and there are few graphs."""
_LEAST_SAMPLED, _ALL_SAMPLED = 8, 1024
"""Smallest number of sampled rows of captured steps with forced rows; and number of rows up to which all are sampled beside draft
trees: capturing another size takes as long as a dozen steps, sampling 256 rows in vain a tenth of one."""
_UNCAPTURED_RUNS = 3
"""Number of times that a step of a new shape runs uncaptured before it is captured."""


def coarse(row_sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return two of the row sizes per doubling. Two things are padded to these coarser sizes: the number of requests that the
    learned drafter drafts for (it has one graph for every tree shape, and some extra requests cost it little), and the number
    of rows of a step with draft trees (more draft tokens can fill the padding)."""
    return tuple(n for n in row_sizes if n // (n & -n) in (1, 3)) or row_sizes


@dataclass(frozen=True, slots=True)
class GraphReport:
    """Number and cost of the captured CUDA graphs."""

    num_graphs: int = 0
    """Number of graphs that are held now."""
    num_bytes: int = 0
    """Device memory that capturing these graphs took, in bytes. What the CUDA driver itself allocates for a graph is not
    included."""
    capture_seconds: float = 0.0
    """Time spent on all captures so far, in seconds."""


class Timestamp(NamedTuple):
    """A point in time, with the work done until then that must not be counted as time of a step."""

    at: float
    """Value of `time.perf_counter()`."""
    capture_seconds: float = 0.0
    """Time spent on captures until then."""
    num_irregular: int = 0
    """Number of runs until then that were captures or uncaptured runs of a capturable step: their times say nothing about a
    usual step."""


class _CapturedStep(NamedTuple):
    graph: torch.cuda.CUDAGraph
    output: Any  # the tensors that a replay fills
    step: Callable[[], Any]  # never called again, but it keeps the tensors alive that a replay reads
    num_bytes: int


class GraphPool:
    """Captured graphs by key, least recently used first. All use the same memory one after the other."""

    def __init__(self, device: torch.device, max_bytes: int = 4 << 30) -> None:
        self.device, self.max_bytes = device, max_bytes
        self.capture_seconds, self.num_irregular = 0.0, 0
        self._uncaptured_runs = Counter[Hashable]()
        self._graphs: OrderedDict[Hashable, _CapturedStep] = OrderedDict()
        self._memory = torch.cuda.graph_pool_handle()

    @property
    def num_bytes(self) -> int:
        """Device memory that capturing the held graphs took."""
        return sum(entry.num_bytes for entry in self._graphs.values())

    @property
    def sizes(self) -> dict[Hashable, int]:
        """Bytes that each graph's capture added to the pool, by key."""
        return {key: entry.num_bytes for key, entry in self._graphs.items()}

    def report(self) -> GraphReport:
        return GraphReport(len(self._graphs), self.num_bytes, self.capture_seconds)

    def run(self, key: Hashable, step: Callable[[], Any], warm_up: Callable[[], None], capture_now: bool = False,
            is_rare: bool = False) -> Any:
        """Replay the graph of `key`. If there is none, run `step` uncaptured the first few times and capture it after that (with
        `capture_now`: at once; with `is_rare`: the second time). `warm_up` runs the step
        without effect, so that everything is compiled and allocated before the capture. The returned tensors are valid until the
        next graph runs, which may use the same memory."""
        entry = self._graphs.get(key)
        if entry is None:
            self.num_irregular += 1
            if not capture_now and self._uncaptured_runs[key] < (1 if is_rare else _UNCAPTURED_RUNS):
                self._uncaptured_runs[key] += 1
                return step()
            entry = self._capture(key, step, warm_up)
        self._graphs.move_to_end(key)
        entry.graph.replay()
        return entry.output

    def clear(self) -> None:
        """Drop all graphs, because the tensors that they point to are about to be freed."""
        self._graphs.clear()
        self._memory = torch.cuda.graph_pool_handle()

    def _capture(self, key: Hashable, step: Callable[[], Any], warm_up: Callable[[], None]) -> _CapturedStep:
        began = time.perf_counter()
        if not self._uncaptured_runs[key]:
            warm_up()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # Capturing does it anyway; doing it first makes the memory that the capture adds visible.
        reserved = torch.cuda.memory_reserved(self.device)  # of this process: others on the device come and go
        graph = torch.cuda.CUDAGraph()
        # If the garbage collector frees the graphs of an engine that is no longer used, a capture that is under way fails.
        # "thread_local": drafter training in another thread may allocate memory meanwhile.
        with no_garbage_collection(), torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            output = step()
        torch.cuda.synchronize(self.device)
        entry = _CapturedStep(graph, output, step, max(0, torch.cuda.memory_reserved(self.device) - reserved))
        while self._graphs and self.num_bytes + entry.num_bytes > self.max_bytes:
            evicted, _ = self._graphs.popitem(last=False)
            logger.info("CUDA graph %s was dropped: graphs hold more than %.1f GiB", evicted, self.max_bytes / 2**30)
        self._graphs[key] = entry
        seconds = time.perf_counter() - began
        self.capture_seconds += seconds
        logger.info("CUDA graph %s was captured in %.2f s, %.1f MiB", key, seconds, entry.num_bytes / 2**20)
        return entry


class CudaGraphs:
    """The captured steps of one engine: their graphs, the sizes that steps are padded to, and the fixed buffers that captured
    steps read their inputs from. Without a graph pool nothing is captured, and only the padding remains."""

    def __init__(self, row_sizes: tuple[int, ...], padding_slot: int, device: torch.device, inputs_per_row: int,
                 pool: GraphPool | None) -> None:
        """`row_sizes`: numbers of rows that steps are padded to. `padding_slot`: slot of the padding request. `inputs_per_row`:
        number of 64-bit integers that a step reads per row (see `rows.py`)."""
        self._padding_slot, self._device, self._inputs_per_row = padding_slot, device, inputs_per_row
        self.attach(pool, row_sizes)

    def attach(self, pool: GraphPool | None, row_sizes: tuple[int, ...]) -> None:
        """Use these row sizes and this pool from the next step on, with new buffers."""
        self.pool = pool
        self.row_sizes, self.tree_sizes = row_sizes, coarse(row_sizes)
        self.max_rows = max(row_sizes, default=0) if pool is not None else 0
        """Number of rows of the largest captured step; 0 if nothing is captured."""
        even_rows = self.max_rows + self.max_rows % 2  # as `rows.py` lays them out
        self.step_inputs = torch.zeros(even_rows * self._inputs_per_row, dtype=torch.int64, device=self._device)
        """Memory that captured steps of the policy read their inputs from."""
        self.draft_slots = torch.full((self.max_rows,), self._padding_slot, device=self._device)
        """Memory that captured drafting reads the slots of its requests from."""

    @property
    def enabled(self) -> bool:
        return self.pool is not None

    @property
    def capture_seconds(self) -> float:
        """Time spent on all captures so far."""
        return 0.0 if self.pool is None else self.pool.capture_seconds

    def num_padding_rows(self, num_rows: int, with_trees: bool) -> int:
        """Number of rows that are missing to the next row size; 0 beyond the largest one."""
        sizes = self.tree_sizes if with_trees else self.row_sizes
        index = bisect_left(sizes, num_rows)
        return sizes[index] - num_rows if index < len(sizes) else 0

    def num_sampled(self, count: int, num_rows: int, with_trees: bool) -> int:
        """Pad the number of sampled rows of a step of `num_rows` rows, some of them forced. Few sizes keep the number of graphs
        small: beside draft trees, whose number of rows changes from step to step, all rows are sampled unless they are many."""
        if num_rows > self.max_rows:
            return count
        if with_trees and num_rows <= _ALL_SAMPLED:
            return num_rows
        return min(num_rows, max(_LEAST_SAMPLED, 1 << (count - 1).bit_length()))

    def run(self, key: Hashable, step: Callable[[], Any], slots: Tensor, capture_now: bool = False,
            is_rare: bool = False) -> Any:
        """Run a step through its captured graph (see `GraphPool.run`). `slots`: the fixed tensor that the step reads its
        requests' slots from. `is_rare`: such steps come now and then, each taking many times as long without a graph."""
        assert self.pool is not None
        return self.pool.run(key, step, partial(self._warm_up, step, slots), capture_now, is_rare)

    def clear(self) -> None:
        """Drop all graphs, because the tensors that they point to are about to be freed."""
        if self.pool is not None:
            self.pool.clear()

    def report(self) -> GraphReport:
        return GraphReport() if self.pool is None else self.pool.report()

    def now(self) -> Timestamp:
        pool = self.pool
        return Timestamp(time.perf_counter(), *(() if pool is None else (pool.capture_seconds, pool.num_irregular)))

    def _warm_up(self, step: Callable[[], Any], slots: Tensor) -> None:
        """Run a step twice with the padding request in all of its slots, where it changes nothing."""
        before = slots.clone()
        slots.fill_(self._padding_slot)
        for _ in range(2):
            step()
        slots.copy_(before)
