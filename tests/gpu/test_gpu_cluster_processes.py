"""Several plain processes that share one GPU, without Ray: the same tokens as one engine, while requests move between them
without a copy on the host (CUDA IPC), and also if one of them is killed."""

from __future__ import annotations

import statistics

import pytest
from cluster.processes import check_processes


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("strategy", ["off", "eagle:d3w2v4"])
def test_processes_share_a_gpu(workers, strategy):
    show(check_processes("cuda", workers, strategy), f"{workers} processes, {strategy}")


def test_processes_exchange_bytes_where_they_share_no_gpu():
    show(check_processes("cuda", 2, "eagle:d3w2v4", shared=False), "2 processes, through the host")


def test_a_process_that_shares_the_gpu_is_killed():
    show(check_processes("cuda", 2, "eagle:d3w2v4", kills=True), "2 processes, one killed")


def show(moves, name):
    """Print the pauses, and require that requests moved with their KV cache."""
    pauses = [1e3 * event["pause_s"] for event in moves if not event["prefilled"]]
    assert pauses, "no request was moved with its KV cache"
    print(f"{name}: {len(moves)} moves, {len(moves) - len(pauses)} prefilled, pause median {statistics.median(pauses):.1f} ms, "
          f"longest {max(pauses):.1f} ms")
