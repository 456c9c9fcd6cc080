"""A step that raises: every request is untouched or ends with an error, once, and the engine goes on with the right tokens."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tiny import eagle, model

import paceline
from paceline import Engine, Rollout, SamplingParams, Strategy
from paceline.config import EngineConfig
from paceline.types import StepResult

ROOT = str(Path(paceline.__file__).parent)
JOBS = [
    ([5, 9, 9, 2, 40, 17, 3, 3, 8], SamplingParams(seed=1, max_new_tokens=7), 3),
    ([5, 9, 9, 2, 40, 17, 3, 3, 8, 11], SamplingParams(seed=2, max_new_tokens=5, raw_logprobs=True), 2),
    ([7, 8] * 6, SamplingParams(seed=3, max_new_tokens=12, temperature=0.3), 1),
    ([1], SamplingParams(seed=4, max_new_tokens=9, stop_token_ids=(3, 4, 5)), 1),
    ([4] * 19, SamplingParams(seed=5, max_new_tokens=5, stop="never"), 1),
]


class Injected(Exception):
    """Raised on purpose."""


class Words:
    """A tokenizer: enough of one for stop strings and texts."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, token_ids))


def make(strategy: Any, pipelined: bool, kv_tokens: int = 120) -> Engine:
    engine = Engine(model("qwen3"), Words(), eagle("qwen3", "eagle3"), strategy,
                    EngineConfig(max_batch=5, max_rows=24, page_size=4, kv_tokens=kv_tokens, capture=(-1,)))
    engine.planner.pipelined = pipelined
    return engine


@cache
def reference() -> dict[tuple[int, int], Rollout]:
    engine = Engine(model("qwen3"), Words(), None, "off", EngineConfig(kernels="torch"))
    return {(job, r.sample): r for job, (prompt, params, n) in enumerate(JOBS)
            for r in engine.generate([prompt], params, n)[0].rollouts}


def add_all(engine: Engine) -> dict[int, tuple[int, int]]:
    return {request: (job, sample) for job, (prompt, params, n) in enumerate(JOBS)
            for sample, request in enumerate(engine.add(prompt, params, n))}


def run_through(engine: Engine, owner: dict[int, tuple[int, int]],
                step: Callable[[], StepResult] | None = None) -> tuple[dict[tuple[int, int], Rollout], int]:
    """Step until all is done, whatever steps raise. Returns the rollouts and the number of steps that raised."""
    got: dict[tuple[int, int], Rollout] = {}
    num_raised = 0
    for _ in range(600):
        if not engine.has_work:
            return got, num_raised
        try:
            finished = (step or engine.step)().finished
        except Injected:
            num_raised += 1
            finished = []
        engine.scheduler.pages.check_integrity()
        for rollout in finished:
            assert owner[rollout.request_id] not in got, "finished twice"
            got[owner[rollout.request_id]] = rollout
    raise AssertionError("the engine waits for ever")


def check(engine: Engine, got: dict[tuple[int, int], Rollout]) -> int:
    """Every request is there, right or with an error; nothing leaks; the engine serves the same again, all right. Returns the
    number of errors."""
    want = reference()
    assert got.keys() == want.keys(), "a request was lost"
    errors = 0
    for key, rollout in got.items():
        if rollout.finish_reason == "error":
            errors += 1
            assert "Injected" in (rollout.error or "")
        else:
            assert rollout.finish_reason == want[key].finish_reason
            assert rollout.token_ids == want[key].token_ids, f"{key}: wrong tokens"
        count = len(rollout.token_ids)
        assert rollout.token_ids == want[key].token_ids[:count], f"{key}: wrong tokens before the error"
        assert rollout.logprobs == pytest.approx(want[key].logprobs[:count], abs=1e-9)
        assert len(rollout.versions) == count and len(rollout.raw_logprobs or rollout.token_ids) == count
    stats = engine.stats()
    assert stats.free_pages == stats.total_pages and engine.planner.requests == {} and engine.drafting._max_missing == {}
    again, raised = run_through(engine, add_all(engine))
    assert raised == 0
    for key, rollout in again.items():
        assert rollout.token_ids == want[key].token_ids, f"{key}: wrong tokens afterwards"
    return errors


def failing(original: Callable[..., Any], at_call: int, afterwards: bool) -> Callable[..., Any]:
    """`original`, whose call number `at_call` raises: before it does anything, or when it has done everything."""
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at_call and not afterwards:
            raise Injected(f"in {original.__name__}\nand more")
        result = original(*args, **kwargs)
        if calls == at_call:
            raise Injected(f"after {original.__name__}")
        return result

    return wrapped


