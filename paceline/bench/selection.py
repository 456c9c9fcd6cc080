"""The selection benchmark: what speculation gains with a model on this machine, by batch size. Every strategy (off, fixed
ones, the bandit and auto) runs on an engine of its own; the engines take turns on the same answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from paceline.bench.demo import PROMPTS, as_chat
from paceline.bench.steps import Step, StepTally, TimedEngine, fixed_strategies
from paceline.config import EngineConfig
from paceline.drafters.checkpoint import load_eagle
from paceline.engine.build import check_speculation
from paceline.engine.pool import RequestPool
from paceline.generation import NamedPrompt, encode_prompt, read_prompts
from paceline.models.weights import check_device, check_model, load_model
from paceline.strategy import AutoSelector
from paceline.types import SamplingParams, StepResult, Strategy

SELECTORS = ("beg", "auto")
"""Selectors that are measured besides off and the fixed strategies."""
WARM_UP = 2
"""Number of rounds that are not counted."""
JOBS_PER_SLOT = 2
"""Each round begins this many jobs per batch slot after the one before."""
_GPU_KV_GB = 4.0
_MAX_PROMPT = 512
"""Maximum number of prompt tokens that the KV caches have room for."""


@dataclass(frozen=True, slots=True)
class SelectionOptions:
    """What is measured, and how long."""

    model: str
    """Hugging Face folder, hub id, GGUF file, or `default` for the bundled policy."""
    drafter: str
    """`suffix`, `none`, or the folder or hub id of a learned drafter."""
    prompts: str | None
    """File of prompts as JSON lines, or `task:NAME`. None: `task:collatz` for the bundled policy, else the demo's prompts."""
    batches: tuple[int, ...]
    """Batch sizes."""
    params: SamplingParams
    """How answers are sampled, and how many tokens are measured for each request."""
    rounds: int
    """Number of rounds; in each, every strategy runs once."""
    device: str = "auto"
    """Device, such as `cpu` or `cuda`; `auto`: a GPU if there is one."""
    dtype: str = "auto"
    """Data type of the policy, or `auto`."""
    threads: int | None = None
    """Number of CPU threads. None: PyTorch's default."""


class SelectionBenchmark:
    """One engine per strategy around the same weights, made when a batch size first needs it."""

    def __init__(self, options: SelectionOptions, on_refused: Callable[[str], None] = lambda message: None) -> None:
        """Loads the model. `on_refused` receives a message for every line of prompts that cannot be used."""
        check_device(options.device)
        check_speculation(options.drafter, "auto")
        check_model(options.model)
        prompts = _read_prompts(options, on_refused)
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        self.options = options
        self._model, self._tokenizer = load_model(options.model, options.device, options.dtype)
        self._learned = None if options.drafter in ("suffix", "none") else load_eagle(options.drafter, self._model)
        self._contenders: dict[str, Contender] = {}
        engine = self._contender("off", Strategy.OFF).engine
        self._jobs = Jobs(_encode(prompts, engine), options.params)
        self._available = engine.drafting.available
        self._next_job = 0

    @property
    def setting(self) -> dict[str, Any]:
        """What the figures depend on, for a report."""
        options = self.options
        return {"model": Path(options.model).name, "drafter": Path(options.drafter).name, "device": self._model.norm.device.type,
                "dtype": str(self._model.norm.dtype).removeprefix("torch."), "threads": torch.get_num_threads(),
                "temperature": options.params.temperature, "new_tokens": options.params.max_new_tokens, "rounds": options.rounds}

    def measure(self, batch: int, on_run: Callable[[str, int, int], None] = lambda name, done, total: None) -> BatchResult:
        """Measures all strategies at one batch size. `on_run` receives the name of the strategy that runs next, and how many runs
        of how many are done."""
        names: list[tuple[str, str | Strategy]] = [("off", Strategy.OFF)]
        names += [(str(strategy), strategy) for strategy in fixed_strategies(batch, self._available)]
        names += [(name, name) for name in SELECTORS]
        contenders = [self._contender(name, strategy) for name, strategy in names]
        first, self._next_job = self._next_job, self._next_job + JOBS_PER_SLOT * batch * (WARM_UP + self.options.rounds)
        return measure(contenders, self._jobs, batch, first, self.options.rounds, on_run)

    def _contender(self, name: str, strategy: str | Strategy) -> Contender:
        if name not in self._contenders:
            batch, params = max(self.options.batches), self.options.params
            on_gpu = self._model.norm.device.type == "cuda"
            config = EngineConfig(max_batch=batch, kv_memory_gb=_GPU_KV_GB if on_gpu else None,
                                  kv_tokens=None if on_gpu else batch * (params.max_new_tokens + _MAX_PROMPT))
            drafter = self.options.drafter if self._learned is None else deepcopy(self._learned)
            self._contenders[name] = Contender(name, TimedEngine(self._model, self._tokenizer, drafter, strategy, config))
        return self._contenders[name]


