"""Training with rollouts from several workers: the same run as with one."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer.test_asynchronous import Recorder, check_versions

pytest.importorskip("ray")

from cluster.local_runtime import LocalRuntime

from paceline.cluster.backend import ClusterBackend
from paceline.cluster.trainer import ClusterTrainer, TrainWorkerSpec
from paceline.cluster.types import WorkerState
from paceline.config import TrainConfig
from paceline.models.weights import load_model
from paceline.rl.checkpoint import read_state
from paceline.trainer import RunStatus, Trainer, TrainerCallback
from paceline.trainer.memory import memory_plan
from paceline.trainer.rollouts import PromptStream


class LocalTrainer(ClusterTrainer):
    """Workers in this process, so that the tests are quick."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.mixed: list[Any] = []

    def _make_runtime(self) -> LocalRuntime:
        return LocalRuntime(self.config.cluster.workers, TrainWorkerSpec(self.config).build)

    def _make_backend(self) -> ClusterBackend:
        """What the workers compute would count as the coordinator's own time."""
        backend = super()._make_backend()
        backend.coordinator.interval_s = 0.0
        return backend

    def _collect(self, *args: Any) -> Any:
        """Also keeps the answers that more than one version of the policy has written."""
        groups = super()._collect(*args)
        self.mixed += [rollout for group in groups for rollout in group.rollouts if len(set(rollout.versions)) > 1]
        return groups


def config(out: Path, **changes: Any) -> TrainConfig:
    fields = {"model": "default", "task": "collatz", "steps": 2, "dtype": "float64", "strategy": "suffix:d4w2v6", "out": str(out),
              "rollout": {"prompts": 2, "group_size": 3, "max_new_tokens": 24}, "reward": {"workers": 0},
              "optimizer": {"lr": 1e-3}, "engine": {"max_batch": 8}, **changes}
    return TrainConfig(**fields)


def tokens(folder: Path) -> list[tuple]:
    lines = [json.loads(line) for file in sorted(folder.glob("rollouts-*.jsonl")) for line in file.read_text().splitlines()]
    return [(line["step"], line["id"], line["sample"], tuple(line["token_ids"]), line["reward"]) for line in lines]


def test_the_rollouts_of_a_run_do_not_depend_on_the_number_of_workers(tmp_path):
    Trainer(config(tmp_path / "one")).run()
    expected = tokens(tmp_path / "one")
    assert len(expected) == 12
    for workers in (2, 4):
        out = tmp_path / str(workers)
        result = LocalTrainer(config(out, cluster={"workers": workers, "shard_training": False})).run()
        assert result.status is RunStatus.COMPLETED
        assert tokens(out) == expected
        trace = json.loads((out / "timeline.trace.json").read_text())["traceEvents"]
        assert {event["tid"] for event in trace if event["ph"] == "X"} == set(range(workers))
        metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert all(0 < line["cluster/busy"] <= 1 and line["accept_length"] >= 1 for line in metrics)


class Broken(LocalTrainer):
    """Workers that cannot be made."""

    def _load(self) -> None:
        raise ValueError("as if there was no memory")


@pytest.mark.parametrize("exists", [False, True])
def test_what_ended_a_run_is_what_is_said(tmp_path, exists):
    out, cluster = tmp_path / "run", {"workers": 2, "shard_training": False}
    if exists:
        out.mkdir()
    with pytest.raises(ValueError, match="as if there was no memory"):
        Broken(config(out, cluster=cluster)).run()
    assert out.exists() == exists and not any(out.glob("*")), "nothing is left of it"


