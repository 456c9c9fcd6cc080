"""No request waits for ever: cached prefixes give way, what can never run ends with an error, and no progress is an error."""

from __future__ import annotations

import random
from collections import deque

import pytest
from tiny import VOCAB, model

from paceline import Engine, SamplingParams
from paceline.cache.pages import PageAllocator
from paceline.config import EngineConfig
from paceline.engine.request import Request
from paceline.engine.scheduler import Scheduler
from paceline.types import Decision, EngineStalledError, Strategy

PROMPT = [1 + i % (VOCAB - 1) for i in range(50)]


def answers(engine: Engine, prompts: list[list[int]], n: int, most_steps: int, **params) -> list[list[int]]:
    """The tokens of all answers, which must be there after `most_steps` steps."""
    steps = 0

    def count(result) -> None:
        nonlocal steps
        steps += 1
        assert steps <= most_steps, "the engine waits for ever"

    groups = engine.generate(prompts, SamplingParams(**params), n, on_step=count)
    assert all(r.error is None for group in groups for r in group.rollouts)
    return [r.token_ids for group in groups for r in group.rollouts]


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("strategy", ["off", "suffix:d4w2v8"])
def test_a_cached_prefix_gives_way_to_a_request_that_needs_all_pages(strategy, pipelined):
    engine = Engine(model(), strategy=strategy, config=EngineConfig(page_size=16, kv_tokens=64))
    engine.planner.pipelined = pipelined
    got = answers(engine, [PROMPT], 2, 100, max_new_tokens=10, seed=3)
    assert got == answers(Engine(model(), drafter=None, strategy="off"), [PROMPT], 2, 100, max_new_tokens=10, seed=3)
    engine.scheduler.pages.check_integrity()


@pytest.mark.parametrize("num_pages", [1, 2, 3])
@pytest.mark.parametrize("page_size", [2, 5, 16])
def test_every_prompt_length_runs_in_a_cache_that_just_holds_it(page_size, num_pages):
    engine = Engine(model(), strategy="off", config=EngineConfig(page_size=page_size, kv_tokens=num_pages * page_size))
    for length in {1, *(size for end in range(1, num_pages + 1) for size in range(end * page_size - 2, end * page_size + 2))}:
        if not 1 <= length < num_pages * page_size:
            continue
        rollouts = engine.generate([PROMPT[:length]], SamplingParams(max_new_tokens=300), n=3)[0].rollouts
        assert {len(rollout.token_ids) for rollout in rollouts} == {num_pages * page_size - length}
    assert engine.stats().free_pages == engine.stats().total_pages


def test_random_requests_in_tiny_caches_are_all_scheduled_to_their_end():
    """The scheduler alone, with made-up tokens: two thousand caches that hardly hold one request."""
    for seed in range(2000):
        rng = random.Random(seed)
        page_size, num_pages = rng.randint(1, 8), rng.randint(1, 8)
        limit = page_size * num_pages
        batch = rng.randint(1, 4)
        scheduler = Scheduler(PageAllocator(num_pages, page_size), batch, batch + rng.randint(0, 9), max(2, limit))
        if limit < 2:
            continue
        number = 0
        for group in range(rng.randint(1, 5)):
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, limit - 1))]
            for sample in range(rng.randint(1, 3)):
                scheduler.add(Request(number, group, sample, prompt, SamplingParams(max_new_tokens=9), frozenset()))
                number += 1
        steps = 0
        while scheduler.has_work:
            steps += 1
            assert steps < 3000, f"seed {seed}: requests wait for ever"
            plan = scheduler.schedule(Decision(Strategy("suffix", 4, 2, 4) if rng.random() < 0.5 else Strategy.OFF))
            assert plan, f"seed {seed}: nothing was scheduled"
            scheduler.on_launch(plan, plan.num_nodes)
            scheduler.on_complete(plan, plan.num_nodes)
            for request, nodes in zip(plan.decode, plan.num_nodes, strict=True):
                request.tokens += [rng.randrange(2) for _ in range(rng.randint(1, 1 + nodes))]
                request.num_computed = len(request.tokens) - 1
                if len(request.tokens) >= min(request.max_tokens, scheduler.max_length):
                    scheduler.finish(request)
            scheduler.pages.check_integrity()


def test_what_can_never_fit_ends_with_an_error_and_the_others_go_on():
    """A request that has more tokens than the cache holds, as one that comes from an engine with a larger cache."""
    engine = Engine(model(), strategy="off", config=EngineConfig(page_size=16, kv_tokens=64))
    params = SamplingParams(max_new_tokens=4)
    first, large, last = (engine.add(prompt, params)[0] for prompt in (PROMPT[:20], PROMPT, PROMPT[20:30]))
    engine.planner.requests[large].tokens += [1] * 30
    finished = {}
    while engine.has_work:
        finished |= {rollout.request_id: rollout for rollout in engine.step().finished}
    assert [finished[i].finish_reason for i in (first, large, last)] == ["length", "error", "length"]
    assert finished[large].error == "request 1: its 80 tokens need 5 pages of the KV cache, which has 4"
    assert engine.stats().free_pages == 4


def test_a_request_waits_for_pages_that_somebody_else_holds():
    """Pages may be reserved for a request that arrives from elsewhere: no reason to give up, until it takes too long."""
    engine = Engine(model(), strategy="off", config=EngineConfig(page_size=16, kv_tokens=64))
    reserved = engine.scheduler.pages.allocate(1)
    assert reserved is not None
    (request,) = engine.add(PROMPT, SamplingParams(max_new_tokens=4))
    for _ in range(300):
        assert engine.step().finished == []
    engine._watchdog.patience_s = 0.0
    with pytest.raises(EngineStalledError, match=r"0 requests running, 1 waiting, 3 of 4 pages available; request 0: waiting"):
        engine.step()
    engine.scheduler.pages.release(reserved)
    finished = [rollout for _ in range(9) for rollout in engine.step().finished]
    assert [(r.request_id, r.finish_reason) for r in finished] == [(request, "length")]


def test_no_progress_is_an_error_that_names_the_state(monkeypatch):
    """A scheduler that admits a request and then forgets it, as a bug might."""
    engine = Engine(model(), strategy="off", config=EngineConfig(max_batch=4))
    engine._watchdog.patience_s = 0.0
    ids = engine.add([1, 2, 3], SamplingParams(max_new_tokens=20), n=2)
    engine.step()
    engine.step()
    monkeypatch.setattr(engine.scheduler, "_plan_decode", lambda plan: [])
    with pytest.raises(EngineStalledError, match=r"no token in \d+ steps: 2 requests running, 0 waiting, \d+ of \d+ pages"):
        deque((engine.step() for _ in range(10_000)), maxlen=0)
    monkeypatch.undo()
    finished = []
    while engine.has_work:
        finished += engine.step().finished
    assert [len(rollout.token_ids) for rollout in finished] == [20, 20] and {r.request_id for r in finished} == set(ids)


def test_a_long_prefill_is_progress():
    engine = Engine(model(), strategy="off", config=EngineConfig(max_batch=1, max_rows=1, kv_tokens=256))
    rollout = engine.generate([[1 + i % 60 for i in range(250)]], SamplingParams(max_new_tokens=2))[0].rollouts[0]
    assert len(rollout.token_ids) == 2 and engine.stats().steps >= 250
