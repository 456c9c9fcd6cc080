"""`paceline generate`: prompts from a file, rollouts to a file, each written when it is finished."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from jinja2 import TemplateError

from paceline.commands.jobs import Job, JobReader, open_prompts
from paceline.commands.output import RolloutFile, to_record
from paceline.commands.progress import ProgressView, figures_line
from paceline.engine import Engine
from paceline.engine.prompts import derive_seed
from paceline.models.weights import parse_dtype
from paceline.types import Rollout, SamplingParams, Strategy

OK, BAD_INPUT, INTERRUPTED = 0, 2, 130


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    model: str
    prompts: str
    out: Path
    n: int
    params: SamplingParams
    strategy: str
    drafter: str
    dtype: str
    device: str
    threads: int | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    """Fields of EngineConfig that are not its defaults."""


class Owner(NamedTuple):
    """Whose answer a request of the engine is."""

    job: Job
    sample: int


def generate(options: GenerateOptions) -> int:
    """Exit code: 0, 2 if any line or rollout failed, 130 when interrupted."""
    check_device(options.device)
    strategy = None if options.strategy == "auto" else Strategy.parse(options.strategy)
    settings = token_settings(options)
    name, lines, num_lines = open_prompts(options.prompts)
    with lines, RolloutFile(options.out, settings) as out:
        total = None if num_lines is None else num_lines * options.n
        with ProgressView("generate", total) as progress:
            generation = Generation(options, name, lines, out, progress)
            try:
                generation.load(strategy)
                generation.run()
            except KeyboardInterrupt:
                progress.say(f"interrupted: {generation.num_done} rollouts of this run are in {options.out}; "
                             "the same command goes on from there")
                return INTERRUPTED
    return generation.report()


class Generation:
    """Feeds one engine from one input and writes what it finishes."""

    engine: Engine

    def __init__(self, options: GenerateOptions, name: str, lines: BinaryIO, out: RolloutFile,
                 progress: ProgressView) -> None:
        self.options, self.out, self.progress = options, out, progress
        self._jobs: Iterator[Job] = iter(JobReader(name, lines, self._complain))
        self._owners: dict[int, Owner] = {}
        self.num_done = self.num_kept = self.num_problems = 0

    def load(self, strategy: Strategy | None) -> None:
        if self.options.threads is not None:
            torch.set_num_threads(self.options.threads)
        self.engine = load_engine(self.options)
        available = self.engine.drafting.available
        if strategy is not None and strategy != Strategy.OFF and strategy.drafter not in available:
            raise ValueError(f"--strategy {strategy}: no such drafter is loaded (loaded: {', '.join(available) or 'none'}); "
                             "see --drafter")
        limit, context = self.engine.scheduler.max_length, self.engine.model.config.max_context
        if limit < context:
            self.progress.say(f"note: the cache holds {limit} tokens, less than the model's context of {context}: longer "
                              "answers end there (--kv-memory-gb)")
        self.progress.restart_clock()

    def run(self) -> None:
        self._refill()
        while self.engine.has_work:
            result = self.engine.step()
            for rollout in result.finished:
                self._keep(rollout)
            self.progress.update(self.engine.stats(), str(result.strategy))  # a few numbers, shown now and then
            self._refill()

    def report(self) -> int:
        skipped = f" ({self.num_kept} were there already)" if self.num_kept else ""
        self.progress.say(figures_line(self.num_done, self.engine.stats(), self.progress.seconds) + skipped)
        if self.num_problems:
            self.progress.say(f"{self.num_problems} line(s) or rollout(s) failed, see above")
        return BAD_INPUT if self.num_problems else OK

    def _refill(self) -> None:
        """Enough for the scheduler to choose from; the rest of the input stays where it is."""
        while len(self._owners) < 2 * self.engine.scheduler.max_batch:
            job = next(self._jobs, None)
            if job is None:
                return
            try:
                self._add(job)
            except (ValueError, TemplateError) as error:
                self._complain(f"{job.place}: {one_line(error)}")

    def _add(self, job: Job) -> None:
        missing = self._missing(job)
        self.num_kept += self.options.n - len(missing)
        self.progress.add_done(self.options.n - len(missing))
        if not missing:
            return
        params = self.options.params if job.seed is None else replace(self.options.params, seed=job.seed)
        prompt_ids = encode(self.engine, job.prompt)
        seeds = [derive_seed(params.seed, prompt_ids if job.key is None else job.key, sample) for sample in missing]
        ids = self.engine.add(prompt_ids, params, len(seeds), seeds=seeds)
        self._owners |= {i: Owner(job, sample) for i, sample in zip(ids, missing, strict=True)}

    def _missing(self, job: Job) -> list[int]:
        """Samples that the output does not have yet."""
        found = {sample: self.out.done.get((str(job.id), sample)) for sample in range(self.options.n)}
        if any(old is not None and old != job.prompt_hash for old in found.values()):
            raise ValueError(f"id {job.id!r}: {self.out.path} has answers to another prompt or seed under this id")
        return [sample for sample, old in found.items() if old is None]

    def _keep(self, rollout: Rollout) -> None:
        job, sample = self._owners.pop(rollout.request_id)
        self.out.write(to_record(job.id, sample, job.prompt_hash, rollout))
        self.progress.add_done(1)
        if rollout.error is None:
            self.num_done += 1
        else:
            self.num_problems += 1
            self.progress.say(f"{job.place}: sample {sample}: {one_line(rollout.error)}")

    def _complain(self, line: str) -> None:
        self.num_problems += 1
        self.progress.lower_total(self.options.n)
        self.progress.say(line)


def token_settings(options: GenerateOptions) -> dict[str, Any]:
    """All that tokens depend on, beside the input itself. What only changes the speed is left out."""
    params, dtype = options.params, parse_dtype(options.dtype)
    return {
        "model": _model_name(options.model), "weights": _weights_stamp(options.model), "n": options.n, "seed": params.seed,
        "temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p,
        "max_new_tokens": params.max_new_tokens, "stop": list(params.stop), "ignore_eos": params.ignore_eos,
        "raw_logprobs": params.raw_logprobs,
        "dtype": f"auto on {options.device}" if dtype is None else str(dtype).removeprefix("torch.")}


def load_engine(options: GenerateOptions) -> Engine:
    try:
        return Engine.load(options.model, options.device, options.dtype, options.drafter, options.strategy, **options.engine)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or "memory" in str(error):
            raise ValueError(f"{options.model}: weights and cache (--kv-memory-gb) do not fit into the memory of "
                             f"{options.device}") from None
        raise


def encode(engine: Engine, prompt: Any) -> list[int]:
    is_chat = not isinstance(prompt, str) and isinstance(prompt[0], dict)
    if is_chat and engine.tokenizer is not None and not engine.tokenizer.chat_template:
        raise ValueError("messages: the model's tokenizer has no chat template; pass a prompt or token_ids")
    return engine.encode(prompt)


def check_device(device: str) -> None:
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ValueError(f"--device {device}: not a device, such as cpu or cuda") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: no CUDA device is there")


def one_line(error: object) -> str:
    return " ".join(str(error).split())


def _model_name(model: str) -> str:
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else model


def _weights_stamp(model: str) -> str | None:
    """Size and time of the newest of a local model's files: tells an exchanged model from the same one, cheaply."""
    path = Path(model).expanduser()
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path] if path.is_file() else []
    if not files:
        return None
    stats = [file.stat() for file in files]
    return f"{sum(s.st_size for s in stats)} bytes, {max(s.st_mtime_ns for s in stats)}"
