"""A whole rollout with long-tailed response lengths: its prompts, its time with one strategy, and what follows from several."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.lib.setup import freeze_memory
from paceline import Engine, SamplingParams
from paceline.types import RolloutGroup, StepResult

TOKENS_PER_PROBLEM = 180
MAX_PROBLEMS = 12


def warm_up(engine: Engine, names: Sequence[str], prompts: list[list[int]], lengths: list[int]) -> None:
    """Captures graphs of every batch size, and lets auto learn on prompts that are not measured."""
    short = shortened(lengths)
    for name in names:
        run(engine, name, prompts, lengths if name == "auto" else short)
    freeze_memory()


def shortened(lengths: Sequence[int]) -> list[int]:
    """Lengths for a warm-up, in which the batch still shrinks in several steps."""
    return [min(length, 64 + 8 * (i % 8)) for i, length in enumerate(lengths)]


@dataclass(slots=True)
class Run:
    """Figures of one rollout."""

    seconds: float
    tokens: int
    tokens_per_verification: float
    strategies: dict[str, int]
    finish_seconds: list[float]
    share_past_end: float


@dataclass(slots=True)
class Watch:
    """Records for every step which responses finish and which strategy was used."""

    began: float
    finished: list[float] = field(default_factory=list)
    strategies: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    verifications: int = 0

    def __call__(self, result: StepResult) -> None:
        self.finished += [time.perf_counter() - self.began] * len(result.finished)
        self.tokens += sum(map(len, result.tokens.values()))
        self.verifications += result.num_requests
        if result.num_requests:
            self.strategies[str(result.strategy)] = self.strategies.get(str(result.strategy), 0) + 1


def run(engine: Engine, strategy: str, prompts: list[list[int]], lengths: list[int]) -> Run:
    params = [SamplingParams(temperature=1.0, max_new_tokens=length, seed=3, ignore_eos=True) for length in lengths]
    engine.scheduler.drop_prefixes()  # every run prefills its prompts
    watch = Watch(time.perf_counter())
    groups = engine.generate(prompts, params, strategy=strategy, on_step=watch)
    seconds = time.perf_counter() - watch.began
    assert watch.tokens == sum(lengths), "a response does not have its length"
    return Run(seconds, watch.tokens, watch.tokens / max(1, watch.verifications), watch.strategies, watch.finished,
               share_past_end(groups, engine.model.config.eos_token_ids))


def share_past_end(groups: Sequence[RolloutGroup], ends: tuple[int, ...]) -> float:
    """Share of tokens that come after a response's first end token."""
    past = total = 0
    for group in groups:
        tokens = group.rollouts[0].token_ids
        end = next((i for i, token in enumerate(tokens) if token in ends), len(tokens) - 1)
        past += len(tokens) - 1 - end
        total += len(tokens)
    return past / total


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    last = runs[-1]
    quantiles = {q: last.finish_seconds[int(q / 100 * (len(last.finish_seconds) - 1))] for q in (10, 50, 90, 99, 100)}
    common = sorted(last.strategies.items(), key=lambda item: -item[1])[:12]
    return {"seconds": statistics.median(r.seconds for r in runs), "each": [r.seconds for r in runs],
            "tokens_per_s": last.tokens / last.seconds, "tokens_per_verification": last.tokens_per_verification,
            "finish_seconds_by_percentile": quantiles, "share_past_end": last.share_past_end, "steps": dict(common)}


def conclusions(content: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    seconds = {name: cell["seconds"] for name, cell in content["rollout"].items()}
    fixed = [name for name in names if name in seconds and name not in ("off", "auto")]
    found: dict[str, Any] = {"best_fixed": min(fixed, key=lambda name: seconds[name])} if fixed else {}
    if "off" in seconds:
        found["ratio_to_off"] = {name: seconds["off"] / value for name, value in seconds.items()}
    theirs = content.get("vllm", {}).get("seconds")
    if theirs:
        found["ratio_to_vllm"] = {name: statistics.median(theirs) / value for name, value in seconds.items()}
    return found


# --- prompts


def compose(problems: Sequence[str], lengths: Sequence[int], salt: int, max_problems: int = MAX_PROBLEMS) -> list[str]:
    """One prompt per response, with enough problems for the response's length, but no more than `max_problems`."""
    draw, texts = random.Random(salt), []
    for length in lengths:
        some = draw.sample(problems, min(len(problems), max_problems, 1 + length // TOKENS_PER_PROBLEM))
        numbered = "\n\n".join(f"{i}. {problem}" for i, problem in enumerate(some, start=1))
        texts.append(some[0] if len(some) == 1 else "Solve all of these problems one after the other. Explain every step in full "
                     f"sentences and check each result before you go on.\n\n{numbered}")
    return texts
