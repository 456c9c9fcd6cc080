"""Worker processes without Ray: the short form, on a CPU, of tests/gpu/test_gpu_cluster_processes.py."""

from __future__ import annotations

import pytest
from cluster.processes import check_processes


def test_two_processes_generate_the_tokens_of_one_while_requests_move_as_handles_of_tensors():
    moves = check_processes("cpu", 2, "both:d3w2v4", batches=1, max_new_tokens=48)
    assert any(not event["prefilled"] for event in moves), "no request was moved with its KV cache"


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "shared"), [("off", True), ("both:d3w2v4", True), ("both:d3w2v4", False)])
def test_four_processes_of_which_one_is_killed(strategy, shared):
    moves = check_processes("cpu", 4, strategy, shared, kills=True)
    assert any(not event["prefilled"] for event in moves)
