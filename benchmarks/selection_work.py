"""What `selection.py` runs: six workloads, each a list of rounds that every strategy gets alike."""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from gpu_common import random_prompts
from gpu_long_tail import draw_lengths

from paceline import SamplingParams
from paceline.drafters.eagle import Eagle

WORKLOADS = ("repetitive", "ordinary", "random", "high_temperature", "shrinking", "stale")
_GROUP = 4
"""Answers to a prompt, as in reinforcement learning."""
_RANDOM_PROMPT = 24
_WAVES = 6
"""Times the batch, where answers that end make room for others: so their last ones, with a smaller batch, weigh little."""


class Sizes(NamedTuple):
    batch: int
    """Of the workloads whose batch is steady."""
    tokens: int
    """Longest answer of those."""
    tail_batch: int
    tail_tokens: int
    natural: bool
    """Answers end themselves (and others take their place); else each has its length."""


class Round(NamedTuple):
    prompts: list[list[int]]
    params: list[SamplingParams]
    keys: list[str]


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    max_batch: int
    rounds: tuple[Round, ...]
    """The first is for warming up."""
    goes_stale: bool = False
    """The learned drafter is replaced by a random one when half of the tokens are drawn."""


class Texts:
    """Prompts of the task, in turn, and others whose answers repeat them."""

    def __init__(self, asked: Sequence[list[int]], repeating: Sequence[list[int]], vocabulary: int) -> None:
        self.repeating, self.vocabulary = repeating, vocabulary
        self._asked, self._next = asked, 0

    def take(self, count: int) -> list[list[int]]:
        found = [self._asked[(self._next + i) % len(self._asked)] for i in range(count)]
        self._next += count
        return found


def make_workload(name: str, texts: Texts, sizes: Sizes, num_rounds: int, learned: bool) -> Workload:
    """learned: there is a drafter that can go stale; without one, the text changes its nature midway."""
    batch = sizes.tail_batch if name == "shrinking" else sizes.batch
    rounds = tuple(_round(name, number, texts, sizes, learned) for number in range(num_rounds + 1))
    return Workload(name, batch, rounds, goes_stale=name == "stale" and learned)


def _round(name: str, number: int, texts: Texts, sizes: Sizes, learned: bool) -> Round:
    count = sizes.batch * (_WAVES if sizes.natural else 1)
    match name:
        case "repetitive":  # the same in every round: their answers are known by and by, as in the epochs of a training
            prompts, temperature = [texts.repeating[i % len(texts.repeating)] for i in range(count)], 0.3
        case "random":
            prompts, temperature = random_prompts(count, _RANDOM_PROMPT, texts.vocabulary, 1000 + number), 2.0
        case "shrinking":
            return _shrinking(number, texts, sizes)
        case "stale" if not learned:
            known = [texts.repeating[i % len(texts.repeating)] for i in range(count)]
            prompts, temperature = [*known, *random_prompts(count, _RANDOM_PROMPT, texts.vocabulary, 2000 + number)], 0.3
        case _:
            prompts, temperature = _grouped(texts, count), 1.3 if name == "high_temperature" else 1.0
    params = _sampling(sizes, temperature)
    each = [params] * len(prompts)
    if name == "stale" and not learned:
        each = [*each[:count], *[replace(params, temperature=2.0)] * count]
    return Round(prompts, each, [f"{name} {number} {i}" for i in range(len(prompts))])


def _shrinking(number: int, texts: Texts, sizes: Sizes) -> Round:
    prompts, params = _grouped(texts, sizes.tail_batch), _sampling(sizes, 1.0)
    lengths = [sizes.tail_tokens] * len(prompts) if sizes.natural else draw_lengths(None, len(prompts), sizes.tail_tokens)
    return Round(prompts, [replace(params, max_new_tokens=length) for length in lengths],
                 [f"shrinking {number} {i}" for i in range(len(prompts))])


def _grouped(texts: Texts, count: int) -> list[list[int]]:
    size = min(_GROUP, count)
    return [prompt for prompt in texts.take(-(-count // size)) for _ in range(size)][:count]


def _sampling(sizes: Sizes, temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_new_tokens=sizes.tokens, seed=5, ignore_eos=not sizes.natural)


def looping(tokens: Sequence[int], times: int) -> list[int]:
    """A text that has said the same a few times already."""
    return list(tokens) * times


def ruined(drafter: Eagle) -> Eagle:
    """One of the same form that knows nothing."""
    found = deepcopy(drafter)
    generator = torch.Generator(device=found.mlp_norm.device).manual_seed(random.Random(0).randrange(2**31))
    with torch.no_grad():
        for parameter in found.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, float(parameter.float().std()) + 1e-3, generator=generator)
    return found


def num_differing(plain: Sequence[list[int]], other: Sequence[list[int]]) -> int:
    return sum(a != b for a, b in zip(plain, other, strict=True))


def plain_json(values: dict[str, Any], most: int = 8) -> dict[str, int]:
    """The most frequent."""
    return dict(sorted(values.items(), key=lambda item: -item[1])[:most])
