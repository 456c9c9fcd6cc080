"""`paceline bench selection`: what speculation is worth with this model on this machine, by batch size: off, fixed strategies,
the bandit and auto, what auto expected, and why."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from paceline.commands.bench_measure import JOBS_PER_PLACE, SELECTORS, WARM_UP, BatchResult, Contender, Jobs, measure
from paceline.commands.bench_runs import TimedEngine, fixed_strategies
from paceline.commands.bench_show import as_json, show
from paceline.commands.demo import PROMPTS
from paceline.commands.demo import as_prompt as as_chat
from paceline.commands.drafter_prompts import encoded, read_prompts
from paceline.commands.generate import check_device
from paceline.commands.policy import policy_source
from paceline.config import EngineConfig
from paceline.drafters.checkpoint import load_eagle
from paceline.drafters.eagle import Eagle
from paceline.models.decoder import Decoder
from paceline.models.weights import load_model
from paceline.report.files import write_file
from paceline.types import SamplingParams, Strategy

_GPU_KV_GB = 4.0
_ROOM = 512
"""Longest prompt that the caches make room for beside the answers."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    model: str
    drafter: str
    """suffix, none, or a learned drafter's folder."""
    prompts: str | None
    batches: tuple[int, ...]
    params: SamplingParams
    rounds: int
    device: str = "cpu"
    dtype: str = "auto"
    threads: int | None = None
    json_file: Path | None = None


def bench_selection(options: BenchOptions) -> int:
    check_device(options.device)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model, tokenizer = load_model(policy_source(options.model), options.device, options.dtype)
    learned = None if options.drafter in ("suffix", "none") else load_eagle(options.drafter, model)
    bench = Bench(options, model, tokenizer, learned)
    console, found = Console(), list[dict[str, Any]]()
    setting = {"model": Path(options.model).name, "drafter": Path(options.drafter).name, "device": options.device,
               "dtype": str(model.norm.dtype).removeprefix("torch."), "threads": torch.get_num_threads(),
               "temperature": options.params.temperature, "new_tokens": options.params.max_new_tokens, "rounds": options.rounds}
    print(", ".join(f"{name} {value}" for name, value in setting.items()))
    for batch in options.batches:
        result = bench.measure(batch)
        show(result, console)
        found.append(as_json(result))
    if options.json_file is not None:
        write_file(options.json_file, (json.dumps({**setting, "batches": found}, indent=1) + "\n").encode())
    return 0


class Bench:
    """Engines by strategy, made when a batch size first asks for one, around the same weights."""

    def __init__(self, options: BenchOptions, model: Decoder, tokenizer: Any, learned: Eagle | None) -> None:
        self._options, self._model, self._tokenizer, self._learned = options, model, tokenizer, learned
        self._contenders: dict[str, Contender] = {}
        engine = self._contender("off", Strategy.OFF).engine
        self._jobs = Jobs(_prompts(options, engine), options.params)
        self._available = engine.drafting.available
        self._next_job = 0

    def measure(self, batch: int) -> BatchResult:
        names: list[tuple[str, str | Strategy]] = [("off", Strategy.OFF)]
        names += [(str(strategy), strategy) for strategy in fixed_strategies(batch, self._available)]
        names += [(name, name) for name in SELECTORS]
        contenders = [self._contender(name, strategy) for name, strategy in names]
        first, self._next_job = self._next_job, self._next_job + JOBS_PER_PLACE * batch * (WARM_UP + self._options.rounds)
        return measure(contenders, self._jobs, batch, first, self._options.rounds)

    def _contender(self, name: str, strategy: str | Strategy) -> Contender:
        if name not in self._contenders:
            batch, params = max(self._options.batches), self._options.params
            on_gpu = self._model.norm.device.type == "cuda"
            config = EngineConfig(max_batch=batch, kv_memory_gb=_GPU_KV_GB if on_gpu else None,
                                  kv_tokens=None if on_gpu else batch * (params.max_new_tokens + _ROOM))
            drafter = self._options.drafter if self._learned is None else deepcopy(self._learned)
            self._contenders[name] = Contender(name, TimedEngine(self._model, self._tokenizer, drafter, strategy, config))
        return self._contenders[name]


def _prompts(options: BenchOptions, engine: TimedEngine) -> list[list[int]]:
    spec = options.prompts or ("task:collatz" if options.model == "default" else None)
    if spec is not None:
        asked = read_prompts(spec, lambda line: print(f"paceline: {line}", file=sys.stderr))
        return _that_fit([encoded(engine, each) for each in asked])
    if engine.tokenizer is None:
        raise ValueError("--prompts: this model came without a tokenizer; give a file with token_ids")
    return _that_fit([engine.encode(as_chat(engine.tokenizer, text)) for text in PROMPTS])


def _that_fit(prompts: Sequence[list[int]]) -> list[list[int]]:
    found = [prompt for prompt in prompts if 0 < len(prompt) <= _ROOM]
    if not found:
        raise ValueError(f"--prompts: not one of at most {_ROOM} tokens")
    return found
