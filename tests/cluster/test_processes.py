"""Worker processes without Ray: the short form, on a CPU, of tests/gpu/test_gpu_cluster_processes.py."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
from cluster.process_trainer import ProcessTrainer, check_same_run
from cluster.processes import check_processes

from benchmarks.lib.process_runtime import ProcessRuntime
from paceline.cluster.coordinator import Coordinator
from paceline.cluster.messages import Add
from paceline.cluster.worker import Send, Worker
from paceline.trainer import TrainResult


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


class Deadly(ProcessRuntime):
    """Kills worker 1 in the first update."""

    def call(self, method: str, each: Any) -> Any:
        calls = super().call(method, each)
        if method == "update" and not self.has_killed:
            self.has_killed = True
            self.processes[1].kill()
        return calls

    has_killed = False


class DeadlyTrainer(ProcessTrainer):
    runtime_class = Deadly


@pytest.mark.slow
def test_a_process_is_killed_in_an_update(tmp_path, monkeypatch):
    check_same_run(DeadlyTrainer, tmp_path, monkeypatch, dtype="float64", cluster={"workers": 2})


class LosesARank(ProcessRuntime):
    """Worker 1 loses a rank of its engine as soon as it has requests for the second time, and again before it gets weights."""

    num_given = num_killed = 0

    def post(self, worker: int, message: Any, payload: Any = None) -> None:
        super().post(worker, message, payload)
        self.num_given += worker == 1 and isinstance(message, Add)
        if self.num_given == 2 and not self.num_killed:
            self.kill_rank()

    def call(self, method: str, each: Any) -> Any:
        if method == "publish" and self.num_killed == 1 and self.num_given > 2:
            self.kill_rank()
        return super().call(method, each)

    def kill_rank(self) -> None:
        (rank,) = [child for child in psutil.Process(self.processes[1].pid).children()
                   if "paceline.engine.rank" in child.cmdline()]
        rank.kill()
        self.num_killed += 1


class RankLosingTrainer(ProcessTrainer):
    runtime_class = LosesARank


SPLIT = {"max_batch": 8, "kv_tokens": 4096, "deterministic": True, "tensor_parallel": 2, "reduction_shares": 8}


@pytest.mark.slow
def test_two_workers_of_two_ranks_each_train_as_one(tmp_path, monkeypatch):
    """And a rank that dies takes its worker with it, not the run."""
    found = []

    class Counting(RankLosingTrainer):
        def run(self) -> TrainResult:
            result, coordinator = super().run(), self.engine.coordinator
            found.append((coordinator.runtime.num_killed, coordinator.num_lost))
            return result

    check_same_run(Counting, tmp_path, monkeypatch, dtype="float64", cluster={"workers": 2}, engine=SPLIT)
    ((killed, lost),) = found
    assert killed == 2 and lost >= 2


class Broken:
    def build(self, worker_id: int, send: Send) -> Worker:
        raise ValueError("there is no such device")


@pytest.mark.slow
def test_workers_that_cannot_start_end_the_run():
    coordinator = Coordinator(ProcessRuntime(1, Broken()))
    try:
        with pytest.raises(RuntimeError, match="worker 0 cannot be started"):
            coordinator.wait_for_all()
    finally:
        coordinator.close()
