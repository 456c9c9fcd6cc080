"""Workloads of simulations: answer lengths from a file, alike within a group."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Workload(NamedTuple):
    """Requests of one rollout batch."""

    lengths: NDArray[np.int64]  # [N] answer lengths
    groups: NDArray[np.int64]  # [N] number of the prompt, ascending
    prompt_tokens: int
    max_new_tokens: int


def read_lengths(path: Path) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Read answer lengths and their probabilities: a CSV file with the columns `output_tokens` and, optionally, `probability`
    (or `count`), or one length per line."""
    text = path.read_text(encoding="utf-8").strip().splitlines()
    if not text:
        raise ValueError(f"{path}: it is empty")
    if "output_tokens" not in text[0]:
        try:
            lengths, counts = np.unique([int(line) for line in text], return_counts=True)
        except ValueError:
            raise ValueError(f"{path}: neither a column output_tokens nor one length per line") from None
        return lengths, counts / counts.sum()
    rows = list(csv.DictReader(text))
    weights = np.array([float(row.get("probability") or row.get("count") or 1.0) for row in rows])
    return np.array([int(row["output_tokens"]) for row in rows]), weights / weights.sum()


def sample_workload(lengths: NDArray[np.int64], probabilities: NDArray[np.float64], requests: int, group_size: int,
                    correlation: float, seed: int = 0, prompt_tokens: int = 256, max_new_tokens: int = 32768) -> Workload:
    """Draw `requests` answers with this distribution of lengths, in groups of `group_size`. `correlation`: correlation of the
    lengths' normal scores within a group (a Gaussian copula), so the distribution over all answers stays that of the file."""
    if requests % group_size:
        raise ValueError(f"requests: {requests} is not a multiple of the group size {group_size}")
    if not 0 <= correlation <= 1:
        raise ValueError(f"correlation: {correlation} is not in [0, 1]")
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(requests // group_size), group_size)
    scores = np.sqrt(correlation) * rng.normal(size=groups[-1] + 1)[groups] + np.sqrt(1 - correlation) * rng.normal(size=requests)
    order = np.argsort(lengths)
    cumulative = np.cumsum(probabilities[order])
    grid = np.linspace(-6, 6, 4097)
    quantiles = np.interp(scores, grid, np.array([NormalDist().cdf(z) for z in grid]))
    drawn = lengths[order][np.minimum(np.searchsorted(cumulative, quantiles), len(lengths) - 1)]
    return Workload(np.clip(drawn, 1, max_new_tokens), groups, prompt_tokens, max_new_tokens)
