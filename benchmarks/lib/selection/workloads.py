"""The six workloads of the selection benchmark, each a list of rounds that every strategy gets alike."""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from benchmarks.lib.prompts import long_tailed_lengths, random_prompts
from paceline import SamplingParams
from paceline.drafters.eagle import Eagle

WORKLOADS = ("repetitive", "ordinary", "random", "high_temperature", "shrinking", "stale")
_GROUP = 4
"""Number of responses per prompt, as in reinforcement learning."""
_RANDOM_PROMPT = 24
_WAVES = 6
"""Number of requests as a multiple of the batch size where finished requests make room for waiting ones, so that the last
steps, at a smaller batch size, count little."""


class Sizes(NamedTuple):
    """Sizes of the workloads of a setting."""

    batch: int
    """Batch size of the workloads with a constant batch."""
    tokens: int
    """Longest response of those workloads."""
    tail_batch: int
    """Number of requests of the workload `shrinking`."""
    tail_tokens: int
    """Longest response of the workload `shrinking`."""
    natural: bool
    """Whether responses end themselves and waiting requests take their place; otherwise every response has a given length."""


class Round(NamedTuple):
    """Requests of one round: prompts, sampling parameters and seed keys."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    keys: list[str]


@dataclass(frozen=True, slots=True)
class Workload:
    """A named list of rounds."""

    name: str
    max_batch: int
    rounds: tuple[Round, ...]
    """The rounds; the first is a warm-up."""
    goes_stale: bool = False
    """Whether the learned drafter is replaced by a random one when half of the tokens are generated."""


class Texts:
    """Prompts of the task, taken in turn, and prompts whose responses repeat them."""

    def __init__(self, asked: Sequence[list[int]], repeating: Sequence[list[int]], vocab_size: int) -> None:
        self.repeating, self.vocab_size = repeating, vocab_size
        self._asked, self._next = asked, 0

    def take(self, count: int) -> list[list[int]]:
        found = [self._asked[(self._next + i) % len(self._asked)] for i in range(count)]
        self._next += count
        return found


def make_workload(name: str, texts: Texts, sizes: Sizes, num_rounds: int, learned: bool) -> Workload:
    """A workload by name. Without a `learned` drafter that can become stale, the text of `stale` turns random midway."""
    batch = sizes.tail_batch if name == "shrinking" else sizes.batch
    rounds = tuple(_round(name, number, texts, sizes, learned) for number in range(num_rounds + 1))
    return Workload(name, batch, rounds, goes_stale=name == "stale" and learned)


def _round(name: str, number: int, texts: Texts, sizes: Sizes, learned: bool) -> Round:
    count = sizes.batch * (_WAVES if sizes.natural else 1)
    match name:
        case "repetitive":  # the same in every round, as in the epochs of a training run: the drafter sees the responses again
            prompts, temperature = [texts.repeating[i % len(texts.repeating)] for i in range(count)], 0.3
        case "random":
            prompts, temperature = random_prompts(count, _RANDOM_PROMPT, texts.vocab_size, 1000 + number), 2.0
        case "shrinking":
            return _shrinking(number, texts, sizes)
        case "stale" if not learned:
            known = [texts.repeating[i % len(texts.repeating)] for i in range(count)]
            prompts, temperature = [*known, *random_prompts(count, _RANDOM_PROMPT, texts.vocab_size, 2000 + number)], 0.3
        case _:
            prompts, temperature = _grouped(texts, count), 1.3 if name == "high_temperature" else 1.0
    params = _sampling(sizes, temperature)
    each = [params] * len(prompts)
    if name == "stale" and not learned:
        each = [*each[:count], *[replace(params, temperature=2.0)] * count]
    return Round(prompts, each, [f"{name} {number} {i}" for i in range(len(prompts))])


def _shrinking(number: int, texts: Texts, sizes: Sizes) -> Round:
    prompts, params = _grouped(texts, sizes.tail_batch), _sampling(sizes, 1.0)
    lengths = [sizes.tail_tokens] * len(prompts) if sizes.natural else long_tailed_lengths(None, len(prompts), sizes.tail_tokens)
    return Round(prompts, [replace(params, max_new_tokens=length) for length in lengths],
                 [f"shrinking {number} {i}" for i in range(len(prompts))])


def _grouped(texts: Texts, count: int) -> list[list[int]]:
    size = min(_GROUP, count)
    return [prompt for prompt in texts.take(-(-count // size)) for _ in range(size)][:count]


def _sampling(sizes: Sizes, temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_new_tokens=sizes.tokens, seed=5, ignore_eos=not sizes.natural)


def looping(tokens: Sequence[int], times: int) -> list[int]:
    """A text that repeats itself."""
    return list(tokens) * times


def ruined(drafter: Eagle) -> Eagle:
    """A drafter of the same form with random weights."""
    found = deepcopy(drafter)
    generator = torch.Generator(device=found.mlp_norm.device).manual_seed(random.Random(0).randrange(2**31))
    with torch.no_grad():
        for parameter in found.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, float(parameter.float().std()) + 1e-3, generator=generator)
    return found


def num_differing(plain: Sequence[list[int]], other: Sequence[list[int]]) -> int:
    """Number of responses that differ."""
    return sum(a != b for a, b in zip(plain, other, strict=True))


def most_frequent(values: dict[str, Any], most: int = 8) -> dict[str, int]:
    """The entries with the largest counts."""
    return dict(sorted(values.items(), key=lambda item: -item[1])[:most])
