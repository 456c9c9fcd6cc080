"""Speculation at a constant batch size: prompts whose responses are long enough, and tokens per second of off, auto and fixed
strategies on them."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.lib.interruptions import Interruptions
from benchmarks.lib.setup import Budget, Setting, free_memory, freeze_memory
from paceline import Engine, SamplingParams
from paceline.models.decoder import Decoder
from paceline.strategy.beg import arms_of
from paceline.types import StepResult


def fixed_strategies(batch: int) -> list[str]:
    """Fixed strategies of the learned drafter that suit a batch size: those of the bandit."""
    return [str(arm) for arm in arms_of(batch, ("eagle",)) if arm.drafter == "eagle"]


def num_parts(batch: int) -> int:
    """Number of batches that are measured one after the other in a round: several if they are small."""
    return max(1, 4 // batch)


def long_responses(setting: Setting, policy: Decoder, prompts: list[list[int]], new_tokens: int) -> tuple[list[list[int]], float]:
    """`select_long` with an engine of its own."""
    engine = setting.engine(policy, None, 256)
    found = select_long(engine, prompts, new_tokens, least=len(prompts) if setting.tiny else 64)
    del engine
    setting.free()
    return found


def select_long(engine: Engine, prompts: list[list[int]], new_tokens: int, least: int = 64) -> tuple[list[list[int]], float]:
    """Prompts whose responses reach `new_tokens` with the seeds of `sampling`, followed by the others if there are fewer than
    `least`; and the share of tokens past the end of a response if all of them are used."""
    groups = engine.generate(prompts, sampling(new_tokens, ignore_eos=False), strategy="off")
    lengths = [len(group.rollouts[0].token_ids) for group in groups]
    order = sorted(range(len(prompts)), key=lambda i: lengths[i] < new_tokens)  # stable
    enough = sum(length >= new_tokens for length in lengths)
    print(f"{enough} of {len(prompts)} responses have {new_tokens} tokens or more", flush=True)
    if enough >= least:
        order = order[:enough]
    return [prompts[i] for i in order], 1 - sum(lengths[i] for i in order) / (new_tokens * len(order))


def sampling(new_tokens: int, ignore_eos: bool = True) -> SamplingParams:
    return SamplingParams(temperature=1.0, max_new_tokens=new_tokens, seed=11, ignore_eos=ignore_eos)


# --- one measurement


@dataclass(slots=True)
class Window:
    """Counts tokens and time of the steps from when all requests decode until the first has `new_tokens` tokens."""

    batch: int
    new_tokens: int
    tokens: int = 0
    verifications: int = 0
    seconds: float = 0.0
    longest_step: float = 0.0
    """Longest time between the results of two steps, in seconds."""
    strategies: dict[str, int] = field(default_factory=dict)
    is_over: bool = False
    drawn: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Tokens by request."""
    _settling: int = 2
    _began: float = 0.0

    def __call__(self, result: StepResult) -> None:
        now = time.perf_counter()
        for request, tokens in result.tokens.items():
            self.drawn[request] += tokens
        self.is_over |= bool(result.finished) or max(map(len, self.drawn.values()), default=0) >= self.new_tokens
        if self.is_over or result.num_requests < self.batch or result.num_prefill_rows:
            return
        if self._settling:
            self._settling -= 1
            self._began = now
            return
        self.tokens += sum(map(len, result.tokens.values()))
        self.verifications += result.num_requests
        self.longest_step = max(self.longest_step, now - self._began - self.seconds)
        self.seconds = now - self._began
        self.strategies[str(result.strategy)] = self.strategies.get(str(result.strategy), 0) + 1


@dataclass(slots=True)
class Measured:
    """Figures of one strategy at one batch size, over all rounds."""

    rates: list[float] = field(default_factory=list)
    longest_step: float = 0.0
    tokens: int = 0
    verifications: int = 0
    strategies: dict[str, int] = field(default_factory=dict)

    def add(self, windows: Sequence[Window]) -> None:
        self.rates.append(sum(w.tokens for w in windows) / max(1e-9, sum(w.seconds for w in windows)))
        self.longest_step = max(self.longest_step, *(w.longest_step for w in windows))
        self.tokens += sum(w.tokens for w in windows)
        self.verifications += sum(w.verifications for w in windows)
        for window in windows:
            for name, count in window.strategies.items():
                self.strategies[name] = self.strategies.get(name, 0) + count

    def record(self) -> dict[str, Any]:
        return {"tokens_per_s": statistics.median(self.rates), "low": min(self.rates), "high": max(self.rates),
                "tokens_per_verification": self.tokens / max(1, self.verifications), "tokens": self.tokens,
                "longest_step_ms": 1e3 * self.longest_step}


@dataclass(slots=True)
class Flips:
    """By strategy: the number of responses that differ from those of off, and the number of tokens compared up to there."""

    counts: dict[str, list[int]] = field(default_factory=dict)

    def compare(self, name: str, plain: list[list[int]], other: list[list[int]]) -> None:
        count = self.counts.setdefault(name, [0, 0])
        for a, b in zip(plain, other, strict=True):
            first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
            count[0] += first is not None
            count[1] += min(len(a), len(b)) if first is None else first + 1

    def summary(self) -> dict[str, Any]:
        flips, tokens = (sum(count[i] for count in self.counts.values()) for i in (0, 1))
        each = {name: 1e6 * flipped / max(1, compared) for name, (flipped, compared) in self.counts.items()}
        return {"all": 1e6 * flips / max(1, tokens), "flips": flips, "tokens_compared": tokens, "by_strategy": each}