PHASES: dict[str, Callable[[Engine], tuple[Any, str]]] = {
    "select": lambda engine: (engine._control, "select"),
    "schedule": lambda engine: (engine.scheduler, "schedule"),
    "schedule: decode": lambda engine: (engine.scheduler, "_plan_decode"),
    "schedule: admission": lambda engine: (engine.scheduler, "_place"),
    "schedule: prefill": lambda engine: (engine.scheduler, "_plan_forced"),
    "schedule: pages": lambda engine: (engine.scheduler.pages, "allocate"),
    "schedule: draft tokens": lambda engine: (engine.scheduler, "_plan_nodes"),
    "plan": lambda engine: (engine.planner, "plan"),
    "plan: command": lambda engine: (engine.planner.control, "observes"),
    "plan: pages": lambda engine: (engine.planner, "_page_edits"),
    "execute": lambda engine: (engine.executor, "execute"),
    "prepare: slots": lambda engine: (engine.executor.state, "update"),
    "prepare: copies": lambda engine: (engine.executor.runner, "copy_pages"),
    "draft": lambda engine: (engine.drafting, "draft"),
    "draft: suffix starts": lambda engine: (engine.drafting.suffix, "start"),
    "draft: suffix": lambda engine: (engine.drafting.suffix, "draft"),
    "draft: learned": lambda engine: (engine.executor.learned, "draft"),
    "launch: layout": lambda engine: (engine.executor.rows, "build"),
    "launch: forward pass": lambda engine: (engine.executor.runner, "run"),
    "launch: sampling": lambda engine: (engine.executor.ops, "sample"),
    "launch: drafter's prefill": lambda engine: (engine.executor.learned, "read_forced"),
    "launch: drafters": lambda engine: (engine.drafting, "on_launch"),
    "launch: scheduler": lambda engine: (engine.scheduler, "on_launch"),
    "process": lambda engine: (engine, "_process"),
    "process: text": lambda engine: (engine.tokenizer, "decode"),
    "process: scheduler": lambda engine: (engine.scheduler, "on_complete"),
    "process: drafters": lambda engine: (engine.drafting, "on_complete"),
    "process: suffix": lambda engine: (engine.drafting.suffix, "extend_all"),
    "process: rollout": lambda engine: (engine, "_rollout"),
    "process: end": lambda engine: (engine.scheduler, "finish"),
    "process: statistics": lambda engine: (engine._counters, "record"),
    "process: selector": lambda engine: (engine._control, "record"),
}


@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_may_raise(phase, monkeypatch):
    total = 0
    for strategy, at_call, afterwards, pipelined in (("suffix:d3w2v6", 1, False, False), ("eagle:d2w2v4", 3, True, True)):
        engine = make(strategy, pipelined)
        owner = add_all(engine)
        target, name = PHASES[phase](engine)
        replaced = failing(getattr(target, name), at_call, afterwards)
        if hasattr(type(target), "__slots__"):  # a record without a dictionary: its class is changed instead
            monkeypatch.setattr(type(target), name, lambda self, *args, inner=replaced: inner(*args))
        else:
            monkeypatch.setattr(target, name, replaced, raising=True)
        got, raised = run_through(engine, owner)
        monkeypatch.undo()
        errors = check(engine, got)
        assert phase != "select" or errors == 0, "before a step begins nothing is touched"
        total += raised
    assert total >= 1, "nothing was injected"


class RandomSelector:
    """Another strategy at every step."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def __call__(self, view: Any) -> Strategy:
        drafter = self.rng.choice(["none", *view.available])
        return Strategy.OFF if drafter == "none" else Strategy(drafter, self.rng.randint(1, 4), self.rng.randint(1, 3), 6)


def raise_at_line(engine: Engine, owner: dict[int, tuple[int, int]], line: int) -> tuple[dict[tuple[int, int], Rollout], int]:
    """`run_through`, in which line number `line` that is executed by the engine's own modules raises."""
    count = 0
    folders = tuple(f"{ROOT}/{name}" for name in ("engine/", "cache/", "drafters/suffix.py"))

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(folders):
            return None
        if event == "line":
            count += 1
            if count == line:
                raise Injected(f"at {frame.f_code.co_filename}:{frame.f_lineno}")  # this also ends tracing
        return trace

    def step() -> StepResult:
        before = sys.gettrace()
        sys.settrace(trace if count < line else before)
        try:
            return engine.step()
        finally:
            sys.settrace(before)

    return run_through(engine, owner, step)


def at_random_lines(seeds: range) -> None:
    num_raised = errors = 0
    for seed in seeds:
        rng = random.Random(seed)
        engine = make(RandomSelector(rng), pipelined=rng.random() < 0.5, kv_tokens=rng.choice([60, 120, 400]))
        got, raised = raise_at_line(engine, add_all(engine), rng.randint(1, 5000))
        num_raised += raised
        errors += check(engine, got)
    assert num_raised > 0.7 * len(seeds) and errors > 0


