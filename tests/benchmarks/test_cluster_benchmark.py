"""The cluster benchmark's stand-in engine behaves like a real one towards a worker, at the pace of the cost curve."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.cluster.calibrated import CalibratedSpec
from benchmarks.cluster.rollout import EMPTY_WEIGHTS, GOALS, reached
from benchmarks.lib.result_tables import make_table
from paceline.cluster.coordinator import Coordinator
from paceline.cluster.local_runtime import LocalRuntime
from paceline.cluster.messages import to_payload
from paceline.cluster.types import PolicyConfig
from paceline.engine.migration import RequestState
from paceline.types import SamplingParams

HERE = Path(__file__).resolve().parents[2] / "benchmarks" / "cluster"


@pytest.mark.parametrize("trains", [False, True])
def test_calibrated_workers_finish_and_move_requests(trains):
    lengths, curve = np.array([5, 4, 3, 5, 4, 300]), (HERE / "h200-7b.json").read_text()
    spec = CalibratedSpec(curve, HERE / "h200-drafter.json", lengths, 4, 100.0, 0.01, 8, 30.0, trains)
    policy = PolicyConfig(reallocation=not trains, min_gain=0.0, min_train_s=0.0)
    coordinator = Coordinator(LocalRuntime(2, spec.build, 2), policy, 0.0)
    coordinator.publish_policy(to_payload(EMPTY_WEIGHTS), 0)
    coordinator.submit([RequestState([1, 2], SamplingParams(max_new_tokens=100, seed=i), 0, i) for i in range(6)], "a")
    found = {}
    for _ in range(500):
        found |= dict(coordinator.step())
    assert sorted(len(rollout.token_ids) for rollout in found.values()) == sorted(lengths)
    assert (coordinator.drafter_version >= 0) == trains


def test_the_result_has_a_table_and_says_which_goals_are_reached():
    cell = {"seconds": 10.0, "simulated_s": 9.5, "idle": 0.45, "training": 0.0, "tail_s": 3.0, "moves": 0,
            "coordinator_share": 0.02}
    quick = {**cell, "seconds": 5.0, "simulated_s": 5.2, "idle": 0.05, "tail_s": 0.5}
    content = {"benchmark": "cluster/rollout", "pause": {"pause_steps": 1.2}, "one_worker": {"static": cell},
               "variants": {"static": cell, "+ reallocation": quick, "+ spot training": quick}}
    content["reached"] = reached(content)
    assert {name for name, (_, ok) in content["reached"].items() if not ok} == {"all_together", "coordinator_share"}
    assert content["reached"].keys() == GOALS.keys()
    table = make_table(content)
    assert "2.00×" in table.sentence and "1.2 steps" in table.sentence and len(table.rows) == 3
