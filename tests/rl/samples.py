"""Random answers for tests of losses and packing."""

from __future__ import annotations

import torch

from paceline.rl.batch import Sample

VOCAB = 61


def random_samples(num_groups: int = 2, size: int = 3, seed: int = 0, longest: int = 9) -> list[Sample]:
    draw = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=draw))

    samples = []
    for group in range(num_groups):
        prompt = [number(0, VOCAB) for _ in range(number(1, 5))]
        for _ in range(size):
            answer = [number(0, VOCAB) for _ in range(number(1, longest))]
            samples.append(Sample(prompt + answer, len(prompt), group, float(number(0, 3)), False,
                                  -torch.rand(len(answer), generator=draw, dtype=torch.float64)))
    return samples