def test_any_line_may_raise():
    at_random_lines(range(25))


@pytest.mark.slow
def test_any_line_may_raise_long():
    at_random_lines(range(1000, 1400))


def test_what_finished_in_the_step_that_raises_is_not_lost(monkeypatch):
    """The suffix drafter's steps process outputs first, and fail afterwards."""
    engine = make("suffix:d2w2v4", pipelined=True)
    (first,) = engine.add([1, 2], SamplingParams(max_new_tokens=3))
    engine.add([3, 4], SamplingParams(max_new_tokens=30))
    while len(engine.planner.requests[first].tokens) < 4:
        engine.step()
    real = engine.drafting.draft

    def draft(plan):
        if first not in engine.planner.requests:
            raise Injected
        return real(plan)

    monkeypatch.setattr(engine.drafting, "draft", draft)
    with pytest.raises(Injected):
        deque((engine.step() for _ in range(9)), maxlen=0)
    monkeypatch.undo()
    finished = [engine.step().finished for _ in range(2)]
    assert [[(r.request_id, r.finish_reason) for r in rollouts] for rollouts in finished] == [[(0, "length")], [(1, "error")]]


@pytest.mark.parametrize("afterwards", [False, True])
@pytest.mark.parametrize("at_call", [1, 2])
def test_requests_that_end_in_the_step_that_raises_are_not_lost(monkeypatch, at_call, afterwards):
    """Forgetting one of two requests that have ended fails, before or after it is forgotten."""
    engine = make("off", pipelined=False)
    engine.add([1, 2], SamplingParams(max_new_tokens=3), n=2)
    monkeypatch.setattr(engine.planner, "finish", failing(engine.planner.finish, at_call, afterwards))
    finished = []
    while engine.has_work:
        with suppress(Injected):
            finished += engine.step().finished
    assert sorted(r.request_id for r in finished) == [0, 1]
    assert [r.finish_reason for r in finished] == ["length", "length" if at_call == 2 else "error"]
    assert not engine.planner.requests and engine.scheduler.pages.num_available == engine.scheduler.pages.num_pages


def test_a_request_that_is_refused_in_the_step_that_raises_is_not_lost(monkeypatch):
    """Whether or not it is forgotten already, and waits no longer."""
    for afterwards in (False, True):
        engine = make("off", pipelined=False)
        (request,) = engine.add([1, 2], SamplingParams(max_new_tokens=3))
        monkeypatch.setattr(engine.planner, "finish", failing(engine.planner.finish, 1, afterwards))
        with pytest.raises(Injected):
            engine._guarded(lambda: engine._refuse(engine.planner.requests[request]))  # noqa: B023
        finished = [rollout for _ in range(3) for rollout in engine.step().finished]
        assert [r.finish_reason for r in finished] == ["error"] and "pages of the KV cache" in finished[0].error
        assert not engine.planner.requests and not engine.has_work


def test_an_interrupt_within_a_step_leaves_a_usable_engine(monkeypatch):
    engine = make("eagle:d3w2v6", pipelined=False)
    monkeypatch.setattr(engine.executor.runner, "run", lambda *args, **kwargs: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1, 2, 3]], n=8)
    monkeypatch.undo()
    assert engine.scheduler.pages.num_available == engine.scheduler.pages.num_pages and not engine.planner.requests
    prompt, params, n = JOBS[0]
    rollouts = engine.generate([prompt], params, n)[0].rollouts
    assert [r.token_ids for r in rollouts] == [reference()[0, i].token_ids for i in range(n)]


@pytest.mark.parametrize("top_k", [2**31, 2**40, 2**63])
def test_a_parameter_that_the_device_cannot_hold_is_refused_and_the_neighbour_is_right(top_k):
    with pytest.raises(ValueError, match="top_k"):
        SamplingParams(top_k=top_k)
    prompt, params, _ = JOBS[0]
    engine = make("suffix:d4w2v8", pipelined=False)
    admitted = engine.add(prompt, params, n=2)
    engine.step()
    (wrong,) = engine.add([2, 3], SamplingParams(max_new_tokens=5))
    object.__setattr__(engine.planner.requests[wrong].params, "top_k", top_k)  # as if validation had let it through
    neighbours = engine.add(prompt, params, n=3)
    finished: dict[int, Rollout] = {}
    num_raised = 0
    while engine.has_work:
        try:
            finished |= {r.request_id: r for r in engine.step().finished}
        except OverflowError:
            num_raised += 1
    assert num_raised == 1 and {finished[i].finish_reason for i in (wrong, *admitted)} == {"error"}
    right = [i for i, request in enumerate(neighbours) if finished[request].finish_reason != "error"]
    assert right, "those that were not admitted yet are served"
    for i in right:
        assert finished[neighbours[i]].token_ids == reference()[0, i].token_ids