@pytest.mark.parametrize("workers", [{"workers": 2, "shard_training": False}, {"workers": 1, "address": "here"}])
def test_generation_goes_on_while_the_policy_is_updated(tmp_path, monkeypatch, workers):
    """In another process, or between the updates of the workers themselves. Tokens are as old as they may be, and have the
    log-probabilities of the policies that sampled them; evaluations run meanwhile."""
    monkeypatch.setattr("paceline.trainer.validation.cluster_address", lambda address: address)
    rollout = {"prompts": 2, "group_size": 2, "max_new_tokens": 48, "max_staleness": 1}
    recorder = Recorder()
    settings = config(tmp_path / "run", cluster=workers, rollout=rollout, steps=8, evaluation={"every": 4, "problems": 2},
                      engine={"max_batch": 2, "on_update": "recompute"}, device="cpu")
    trainer = LocalTrainer(settings, callbacks=[] if "address" in workers else [recorder])
    assert trainer.run().num_steps == 8
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    assert trainer.mixed, "some answers were written by two versions of the policy"
    if recorder.trained:
        assert check_versions(recorder, 1) == {0, 1}
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(line["async/staleness_max"] for line in metrics) == 1 and metrics[-1]["async/open_groups"] == 2
    assert "address" in workers or any(line["async/update_overlap_s"] > 0 for line in metrics)
    assert len((tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()) == 3
    groups = list(dict.fromkeys((step, name) for step, name, *_ in tokens(tmp_path / "run")))
    assert len({name for _, name in groups}) == len(groups) == trainer.state.cursor == 16, "every prompt is used once"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_resumed_run_loses_no_prompt_and_trains_on_none_twice(tmp_path, workers):
    """Unfinished prompts are begun anew, also where the rest of the run is synchronous."""
    cluster = {"workers": 2, "shard_training": False}
    rollout = {"prompts": 4, "group_size": 2, "max_new_tokens": 64, "max_staleness": 2, "stale_groups": "drop"}
    first = LocalTrainer(config(tmp_path / "run", cluster=cluster, steps=1, rollout=rollout, dtype="float32"))
    first.run()
    state = read_state(tmp_path / "run" / "checkpoints" / "step-000001")
    assert len(state.unfinished) == 8 and max(state.unfinished) < state.cursor + len(state.unfinished)
    assert state.unfinished[0] < state.cursor, "a group was overtaken: its number says which, a count would not"
    later = rollout if workers > 1 else {**rollout, "max_staleness": 0}
    settings = config(tmp_path / "run", cluster=cluster if workers > 1 else {}, steps=3, rollout=later, dtype="float32")
    more = (LocalTrainer if workers > 1 else Trainer)(settings, resume=True)
    assert more.run().num_steps == 3
    trained = [name for _, name in dict.fromkeys((step, name) for step, name, *_ in tokens(tmp_path / "run"))]
    left = read_state(tmp_path / "run" / "checkpoints" / "step-000003").unfinished
    prompts = PromptStream(more._task, 0, None).take(0, more.state.cursor + len(left))
    assert sorted(trained) == sorted(problem.id for number, problem in enumerate(prompts) if number not in left)


def test_a_run_of_one_process_goes_on_with_workers(tmp_path):
    """What its strategy selection has learned is in the checkpoint, and is not for the workers."""
    fields = {"strategy": "auto", "dtype": "float32"}
    assert Trainer(config(tmp_path / "run", steps=1, **fields)).run().status is RunStatus.COMPLETED
    assert (tmp_path / "run" / "checkpoints" / "step-000001" / "selection.json").is_file()
    workers = {"workers": 2, "shard_training": False}
    more = LocalTrainer(config(tmp_path / "run", steps=2, cluster=workers, **fields), resume=True)
    assert more.run().num_steps == 2


@pytest.mark.parametrize("gigabytes", [1.0, 0.25])
def test_a_worker_keeps_as_many_captured_answers_as_the_run_says(tmp_path, gigabytes):
    settings = config(tmp_path, drafter="learned", drafter_buffer_gb=gigabytes, cluster={"workers": 2, "shard_training": False})
    worker = TrainWorkerSpec(settings).build(0, lambda worker, message: None)
    assert worker.training._buffer.max_bytes == gigabytes * 2**30


def test_captured_answers_on_disk_are_refused(tmp_path):
    cluster = {"workers": 2, "shard_training": False}
    with pytest.raises(ValueError, match=r"^drafter_disk_gb: several workers keep captured answers in memory only"):
        LocalTrainer(config(tmp_path / "disk", drafter_disk_gb=8.0, cluster=cluster)).run()
    assert not (tmp_path / "disk").exists()
    settings = config(tmp_path / "memory", steps=1, drafter_disk_gb=0.0, cluster=cluster)
    assert LocalTrainer(settings).run().status is RunStatus.COMPLETED


@pytest.fixture
def one_rank(monkeypatch):
    """A worker in this process trains the policy as the only rank of a process group."""
    monkeypatch.setattr("paceline.trainer.validation.cluster_address", lambda address: address)
    yield {"workers": 1, "address": "here"}
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class Watcher(TrainerCallback):
    """Notes whether engines are asleep when a phase begins."""

    def on_run_begin(self, trainer: LocalTrainer) -> None:
        self.worker, self.asleep = trainer.engine.coordinator.runtime.workers[0], {}

    def on_phase(self, phase: str) -> None:
        self.asleep.setdefault(phase, set()).update(engine.executor.is_asleep for engine in self.worker._engines)

    def on_step_end(self, *_: Any) -> None:
        self.on_phase("published")


def test_engines_sleep_while_their_workers_train(tmp_path, one_rank):
    fields = {"drafter": "learned", "strategy": "eagle:d2w2v3", "spot": {"form": "eagle"}, "sleep_during_update": True,
              "compare_off": True, "device": "cpu", "dtype": "float32"}
    watcher = Watcher()
    result = LocalTrainer(config(tmp_path / "run", cluster=one_rank, **fields), callbacks=[watcher]).run()
    assert watcher.asleep["train"] == {True} and watcher.asleep["generate"] == watcher.asleep["published"] == {False}
    assert result.summary["identical_rollouts"] and result.summary["compared_rollouts"] == 12
    Trainer(config(tmp_path / "one", dtype="float32")).run()
    assert tokens(tmp_path / "run") == tokens(tmp_path / "one")


class Elsewhere(LocalTrainer):
    """What the driver takes for a worker with a GPU is on the CPU."""

    def _make_runtime(self) -> LocalRuntime:
        assert self.config.device == "cuda"
        return LocalRuntime(1, TrainWorkerSpec(self.config.model_copy(update={"device": "cpu"})).build)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this process has a GPU")
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_driver_without_a_gpu_leads_workers_that_have_one(tmp_path, one_rank, monkeypatch, device):
    """Whatever it does itself needs none: checks, memory plan, sampling of prompts, checkpoints."""
    monkeypatch.setattr("paceline.cluster.ray_session.num_gpus", lambda address: 8.0)
    settings = config(tmp_path / "run", cluster=one_rank, device=device, steps=1, dtype="float32")
    if device == "cuda":
        plan = memory_plan(settings)
        assert plan is not None and plan.capacity is None
    assert Elsewhere(settings).run().status is RunStatus.COMPLETED
    own = config(tmp_path / "own", cluster={**one_rank, "shard_training": False}, device="cuda")
    with pytest.raises(ValueError, match=r"device: .*no CUDA device is available"):  # it would train the policy here
        Elsewhere(own).run()


def test_the_comparison_is_of_the_same_workers_without_speculation(tmp_path):
    cluster = {"workers": 2, "shard_training": False}
    trainer = LocalTrainer(config(tmp_path / "run", compare_off=True, dtype="float32", cluster=cluster))
    assert trainer.run().summary["identical_rollouts"]
    for worker in trainer.engine.coordinator.runtime.workers.values():
        speculating, baseline = worker._engines
        assert worker.engine is speculating and baseline.drafting.suffix is None
        assert baseline.stats().generated_tokens > 0 and baseline.version == speculating.version == 2
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    lengths = [sum(len(line[3]) for line in tokens(tmp_path / "run") if line[0] == step) for step in (1, 2)]
    assert [line["generated_tokens"] for line in metrics] == lengths, "the comparison is not counted"
    assert all(line["time/generate_off"] > 0 and line["drafted"] > 0 for line in metrics)


class Killer(TrainerCallback):
    """`kill -9` of a worker in the middle of each of these: generation, drafter training, an update, a publication, and while a
    checkpoint is written."""

    def __init__(self, worker: int) -> None:
        """`worker`: the first one that is killed; then they take turns."""
        self._worker, self.killed, self._step = worker, [], 0

    def on_run_begin(self, trainer: ClusterTrainer) -> None:
        self._coordinator = trainer.engine.coordinator
        self._runtime = self._coordinator.runtime
        self._call, self._runtime.call = self._runtime.call, self._call_and_kill
        self._advance, self._coordinator.advance = self._coordinator.advance, self._advance_and_kill

    def on_step_begin(self, step: int) -> None:
        self._step = step
        self._coordinator.wait_for_all()
        self._pids = self._runtime.pids()

    def on_engine_step(self, result: Any, progress: Any) -> None:
        if self._step == 2 and self._coordinator.book.num_generated:
            self._kill("generation")

    def _advance_and_kill(self, timeout_s: float | None = None) -> None:
        self._advance(timeout_s)
        states = [view.state for view in self._coordinator._workers.values()]
        if self._step == 3 and self._coordinator.drafter.is_awaited and WorkerState.TRAINING in states:
            self._kill("drafter training")

    def _call_and_kill(self, method: str, each: Any) -> Any:
        calls = self._call(method, each)
        if (self._step, method) in ((4, "update"), (5, "publish"), (6, "save")):
            time.sleep(0.02)
            self._kill(method)
        return calls

    def _kill(self, moment: str) -> None:
        if moment not in self.killed:
            self.killed.append(moment)
            os.kill(self._pids[self._worker], signal.SIGKILL)
            self._worker = 1 - self._worker


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return dict(load_model(checkpoint / "policy", "cpu", "float64")[0].named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1])
def test_workers_train_the_policy_and_may_die(tmp_path, monkeypatch, first):
    """The run is that of one process: the same tokens, and the same weights up to rounding, whatever is killed on the way."""
    from paceline.cli.train import trainer_class

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    fields = {"algorithm": "ppo", "steps": 6, "drafter": "learned",
              "drafter_budget": {"trial_share": 100.0, "shortest_s": 3.0, "longest_s": 3.0},
              "rollout": {"prompts": 2, "group_size": 8, "max_new_tokens": 200}, "strategy": "auto"}
    sleeps = first == 1  # then the other worker's engine has no weights when one dies during the update
    settings = config(tmp_path / "ray", **fields, cluster={"workers": 2}, sleep_during_update=sleeps)
    assert trainer_class(settings) is ClusterTrainer and trainer_class(config(tmp_path)) is Trainer
    killer = Killer(first)
    assert trainer_class(settings)(settings, callbacks=[killer]).run().status is RunStatus.COMPLETED
    assert killer.killed == ["generation", "drafter training", "update", "publish", "save"]
    Trainer(config(tmp_path / "one", **fields)).run()
    assert tokens(tmp_path / "ray") == tokens(tmp_path / "one")
    found, expected = (weights(tmp_path / run / "checkpoints" / "step-000006") for run in ("ray", "one"))
    assert all((found[name] - expected[name]).abs().max() < 1e-12 for name in expected)
    lines = [json.loads(line) for line in (tmp_path / "ray" / "metrics.jsonl").read_text().splitlines()]
    assert [line["grad_norm"] for line in lines] == pytest.approx(
        [json.loads(line)["grad_norm"] for line in (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()])
    assert all(line["cluster/publish_s"] > 0 for line in lines)
    events = [json.loads(line) for line in (tmp_path / "ray" / "timeline.jsonl").read_text().splitlines()]
    assert sum(event["event"] == "lost" for event in events) >= 4
    assert (tmp_path / "ray" / "checkpoints" / "step-000006" / "drafter").is_dir() and lines[-1]["step"] == 6
    assert any(event["event"] == "interval" and event["state"] == "updating" for event in events)
