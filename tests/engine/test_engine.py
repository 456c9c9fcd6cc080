"""What users of the engine rely on beyond the contract: prefix sharing, limits, features, errors, no leaks."""

from __future__ import annotations

import gc
import itertools
import random
import time
import weakref
from collections import deque

import numpy as np
import pytest
import torch
from tiny import CONFIGS, VOCAB, eagle, model

from paceline import Engine, SamplingParams, Strategy
from paceline.config import EngineConfig
from paceline.engine.prompts import derive_seed
from paceline.kernels import TorchOps
from paceline.models.attend import PackedAttend
from paceline.models.decoder import Decoder, Rope
from paceline.strategy.predict import Prediction
from paceline.types import Decision, StepOutcome, StepView


def small(**options) -> EngineConfig:
    return EngineConfig(max_batch=8, **options)


def test_a_group_prefills_its_prompt_once():
    prompt = list(range(1, 40))
    engine = Engine(model(), strategy="off", config=small(page_size=4))
    engine.generate([prompt], SamplingParams(max_new_tokens=3), n=6)
    stats = engine.stats()
    assert stats.prompt_tokens == len(prompt)  # the last token is every other answer's own first row
    assert stats.cached_prompt_tokens == 5 * (len(prompt) - 1)


def test_chunked_prefill_beside_decoding():
    engine = Engine(model(), strategy="off", config=small(max_rows=8))
    (first,) = engine.add([1, 2], SamplingParams(max_new_tokens=40))
    engine.step()
    engine.step()
    engine.add(list(range(1, 50)), SamplingParams(max_new_tokens=2))
    mixed = [engine.step() for _ in range(4)]
    assert all(first in result.tokens and 0 < result.num_prefill_rows <= 7 for result in mixed)


def test_drafting_does_not_keep_newcomers_waiting():
    """Draft tokens get the rows that prefill leaves, not the other way round."""
    steps = {}
    for strategy in ("off", "suffix:d8w2v16"):
        engine = Engine(model(), strategy=strategy, config=EngineConfig(max_batch=16, max_rows=40))
        prompts = [[i, 1, i, 2, i, 1, i] for i in range(16)]
        engine.generate(prompts, SamplingParams(max_new_tokens=20, temperature=2.0))
        steps[strategy] = engine.stats().steps
    assert steps["suffix:d8w2v16"] <= steps["off"]


def test_memory_pressure_preempts_the_youngest_and_everybody_finishes(caplog):
    caplog.set_level("INFO", "paceline.engine.scheduler")
    engine = Engine(model(), config=small(page_size=4, kv_tokens=120))
    groups = engine.generate([[1, 2, 3], [4, 5, 6], [7]], SamplingParams(max_new_tokens=50), n=2)
    assert engine.stats().preemptions == sum("the KV cache is full" in message for message in caplog.messages) > 0
    assert [len(r.token_ids) for group in groups for r in group.rollouts] == [50] * 6
    preempted = [r.num_preemptions for group in groups for r in group.rollouts]
    assert preempted[0] == 0 and preempted[-1] > 0


def test_pages_are_copied_with_all_that_lies_on_them():
    engine = Engine(model(), config=small(page_size=4))
    for tensor in engine.executor.store.tensors():
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape))
    before = [tensor.clone().unflatten(0, (-1, 4)) for tensor in engine.executor.store.tensors()]
    engine.executor.runner.copy_pages(np.zeros((0, 2), int))
    engine.executor.runner.copy_pages(np.array([(2, 5), (2, 0), (6, 3)]))
    for old, tensor in zip(before, engine.executor.store.tensors(), strict=True):
        old[[5, 0, 3]] = old[[2, 2, 6]]
        assert torch.equal(tensor.unflatten(0, (-1, 4)), old)


