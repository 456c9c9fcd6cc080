"""Commands are all that an executor is told: recorded ones, replayed on a fresh executor, give the same outputs bit for bit."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import numpy as np
import pytest
from tiny import VOCAB, captured, eagle, model

from paceline import Engine, SamplingParams, Strategy
from paceline.config import EngineConfig
from paceline.engine.command import ImportPages, LoadWeights, StepCommand, StepOutputs
from paceline.engine.executor import Executor
from paceline.engine.request import Status
from paceline.models.state_dict import export_state
from paceline.types import StepView

STRATEGIES = ["off", "suffix:d4w2v6", "eagle:d3w2v6", "eagle:d1w1v1"]


class Recorder:
    """Records the commands of an engine, and what its steps gave."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self._execute = engine, engine.executor.execute
        self.commands: list[Any] = []
        self.outputs: list[Any] = []
        engine.executor.execute = self  # type: ignore[method-assign]

    def __call__(self, command: Any) -> Any:
        self.commands.append(_kept(command))
        found = self._execute(command)
        self.outputs.append(found)
        return found


def _kept(command: Any) -> Any:
    """A copy that stays as it is. Steps are pickled, as if they were sent to another process."""
    if isinstance(command, StepCommand):
        return pickle.loads(pickle.dumps(command))
    if isinstance(command, LoadWeights):
        return LoadWeights({name: tensor.clone() for name, tensor in dict(command.state).items()})
    if isinstance(command, ImportPages):
        return ImportPages(command.pages, [tensor.clone() for tensor in command.tensors])
    return command


def make(kind: str, policy: Any, rng: random.Random, capture: bool) -> Engine:
    config = EngineConfig(page_size=4, max_batch=5, max_rows=48, kv_tokens=260, on_update="recompute", profile=False)
    engine = Engine(policy, None, copy.deepcopy(eagle(kind)), lambda view: choose(rng, view), config)
    if capture:
        captured(engine, (1, 4, 16, 40))
    return engine


def choose(rng: random.Random, view: StepView) -> Strategy:
    return Strategy.parse(rng.choice(STRATEGIES))


def run(recorders: list[Recorder], rng: random.Random, steps: int) -> None:
    """Requests arrive, share prefixes, pause and go on, are pre-empted, aborted and moved; weights change, and engines sleep, are
    warmed up and profiled."""
    state = export_state(recorders[0].engine.model)
    shared = [rng.randrange(VOCAB) for _ in range(14)]
    for number in range(steps):
        engine, other = (each.engine for each in rng.sample(recorders, 2))
        if rng.random() < 0.4:
            prompt = shared[: rng.randrange(1, 15)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))]
            extra = {"repetition_penalty": 1.3, "min_tokens": 3, "logit_bias": {5: 1.0}} if rng.random() < 0.2 else {}
            if rng.random() < 0.4:
                extra |= {"pauses": True, "max_turn_tokens": rng.randrange(1, 9)}
            params = SamplingParams(max_new_tokens=rng.randrange(3, 30), seed=number, temperature=rng.choice([0.0, 1.0]),
                                    raw_logprobs=rng.random() < 0.2, **extra)
            engine.add(prompt, params, n=rng.randrange(1, 4))
        engine.step()
        other.step()
        for each in (engine, other):
            for paused in [found.id for found in each.planner.requests.values() if found.status is Status.PAUSED]:
                if rng.random() < 0.4 and not each.resume(paused, [rng.randrange(VOCAB) for _ in range(rng.randrange(9))]):
                    each.end(paused)
        running = engine.scheduler.running
        if running and rng.random() < 0.1:
            engine._drain()
            if engine.scheduler.running:
                engine.scheduler.preempt(engine.scheduler.running[-1])
        if running and rng.random() < 0.1:
            engine.abort([running[0].id])
        if engine.scheduler.running and rng.random() < 0.1:
            moved = engine.migration.export_request(engine.scheduler.running[0].id, engine.version)
            if moved is not None:
                other.migration.import_request(moved, other.version)
        if rng.random() < 0.05:
            engine.update_weights({name: tensor * (1 + 0.1 * rng.random()) for name, tensor in state.items()})
        if rng.random() < 0.05:
            engine.update_drafter(eagle("llama", seed=rng.randrange(9)), version=0)
        if number == steps // 2:
            engine.warm_up()
            engine.dummy_steps.run_catch_up(2, 3)
            with engine.dummy_steps.lent_slots(3, 8) as slots:
                for strategy in map(Strategy.parse, STRATEGIES):
                    engine.dummy_steps.run_with_context(slots, strategy, 8)
                    engine.dummy_steps.run_drafter(3, strategy)
        if rng.random() < 0.05:
            engine.sleep(weights=rng.random() < 0.5)
            engine.wake()


def replay(recorder: Recorder, fresh: Executor, exactly: bool) -> int:
    """Number of steps, all of which gave the same as before."""
    count = 0
    for command, before in zip(recorder.commands, recorder.outputs, strict=True):
        after = fresh.execute(command)
        if isinstance(command, StepCommand):
            assert_same(before.read(), after.read(), len(command.slots), exactly)
            count += 1
    return count


def assert_same(a: StepOutputs, b: StepOutputs, num_requests: int, exactly: bool) -> None:
    counts = np.ones(num_requests, int) if a.counts is None else a.counts[:num_requests]
    assert b.counts is None or np.array_equal(counts, b.counts[:num_requests])
    valid = np.arange(min(a.tokens.shape[1], b.tokens.shape[1])) < counts[:, None]
    for ours, theirs in zip(a[:3], b[:3], strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            one, other = (found[:num_requests, : valid.shape[1]][valid] for found in (ours, theirs))
            same = np.array_equal if exactly or one.dtype == np.int64 else np.allclose
            assert same(one, other, equal_nan=True)


@pytest.mark.parametrize(("seed", "capture"), [(0, False), (1, True), *(
    pytest.param(seed, seed % 2 == 0, marks=pytest.mark.slow) for seed in range(2, 22))])
@pytest.mark.filterwarnings("ignore:the drafter")
def test_recorded_commands_replay_bit_for_bit(seed, capture):
    """With `capture`, the fresh executor pads its steps and captures them, which may change the last bit of a sum."""
    rng = random.Random(seed)
    policies = [copy.deepcopy(model()) for _ in range(4)]
    engines = [make("llama", policy, rng, capture=False) for policy in policies[:2]]
    fresh = [make("llama", policy, rng, capture) for policy in policies[2:]]
    recorders = [Recorder(engine) for engine in engines]
    run(recorders, rng, 60)
    preemptions = sum(engine.stats().preemptions for engine in engines)
    cached = sum(engine.stats().cached_prompt_tokens for engine in engines)
    assert cached > 0 and (preemptions > 0 or seed > 1)
    for recorder, twin in zip(recorders, fresh, strict=True):
        assert replay(recorder, twin.executor, exactly=not capture) > 20
    kinds = {type(command).__name__ for recorder in recorders for command in recorder.commands}
    assert kinds >= {"StepCommand", "LoadWeights", "LoadDrafter", "Sleep", "Wake", "ExportPages", "ImportPages", "LendSlots",
                     "ReturnSlots", "DummyStep", "DummyDraft", "DummyCatchUp"} or seed > 0
