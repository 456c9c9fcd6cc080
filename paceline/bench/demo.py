"""The demo's measurement: a dozen prompts with speculation off and on, generated in turns by two engines around the same
weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from paceline.config import EngineConfig
from paceline.engine import Engine
from paceline.models.decoder import Decoder
from paceline.tasks import make_task
from paceline.types import RolloutGroup, SamplingParams, StepResult

_TEXT = ("The river rises in the hills above the town. It runs past the old mill, under the stone bridge and through the "
         "water meadows. In spring the river floods the meadows, and in summer children swim below the stone bridge.")
_CODE = ("def area(width, height):\n    return width * height\n\n"
         "def volume(width, height, depth):\n    return width * height * depth")
PROMPTS = (
    f"Copy this text exactly, word for word:\n\n{_TEXT}",
    "Write the multiplication table of 7, from 7 x 1 = 7 to 7 x 12 = 84, one line each.",
    "Write a short story about a lighthouse keeper.",
    f"Repeat this Python code, then the same code again with every function renamed to upper case:\n\n{_CODE}",
    "Count from 1 to 40, separated by commas.",
    "Explain why the sky is blue.",
    f"Write this text in capital letters:\n\n{_TEXT}",
    "List the days of the week five times, one day per line.",
    "Write a Python class Stack with the methods push, pop, peek, is_empty and size, then show how each is used.",
    f"Put this text into a list, one sentence per item, and then repeat the list:\n\n{_TEXT}",
    "Write an HTML table with ten rows: number, square, cube.",
    "What is 23 + 45? Then 24 + 45, 25 + 45, and so on up to 40 + 45, one line each.",
)
"""Prompts of the demo: some that speculation suits, some that it does not."""
_PROMPTS_PER_ROUND = 1
"""Number of prompts that run together, like the tail of a rollout; then it is the other engine's turn, so that both see the same
machine."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the demo generates, and with which model."""

    model: str
    """Hugging Face folder, hub id, GGUF file, or `default` for the bundled policy."""
    out: Path
    """Folder for `summary.json`."""
    n: int
    """Number of answers per prompt."""
    params: SamplingParams
    """How answers are sampled."""
    dtype: str = "auto"
    """Data type of the model, or `auto`."""
    device: str = "auto"
    """Device, such as `cpu` or `cuda`; `auto`: a GPU if there is one."""
    threads: int | None = None
    """Number of CPU threads. None: PyTorch's default."""

    @property
    def prompts(self) -> tuple[str, ...]:
        """The demo's prompts; those of its own task for the bundled policy, which knows nothing else."""
        if self.model != "default":
            return PROMPTS
        task = make_task("collatz")
        return tuple(str(task[i].prompt) for i in range(len(PROMPTS)))


@dataclass(slots=True)
class Side:
    """One of the two engines, and what it has generated."""

    name: str
    """`off` or `auto`."""
    engine: Engine
    seconds: float = 0.0
    """Seconds of generation."""
    groups: list[RolloutGroup] = field(default_factory=list)
    """Rollouts of each prompt."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens generated."""
        return sum(len(rollout.token_ids) for group in self.groups for rollout in group.rollouts)

    def figures(self) -> dict[str, Any]:
        """Tokens, time and accept length as plain JSON."""
        stats = self.engine.stats()
        return {"tokens": self.num_tokens, "seconds": round(self.seconds, 3),
                "tokens_per_second": round(self.num_tokens / self.seconds, 2),
                "tokens_per_verification": round(stats.tokens_per_verification, 3), "strategy_steps": stats.strategy_steps}


def make_sides(model: Decoder, tokenizer: Any, n: int) -> list[Side]:
    """Two new engines around the same weights: without speculation, and with automatic selection."""
    config = EngineConfig(max_batch=_PROMPTS_PER_ROUND * n, kv_memory_gb=0.5)
    return [Side("off", Engine(model, tokenizer, drafter="none", strategy="off", config=config)),
            Side("auto", Engine(model, tokenizer, drafter="suffix", strategy="auto", config=config))]


def as_chat(tokenizer: Any, text: str) -> Any:
    """The text as a user message if the tokenizer has a chat template, else as it is."""
    return [{"role": "user", "content": text}] if tokenizer.chat_template else text


def run_demo(model: Decoder, tokenizer: Any, options: DemoOptions,
             on_step: Callable[[Side, StepResult], None] = lambda side, result: None) -> list[Side]:
    """Generates all prompts with both engines in turns, after a warm-up."""
    for side in make_sides(model, tokenizer, options.n):  # kernels compile on first use
        side.engine.generate([as_chat(tokenizer, options.prompts[0])], SamplingParams(max_new_tokens=12), options.n)
    sides, prompts = make_sides(model, tokenizer, options.n), [as_chat(tokenizer, text) for text in options.prompts]
    for number, start in enumerate(range(0, len(prompts), _PROMPTS_PER_ROUND)):
        for side in sides if number % 2 == 0 else reversed(sides):
            _run_round(side, prompts[start : start + _PROMPTS_PER_ROUND], options, on_step)
    return sides


def _run_round(side: Side, prompts: list[Any], options: DemoOptions, on_step: Callable[[Side, StepResult], None]) -> None:
    began = time.perf_counter()
    side.groups += side.engine.generate(prompts, options.params, options.n, on_step=lambda result: on_step(side, result))
    side.seconds += time.perf_counter() - began


def summarize(sides: list[Side], options: DemoOptions) -> dict[str, Any]:
    """Figures of both engines and how they compare, as plain JSON."""
    off, auto = sides
    differing, rollouts, positions = compare(off, auto)
    a, b, weight = off.figures(), auto.figures(), off.engine.model.norm
    return {
        "model": options.model, "dtype": str(weight.dtype).removeprefix("torch."), "device": weight.device.type,
        "threads": torch.get_num_threads(), "prompts": len(PROMPTS), "n": options.n, "seed": options.params.seed,
        "temperature": options.params.temperature, "max_new_tokens": options.params.max_new_tokens,
        "off": a, "auto": b, "speedup": round(b["tokens_per_second"] / a["tokens_per_second"], 3),
        "identical": positions == 0, "rollouts": rollouts, "differing_rollouts": differing, "differing_tokens": positions}


def compare(off: Side, auto: Side) -> tuple[int, int, int]:
    """(number of rollouts that differ, number of rollouts, number of differing tokens). After a first difference all further
    tokens of a rollout may differ."""
    differing = rollouts = positions = 0
    for left, right in zip(off.groups, auto.groups, strict=True):
        for a, b in zip(left.rollouts, right.rollouts, strict=True):
            wrong = sum(x != y for x, y in zip_longest(a.token_ids, b.token_ids))
            rollouts, positions, differing = rollouts + 1, positions + wrong, differing + (wrong > 0)
    return differing, rollouts, positions