def test_no_page_leaks_after_ten_thousand_requests_with_aborts():
    """The scheduler alone, with made-up tokens: ten thousand requests in a few seconds."""
    from paceline.cache.pages import PageAllocator
    from paceline.engine.request import Request, Status
    from paceline.engine.scheduler import Scheduler

    rng = random.Random(0)
    scheduler = Scheduler(PageAllocator(64, 4), max_batch=12, max_rows=40, max_length=200)
    alive: list[Request] = []
    created = 0
    while created < 10_000 or scheduler.has_work:
        while created < 10_000 and len(alive) < 30:
            group, prompt = created, [rng.randrange(3) for _ in range(rng.randrange(1, 20))]
            for sample in range(rng.randrange(1, 4)):
                request = Request(created, group, sample, prompt, SamplingParams(max_new_tokens=30), frozenset())
                scheduler.add(request)
                alive.append(request)
                created += 1
        strategy = Strategy("suffix", 4, 2, rng.randrange(1, 9)) if rng.random() < 0.5 else Strategy.OFF
        plan = scheduler.schedule(Decision(strategy, num_drafted_for=rng.choice([None, 1, 3])))
        scheduler.on_launch(plan, plan.num_nodes)
        scheduler.on_complete(plan, plan.num_nodes)
        for request, nodes in zip(plan.decode, plan.num_nodes, strict=True):
            request.tokens += [rng.randrange(3) for _ in range(rng.randint(1, 1 + nodes))]
            request.num_computed = len(request.tokens) - 1
            if len(request.tokens) >= request.max_tokens or rng.random() < 0.15:
                scheduler.finish(request)
        if rng.random() < 0.1 and alive:
            victim = rng.choice(alive)
            if victim.status is not Status.FINISHED:
                scheduler.finish(victim)
        if rng.random() < 0.01:
            scheduler.drop_prefixes()
        alive = [request for request in alive if request.status is not Status.FINISHED]
        scheduler.pages.check_integrity()
    assert scheduler.pages.num_available == 64
    assert sorted(scheduler._free_slots) == list(range(12))


def test_real_engine_leaks_nothing_under_aborts():
    rng = random.Random(1)
    engine = Engine(model(), config=small(page_size=4, kv_tokens=200))
    live: list[int] = []
    for _ in range(150):
        if rng.random() < 0.5:
            live += engine.add([rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))],
                               SamplingParams(max_new_tokens=rng.randrange(1, 20)), n=rng.randrange(1, 4))
        if live and rng.random() < 0.3:
            for rollout in engine.abort([live.pop(rng.randrange(len(live)))]):
                assert rollout.finish_reason == "abort"
        engine.step()
        engine.scheduler.pages.check_integrity()
    engine.abort(live)
    while engine.has_work:
        engine.step()
    assert engine.stats().free_pages == engine.stats().total_pages
    assert engine.planner.requests == {} and engine.drafting._max_missing == {}


# -- features


@pytest.mark.parametrize("strategy", ["off", "suffix:d6w2v12", "eagle:d4w3v12"])
def test_captured_features_equal_a_forward_pass(strategy):
    layers = (1, -1)
    engine = Engine(model("qwen3"), drafter=eagle("qwen3", "eagle3"), strategy=strategy,
                    config=small(capture=layers, page_size=3, kv_tokens=150))
    groups = engine.generate([[1, 2, 3, 4], [9, 8]], SamplingParams(max_new_tokens=25), n=3)
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        record = rollout.features
        assert record is not None and record.layers == layers
        assert record.token_ids == rollout.prompt_ids + rollout.token_ids
        fed = torch.tensor(record.token_ids[:-1])
        cos, sin = Rope(model("qwen3").config, 256, torch.float64, "cpu")(torch.arange(len(fed)))
        hidden = model("qwen3")(fed, PackedAttend(TorchOps(), cos, sin, (len(fed),)), layers)
        torch.testing.assert_close(record.features, hidden.features, atol=1e-9, rtol=0)


# -- finishing and errors


def test_length_limits():
    engine = Engine(model(), config=small(max_context=20))
    rollout = engine.generate([[1] * 10], SamplingParams(max_new_tokens=100))[0].rollouts[0]
    assert len(rollout.token_ids) == 10 and rollout.finish_reason == "length"


def test_stop_ids_and_eos_end_an_answer_and_are_kept():
    free = Engine(model()).generate([[1, 2]], SamplingParams(max_new_tokens=30, seed=2))[0].rollouts[0]
    stop = free.token_ids[7]
    first = free.token_ids.index(stop)
    for strategy in ("off", "suffix:d8w4v32"):
        rollout = Engine(model(), strategy=strategy).generate(
            [[1, 2]], SamplingParams(max_new_tokens=30, seed=2, stop_token_ids=(stop,)))[0].rollouts[0]
        assert rollout.token_ids == free.token_ids[: first + 1] and rollout.finish_reason == "stop"
        assert len(rollout.logprobs) == len(rollout.versions) == first + 1


@pytest.mark.parametrize(("prompt", "message"), [
    ([], "prompt: it is empty"), ([1, VOCAB], "token id 61"), ([-1], "token id -1"), ([1] * 256, "256 tokens"),
    ("text", "without a tokenizer"), ([{"role": "user", "content": "hi"}], "without a tokenizer")])