class BatchBench:
    """One model with its drafter: an engine for all strategies, optionally others, and prompts that are used once."""

    def __init__(self, make_engine: Callable[[], Engine], pool: list[list[int]], warm: list[list[int]], new_tokens: int,
                 others: dict[str, tuple[Engine, str]] | None = None) -> None:
        """pool: prompts to measure on. warm: prompts for warming up. others: further engines by name, with their strategies."""
        self.flips, self._new_tokens = Flips(), new_tokens
        self._make_engine, self._others = make_engine, others or {}
        self._pool, self._warm, self._next = pool, warm, 0
        self.engine = make_engine()

    def measure(self, batch: int, rounds: int, budget: Budget, fixed: Sequence[str]) -> dict[str, Any]:
        """Tokens per second of auto, off and the `fixed` strategies at this batch size."""
        names = ["auto", *self._others, "off", *fixed]
        parts = num_parts(batch)
        self._warm_up(names, batch)
        found, interruptions = {name: Measured() for name in names}, {name: Interruptions() for name in names}
        began = time.perf_counter()
        for number in range(rounds):
            took = (time.perf_counter() - began) / max(1, number)
            if number and budget.left < took:
                break
            prompts = self._take(names, batch, parts)
            drawn: dict[str, list[list[int]]] = {}
            for name in names:
                with interruptions[name]:
                    drawn[name], windows = self._run(name, prompts, batch, self._new_tokens)
                found[name].add(windows)
            for name in names:
                if name != "off":
                    self.flips.compare(name, drawn["off"], drawn[name])
        return _cell(found, fixed) | {"interruptions": {name: each.found for name, each in interruptions.items() if each.found}}

    def _run(self, name: str, parts: list[list[list[int]]], batch: int, new_tokens: int) -> tuple[list[list[int]], list[Window]]:
        """Responses have no known end, as if requests waited: what counts for a selector is then tokens per second, not when the
        last response is finished. They are broken off when the first one has its tokens."""
        engine, strategy = self._others.get(name, (self.engine, name))
        own, engine.selector = engine.selector, engine.selector_of(strategy)
        drawn, windows, params = [], [], sampling(4 * new_tokens, ignore_eos=False)
        for prompts in parts:
            window = Window(len(prompts), new_tokens)
            requests = [engine.add(prompt, params)[0] for prompt in prompts]
            while engine.has_work and not window.is_over:
                window(engine.step())
            engine.abort(requests)
            drawn += [window.drawn[request] for request in requests]
            while engine.has_work:
                engine.step()
            windows.append(window)
        engine.selector = own
        return drawn, windows

    def _warm_up(self, names: Sequence[str], batch: int) -> None:
        """Lets auto learn, and runs each strategy for a few tokens."""
        for name in names:
            self._run(name, [self._warm[:batch]], batch, self._new_tokens if name == "auto" else min(24, self._new_tokens))
        freeze_memory()

    def _take(self, names: Sequence[str], batch: int, parts: int) -> list[list[list[int]]]:
        """Prompts that this engine has not seen. When all are used, a fresh engine, which remembers none, takes its place."""
        if self._next + parts * batch > len(self._pool):
            del self.engine  # first: there may not be memory for two
            free_memory()
            self._next, self.engine = 0, self._make_engine()
            self._warm_up(names, batch)
        some = self._pool[self._next : self._next + parts * batch]
        self._next += parts * batch
        return [[some[i % len(some)] for i in range(first, first + batch)] for first in range(0, parts * batch, batch)]


def _cell(found: dict[str, Measured], fixed: Sequence[str]) -> dict[str, Any]:
    cell: dict[str, Any] = {name: measured.record() for name, measured in found.items() if measured.rates}
    for name, record in cell.items():
        pairs = zip(found[name].rates, found["off"].rates, strict=True)
        record["ratio_to_off"] = statistics.median(rate / off for rate, off in pairs)
    best = max(fixed, key=lambda name: cell[name]["tokens_per_s"])
    cell["auto"]["steps"] = found["auto"].strategies
    return {"strategies": cell, "best_fixed": best, "best_fixed_ratio": cell[best]["ratio_to_off"],
            "auto_to_best": cell["auto"]["tokens_per_s"] / max(cell[best]["tokens_per_s"], cell["off"]["tokens_per_s"])}


def show(name: str, batch: int, cell: dict[str, Any]) -> None:
    print(f"{name}, batch {batch}: best fixed {cell['best_fixed']} {cell['best_fixed_ratio']:.2f}x, auto "
          f"{cell['strategies']['auto']['ratio_to_off']:.2f}x")
    for strategy, record in cell["strategies"].items():
        print(f"  {strategy:16} {record['tokens_per_s']:9.0f} tok/s  {record['ratio_to_off']:.2f}x  "
              f"{record['tokens_per_verification']:.2f} per verification", flush=True)
