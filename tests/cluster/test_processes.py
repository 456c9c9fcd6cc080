"""Worker processes without Ray: the short form, on a CPU, of tests/gpu/test_gpu_cluster_processes.py."""

from __future__ import annotations

import pytest
from cluster.process_trainer import ProcessTrainer, check_same_run
from cluster.processes import check_processes


def test_two_processes_generate_the_tokens_of_one_while_requests_move_as_handles_of_tensors():
    moves = check_processes("cpu", 2, "eagle:d3w2v4", batches=1, max_new_tokens=48)
    assert any(not event["prefilled"] for event in moves), "no request was moved with its KV cache"


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "shared"), [("off", True), ("eagle:d3w2v4", True), ("eagle:d3w2v4", False)])
def test_four_processes_of_which_one_is_killed(strategy, shared):
    moves = check_processes("cpu", 4, strategy, shared, kills=True)
    assert any(not event["prefilled"] for event in moves)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_processes_train_as_one(tmp_path, monkeypatch, dtype):
    """The form on a CPU of tests/gpu/test_gpu_workers.py."""
    check_same_run(ProcessTrainer, tmp_path, monkeypatch, dtype=dtype, cluster={"workers": 2}, sleep_during_update=True,
                   compare_off=True)
