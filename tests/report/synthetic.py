"""Metrics like those of a training run."""

from __future__ import annotations

import random
from typing import Any


def metrics_of(step: int, rng: random.Random) -> dict[str, Any]:
    generate, p50 = 10 + 3 * rng.random(), 300 + rng.randrange(100)
    return {"reward/mean": rng.random(), "reward/errors": 1 + rng.randrange(3), "length/p50": p50, "length/p99": 4 * p50,
            "length/max": 6 * p50, "tokens_per_second": 2000 + rng.random(), "accept_length": 1 + rng.random(),
            "time/generate": generate, "time/reward": 0.5, "time/infer": 2.0, "time/train": 6.0, "time/idle": 0.5,
            "time/step": generate + 10, "kl": 1e-3 * rng.random(), "lr": 1e-6, "strategy": "suffix:d8w2v16"}


def trace_of(step: int, rng: random.Random) -> dict[str, Any]:
    live = [max(1, 64 - i * i // 400) for i in range(160)]
    sums = [10, 1.0, 120, 100, 30, 20]
    return {"on": {"seconds": 12.0, "live": live, "strategies": ["", "eagle:d4w1v4", "off"],
                   "strategy": [0] + [2] * 99 + [1] * 60},
            "off": {"seconds": 15.0, "live": live}, "lengths": [rng.randrange(400) for _ in range(64)],
            "drafter_version": step // 2,
            "batch": {"0": {"eagle": sums}, "2": {"none": [10, 0.5, 100, 100, 0, 0], "eagle": sums}, "6": {"suffix": sums}},
            "position": {"width": 16, "all": [[200, 160], [90, 60], [5, 4]], "drafted": [[100, 40], [30, 20], [0, 0]]}}
