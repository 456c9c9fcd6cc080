"""The simulator: nothing is lost, known cases come out as computed by hand, and better policies are better."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from paceline.bundled import simulation_file
from paceline.cli.app import app
from paceline.cluster.types import PolicyConfig
from paceline.sim import DrafterQuality, Pace, SimConfig, Workload, read_lengths, sample_workload, simulate
from paceline.sim.simulator import _Simulation
from paceline.sim.variants import compare, compare_staleness
from paceline.strategy import CostCurve, Points
from paceline.types import Strategy

STATIC = PolicyConfig(scheduling=False, reallocation=False, max_trainers=0)
QUALITY = DrafterQuality(np.array([30.0, 120.0]), np.array([1.0, 4.0]),
                         np.array([[[0.7] * 6, [0.8] * 6], [[0.8] * 6, [0.9] * 6]]))


def curve(ms_per_row: float = 0.02) -> CostCurve:
    rows = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    return CostCurve(Points.through([(n, 4 + ms_per_row * n) for n in rows]), Points.through([(1, 0.2), (256, 1.0)]),
                     Points.through([(1, 0.3), (256, 1.0)]))


def long_tail(requests: int = 512, group_size: int = 8, seed: int = 0) -> Workload:
    lengths = np.arange(1, 4001)
    return sample_workload(lengths, lengths**-1.5 / (lengths**-1.5).sum(), requests, group_size, 0.8, seed, 32, 4000)


def test_one_request_takes_its_length_times_the_step():
    pace = Pace(curve(), 8, 0.0)
    work = Workload(np.array([1000]), np.array([0]), 0, 4096)
    assert simulate(work, pace, SimConfig(1, max_batch=8)).seconds == pytest.approx(1000 * pace.table(0.0)[1])


def test_continuous_batching_without_a_coordinator():
    """Two slots, three answers: the third starts when the first ends."""
    pace = Pace(curve(), 2, 0.0)
    one, two = pace.table(0.0)[1], pace.table(0.0)[2]
    work = Workload(np.array([100, 300, 300]), np.array([0, 0, 0]), 0, 4096)
    assert simulate(work, pace, SimConfig(1, STATIC, max_batch=2)).seconds == pytest.approx(300 * two + 100 * one)


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_every_token_is_generated_once(workers):
    work = long_tail()
    for result in compare(work, curve(), QUALITY, SimConfig(workers, max_batch=16, trained_s=30.0), 2).values():
        assert result.tokens == work.lengths.sum() and np.isfinite(result.seconds)
        assert 0 < result.generating_share <= 1 and 0 <= result.training_share < 1 and result.idle_share > -1e-9


def test_requests_that_are_moved_or_queued_ahead_run_once_and_within_the_batch():
    """Many short answers and few long ones: workers queue requests ahead, and those that wait for a slot may be moved."""
    lengths = np.where(np.arange(256) % 16 == 0, 3000, 40)
    work = Workload(lengths, np.arange(256) // 16, 16, 4096)
    simulation = _Simulation(work, Pace(curve(ms_per_row=1.0), 8, 0.0), SimConfig(4, PolicyConfig(max_trainers=0, min_gain=0.0),
                                                                                 max_batch=8, interval_s=0.4))
    advance = simulation._advance

    def checked(end: float) -> None:
        advance(end)
        held = np.concatenate([np.r_[worker.running, np.array(worker.queue, int)] for worker in simulation.workers])
        assert len(held) == len(np.unique(held)) and max(len(worker.running) for worker in simulation.workers) <= 8

    simulation._advance = checked
    assert simulation.run().num_moves > 0


def test_each_variant_is_at_least_as_fast_as_the_one_before_on_average():
    runs = [compare(long_tail(seed=seed), curve(), QUALITY, SimConfig(4, max_batch=16, trained_s=30.0, interval_s=0.1), 4)
            for seed in range(4)]
    mean = {name: np.mean([run[name].seconds for run in runs]) for name in runs[0]}
    names = list(mean)
    for before, after in pairwise(names):
        assert mean[after] <= 1.02 * mean[before], (before, after, mean)
    assert mean["static"] > 1.8 * mean["+ spot training"]


def test_reallocation_pays_where_steps_grow_with_the_batch():
    work = Workload(np.array([2000] * 8 + [20] * 8), np.repeat([0, 1], 8), 16, 4096)
    config = SimConfig(2, PolicyConfig(max_trainers=0), max_batch=8, interval_s=0.05, typical_length=2000)
    pace = Pace(curve(ms_per_row=2.0), 8, 0.0)
    without = simulate(work, pace, SimConfig(2, STATIC, max_batch=8))
    with_moves = simulate(work, pace, config)
    assert with_moves.seconds < 0.8 * without.seconds


def test_accept_length_grows_with_training_and_with_draft_tokens():
    deep, chain = Strategy.parse("eagle:d6w4v24"), Strategy.parse("eagle:d6w1v6")
    assert QUALITY.accept_length(Strategy.OFF, 60.0) == QUALITY.accept_length(deep, 0.0) == 1.0
    found = [QUALITY.accept_length(deep, seconds) for seconds in (10.0, 30.0, 60.0, 120.0, 1e6)]
    assert found == sorted(found) and found[1] == pytest.approx(1 + sum(0.8**d for d in range(1, 7)))
    assert found[-1] == found[-2] > QUALITY.accept_length(chain, 120.0)


def test_lengths_keep_their_distribution_and_are_alike_within_a_group():
    lengths = np.arange(1, 1001)
    work = sample_workload(lengths, np.full(1000, 1e-3), 20000, 10, 0.9)
    assert abs(work.lengths.mean() - 500) < 25
    means = work.lengths.reshape(-1, 10).mean(axis=1)
    assert means.std() > 200
    loose = sample_workload(lengths, np.full(1000, 1e-3), 20000, 10, 0.0)
    assert loose.lengths.reshape(-1, 10).mean(axis=1).std() < 120


def test_length_files(tmp_path):
    plain, table = tmp_path / "plain.txt", tmp_path / "table.csv"
    plain.write_text("5\n7\n5\n")
    table.write_text("output_tokens,probability\n5,2\n7,1\n")
    for path in (plain, table):
        lengths, weights = read_lengths(path)
        assert lengths.tolist() == [5, 7] and weights == pytest.approx([2 / 3, 1 / 3])
    plain.write_text("five\n")
    with pytest.raises(ValueError, match="output_tokens"):
        read_lengths(plain)


def test_the_command(tmp_path: Path, capsys):
    (tmp_path / "curve.json").write_text(curve().dumps())
    (tmp_path / "lengths.txt").write_text("\n".join(map(str, long_tail().lengths)))
    app(["simulate", "--lengths", str(tmp_path / "lengths.txt"), "--curve", str(tmp_path / "curve.json"), "--workers", "4",
         "--requests", "256", "--max-batch", "16", "--json", str(tmp_path / "out.json")], standalone_mode=False)
    assert "+ reallocation" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["variants"]["static"]["seconds"] > 0


@pytest.mark.slow
def test_the_coordinator_takes_less_than_a_hundredth_of_the_time_of_a_large_cluster():
    costs = CostCurve.loads(simulation_file("h200-7b.json").read_text())
    lengths = np.arange(16, 32768, 16)
    work = sample_workload(lengths, (w := np.exp(-np.log(lengths / 800) ** 2 / 2) / lengths) / w.sum(), 16384, 16, 0.8)
    config = SimConfig(64, max_batch=256, trained_s=30.0)
    found = compare(work, costs, DrafterQuality.load(simulation_file("h200-drafter.json")), config, 8)
    assert found["+ spot training"].coordinator_share < 0.01


def test_synchronous_steps_take_their_rollouts_and_updates_one_after_the_other():
    """Two steps of one answer each: without staleness 100 + 300 tokens and two updates; with it the second answer is generated
    beside the first one and during the first update."""
    pace = Pace(curve(), 8, 0.0)
    one, two = pace.table(0.0)[1], pace.table(0.0)[2]
    work = Workload(np.array([100, 300]), np.array([0, 1]), 0, 4096)
    config = SimConfig(1, STATIC, max_batch=8, steps=2, update_s=0.3, interval_s=0.01)
    synchronous, ahead = (simulate(work, pace, replace(config, max_staleness=allowed)) for allowed in (0, 1))
    assert synchronous.seconds == pytest.approx(400 * one + 0.6, abs=0.03) and synchronous.staleness == 0
    assert ahead.seconds == pytest.approx(100 * two + 200 * one + 0.3, abs=0.03)
    stale = 100 + 0.3 / one  # tokens of the second answer before the first update has ended
    assert ahead.staleness == pytest.approx(stale / 400, rel=0.02)
    waiting = simulate(work, pace, replace(config, max_staleness=1, updates_on_workers=True))
    assert waiting.seconds == pytest.approx(100 * two + 200 * one + 0.6, abs=0.03)


def test_staleness_hides_tails_and_updates_and_speculation_adds_to_it():
    work = long_tail(1024)
    config = SimConfig(4, max_batch=16, trained_s=30.0, steps=8, update_s=2.0)
    found = compare_staleness(work, curve(), QUALITY, config)
    for speculates in (False, True):
        seconds = [found[speculates, allowed].seconds for allowed in (0, 1, 2)]
        assert seconds[0] > 1.2 * seconds[1] > 1.1 * seconds[2]
        assert all(found[speculates, allowed].tokens == work.lengths.sum() for allowed in (0, 1, 2))
        assert all(found[speculates, allowed].staleness <= allowed for allowed in (0, 1, 2))
    assert found[True, 1].seconds < found[False, 1].seconds
