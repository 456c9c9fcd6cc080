"""Makes cost curve and drafter quality that the cluster benchmarks and `paceline simulate` use, from results measured on
an H200: a policy of Qwen2.5-7B's cost (`older/gpu/speculate.json`, model "twin") and HASS training (`gpu/drafter_training.json`).

    python -m benchmarks.cluster.make_curve

Steps without speculation are points of the curve. Those with draft trees took
policy(rows) + start(requests) + (depth - 1) * level(requests * width); the three parts are fitted, with coefficients >= 0.
"""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
from scipy.optimize import nnls

from benchmarks.lib.results import ROOT
from paceline.bundled import simulation_file
from paceline.models.config import ModelConfig
from paceline.strategy import CostCurve, Points
from paceline.types import Strategy

RESULTS = ROOT / "benchmarks" / "results" / "gpu"
KNOTS = (256, 512, 1024, 2048)
"""Rows beyond the measured batch sizes at which the policy's curve has a corner."""
SHAPE = ModelConfig("qwen2", 152064, 3584, 18944, 28, 28, 4, 128, qkv_bias=True)
READ_BYTES_PER_MS = 4.22e9
"""Memory bandwidth of an H200."""


def main() -> None:
    batches = json.loads((RESULTS.parent / "older" / "gpu" / "speculate.json").read_text())["models"]["twin"]["batches"]
    off = sorted((int(b), step_ms(int(b), found["strategies"]["off"])) for b, found in batches.items())
    base = Points.through(off)
    rows, targets, weights = [], [], []
    for batch, found in batches.items():
        for name, result in found["strategies"].items():
            if not name.startswith("eagle"):
                continue
            strategy, requests = Strategy.parse(name), int(batch)
            count = requests * (1 + strategy.budget)
            corners = [max(0.0, min(count, b) - a) for a, b in zip(KNOTS, (*KNOTS[1:], np.inf), strict=True)]
            levels = strategy.depth - 1
            rows.append([*corners, 1.0, requests, levels, levels * requests * strategy.width])
            targets.append(step_ms(requests, result) - float(np.interp(min(count, 256), base.x, base.y)))
            weights.append(1 / step_ms(requests, result))
    weight = np.array(weights)
    found, _ = nnls(np.array(rows) * weight[:, None], np.array(targets) * weight)
    slopes, (start, start_row, level, level_row) = found[: len(KNOTS)], found[len(KNOTS) :]
    policy, at = list(off), off[-1][1]
    for (a, b), slope in zip(pairwise(KNOTS), slopes, strict=False):
        at += slope * (b - a)
        policy.append((b, at))
    kv_bytes = SHAPE.num_layers * 2 * SHAPE.num_kv_heads * SHAPE.head_dim * 2
    curve = CostCurve(Points.through(policy), Points.through([(n, start + start_row * n) for n in (1, 256)]),
                      Points.through([(n, level + level_row * n) for n in (1, 1024)]),
                      request_context_ms=1e3 * kv_bytes / READ_BYTES_PER_MS)
    errors = [abs(np.dot(row, found) - target) * w for row, target, w in zip(rows, targets, weights, strict=True)]
    simulation_file("h200-7b.json").write_text(curve.dumps() + "\n")
    marks = json.loads((RESULTS / "drafter_training.json").read_text())["forms"]["hass"]["marks"]
    realized = float(np.mean([(m["measured"]["eagle:d6w4v48"] - 1) / (m["expected_d6"]["4"] - 1) for m in marks.values()]))
    quality = {"realized": realized, "marks": {seconds: mark["by_depth"] for seconds, mark in marks.items()}}
    simulation_file("h200-drafter.json").write_text(json.dumps(quality, indent=1) + "\n")
    print(f"{len(errors)} speculative steps, mean error {np.mean(errors):.1%}, largest {np.max(errors):.1%}")


def step_ms(batch: int, result: dict[str, float]) -> float:
    """Milliseconds per step of a measured run."""
    return 1e3 * batch * result["tokens_per_verification"] / result["tokens_per_s"]


if __name__ == "__main__":
    main()
