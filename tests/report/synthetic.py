"""Metrics like those of a training run."""

from __future__ import annotations

import random
from typing import Any


def metrics_of(step: int, rng: random.Random) -> dict[str, Any]:
    generate, p50 = 10 + 3 * rng.random(), 300 + rng.randrange(100)
    return {"reward/mean": rng.random(), "reward/errors": rng.randrange(3), "length/p50": p50, "length/p99": 4 * p50,
            "length/max": 6 * p50, "tokens_per_second": 2000 + rng.random(), "accept_length": 1 + rng.random(),
            "time/generate": generate, "time/reward": 0.5, "time/infer": 2.0, "time/train": 6.0, "time/idle": 0.5,
            "time/step": generate + 10, "kl": 1e-3 * rng.random(), "lr": 1e-6, "strategy": "suffix:d8w2v16"}
