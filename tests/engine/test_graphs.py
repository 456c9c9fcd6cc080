"""Which steps are captured, and when, without a GPU: a fake pool whose graphs are the steps themselves."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from kernels.trees import step_command
from tiny import FakeGraphs, captured, eagle, model

from paceline import Engine, SamplingParams
from paceline.config import EngineConfig
from paceline.engine.graphs import GRAPH_SIZES, CudaGraphs, GraphPool, coarse
from paceline.engine.rows import INPUTS_PER_ROW, RowBuilder
from paceline.kernels import TorchOps
from paceline.strategy import drafts_at

PROMPTS = [[1, 2, 3, 4, 5] * 3, [7, 8, 9], [3], [11] * 20, [50, 51] * 5]


class Pool(GraphPool):
    """A pool that only remembers which keys were captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        super().__init__(torch.device("cpu"))
        self.captured: list[str] = []

    def _capture(self, key, step, warm_up):
        self.captured.append(key)
        raise StopIteration


def test_a_step_is_captured_when_it_has_been_asked_for_a_few_times(monkeypatch):
    pool = Pool(monkeypatch)
    graphs = CudaGraphs((4,), padding_slot=9, device=torch.device("cpu"), inputs_per_row=1, pool=pool)
    slots, before = graphs.draft_slots, graphs.now()
    assert [graphs.run("a", lambda: 7, slots) for _ in range(3)] == [7, 7, 7]
    assert graphs.run("b", lambda: 8, slots) == 8 and pool.captured == []
    with pytest.raises(StopIteration):
        graphs.run("a", lambda: 7, slots)
    with pytest.raises(StopIteration):
        graphs.run("c", lambda: 7, slots, capture_now=True)
    assert pool.captured == ["a", "c"] and graphs.now().num_irregular - before.num_irregular == 6


def test_two_sizes_per_doubling():
    assert coarse(GRAPH_SIZES)[:9] == (1, 2, 4, 8, 12, 16, 24, 32, 48) and coarse(()) == () and coarse((5, 7)) == (5, 7)
    assert all(b <= 2 * a for a, b in zip(coarse(GRAPH_SIZES), coarse(GRAPH_SIZES)[1:], strict=False))


@pytest.mark.parametrize("profile", [pytest.param(False, marks=pytest.mark.slow), True])
def test_after_warming_up_auto_finds_everything_captured(profile, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    drafter = eagle("qwen3", dtype=torch.float32)
    engine = Engine(model("qwen3", dtype=torch.float32), None, drafter, "auto",
                    EngineConfig(max_batch=4, kv_tokens=2048, kernels="torch", profile=profile))
    graphs = captured(engine, tuple(n for n in GRAPH_SIZES if n <= 32))
    engine.planner.pipelined = False  # on a CPU, observed drafts are not copied
    engine.warm_up()
    known = set(graphs.steps)
    assert known and not graphs.asked
    engine.generate(PROMPTS, SamplingParams(max_new_tokens=40, temperature=0.7, ignore_eos=True), 3)
    assert set(graphs.steps) == known and not graphs.asked
    assert len(engine.stats().strategy_steps) > 1
    for count in (1, 4):  # and whatever it might have chosen
        ids = engine.add([1, 2, 3], SamplingParams(max_new_tokens=200, ignore_eos=True), count)
        for strategy in drafts_at(count):
            for budget in {1, strategy.budget // 2 or 1, strategy.budget}:
                engine.step(replace(strategy, budget=budget))
        engine.abort(ids)
    assert set(graphs.steps) == known and not graphs.asked


@pytest.mark.parametrize(("strategy", "requests", "rows"), [
    pytest.param("eagle:d6w4v20", 32, {768}, marks=pytest.mark.slow),  # 32 * 21 rows, padded
    ("eagle:d8w4v31", 64, {2048}),  # the largest row size
    ("eagle:d8w5v32", 64, set()),  # 64 * 33 rows are more than that
])
def test_fixed_strategies_are_captured_up_to_the_largest_row_size(strategy, requests, rows):
    """`auto` has 512 rows at most with draft trees; a fixed strategy may have four times as many."""
    params, found = SamplingParams(max_new_tokens=4, temperature=0.7, ignore_eos=True), []
    for name in ("off", strategy):
        engine = Engine(model("qwen3"), None, eagle("qwen3"), name, EngineConfig(
            max_batch=64, max_rows=4096, kv_tokens=16384, kernels="torch", profile=False))
        graphs = captured(engine, GRAPH_SIZES)
        used: list[int] = []
        (group,) = engine.generate([[1, 2, 3]], params, requests, on_step=lambda result, used=used: used.append(result.num_rows))
        found.append([rollout.token_ids for rollout in group.rollouts])
    assert max(used) == max(rows, default=64 * 33)
    assert {key[0] for key in graphs.steps if key[0] != "draft" and key[0] > 512} == rows
    assert ("draft", requests) in {key[:2] for key in graphs.steps}  # the drafter's rows are its requests
    assert found[0] == found[1]


def test_a_warmed_up_engine_is_freed():
    """Engines contain reference cycles: whoever replaces one needs the garbage collector to find the KV cache of the old one."""
    engine = Engine(model("qwen3", dtype=torch.float32), None, eagle("qwen3", dtype=torch.float32), "auto",
                    EngineConfig(max_batch=2, kv_tokens=1024, kernels="torch", profile=False))
    captured(engine, (1, 2))
    engine.warm_up()
    store = weakref.ref(engine.executor.store)
    del engine
    gc.collect()
    assert store() is None


def test_steps_that_are_not_captured_end_with_their_forced_rows():
    """Kernels for long prompts read them from there; in captured steps padding follows."""
    command = step_command([0, 1, 2], [3], 2, ((5, False), (4, True)))
    for pool, padding in ((None, 0), (FakeGraphs(), 3)):
        graphs = CudaGraphs((16,), 8, torch.device("cpu"), INPUTS_PER_ROW, pool)
        step = RowBuilder(graphs, TorchOps(), 8, torch.device("cpu")).build(command, None)
        tree = step.tree
        assert step.num_rows == 4 + 9 + padding and step.first_forced == 4 and step.fixed is (padding > 0)
        assert tree.tokens[4:13].tolist() == command.tokens.tolist()
        assert tree.forced[tree.request[4:13]].tolist() == [5] * 5 + [4] * 4
        assert step.next_tokens.tolist()[4:13] == [1, 2, 3, 4, 7, 6, 7, 8, -1]
        sampled = tree.sampled.tolist()
        assert sampled[:5] == [0, 1, 2, 3, 12] and tree.sample[:3].tolist() == [0, -1, 4]
