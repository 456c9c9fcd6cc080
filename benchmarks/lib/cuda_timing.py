"""Times of GPU kernels, measured by replaying captured CUDA graphs."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch


def replay_us(calls: list[Callable[[], Any]], at_least: int = 20, replays: int = 12) -> float:
    """Microseconds per call: `at_least` calls or more are captured one after the other, and the median of the replays counts.
    Give several calls, each with data of its own, where the cache must be cold."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    sequence = calls * max(1, at_least // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in sequence:
            call()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[2:]) * 1e3 / len(sequence)
