"""Captured steps. A graph is keyed by what fixes its shapes, the padded number of rows above all, so that a dozen serve every
strategy; all share one memory pool, and the least recently used go when they hold too much. Capturing takes as long as a dozen
steps, so what is asked for once or twice, on the way to another size or to try a strategy, runs as it is."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

GRAPH_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""Row counts that steps are padded to: a few per doubling, so that padding costs little and graphs are few."""
_PATIENCE = 3
"""Times that a step runs uncaptured."""


def coarse(row_sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Two per doubling: what requests are padded to when a drafter guesses for them (it has graphs for every shape of tree, and a
    few lines more cost it little), and rows with trees (whose room more nodes can fill)."""
    return tuple(n for n in row_sizes if n // (n & -n) in (1, 3)) or row_sizes


def rehearsal(slots: torch.Tensor, padding: int) -> Callable[[Callable[[], Any]], None]:
    """Runs a step where it can do no harm: with padding in all of its `slots`."""

    def rehearse(step: Callable[[], Any]) -> None:
        before = slots.clone()
        slots.fill_(padding)
        for _ in range(2):
            step()
        slots.copy_(before)

    return rehearse


@dataclass(frozen=True, slots=True)
class GraphReport:
    num_graphs: int = 0
    num_bytes: int = 0
    """Device memory that capturing them took."""
    capture_seconds: float = 0.0


class Moment(NamedTuple):
    """When, and what had been done till then that is no part of a step."""

    at: float
    capture_seconds: float = 0.0
    num_irregular: int = 0
    """Steps that were captured, or ran uncaptured: their times say nothing."""

    @classmethod
    def now(cls, pool: GraphPool | None) -> Moment:
        return cls(time.perf_counter(), *(() if pool is None else (pool.capture_seconds, pool.num_irregular)))


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    output: Any  # the tensors that a replay fills
    step: Callable[[], Any]  # never called again: it holds the tensors that a replay reads
    num_bytes: int


class GraphPool:
    def __init__(self, device: torch.device, max_bytes: int = 4 << 30, shared: bool = True) -> None:
        """shared: all graphs use the same memory, one after the other; otherwise each has its own."""
        self.device, self.max_bytes, self._shared = device, max_bytes, shared
        self.capture_seconds, self.num_irregular = 0.0, 0
        self._uncaptured = Counter[Hashable]()  # how often it ran
        self._graphs: OrderedDict[Hashable, _Captured] = OrderedDict()
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self._graphs.values())

    def report(self) -> GraphReport:
        return GraphReport(len(self._graphs), self.num_bytes, self.capture_seconds)

    @property
    def sizes(self) -> dict[Hashable, int]:
        """Key → bytes its capture added to the pool."""
        return {key: entry.num_bytes for key, entry in self._graphs.items()}

    def run(self, key: Hashable, step: Callable[[], Any], rehearse: Callable[[Callable[[], Any]], None],
            at_once: bool = False) -> Any:
        """Replays the graph of `key`; captures `step` when it has been asked for a few times, or at once: then `rehearse(step)`
        runs it where it can do no harm, so that everything is compiled and allocated before. What it returns is there until
        the next graph runs, which may use the same memory."""
        entry = self._graphs.get(key)
        if entry is None:
            self.num_irregular += 1
            if not at_once and self._uncaptured[key] < _PATIENCE:
                self._uncaptured[key] += 1
                return step()
            entry = self._capture(key, step, rehearse)
        self._graphs.move_to_end(key)
        entry.graph.replay()
        return entry.output

    def clear(self) -> None:
        """Drop all graphs: the tensors they point at are about to move."""
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()

    def _capture(self, key: Hashable, step: Callable[[], Any], rehearse: Callable[[Callable[[], Any]], None]) -> _Captured:
        began = time.perf_counter()
        if not self._uncaptured[key]:
            rehearse(step)
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # capturing does it anyway: before, so that what it adds can be told
        free = torch.cuda.mem_get_info(self.device)[0]
        graph = torch.cuda.CUDAGraph()
        # thread_local: a drafter that trains beside may allocate meanwhile
        pool = self._pool if self._shared else torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            output = step()
        torch.cuda.synchronize(self.device)
        entry = _Captured(graph, output, step, max(0, free - torch.cuda.mem_get_info(self.device)[0]))
        while self._graphs and self.num_bytes + entry.num_bytes > self.max_bytes:
            self._graphs.popitem(last=False)
        self._graphs[key] = entry
        self.capture_seconds += time.perf_counter() - began
        return entry
