"""A policy that is split over ranks: the same tokens and the same bits for every number of ranks. Ranks are threads here
(`engine.thread_ranks`); those that are processes are tested in `test_rank_processes.py`."""

from __future__ import annotations

import pytest
import torch
from engine.thread_ranks import ThreadRank
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CONFIGS, WINDOWED, eagle, model

from paceline import Engine, SamplingParams, Strategy
from paceline.config import ConfigError, EngineConfig
from paceline.engine.ranks import Ranks
from paceline.models.state_dict import export_state

PROMPTS = [[5, 9, 9, 2, 40, 17, 3, 3, 8], [1], [7, 7, 7, 30, 12]]
PARAMS = SamplingParams(max_new_tokens=24, seed=3, raw_logprobs=True)
LEARNED, SUFFIX = "eagle:d3w2v5", "suffix:d4w2v6"


def split(ranks: int, kind: str = "llama", strategy: str = "off", dtype: torch.dtype = torch.float64, shares: int | None = 8,
          **options) -> Engine:
    """An engine whose policy is split over so many ranks; 0: one process that sums in one pass."""
    config = EngineConfig(**{"page_size": 4, "kv_tokens": 512, "max_batch": 6, "profile": False,
                             "deterministic": dtype == torch.float32,
                             "tensor_parallel": max(1, ranks), "reduction_shares": shares if ranks else None, **options})
    others = Ranks(ranks, torch.device("cpu"), 60, ThreadRank) if ranks > 1 else None
    drafter = eagle(kind, dtype=dtype) if strategy.startswith("eagle") else "suffix"
    return Engine(model(kind, dtype=dtype), None, drafter, Strategy.parse(strategy), config, others)


def answers(engine: Engine, params: SamplingParams = PARAMS, n: int = 2) -> list[tuple]:
    """Tokens and log-probabilities of all answers."""
    groups = engine.generate(PROMPTS, params, n=n)
    assert all(rollout.error is None for group in groups for rollout in group.rollouts)
    return [(r.token_ids, r.logprobs, r.raw_logprobs) for group in groups for r in group.rollouts]


def step_often(engine: Engine) -> None:
    for _ in range(20):
        engine.step()


def tokens(found: list[tuple]) -> list[list[int]]:
    return [each[0] for each in found]