class Jobs(NamedTuple):
    """An endless sequence of prompts. Seeds derive from a job's number, so every engine generates the same answers."""

    prompts: Sequence[list[int]]
    params: SamplingParams

    def add(self, requests: RequestPool[int], number: int) -> None:
        """Adds job `number` to an engine's requests."""
        requests.add(self.prompts[number % len(self.prompts)], self.params, [number], key=f"bench {number}")


@dataclass(slots=True)
class Contender:
    """A strategy and its engine. Engines are separate, so that no strategy profits from what another has learned."""

    name: str
    engine: TimedEngine
    tally: StepTally = field(default_factory=StepTally)
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tally.tokens / self.seconds

    def reset(self) -> None:
        """Discards all figures so far."""
        self.tally, self.seconds, self.engine.choosing.seconds = StepTally(), 0.0, 0.0


class Cell(NamedTuple):
    """Figures of one strategy or selector at one batch size."""

    name: str
    """Name of the strategy or selector."""
    tokens_per_s: float
    """Tokens per second."""
    ratio: float
    """Tokens per second divided by those of off."""
    tokens_per_verification: float
    """Accept length."""
    used: str
    """The strategy of the most steps."""
    step: Step | None
    """Mean step of that strategy with a full batch. None: there was none."""
    strategies: dict[str, int]
    """Number of steps per strategy."""
    choosing_share: float
    """Share of the time that was spent on strategy selection."""


class Expected(NamedTuple):
    """What auto predicted for a step of a full batch, and what was measured."""

    strategy: str
    """The strategy that auto chose last."""
    predicted_ms: float
    measured_ms: float | None
    """None: the strategy never ran with a full batch."""
    predicted_tokens: float
    measured_tokens: float | None
    """None: the strategy never ran with a full batch."""
    cost_error: float
    """Mean relative error of recent predicted times."""
    progress_error: float
    """Mean relative error of recent predicted tokens."""


class BatchResult(NamedTuple):
    """Figures of all strategies at one batch size."""

    batch: int
    """Batch size."""
    cells: list[Cell]
    """Figures of each strategy; the first is off, the last auto."""
    expected: Expected | None
    """What auto predicted. None: it made no prediction."""
    num_differing: int
    """Number of answers, as far as they were generated, whose tokens differ from those of off."""

    def cell(self, name: str) -> Cell:
        """Figures of the strategy with this name."""
        return next(cell for cell in self.cells if cell.name == name)


