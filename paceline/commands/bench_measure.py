"""One batch size of `paceline bench selection`: every strategy on an engine of its own, in turns, on the same answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from paceline.commands.bench_runs import Step, Tally, TimedEngine
from paceline.strategy import ModelSelector
from paceline.strategy.model import Promise
from paceline.types import SamplingParams, StepResult

SELECTORS = ("beg", "auto")
WARM_UP = 2
JOBS_PER_PLACE = 2
"""By which a round's first job is ahead of the one before's."""


class Jobs(NamedTuple):
    """An endless row of prompts; seeds derive from a job's number, so every engine draws the same answers."""

    prompts: Sequence[list[int]]
    params: SamplingParams

    def add(self, engine: TimedEngine, number: int) -> int:
        return engine.add(self.prompts[number % len(self.prompts)], self.params, key=f"bench {number}")[0]


@dataclass(slots=True)
class Contender:
    """A strategy and its engine: what one learns of the answers, the others do not know."""

    name: str
    engine: TimedEngine
    tally: Tally = field(default_factory=Tally)
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tally.tokens / self.seconds

    def forget_figures(self) -> None:
        self.tally, self.seconds, self.engine.choosing.seconds = Tally(), 0.0, 0.0


class Cell(NamedTuple):
    """Of one strategy at one batch size."""

    name: str
    tokens_per_s: float
    ratio: float
    """To off."""
    tokens_per_verification: float
    used: str
    """The strategy of most steps …"""
    step: Step | None
    """… and its mean step with a full batch."""
    strategies: dict[str, int]
    choosing_share: float


class Expected(NamedTuple):
    """What auto promised and what came, per step of a full batch."""

    strategy: str
    predicted_ms: float
    measured_ms: float | None
    predicted_tokens: float
    measured_tokens: float | None
    cost_error: float
    calibration_error: float


class BatchResult(NamedTuple):
    batch: int
    cells: list[Cell]
    expected: Expected | None
    num_differing: int
    """Answers, or beginnings of them, that are not those of off."""

    def cell(self, name: str) -> Cell:
        return next(cell for cell in self.cells if cell.name == name)


def measure(contenders: Sequence[Contender], jobs: Jobs, batch: int, first_job: int, rounds: int) -> BatchResult:
    """Round by round; the first two are not counted: code compiles, graphs are captured, selectors learn the place."""
    tokens, differing = batch * jobs.params.max_new_tokens, 0
    for number in range(WARM_UP + rounds):
        if number == WARM_UP:
            for contender in contenders:
                contender.forget_figures()
        start = first_job + JOBS_PER_PLACE * batch * number
        turns = [*contenders[number % len(contenders) :], *contenders[: number % len(contenders)]]
        drawn = {contender.name: _run(contender, jobs, batch, start, tokens) for contender in turns}
        differing += number >= WARM_UP and sum(_differs(drawn["off"][job], answers[job]) for answers in drawn.values()
                         for job in answers.keys() & drawn["off"].keys())
    cells = [_cell(contender, contenders[0], batch) for contender in contenders]
    return BatchResult(batch, cells, _expected(contenders[-1], batch), differing)


def _run(contender: Contender, jobs: Jobs, batch: int, first_job: int, tokens: int) -> dict[int, list[int]]:
    """As many requests as the batch has, always: a finished one makes room for the next. Counts from the first step in which all
    decode until so many tokens are drawn. Job -> its answer, as far as it came."""
    engine, numbers = contender.engine, count(first_job)
    under_way = {jobs.add(engine, number): number for number in (next(numbers) for _ in range(batch))}
    answers: dict[int, list[int]] = {}
    drawn, began = 0, 0.0
    while drawn < tokens:
        result = engine.step()
        if not began:
            began = time.perf_counter() if _is_full(result, batch) else 0.0
        else:
            drawn += sum(map(len, result.tokens.values()))
            contender.tally(result)
        for rollout in result.finished:
            answers[under_way.pop(rollout.request_id)] = rollout.token_ids
            number = next(numbers)
            under_way[jobs.add(engine, number)] = number
    contender.seconds += time.perf_counter() - began
    for rollout in engine.abort(list(under_way)):
        answers[under_way[rollout.request_id]] = rollout.token_ids
    return answers


def _is_full(result: StepResult, batch: int) -> bool:
    return result.num_requests == batch and result.num_prefill_rows == 0


def _differs(a: list[int], b: list[int]) -> bool:
    return any(x != y for x, y in zip(a, b, strict=False))


def _cell(contender: Contender, off: Contender, batch: int) -> Cell:
    tally, used = contender.tally, contender.tally.most_used()
    return Cell(contender.name, contender.rate, contender.rate / off.rate, tally.tokens_per_verification, used,
                tally.mean_step(used, batch), dict(tally.strategies), contender.engine.choosing.seconds / contender.seconds)


def _expected(auto: Contender, batch: int) -> Expected | None:
    selector = auto.engine.select
    if not isinstance(selector, ModelSelector) or selector.promise is None:
        return None
    promise: Promise = selector.promise
    came = auto.tally.mean_step(str(promise.strategy), batch)
    scale = batch / max(1, promise.batch)
    return Expected(str(promise.strategy), promise.ms, came.ms if came else None, scale * promise.tokens,
                    came.tokens if came else None, selector.cost_error, selector.calibration_error)
