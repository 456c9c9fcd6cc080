"""Profiling with steps that take a known time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from tiny import eagle, model

from paceline import Engine, SamplingParams
from paceline.config import EngineConfig
from paceline.engine.profile import load_or_profile, profile
from paceline.strategy import CostCurve
from paceline.types import Strategy


@pytest.fixture
def made(monkeypatch) -> Callable[[tuple[int, ...]], SimpleNamespace]:
    """Makes steps whose time grows with tiles of 128 rows, on a simulated clock."""
    clock = [0.0]
    monkeypatch.setattr("paceline.engine.profile.time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def wait(seconds):
        clock[0] += seconds

    def run_step(num_requests, strategy):
        clock[0] += 5e-4 * -(-num_requests * (1 + strategy.budget) // 128)

    def run_with_context(slots, strategy, context):
        run_step(len(slots), strategy)
        clock[0] += 1e-3 * len(slots) * context / 1e3

    return lambda tree_sizes: SimpleNamespace(
        max_rows=2048, max_batch=256, max_length=4096, page_size=16, device=torch.device("cpu"), tree_sizes=tree_sizes,
        has_learned_drafter=False, wait=wait, run_step=run_step, run_with_context=run_with_context,
        lent_slots=lambda requests, context: nullcontext(list(range(requests))))


def test_every_number_of_rows_that_steps_are_padded_to_is_measured(made):
    costs = profile(made((128, 192, 256, 384, 512, 768)), 5.0)
    assert {128, 192, 256, 384, 512} <= set(costs.policy.x.tolist())
    assert max(costs.policy.x) == 512
    assert costs.policy.at(192) == pytest.approx(costs.policy.at(256))  # a straight line from 128 to 256 would give 0.75


def test_without_padding_a_few_sizes_are_enough(made):
    costs = profile(made(()), 5.0)
    assert 192 not in costs.policy.x.tolist()
    assert costs.policy.at(192) == pytest.approx((costs.policy.at(128) + costs.policy.at(256)) / 2)


def test_the_shortest_times_of_three_starts_count_on_a_cpu(made, tmp_path):
    """One start may fall into a time in which others use the machine, and its profile was kept for ever."""
    steps, busy = made(()), iter((2.0, 1.0, 3.0))
    real, run = steps.run_step, []

    def run_step(num_requests, strategy):
        for _ in range(int(factor)):
            real(num_requests, strategy)

    steps.run_step, steps.compile_ahead = run_step, lambda: None
    for _ in range(5):
        factor = next(busy, 0.0)
        run.append(load_or_profile(steps, ["this engine"], 5.0, tmp_path).policy.at(256))
    assert run == pytest.approx([2.0, 1.0, 1.0, 1.0, 1.0])
    file, = tmp_path.iterdir()
    assert CostCurve.loads(file.read_text()).policy.at(256) == pytest.approx(1.0), "`paceline simulate --curve` reads it"
    file.write_text(file.read_text()[:-20])
    factor = 1.0
    assert load_or_profile(steps, ["this engine"], 5.0, tmp_path).policy.at(256) == pytest.approx(1.0), "damaged: measured anew"


def test_a_further_level_costs_what_it_takes_although_the_first_one_reads_what_is_in_no_cache(made):
    """Seen on a CPU: the drafter's short job was measured behind a step of the policy, and the deep one behind the short one. A
    further level seemed to cost nothing, and trees of width 4 as little as chains."""
    steps, is_cached = made(()), False
    real = steps.run_step, steps.run_with_context

    def evicting(run):
        def call(*args):
            nonlocal is_cached
            run(*args)
            is_cached = False
        return call

    def run_drafter(num_requests, strategy):
        nonlocal is_cached
        level = 0.2 + 0.001 * num_requests * strategy.width
        steps.wait(1e-3 * ((0.3 if is_cached else 1.1) + (strategy.depth - 1) * level))
        is_cached = True

    steps.run_step, steps.run_with_context = (evicting(run) for run in real)
    steps.run_drafter, steps.has_learned_drafter = run_drafter, True
    costs = profile(steps, 5.0)
    for rows in (1, 4, 16, 256):
        assert costs.start.at(rows) == pytest.approx(1.1)
        assert costs.level.at(rows) == pytest.approx(0.2 + 0.001 * rows)


def test_context_costs_what_reading_it_takes(made):
    costs = profile(made(()), 5.0)
    assert costs.request_context_ms + costs.row_context_ms == pytest.approx(1.0)


def test_dummy_requests_read_pages_of_their_own_and_change_nothing():
    """Prefixes that are shared lie on those pages, and requests may be running in those slots."""
    config = EngineConfig(max_batch=4, kv_tokens=256, page_size=16, profile=False)
    one = Engine(model(), None, eagle("llama", "eagle"), "off", config)
    one.add([1, 2, 3, 4, 5] * 8, SamplingParams(max_new_tokens=30, seed=1), 3)
    for _ in range(6):
        one.step()
    state, steps = one.executor.state, one.dummy_steps

    def everything():
        slots = [tensor[: state.padding].clone() for tensor in state.tensors[:-1]]
        kept = one.executor.store.spare_page * one.executor.store.page_size
        return slots + [tensor[:kept].clone() for tensor in one.executor.store.tensors()]

    before = everything()
    for requests, missing in ((1, 8), (1, 128), (4, 2)):
        steps.run_catch_up(requests, missing)
    with steps.lent_slots(3, 48) as slots:
        pages = state.tensors.page_table[slots, :3]
        assert len(set(pages.flatten().tolist())) == 9
        assert (state.tensors.page_table[slots, 3:] == one.executor.store.spare_page).all()
        for strategy in (Strategy.OFF, Strategy.parse("eagle:d2w1v2")):
            for _ in range(2):
                steps.run_with_context(slots, strategy, 48)
    for was, now in zip(before, everything(), strict=True):
        assert torch.equal(was.view(torch.uint8), now.view(torch.uint8))  # memory that was never written may hold NaN
