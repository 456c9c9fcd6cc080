"""Memory of captured CUDA graphs: Paceline's shared pool against one set of graphs per strategy, measured by capturing both."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.engine.engine import Engine
from paceline.engine.graphs import GraphPool, GraphReport
from paceline.types import Strategy


@dataclass(frozen=True, slots=True)
class GraphComparison:
    """Memory, number and capture time of the graphs of several strategies, captured in both ways."""

    ours: GraphReport
    """All strategies together: graphs keyed by the number of rows, in one memory pool."""
    per_strategy: dict[str, GraphReport]
    """The usual way for each strategy alone: one policy graph per batch size and number of tokens to verify, one drafter graph
    per batch size, each with memory of its own."""

    @property
    def naive(self) -> GraphReport:
        """The usual way for all strategies together: one set of graphs per strategy."""
        reports = self.per_strategy.values()
        return GraphReport(sum(r.num_graphs for r in reports), sum(r.num_bytes for r in reports),
                           sum(r.capture_seconds for r in reports))


def compare_graph_memory(engine: Engine, strategies: Sequence[Strategy], batches: Sequence[int]) -> GraphComparison:
    """Captures every strategy at every batch size whose rows fit the engine's largest row size, and frees the graphs again. The
    engine must be idle and must use CUDA graphs."""
    own = engine.executor.graphs.pool
    if own is None or engine.has_work:
        raise ValueError("engine: graphs are compared on an idle engine that captures them")
    own.clear()
    try:
        ours = _measure(engine, strategies, batches, shared=True)
        alone = {str(strategy): _measure(engine, [strategy], batches, shared=False) for strategy in strategies}
    finally:
        engine.executor.graphs.pool = own
    return GraphComparison(ours, alone)


def _measure(engine: Engine, strategies: Sequence[Strategy], batches: Sequence[int], shared: bool) -> GraphReport:
    """Captures into a fresh pool. Without `shared`, steps are padded to the batch size only and no two graphs share memory."""
    gc.collect()
    torch.cuda.empty_cache()
    pool = GraphPool(engine.device, max_bytes=1 << 62, shared=shared)
    engine.executor.graphs.pool = pool
    engine.capture_graphs(strategies, batches, exact=not shared)
    return pool.report()