def test_a_bad_prompt_is_one_clear_line_and_the_others_finish(prompt, message):
    engine = Engine(model())
    with pytest.raises(ValueError, match=message):
        engine.add(prompt)
    groups = engine.generate([[1, 2], prompt, [3]], SamplingParams(max_new_tokens=4), n=2)
    assert [r.finish_reason for group in groups for r in group.rollouts] == ["length"] * 2 + ["error"] * 2 + ["length"] * 2
    error = groups[1].rollouts[0].error
    assert error is not None and message in error and "\n" not in error


@pytest.mark.parametrize("bad", [
    {"temperature": -1}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}, {"min_p": 2},
    {"max_new_tokens": 0}, {"seed": 2**64}, {"stop": [""]}, {"stop_token_ids": [-1]}, {"top_k": 1.5}])
def test_impossible_parameters_name_the_field(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingParams(**bad)


@pytest.mark.parametrize("text", ["suffix", "eagle:d0w1v1", "suffix:d1w1v128", "eagle:d40w8v8", "none:d1w1v1", "d1w1v1"])
def test_impossible_strategies(text):
    with pytest.raises(ValueError, match="strategy"):
        Strategy.parse(text)


def test_strategies_print_as_they_are_read():
    for text in ("off", "suffix:d8w2v16", "eagle:d6w4v32"):
        assert str(Strategy.parse(text)) == text


def test_a_strategy_without_its_drafter_is_refused():
    engine = Engine(model(), strategy="eagle:d2w2v4")
    with pytest.raises(ValueError, match="without that drafter"):
        engine.generate([[1, 2, 3]])
    assert engine.stats().free_pages == engine.stats().total_pages


def test_a_strategy_may_be_given_with_the_call_or_the_step():
    engine = Engine(model(), strategy="off")
    params = SamplingParams(max_new_tokens=12)
    plain = engine.generate([[1, 2, 3]], params)[0].rollouts[0].token_ids
    assert engine.generate([[1, 2, 3]], params, strategy="suffix:d4w2v6")[0].rollouts[0].token_ids == plain
    assert set(engine.stats().strategy_steps) == {"off", "suffix:d4w2v6"}
    engine.add([1, 2, 3], params)
    while engine.has_work:
        engine.step(Strategy.parse("suffix:d2w1v2"))
    assert "suffix:d2w1v2" in engine.stats().strategy_steps


def test_unknown_option_is_an_error():
    with pytest.raises(ValueError, match="page_sise"):
        EngineConfig(page_sise=4)


def test_not_a_number_ends_one_request_only():
    """Token 13 has an embedding of NaN: only the requests that sample it or have it in their prompt fail."""
    decoder = Decoder(CONFIGS["qwen2"]).to(torch.float64)
    decoder.load_state_dict(model("qwen2").state_dict())
    decoder.requires_grad_(False)
    decoder.embed.weight[13] = float("nan")
    engine = Engine(decoder, strategy="suffix:d4w2v8")
    params = SamplingParams(max_new_tokens=6, top_k=3, seed=1)
    groups = engine.generate([[1, 2, 3], [5, 13], [7, 8]], params)
    assert groups[1].rollouts[0].finish_reason == "error"
    assert "not numbers" in (groups[1].rollouts[0].error or "")
    clean = Engine(model("qwen2"), strategy="off").generate([[1, 2, 3], [7, 8]], params)
    for got, want in ((groups[0], clean[0]), (groups[2], clean[1])):
        assert got.rollouts[0].token_ids == want.rollouts[0].token_ids
    assert engine.stats().free_pages == engine.stats().total_pages


def test_seeds_derive_from_what_was_asked():
    assert derive_seed(7, [1, 2], 0) == derive_seed(7, [1, 2], 0)
    different = {derive_seed(7, [1, 2], 0), derive_seed(8, [1, 2], 0), derive_seed(7, [1, 2], 1), derive_seed(7, "1,2", 0),
                 derive_seed(7, [1, 2, 3], 0), derive_seed(7, [12], 0)}
    assert len(different) == 6
    engine = Engine(model())
    params = SamplingParams(max_new_tokens=10)
    alone = engine.generate([[3, 4]], params)[0].rollouts[0].token_ids
    assert engine.generate([[1], [3, 4], [5]], params)[1].rollouts[0].token_ids == alone


def test_select_is_called_with_what_happens():
    seen = []

    def select(view):
        seen.append(view)
        return Strategy("suffix", 4, 2, 6) if len(seen) % 2 else Strategy.OFF

    engine = Engine(model(), strategy=select)
    engine.generate([[1, 2, 3]] * 2, SamplingParams(max_new_tokens=12), n=2, keys=["a", "b"])
    assert {view.num_running for view in seen} >= {4}
    assert seen[0].available == ("suffix",)
    assert set(engine.stats().strategy_steps) == {"off", "suffix:d4w2v6"}


def test_a_warm_engine_that_is_deleted_is_freed():
    """A program may make several, one after the other, on a device that has memory for one."""
    made = Engine(model(), None, eagle(), "auto", EngineConfig(max_batch=2, max_context=64, profile=False))
    made.warm_up()
    made.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4))
    cache = weakref.ref(made.executor.store.layers[0].k)
    del made
    gc.collect()
    assert cache() is None