@pytest.fixture
def engines():
    """Makes engines that are closed after the test."""
    made: list[Engine] = []

    def make(*args, **options) -> Engine:
        made.append(split(*args, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", CONFIGS | WINDOWED)
def test_the_same_bits_on_any_number_of_ranks(kind, dtype, engines):
    want = answers(engines(1, kind, dtype=dtype))
    for ranks in (2,) if CONFIGS.get(kind, WINDOWED.get(kind)).num_heads % 4 else (2, 4):
        assert answers(engines(ranks, kind, dtype=dtype)) == want
    if dtype == torch.float64:
        assert tokens(want) == tokens(answers(engines(0, kind)))


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("strategy", [SUFFIX, LEARNED])
def test_speculation_does_not_change_tokens(kind, strategy, engines):
    want, engine = tokens(answers(engines(0, kind))), engines(2, kind, strategy)
    assert tokens(answers(engine)) == want
    assert engine.stats().drafted > 0
    assert tokens(answers(engine)) == want  # prompts are found in the cache
    assert engine.stats().cached_prompt_tokens > 0


@pytest.mark.parametrize("strategy", ["off", LEARNED])
def test_preempted_requests_get_the_same_tokens(strategy, engines):
    engine = engines(2, strategy=strategy, kv_tokens=64)
    assert tokens(answers(engine)) == tokens(answers(engines(0)))
    assert engine.stats().preemptions > 0


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gpt_oss"])
def test_new_weights_reach_all_ranks(kind, engines):
    engine, new = engines(2, kind), model(kind, 1)
    before = answers(engine)
    engine.update_weights(iter(export_state(new).items()))
    after = answers(engine)
    assert before != after
    engine.update_weights(dict(model(kind).named_parameters()))
    assert answers(engine) == before
    whole = Engine(model(kind, 1), None, "suffix", "off", EngineConfig(page_size=4, kv_tokens=512, max_batch=6))
    assert tokens(after) == tokens(answers(whole))


def test_refused_weights_change_nothing(engines):
    engine = engines(2)
    want, state = answers(engine), dict(export_state(model("llama", 1)))
    name = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(ValueError, match="wrong shape"):
        engine.update_weights(state | {name: state[name][:, 1:]})
    assert answers(engine) == want
    with pytest.raises(ValueError, match="missing"):
        engine.update_weights(item for item in state.items() if item[0] != name)
    with pytest.raises(RuntimeError, match="incomplete"):
        engine.step()
    engine.update_weights(export_state(model("llama")))
    assert answers(engine) == want


@pytest.mark.parametrize("weights", [False, True, "discard"])
def test_requests_sleep_and_go_on(weights, engines):
    want, engine = tokens(answers(engines(0))), engines(2, strategy=LEARNED)
    ids = [request for prompt in PROMPTS for request in engine.add(prompt, PARAMS, n=2)]
    got: dict[int, list[int]] = {}
    for nap in range(100):
        if nap in (3, 6):
            engine.sleep(weights)
            engine.wake()
            if weights == "discard":
                engine.update_weights(export_state(model("llama")))
        got |= {r.request_id: r.token_ids for r in engine.step().finished}
    assert [got[i] for i in ids] == want


def test_every_sampling_parameter_is_served(engines):
    params = SamplingParams(max_new_tokens=16, seed=5, top_k=9, top_p=0.9, repetition_penalty=1.2, logit_bias=((3, 2.0),),
                            min_tokens=4, allowed_token_ids=tuple(range(40)))
    assert tokens(answers(engines(2), params)) == tokens(answers(engines(0), params))


def test_a_request_moves_to_another_split_engine(engines):
    want = tokens(answers(engines(0), n=1))
    source, target = engines(2, strategy=LEARNED), engines(2, strategy=LEARNED)
    ids = [source.add(prompt, PARAMS)[0] for prompt in PROMPTS]
    got: dict[int, list[int]] = {}
    for _ in range(4):
        source.step()
    pages = source.migration.export_pages(ids[0])
    reservation = target.migration.reserve(pages)
    state = source.migration.export_request(ids[0], source.version, reservation.num_tokens)
    moved = target.migration.import_request(state, target.version, reservation)
    assert target.migration.is_running(moved)  # it need not be computed again
    for engine, names in ((source, {i: i for i in ids}), (target, {moved: ids[0]})):
        while engine.has_work:
            got |= {names[r.request_id]: r.token_ids for r in engine.step().finished}
    assert [got[i] for i in ids] == want


def test_a_rank_that_raises_ends_the_engine_with_one_line(engines):
    engine = engines(2)
    engine.add([1, 2, 3], PARAMS)
    engine.step()
    engine.executor.ranks.send("no command")
    with pytest.raises(RuntimeError, match=r"tensor parallel: rank 1 of 2 failed: KeyError.*; the engine has ended") as info:
        step_often(engine)
    assert "\n" not in str(info.value)
    with pytest.raises(RuntimeError, match="the engine has ended"):
        step_often(engine)


def test_a_step_that_raises_on_rank_0_ends_the_ranks(engines, monkeypatch):
    engine = engines(2)
    engine.add([1, 2, 3], PARAMS)
    engine.step()

    def fail(*args, **options):
        raise MemoryError("no room")

    monkeypatch.setattr(engine.executor.ops, "sample", fail)
    with pytest.raises(RuntimeError, match="MemoryError: no room; the engine has ended"):
        engine.step()
    assert engine.step().finished[0].finish_reason == "error"


@pytest.mark.parametrize(("kind", "options", "message"), [
    ("qwen2", {"tensor_parallel": 4}, "num_heads 6 is not a multiple of 4"),
    ("qwen3_moe", {"tensor_parallel": 8, "reduction_shares": 8}, "is not a multiple of 8"),
])
def test_what_cannot_be_split_is_refused_before_a_rank_starts(kind, options, message, monkeypatch):
    monkeypatch.setattr("paceline.engine.engine.start_ranks", None)
    with pytest.raises(ValueError, match=message) as info:
        Engine(model(kind), config=EngineConfig(**options))
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("options", [{"tensor_parallel": 3}, {"tensor_parallel": 4, "reduction_shares": 2},
                                     {"reduction_shares": 6}])
def test_impossible_numbers_are_refused(options):
    with pytest.raises(ConfigError):
        EngineConfig(**options)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["llama", "qwen3", "qwen3_moe", "gemma3"]), st.sampled_from(["off", SUFFIX, LEARNED]),
       st.sampled_from([2, 4]), st.sampled_from([48, 64, 512]), st.integers(0, 5), st.booleans(), st.booleans())
def test_whatever_happens_the_bits_are_the_same(kind, strategy, ranks, kv_tokens, seed, updates, sleeps):
    params = SamplingParams(max_new_tokens=20, seed=seed, raw_logprobs=True)
    found = []
    for number in (1, ranks):
        engine = split(number, kind, strategy, kv_tokens=kv_tokens)
        found.append(answers(engine, params))
        if updates:
            engine.update_weights(export_state(model(kind, 1)))
        if sleeps:
            engine.sleep(weights=True)
            engine.wake()
        found[-1] += answers(engine, params)
        engine.close()
    assert found[0] == found[1]