def measure(contenders: Sequence[Contender], jobs: Jobs, batch: int, first_job: int, rounds: int,
            on_run: Callable[[str, int, int], None] = lambda name, done, total: None) -> BatchResult:
    """Runs all contenders in turn, round by round. The first rounds are a warm-up (compilation, graph capture, learning of the
    selectors) and are not counted."""
    tokens, differing = batch * jobs.params.max_new_tokens, 0
    for number in range(WARM_UP + rounds):
        if number == WARM_UP:
            for contender in contenders:
                contender.reset()
        start = first_job + JOBS_PER_SLOT * batch * number
        turns = [*contenders[number % len(contenders) :], *contenders[: number % len(contenders)]]
        drawn: dict[str, dict[int, list[int]]] = {}
        for contender in turns:
            on_run(contender.name, number * len(turns) + len(drawn), (WARM_UP + rounds) * len(turns))
            drawn[contender.name] = _run(contender, jobs, batch, start, tokens)
        differing += number >= WARM_UP and sum(_differs(drawn["off"][job], answers[job]) for answers in drawn.values()
                         for job in answers.keys() & drawn["off"].keys())
    cells = [_cell(contender, contenders[0], batch) for contender in contenders]
    return BatchResult(batch, cells, _expected(contenders[-1], batch), differing)


def _run(contender: Contender, jobs: Jobs, batch: int, first_job: int, tokens: int) -> dict[int, list[int]]:
    """Keeps the batch full: each finished request is replaced by the next job. Measures from the first step in which all requests
    decode until `tokens` tokens are generated. Returns each job's answer as far as it was generated."""
    answers: dict[int, list[int]] = {}
    drawn, began, numbers = 0, 0.0, count(first_job)
    with RequestPool[int](contender.engine) as requests:
        for number in islice(numbers, batch):
            jobs.add(requests, number)
        while drawn < tokens:
            result, finished, _ = requests.step()
            if not began:
                began = time.perf_counter() if _is_full(result, batch) else 0.0
            else:
                drawn += sum(map(len, result.tokens.values()))
                contender.tally(result)
            for number, rollout in finished:
                answers[number] = rollout.token_ids
                jobs.add(requests, next(numbers))
        contender.seconds += time.perf_counter() - began
        return answers | {number: rollout.token_ids for number, rollout in requests.abort()}


def _is_full(result: StepResult, batch: int) -> bool:
    return result.num_requests == batch and result.num_prefill_rows == 0


def _differs(a: list[int], b: list[int]) -> bool:
    return any(x != y for x, y in zip(a, b, strict=False))


def _cell(contender: Contender, off: Contender, batch: int) -> Cell:
    tally, used = contender.tally, contender.tally.most_used()
    return Cell(contender.name, contender.rate, contender.rate / off.rate, tally.tokens_per_verification, used,
                tally.mean_step(used, batch), dict(tally.strategies), contender.engine.choosing.seconds / contender.seconds)


def _expected(auto: Contender, batch: int) -> Expected | None:
    selector = auto.engine.selector
    if not isinstance(selector, AutoSelector) or selector.decision is None:
        return None
    decision = selector.decision
    if not decision.expected_progress:  # a drafter is being tried
        return None
    measured = auto.tally.mean_step(str(decision.strategy), batch)
    return Expected(str(decision.strategy), decision.expected_ms, measured.ms if measured else None,
                    batch * decision.expected_progress, measured.tokens if measured else None, selector.cost_error,
                    selector.progress_error)


def _read_prompts(options: SelectionOptions, on_refused: Callable[[str], None]) -> list[NamedPrompt] | None:
    """The prompts that the options name. None: the demo's."""
    source = options.prompts or ("task:collatz" if options.model == "default" else None)
    return None if source is None else read_prompts(source, on_refused)


def _encode(prompts: list[NamedPrompt] | None, engine: TimedEngine) -> list[list[int]]:
    if prompts is not None:
        return _short_enough([encode_prompt(engine, each) for each in prompts])
    if engine.tokenizer is None:
        raise ValueError("--prompts: this model has no tokenizer; give a file with token_ids")
    return _short_enough([engine.encode(as_chat(engine.tokenizer, text)) for text in PROMPTS])


def _short_enough(prompts: Sequence[list[int]]) -> list[list[int]]:
    found = [prompt for prompt in prompts if 0 < len(prompt) <= _MAX_PROMPT]
    if not found:
        raise ValueError(f"--prompts: no prompt has at most {_MAX_PROMPT} tokens")
    return found
