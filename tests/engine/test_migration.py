"""Requests move between engines in the middle of an answer; tokens, log-probabilities and features are those of one engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import captured, eagle, model

from paceline import Engine, SamplingParams, Strategy
from paceline.config import EngineConfig
from paceline.engine.migration import KvPages, RequestState

STRATEGIES = ["off", "suffix:d4w2v6", "eagle:d3w2v4"]
PROMPTS = [[5, 9, 9, 2, 40, 17, 3, 3, 8], [1], [7, 7, 7, 30, 12]]
PARAMS = SamplingParams(max_new_tokens=40, seed=3, raw_logprobs=True)


def make_engine(strategy: str = "off", **options) -> Engine:
    config = EngineConfig(**{"page_size": 4, "kv_tokens": 512, "max_batch": 6, "kernels": "torch", "capture": (-1,), **options})
    return Engine(model("llama"), None, eagle("llama"), Strategy.parse(strategy), config)


def finish(*engines: Engine) -> dict[int, list]:
    """Run all engines to the end. Rollouts by seed."""
    found = {}
    while any(engine.has_work for engine in engines):
        for engine in engines:
            if engine.has_work:
                found |= {rollout.seed: rollout for rollout in engine.step().finished}
    for engine in engines:
        engine.scheduler.pages.check_integrity()
        assert not engine.planner.requests
    return found


def expected(strategy: str = "off") -> dict[int, list]:
    engine = make_engine(strategy)
    for prompt in PROMPTS:
        engine.add(prompt, PARAMS, 2)
    return finish(engine)


def same(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for seed in a:
        assert a[seed].token_ids == b[seed].token_ids
        np.testing.assert_allclose(a[seed].logprobs, b[seed].logprobs, rtol=0, atol=1e-12)
        np.testing.assert_allclose(a[seed].raw_logprobs, b[seed].raw_logprobs, rtol=0, atol=1e-12)
        assert a[seed].versions == b[seed].versions
        torch.testing.assert_close(a[seed].features.features, b[seed].features.features, rtol=0, atol=1e-10)


def move(source: Engine, target: Engine, request_id: int, steps_between: int = 2) -> int | None:
    """Two stages, with steps of both engines between them."""
    pages = source.migration.export_pages(request_id)
    reservation = None if pages is None else target.migration.reserve(pages)
    for _ in range(steps_between):
        source.step()
        target.step()
    state = source.migration.export_request(request_id, source.version, reservation.num_tokens if reservation else 0)
    if state is None:
        if reservation is not None:
            target.migration.release(reservation)
        return None
    return target.migration.import_request(state, target.version, reservation)


@pytest.mark.parametrize(("strategy", "pipelined"), [*((strategy, False) for strategy in STRATEGIES), ("off", True),
                                                      ("eagle:d3w2v4", True)])
def test_a_moved_request_continues_token_for_token(strategy, pipelined):
    source, target = make_engine(strategy), make_engine(strategy)
    if pipelined:
        for engine in (source, target):
            captured(engine, (4, 8, 16, 32, 64))
    ids = [i for prompt in PROMPTS for i in source.add(prompt, PARAMS, 2)]
    finished = {}
    for _ in range(6):
        finished |= {rollout.seed: rollout for rollout in source.step().finished}
    assert not finished
    for request_id in ids[::2]:
        moved = move(source, target, request_id, steps_between=0)
        assert moved is not None
        assert target.planner.requests[moved].slot >= 0, "it is not prefilled again"
    assert target.stats().prompt_tokens == 0
    same(finish(source, target), expected(strategy))


def test_full_pages_travel_while_the_request_generates():
    source, target = make_engine(), make_engine()
    (request_id,) = source.add(PROMPTS[0], PARAMS, 1)
    alone = make_engine()
    alone.add(PROMPTS[0], PARAMS, 1)
    for _ in range(12):
        source.step()
    pages = source.migration.export_pages(request_id)
    assert pages.num_tokens == 20 and pages.num_bytes > 0
    reservation = target.migration.reserve(pages)
    for _ in range(5):
        source.step()
    state = source.migration.export_request(request_id, 0, pages.num_tokens)
    assert state.kv.num_tokens == len(state.prompt_ids) + len(state.output_ids) - 1 - 20
    target.migration.import_request(state, 0, reservation)
    same(finish(source, target), finish(alone))


def test_the_drafters_cache_travels_too():
    """The learned drafter drafts the same trees on the other engine: the same number of draft tokens is accepted."""
    source, target, alone = (make_engine("eagle:d2w30v40") for _ in range(3))
    (request_id,) = source.add(PROMPTS[0], PARAMS, 1)
    alone.add(PROMPTS[0], PARAMS, 1)
    for _ in range(4):
        source.step()
    move(source, target, request_id, steps_between=0)
    finish(source, target)
    finish(alone)
    assert source.stats().accepted + target.stats().accepted == alone.stats().accepted
    assert alone.stats().accepted > 0
    assert source.stats().verifications + target.stats().verifications == alone.stats().verifications


def test_a_drafter_that_was_off_catches_up_on_the_other_engine():
    """It drafts there as if it had never missed anything, also if it was switched on between the two stages."""
    on, off = Strategy.parse("eagle:d2w30v40"), Strategy.OFF
    accepted = []
    for moves in (False, True):
        source, target = make_engine("eagle:d2w30v40"), make_engine("eagle:d2w30v40")
        (request_id,) = source.add(PROMPTS[0], PARAMS, 1)
        for _ in range(14):
            source.step(off)
        if moves:
            pages = source.migration.export_pages(request_id)
            assert pages.num_tokens == 20 and pages.num_drafted <= 9
            reservation = target.migration.reserve(pages)
        source.step(on)
        if moves:
            target.migration.import_request(source.migration.export_request(request_id, 0, 20), 0, reservation)
        finish(source, target)
        accepted.append(source.stats().accepted + target.stats().accepted)
    assert accepted[0] == accepted[1] > 0


def test_a_new_request_and_one_whose_worker_died_are_states_without_pages():
    alone = make_engine()
    ids = alone.add(PROMPTS[0], PARAMS, 2)
    seeds = [alone.planner.requests[i].params.seed for i in ids]
    reference = finish(alone)
    engine = make_engine()
    params = [SamplingParams(max_new_tokens=40, seed=seed, raw_logprobs=True) for seed in seeds]
    engine.migration.import_request(RequestState(PROMPTS[0], params[0], 0, 0), 0)
    done = reference[seeds[1]]
    engine.migration.import_request(RequestState(
        PROMPTS[0], params[1], 0, 1, done.token_ids[:9], done.logprobs[:9], done.raw_logprobs[:9], done.versions[:9]), 0)
    same(finish(engine), reference)


def test_without_room_the_request_is_prefilled():
    source, target = make_engine(), make_engine(max_batch=1)
    (request_id,) = source.add(PROMPTS[0], PARAMS, 1)
    target.add(PROMPTS[1], PARAMS, 1)
    for _ in range(12):
        source.step()
        target.step()
    pages = source.migration.export_pages(request_id)
    assert target.migration.reserve(pages) is None
    state = source.migration.export_request(request_id, 0)
    moved = target.migration.import_request(state, 0)
    assert target.planner.requests[moved].slot == -1
    alone = make_engine()
    alone.add(PROMPTS[0], PARAMS, 1)
    alone.add(PROMPTS[1], PARAMS, 1)
    same(finish(source, target), finish(alone))


def test_pages_whose_process_has_died_are_computed_again():
    """Handles of tensors can be opened only while the process lives that has them."""
    def gone():
        raise ConnectionRefusedError("its process has ended")

    source, target = make_engine(), make_engine()
    ids = [i for prompt in PROMPTS for i in source.add(prompt, PARAMS, 2)]
    for _ in range(6):
        source.step()
    pages = source.migration.export_pages(ids[0])
    handles = [(gone, ())] * len(pages.arrays)
    assert target.migration.reserve(KvPages(pages.num_tokens, handles)) is None
    for request_id, reservation in ((ids[0], target.migration.reserve(pages)), (ids[2], None)):
        state = source.migration.export_request(request_id, 0, reservation.num_tokens if reservation else 0)
        state.kv = KvPages(state.kv.num_tokens, handles)
        assert not target.migration.is_running(target.migration.import_request(state, 0, reservation))
    same(finish(source, target), expected())


def test_pages_of_another_policy_version_are_not_used():
    source, target = make_engine(), make_engine()
    (request_id,) = source.add(PROMPTS[0], PARAMS, 1)
    for _ in range(12):
        source.step()
    target.version = 1
    moved = target.migration.import_request(source.migration.export_request(request_id, 0), 1)
    assert target.planner.requests[moved].slot == -1


def test_a_request_that_has_ended_does_not_move():
    engine = make_engine()
    (request_id,) = engine.add([1], SamplingParams(max_new_tokens=2), 1)
    finish(engine)
    assert engine.migration.export_pages(request_id) is None
    assert engine.migration.export_request(request_id, 0) is None


def test_answers_of_other_engines_help_the_suffix_drafter():
    first, second, alone = (make_engine("suffix:d4w2v6") for _ in range(3))
    rollout = first.generate([PROMPTS[0]], PARAMS)[0].rollouts[0]
    second.drafting.learn_text(PROMPTS[0], rollout.token_ids)
    for engine in (second, alone):
        engine.generate([PROMPTS[0]], PARAMS)
    assert second.stats().accepted > alone.stats().accepted


JOURNEYS = st.sampled_from(STRATEGIES), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 3)), max_size=12)


@settings(max_examples=4)
@given(*JOURNEYS)
def test_any_journey_gives_the_same_tokens(strategy, journey):
    travel(strategy, journey)


@pytest.mark.slow
@settings(max_examples=60, derandomize=False)
@given(*JOURNEYS)
def test_any_journey_gives_the_same_tokens_thoroughly(strategy, journey):
    travel(strategy, journey)


def travel(strategy: str, journey: list[tuple[int, int, int]]) -> None:
    """Moves requests between three engines, with steps before and during each move."""
    engines = [make_engine(strategy, kv_tokens=160), make_engine(strategy, max_batch=3), make_engine("off")]
    ids = [request_id for prompt in PROMPTS for request_id in engines[0].add(prompt, PARAMS, 2)]
    places = {i: (0, request_id) for i, request_id in enumerate(ids)}
    finished = {}
    for which, steps, between in journey:
        for engine in engines:
            for _ in range(steps):
                finished |= {rollout.seed: rollout for rollout in engine.step().finished}
        at, request_id = places[which]
        to = (at + 1 + between % 2) % 3
        if request_id not in engines[at].planner.requests:
            continue
        moved = None
        pages = engines[at].migration.export_pages(request_id)
        reservation = None if pages is None else engines[to].migration.reserve(pages)
        for engine in engines:
            for _ in range(between):
                finished |= {rollout.seed: rollout for rollout in engine.step().finished}
        state = engines[at].migration.export_request(request_id, 0, reservation.num_tokens if reservation else 0)
        if state is not None:
            moved = engines[to].migration.import_request(state, 0, reservation)
        elif reservation is not None:
            engines[to].migration.release(reservation)
        if moved is not None:
            places[which] = (to, moved)
    same(finished | finish(*engines), expected("off"))


def test_pages_are_plain_bytes():
    engine = make_engine()
    (request_id,) = engine.add(PROMPTS[0], PARAMS, 1)
    for _ in range(6):
        engine.step()
    pages = engine.migration.export_pages(request_id)
    assert isinstance(pages, KvPages) and all(array.dtype == np.uint8 for array in pages.arrays)


def test_reserved_pages_survive_a_step_that_raises(monkeypatch):
    """The target's own requests end with an error; the request that follows finds its pages."""
    source, target = make_engine(), make_engine()
    (request_id,) = source.add(PROMPTS[0], PARAMS, 1)
    target.add(PROMPTS[1], PARAMS, 1)
    for _ in range(12):
        source.step()
        target.step()
    pages = source.migration.export_pages(request_id)
    reservation = target.migration.reserve(pages)
    with monkeypatch.context() as broken:
        broken.setattr(target.executor.runner, "run", lambda *args, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            target.step()
    moved = target.migration.import_request(source.migration.export_request(request_id, 0, pages.num_tokens), 0, reservation)
    assert target.planner.requests[moved].slot >= 0 and not target.migration.reserved_pages
    found = finish(source, target)
    alone = make_engine()
    alone.add(PROMPTS[0], PARAMS, 1)
    same({seed: rollout for seed, rollout in found.items() if rollout.error is None}, finish(alone))


def test_a_request_that_is_preempted_before_its_first_step_here_is_prefilled():
    """It came with its pages, and loses them at once, as when weights are replaced: its slot begins with what was prefilled."""
    prompt, params = [5, 9, 9, 2, 40, 1, 7, 30], SamplingParams(seed=3, max_new_tokens=20)
    wanted = Engine(model(), None, "none", "off").generate([prompt], params)[0].rollouts[0].token_ids
    source, target = (Engine(model(), None, "none", "off", EngineConfig(max_rows=5, max_batch=2)) for _ in range(2))
    (request,) = source.add(prompt, params)
    while len(source.planner.requests[request].output_ids) < 6:
        source.step()
    target.migration.import_request(source.migration.export_request(request, 0), 0)
    target.scheduler.preempt_all()
    found = []
    while target.has_work:
        found += target.step().finished
    assert found[0].token_ids == wanted