@pytest.mark.parametrize("drafter", ["none", "suffix", "learned"])
def test_warming_up_teaches_nothing(drafter):
    """`Engine.warm_up` generates made-up responses, all of which end at `max_new_tokens`. `auto` must not conclude from them that
    responses of the user's requests do, too."""
    learned = eagle() if drafter == "learned" else drafter
    made = Engine(model(), None, learned, "auto", EngineConfig(max_batch=4, max_context=64, profile=False))
    for _ in range(30):  # on a CPU it generates two at a time
        made.warm_up()
    stats = made.stats()
    assert stats.steps == stats.cached_prompt_tokens == 0 and not stats.strategy_steps and not made.has_work
    views, select = [], made.selector.select
    made.selector.select = lambda view: (views.append(view), select(view))[1]
    expected = Engine(model(), None, "none", "off").generate([[1, 2, 3]], SamplingParams(max_new_tokens=6), 2)
    found = made.generate([[1, 2, 3]], SamplingParams(max_new_tokens=6), 2)
    assert [r.token_ids for r in found[0].rollouts] == [r.token_ids for r in expected[0].rollouts]
    assert views and not any(view.remaining for view in views)


@pytest.mark.parametrize("pipelined", [False, True])
def test_what_the_caller_does_is_not_blamed_on_a_strategy(monkeypatch, pipelined):
    """A trainer grades and stores responses between two steps. That may take longer than a step, and `auto` took it for the cost
    of the strategy in use. On a simulated clock: every look at it takes a millisecond."""
    outcomes: list[StepOutcome] = []
    clock = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: 1e-3 * next(clock))

    class Off:
        def select(self, view):
            return Decision(Strategy.OFF)

        def observe(self, outcome):
            outcomes.append(outcome)

    engine = Engine(model(), None, "none", Off(), EngineConfig(max_batch=4, max_context=64))
    engine.planner.pipelined = pipelined
    engine.add([1, 2, 3], SamplingParams(max_new_tokens=40, ignore_eos=True), 2)
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
        if steps % 10 == 0:
            deque(itertools.islice(clock, 1000), maxlen=0)
    timed = [outcome.ms for outcome in outcomes if outcome.is_timed]
    assert len(timed) >= 35 and 0 < max(timed) < 100


def test_trees_are_for_as_many_requests_as_they_were_chosen_for():
    """A strategy that was chosen for a few decoding requests must not be applied to the many that are admitted in the same step
    because their prompts are in the prefix cache: the step would have thousands of rows."""
    views: list[StepView] = []

    class Predicted:
        def select(self, view):
            views.append(view)
            return Prediction(Strategy("eagle", 4, 2, 8), view.num_running, 2.0, 1.0).decision(view)

        def observe(self, outcome):
            pass

    engine = Engine(model(), None, eagle(), Predicted(), EngineConfig(max_batch=32, max_context=128, page_size=4))
    params, drafted = SamplingParams(max_new_tokens=40, ignore_eos=True), []
    engine.add(list(range(1, 30)), params, 2)
    for _ in range(4):
        engine.step()
    engine.add(list(range(1, 30)), params, 30)  # all of it is in the cache
    while engine.has_work:
        result = engine.step()
        drafted.append((len(result.drafted_by_request), views[-1].num_running, result.num_requests))
    assert any(running == 2 < requests for _, running, requests in drafted), "they were admitted in a step chosen for two"
    assert all(count <= running + running // 8 for count, running, _ in drafted) and max(drafted)[0] == 32


def test_warming_up_leaves_running_requests_alone():
    made = Engine(model(), None, "suffix", "auto", EngineConfig(max_batch=4, max_context=64, profile=False))
    ids = made.add([1, 2, 3], SamplingParams(max_new_tokens=6), 2)
    made.step()
    made.warm_up()
    steps = made.stats().steps
    finished = []
    while made.has_work:
        finished += made.step().finished
    assert sorted(r.request_id for r in finished) == ids and made.stats().steps > steps > 0
