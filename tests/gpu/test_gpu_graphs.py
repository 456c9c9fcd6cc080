"""Captured drafting, launching ahead, sleeping: what only a CUDA device can show. `python -m pytest tests/gpu` on a GPU host."""

from __future__ import annotations

import gc
import random
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from drafters.long_context import Observing, drafts_behind_long_prompts
from tiny import eagle, model

from benchmarks.lib.interruptions import Interruptions
from paceline import Engine, SamplingParams, Strategy
from paceline.config import EngineConfig
from paceline.drafters.eagle import MIN_WINDOW
from paceline.engine.command import StepCommand
from paceline.engine.graphs import GraphPool
from paceline.models.decoder import Decoder
from paceline.types import StepView

PROMPTS = [[1, 2, 3, 4, 5] * 5, [7, 8, 9], [3], [11] * 40, [50, 51] * 9]
PARAMS = SamplingParams(max_new_tokens=64, seed=3, temperature=0.5)
STRATEGIES = ["off", "eagle:d3w2v6", "eagle:d6w4v24", "eagle:d1w1v1", "suffix:d4w2v8"]


def moved(kind: str, dtype: torch.dtype) -> Decoder:
    decoder = Decoder(model(kind).config).to("cuda", dtype)
    decoder.load_state_dict(model(kind).state_dict())
    return decoder.requires_grad_(False)


def made(strategy: str, dtype: torch.dtype = torch.bfloat16, draft_vocab: int = 0, window: int | None = None,
         **options) -> Engine:
    settings = {"max_batch": 16, "kv_memory_gb": 0.25, "deterministic": dtype == torch.bfloat16} | options
    drafter = deepcopy(eagle("qwen3", "eagle3", draft_vocab=draft_vocab))
    drafter.config = replace(drafter.config, window=window)
    return Engine(moved("qwen3", dtype), drafter=drafter, strategy=strategy, config=EngineConfig(**settings))


def tokens(engine: Engine, n: int = 2) -> list[list[int]]:
    return [r.token_ids for group in engine.generate(PROMPTS, PARAMS, n) for r in group.rollouts]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_float64_drafting_gives_the_tokens_of_a_cpu(strategy):
    cpu = Engine(model("qwen3"), drafter=None, strategy="off", config=EngineConfig(kernels="torch"))  # nothing to compile
    assert tokens(made(strategy, torch.float64)) == tokens(cpu)


@pytest.mark.parametrize(("draft_vocab", "window"), [(0, None), (20, None), (20, MIN_WINDOW)])
@pytest.mark.parametrize("strategy", STRATEGIES[1:4])
def test_captured_drafts_are_the_uncaptured_ones(strategy, draft_vocab, window):
    """Deterministic bfloat16: the same tokens, and as many of them guessed."""
    results = []
    for graphs in (True, False):
        engine = made(strategy, draft_vocab=draft_vocab, window=window, cuda_graphs=graphs)
        results.append((tokens(engine), engine.stats().drafted, engine.stats().accepted, engine.stats().steps))
        assert (engine.graph_report().num_graphs > 0) is graphs
    assert results[0] == results[1]
    assert results[0][2] > 0 and results[0][0] == tokens(made("off"))


def test_observed_drafts_are_what_the_drafter_estimated():
    """Not what verification, whose graph may have been captured in the same memory, wrote there afterwards."""
    strategy, seen = Observing("eagle:d3w2v6"), []
    for graphs in (True, False):
        engine, observed = made("off", cuda_graphs=graphs), []

        def overwriting(batch, *args, run=engine.executor.runner.run, **options):
            if batch.survival is not None:
                batch.survival.fill_(float("nan"))
            return run(batch, *args, **options)

        engine.executor.runner.run = overwriting
        engine.generate(PROMPTS, PARAMS, 2, strategy=strategy, on_step=lambda result, observed=observed: observed.append(
            [] if result.drafts is None else result.drafts.survival.tolist()))
        seen.append(observed)
    assert sum(len(step) > 0 for step in seen[0]) > 10
    for captured, plain in zip(*seen, strict=True):
        assert captured == pytest.approx(plain, rel=1e-2)


@pytest.mark.parametrize(("form", "window", "strategy"), [
    ("eagle", None, "eagle:d1w4v4"), ("eagle", 1024, "eagle:d3w2v4"), ("eagle3", 100, "eagle:d4w3v12")])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-3), (torch.bfloat16, 0.02)], ids=str)
def test_drafts_behind_long_prompts_equal_those_of_the_reference_kernels(dtype, most, form, window, strategy):
    lengths = [7000, 2500, 700, 50]
    reference = drafts_behind_long_prompts(lengths, "cpu", torch.float64, "torch", form, window=window, strategy=strategy)
    found = drafts_behind_long_prompts(lengths, "cuda", dtype, form=form, window=window, strategy=strategy)
    assert float((found - reference).abs().mean()) < most, (found, reference)


def test_any_mix_of_strategies_gives_the_same_tokens():
    rng = random.Random(0)

    def select(view: StepView) -> Strategy:
        return Strategy.parse(rng.choice(STRATEGIES))

    engine = made("off", kv_tokens=700, page_size=4)
    want = tokens(made("off"))
    engine.selector = select
    for _ in range(3):
        assert tokens(engine) == want
    assert engine.stats().free_pages == engine.stats().total_pages


