"""Drafter training on idle workers while others generate."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
from cluster.local import PARAMS, PROMPTS, assert_same, make_engine, run, submit, weights
from cluster.local_runtime import LocalRuntime
from safetensors.torch import save
from tiny import eagle

from paceline import SamplingParams
from paceline.cluster.coordinator import Coordinator
from paceline.cluster.messages import Add, EndTraining, StartTraining
from paceline.cluster.reports import DrafterTrained, Finished, StepSums, TrainingPreempted
from paceline.cluster.spot_group import Trainers, TrainingRound
from paceline.cluster.training import DrafterTraining
from paceline.cluster.types import PolicyConfig, WorkerState
from paceline.cluster.worker import Worker
from paceline.engine.migration import RequestState
from paceline.spot import SpotConfig, SpotTrainer, capture_layers


def make_training_cluster(num_workers: int = 3, max_trainers: int = 1) -> Coordinator:
    """Workers that report their drafter after every step."""
    layers = capture_layers(eagle("llama").config)
    config = SpotConfig(form="eagle", step_tokens=64, micro_batch_tokens=64)

    def make(worker, send):
        engine = make_engine("eagle:d3w2v4", capture=layers)
        return Worker(worker, engine, send, DrafterTraining(engine, config, publish_s=0.0))

    policy = PolicyConfig(reallocation=False, min_train_s=0.0, max_trainers=max_trainers)
    coordinator = Coordinator(LocalRuntime(num_workers, make, 2), policy, 0.0)
    coordinator.publish_policy(weights(), 0)
    return coordinator


def generate_long(coordinator: Coordinator) -> None:
    """One worker generates a long answer; the others have nothing to do."""
    params = SamplingParams(max_new_tokens=200, seed=1)
    run(coordinator, coordinator.submit([RequestState([3, 1, 4], params, 0, 0)], "long"))


def test_idle_workers_train_while_others_generate_and_the_drafter_reaches_every_worker():
    coordinator = make_training_cluster()
    policy = [p.clone() for p in coordinator.runtime.workers[0].engine.model.parameters()]
    assert_same(run(coordinator, submit(coordinator)))
    generate_long(coordinator)
    for _ in range(4):
        coordinator.step()
    check_training_was_recorded(coordinator)
    check_drafter_reaches_every_worker(coordinator)
    unchanged = coordinator.runtime.workers[0].engine.model.parameters()
    assert all(torch.equal(a, b) for a, b in zip(policy, unchanged, strict=True)), "the policy is left alone"


def check_training_was_recorded(coordinator: Coordinator) -> None:
    coordinator.timeline.close()
    intervals = [e for e in coordinator.timeline.events if e["event"] == "interval"]
    training = [e for e in intervals if e["state"] == "training"]
    busy = [e for e in intervals if e["state"] == "busy"]
    assert training, "no worker has trained"
    assert any(a["worker"] != b["worker"] and a["start"] < b["end"] and b["start"] < a["end"] for a in training for b in busy)
    assert coordinator.drafter_version >= 0 and coordinator.trained is not None
    assert coordinator.timeline.shares()["training"] > 0


def check_drafter_reaches_every_worker(coordinator: Coordinator) -> None:
    workers = list(coordinator.runtime.workers.values())
    wait_until(lambda: coordinator.step() or
               {worker.drafter_version for worker in workers} == {coordinator.drafter_version} != {-1})
    original = eagle("llama").fc.weight
    assert all(torch.equal(worker.engine.eagle.module.fc.weight, original) for worker in workers), "it is not used yet"
    coordinator.use_drafter()
    wait_until(lambda: coordinator.step() or not any(torch.equal(w.engine.eagle.module.fc.weight, original) for w in workers))
    drafters = [list(worker.engine.eagle.module.parameters()) for worker in workers]
    for other in drafters[1:]:
        assert all(torch.equal(a, b) for a, b in zip(drafters[0], other, strict=True))


def test_training_continues_on_another_worker_after_its_trainer_died():
    coordinator = make_training_cluster()
    run(coordinator, submit(coordinator))
    (long,) = coordinator.submit([RequestState([3, 1, 4], SamplingParams(max_new_tokens=200, seed=1), 0, 0)], "long")
    trainers, reported, found = [], [], {}
    for _ in range(400):
        found |= dict(coordinator.step())
        active = [w for w, worker in coordinator.runtime.workers.items() if worker.training.active]
        if active and coordinator.trained is None:
            time.sleep(0.01)  # for the thread that packs the drafter
        if active and coordinator.trained is not None and len(trainers) < 2 and active[0] not in trainers:
            reported.append(coordinator.trained.snapshot_metadata["progress"]["step"])
            trainers += active
            if len(trainers) == 1:
                coordinator.runtime.kill(active[0])
                coordinator.runtime.start = lambda worker: None
        if found:
            break
    assert len(trainers) == 2, "another worker trains"
    assert 0 < reported[0] < coordinator.trained.snapshot_metadata["progress"]["step"], "it went on from there"
    alone = make_engine()
    alone.add([3, 1, 4], SamplingParams(max_new_tokens=200), seeds=[1])
    expected = alone.step()
    while not expected.finished:
        expected = alone.step()
    assert found[long].token_ids == expected.finished[0].token_ids


def make_training_worker(send=lambda *message: None) -> Worker:
    """A worker that has answers to train on."""
    engine = make_engine("eagle:d3w2v4", capture=capture_layers(eagle("llama").config))
    worker = Worker(0, engine, send, DrafterTraining(engine, SpotConfig(form="eagle", step_tokens=64, micro_batch_tokens=64)))
    for group in engine.generate(PROMPTS, PARAMS, 2):
        for rollout in group.rollouts:
            worker.training.add(rollout.features, 0)
    return worker


def test_work_ends_training_within_one_micro_batch():
    worker = make_training_worker()
    worker.post(StartTraining(TrainingRound(1, (0,), "")))
    worker.step()
    assert worker.state is WorkerState.TRAINING
    worker.post(EndTraining())
    worker.step()
    report = worker.report()
    assert report.state is WorkerState.IDLE
    assert isinstance(report.events[0], TrainingPreempted)
    events, ends = report.events[1:], time.perf_counter() + 120
    while not events and time.perf_counter() < ends:
        worker.step()
        events += worker.report().events
    assert [type(event) for event in events] == [DrafterTrained]


def test_a_request_waits_for_the_micro_batch_under_way_and_for_nothing_else(monkeypatch):
    """The stated bound of pre-emption. Micro-batches, and the serialization of a drafter, end when this test says so."""
    began, micro_batches, packing = [], threading.Semaphore(0), threading.Event()
    monkeypatch.setattr("paceline.cluster.training.save", lambda tensors: packing.wait(60) and save(tensors))
    run_micro_batch = SpotTrainer._run_micro_batch

    def held_micro_batch(trainer):
        began.append(len(began))
        assert micro_batches.acquire(timeout=60)
        return run_micro_batch(trainer)

    monkeypatch.setattr(SpotTrainer, "_run_micro_batch", held_micro_batch)
    worker, stop, events = make_training_worker(), threading.Event(), []
    thread = threading.Thread(target=lambda: [worker.step() or time.sleep(0.001) for _ in iter(stop.is_set, True)])
    thread.start()
    try:
        for number in range(3):
            before = len(began)
            worker.post(StartTraining(TrainingRound(number, (0,), "")))
            wait_until(lambda count=before: len(began) == count + 1)
            micro_batches.release()
            wait_until(lambda count=before: len(began) == count + 2)
            worker.post(Add(number, 1, RequestState([3, 1, 4], SamplingParams(max_new_tokens=2, seed=number), 0, 0)))
            micro_batches.release()  # of the one under way; another would wait forever
            wait_until(lambda: events.extend(worker.report().events) or any(isinstance(event, Finished) for event in events))
            assert len(began) == before + 2, "no micro-batch begins after the request has come"
            assert [event.wait_s > 0 for event in events if isinstance(event, TrainingPreempted)] == [True]
            assert not any(isinstance(event, DrafterTrained) for event in events), "nothing waits for the drafter to be packed"
            events.clear()
    finally:
        stop.set()
        packing.set()
        micro_batches.release(1000)
        thread.join()


def wait_until(condition) -> None:
    ends = time.perf_counter() + 120
    while not condition():
        assert time.perf_counter() < ends, "it takes too long"
        time.sleep(0.002)


CONFIG = SpotConfig(form="eagle", step_tokens=64, micro_batch_tokens=64)


def make_training(prompts: list[list[int]]) -> DrafterTraining:
    """Drafter training with the answers to these prompts."""
    engine = make_engine("eagle:d3w2v4", capture=capture_layers(eagle("llama").config))
    training = DrafterTraining(engine, CONFIG, publish_s=1e9)
    for group in engine.generate(prompts, PARAMS, 2):
        for rollout in group.rollouts:
            training.add(rollout.features, 0)
    return training


def run_until(members: list[DrafterTraining], step: int) -> None:
    for _ in range(20_000):
        if all(member._trainer.progress.step >= step for member in members):
            return
        for member in members:
            if member._trainer.progress.step < step:
                member.run_micro_batch()
    raise AssertionError("they wait for each other")


def drafter_weights(training: DrafterTraining) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in training._trainer.parameters.values()])


def test_members_with_the_same_data_train_as_one_alone(tmp_path):
    alone, *members = (make_training(PROMPTS) for _ in range(3))
    alone.start(None, TrainingRound(1, (5,), ""), 5)
    for worker, member in enumerate(members):
        member.start(None, TrainingRound(1, (0, 1), str(tmp_path / "a")), worker)
    run_until([alone, *members], 4)
    for member in members:
        torch.testing.assert_close(drafter_weights(member), drafter_weights(alone), rtol=0, atol=1e-12)


def test_members_join_and_leave(tmp_path):
    """Whoever joins continues where the others are; gradients are averaged, so all have the same drafter though each has data of
    its own. One that leaves holds nobody up."""
    first, second, third = (make_training([prompt]) for prompt in PROMPTS[:3])
    first.start(None, TrainingRound(1, (0,), ""), 0)
    run_until([first], 3)
    for worker, member in enumerate((first, second)):
        member.start(None, TrainingRound(2, (0, 1), str(tmp_path / "b")), worker)
    run_until([first, second], 6)
    assert torch.equal(drafter_weights(first), drafter_weights(second))
    first.run_micro_batch()  # it waits for the second one now
    before, reported = drafter_weights(second), []
    first.stop()
    second.stop()
    wait_until(lambda: first.report_trained(reported.append) or reported)
    assert second._packing is None, "the first one reports the drafter"
    third.start(None, TrainingRound(3, (1, 2), str(tmp_path / "c")), 2)
    second.start(None, TrainingRound(3, (1, 2), str(tmp_path / "c")), 1)
    run_until([second, third], 7)
    assert torch.equal(drafter_weights(second), drafter_weights(third)) and not torch.equal(drafter_weights(second), before)


def test_a_member_that_is_gone_ends_the_round(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.cluster.spot_group._TIMEOUT", timedelta(seconds=1))
    training = make_training(PROMPTS)
    training.start(None, TrainingRound(1, (0, 1), str(tmp_path / "d")), 0)
    ends = time.perf_counter() + 120
    while training.active and time.perf_counter() < ends:
        training.run_micro_batch()
    assert not training.active


def test_a_member_goes_on_alone_if_the_other_is_gone_before_their_group_is_formed(tmp_path):
    training = make_training(PROMPTS)
    training.start(None, TrainingRound(1, (0, 1), str(tmp_path / "e")), 0)
    assert training.run_micro_batch() is None, "it waits for the other one"
    training.start(None, TrainingRound(2, (0,), ""), 0)
    assert training.run_micro_batch() is not None
    training.stop()


def test_rounds_begin_when_workers_join_or_leave():
    trainers = Trainers()
    rendezvous = iter("abc")
    assert trainers.new_rounds(lambda: next(rendezvous)) == []
    trainers.add(4)
    assert trainers.new_rounds(lambda: next(rendezvous)) == [(4, TrainingRound(1, (4,), ""))]
    trainers.add(2)
    two = TrainingRound(2, (4, 2), "a")
    assert trainers.new_rounds(lambda: next(rendezvous)) == [(4, two), (2, two)]
    trainers.remove(4, 2)
    trainers.add(4)
    trainers.remove(4, 2)  # said before it was added again
    assert trainers.new_rounds(lambda: next(rendezvous))[0][1].members == (2, 4)
    assert trainers.new_rounds(lambda: next(rendezvous)) == []


def test_idle_workers_train_together_while_another_generates():
    """A group takes real time to form, on a busy machine longer than an answer: then there is another one."""
    coordinator, together = make_training_cluster(max_trainers=3), 0
    run(coordinator, submit(coordinator))
    for seed in range(20):
        coordinator.submit([RequestState([3, 1, 4], SamplingParams(max_new_tokens=100, seed=seed), 0, 0)], f"long {seed}")
        while not coordinator.step():
            active = [worker.training for worker in coordinator.runtime.workers.values() if worker.training.active]
            together += len(active) == 2 and all(training._group is not None and training._forming is None for training in active)
        if together and coordinator.trained is not None:
            return
    raise AssertionError("no two workers have trained together")


@pytest.mark.slow
def test_more_draft_tokens_are_accepted_after_spot_training():
    def accept_lengths(max_trainers: int) -> list[float]:
        layers = capture_layers(eagle("llama").config)
        config = SpotConfig(form="eagle", step_tokens=256, micro_batch_tokens=256, lr=3e-3, temperature=0.5)

        def make(worker, send):
            engine = make_engine("eagle:d3w2v4", capture=layers)
            return Worker(worker, engine, send, DrafterTraining(engine, config, publish_s=0.5))

        policy = PolicyConfig(reallocation=False, min_train_s=0.0, max_trainers=max_trainers)
        coordinator = Coordinator(LocalRuntime(3, make, 2), policy, 0.0)
        coordinator.publish_policy(weights(), 0)
        found = []
        for batch in range(5):
            coordinator.sums = StepSums()
            ids = []
            for k in range(6):
                length, seed = 240 if k == 0 else 30, 1000 * batch + 10 * k
                params = [SamplingParams(max_new_tokens=length, seed=seed + sample, temperature=0.5) for sample in range(2)]
                states = [RequestState([k + 1, k + 2], each, 0, sample) for sample, each in enumerate(params)]
                ids += coordinator.submit(states, str(k))
            run(coordinator, ids, rounds=4000)
            counters = coordinator.sums.counters
            found.append(counters.generated_tokens / counters.verifications)
        return found

    frozen, trained = accept_lengths(0), accept_lengths(1)
    assert sum(trained[2:]) / 3 > sum(frozen[2:]) / 3 + 0.04