@pytest.mark.parametrize("strategy", ["off", "eagle:d3w2v6"])
def test_launching_a_step_never_waits_for_the_device(strategy):
    engine = made(strategy)
    for _ in range(4):  # everything is captured and compiled, what is asked for once in a run, too
        tokens(engine)
    execute = engine.executor.execute

    def unwaiting(command):
        if not isinstance(command, StepCommand):
            return execute(command)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return execute(command)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine.executor.execute = unwaiting
    try:
        got = tokens(engine)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert got == tokens(made("off"))


def test_what_is_asked_for_twice_is_not_captured():
    engine = made("off")
    engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=3, seed=3, ignore_eos=True))
    assert engine.graph_report().num_graphs == 0
    engine.generate([[4, 2, 3]], SamplingParams(max_new_tokens=16, seed=3, ignore_eos=True))
    assert engine.graph_report().num_graphs == 2, "steps with prompts, at the second time, and those without"


@pytest.mark.parametrize("strategy", ["auto", "beg"])
def test_a_warmed_up_engine_captures_nothing_more(strategy):
    engine = made(strategy)
    engine.warm_up()
    captured = set(engine.executor.graphs.pool.sizes)
    for _ in range(3):
        assert tokens(engine) == tokens(made("off"))
    assert set(engine.executor.graphs.pool.sizes) == captured


def test_new_weights_reach_captured_drafting():
    """A reduced vocabulary's rows of the head are the policy's new ones, at the old address."""
    engine = made("eagle:d3w2v6", draft_vocab=20)
    tokens(engine)
    changed = {name: tensor * 1.05 for name, tensor in engine.model.state_dict().items()}
    engine.update_weights(changed)
    engine.reset_stats()
    got = tokens(engine), engine.stats().accepted
    fresh = made("eagle:d3w2v6", draft_vocab=20)
    fresh.update_weights(changed)
    fresh.reset_stats()
    assert got == (tokens(fresh), fresh.stats().accepted)


@pytest.mark.parametrize("weights", [False, True])
def test_a_sleeping_engine_has_given_its_memory_back(weights):
    gc.collect()  # what other tests left would be freed together with the engine's memory, or lie in the same segments
    torch.cuda.empty_cache()
    engine = made("eagle:d3w2v6", kv_tokens=1_000_000, max_batch=4096)  # each tensor is too large for a segment of other tests
    before = tokens(engine), engine.stats().accepted
    held = sum(tensor.numel() * tensor.element_size() for tensor in engine.executor.store.tensors())
    reserved = torch.cuda.memory_reserved()
    engine.sleep(weights)
    assert reserved - torch.cuda.memory_reserved() > 0.95 * held and engine.graph_report().num_graphs == 0
    assert (next(engine.model.parameters()).device.type == "cpu") is weights
    engine.wake()
    engine.reset_stats()
    assert (tokens(engine), engine.stats().accepted) == before
    assert next(engine.model.parameters()).device.type == "cuda"


def test_sleeping_requests_go_on():
    engine, want = made("eagle:d3w2v6"), tokens(made("off"), n=1)
    ids = [request for prompt in PROMPTS for request in engine.add(prompt, PARAMS)]
    finished = {}
    for nap in range(400):
        if nap in (4, 11):
            engine.sleep(weights=True)
            engine.wake()
        finished |= {rollout.request_id: rollout.token_ids for rollout in engine.step().finished}
    assert [finished[i] for i in ids] == want


def test_garbage_that_is_found_during_a_capture_does_not_break_it():
    """Seen on an H200: the garbage collector freed the graphs of an earlier engine while one of a new engine was captured."""
    pool, x = GraphPool(torch.device("cuda")), torch.zeros(8, device="cuda")

    def leave_garbage() -> None:
        other = GraphPool(torch.device("cuda"))
        other.run("other", x.neg, lambda: None, capture_now=True)
        other.itself = other

    def step() -> torch.Tensor:
        [[] for _ in range(20_000)]  # enough for the collector to run
        return x + 1

    assert pool.run("key", step, leave_garbage, capture_now=True).tolist() == [1.0] * 8


def test_a_drafter_that_catches_up_compiles_nothing():
    """Seen on an H200: the kernel had variants by the alignment of its inputs, and 0.2 s in the middle of a run went into one;
    the attention of many rows, which nothing else of a drafter uses, took 2.6 s."""
    engine = made("auto")
    engine.warm_up()
    engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=2), 2)  # the kernels of prompts
    with Interruptions() as interruptions:
        for prompts in (1, 2, 3, 5):
            for gap in (6, 7):
                for number in range(prompts):
                    engine.add([1 + number, 2, 3, 4, 5], SamplingParams(max_new_tokens=24, seed=number, ignore_eos=True))
                while engine.has_work:
                    for _ in range(gap):
                        engine.step(Strategy.OFF)
                    engine.step(Strategy.parse("eagle:d3w2v6"))
    assert not [each for each in interruptions.found if each["kind"] == "compiled"]
