"""Generation from a file of prompts into a file of rollouts. Each rollout is written as soon as it is finished, and a later run
with the same settings generates only what is missing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from paceline.bundled import resolve_model
from paceline.engine import Engine
from paceline.engine.build import check_speculation
from paceline.engine.pool import RequestPool
from paceline.engine.prompts import derive_seed
from paceline.files import one_line
from paceline.generation.jobs import Job, JobReader, open_prompts
from paceline.generation.output import RolloutFile, to_record
from paceline.models.weights import check_model, parse_dtype, resolve_device
from paceline.types import EngineStats, Rollout, SamplingParams, StepResult


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """What to generate, and with which engine."""

    model: str
    """Hugging Face folder, hub id, GGUF file, or `default` for the bundled policy."""
    prompts: str
    """File of prompts as JSON lines; `-` is standard input."""
    out: Path
    """File of rollouts as JSON lines."""
    n: int
    """Number of answers per prompt."""
    params: SamplingParams
    """Sampling parameters of every prompt that has no seed of its own."""
    strategy: str
    """Speculation strategy, such as `auto` or `suffix:d8w2v16`."""
    drafter: str
    """`suffix`, `none`, or the folder or hub id of a learned drafter."""
    dtype: str
    """Data type of weights and computation, or `auto`."""
    device: str
    """Device, such as `cpu` or `cuda`; `auto`: a GPU if there is one."""
    threads: int | None = None
    """Number of CPU threads. None: PyTorch's default."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Fields of `EngineConfig` that differ from its defaults."""


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """What one call of `FileGenerator.run` did."""

    num_generated: int
    """Number of rollouts generated and written by this call."""
    num_existing: int
    """Number of rollouts that an earlier run had already written."""
    num_problems: int
    """Number of input lines that could not be used plus rollouts that failed."""
    interrupted: bool
    """Whether the call ended early with a KeyboardInterrupt."""
    stats: EngineStats | None
    """The engine's statistics. None: the call was interrupted before the engine was loaded."""
    seconds: float
    """Seconds spent on generation, without loading."""


_WARM_UP_SHARE, _USUAL_RATE = 0.05, 10_000.0
"""Largest share of a run's time that is spent on capturing CUDA graphs beforehand, if it generates so many tokens per second."""


class GenerationCallback:
    """Told how a `FileGenerator` proceeds. All methods do nothing by default."""

    def on_begin(self, num_rollouts: int | None) -> None:
        """The input and output are open. `num_rollouts` are wanted in total; None: the input's length is unknown."""

    def on_warm_up(self, done: int, total: int) -> None:
        """On a GPU, before generation: so many parts of the warm-up are done, of all."""

    def on_engine_ready(self, engine: Engine) -> None:
        """The engine is loaded and generation begins."""

    def on_rollouts(self, count: int) -> None:
        """`count` more of the wanted rollouts are in the output, generated or found there."""

    def on_engine_step(self, result: StepResult, stats: EngineStats) -> None:
        """The engine has made a step."""

    def on_warning(self, message: str) -> None:
        """Something the user should know; generation continues."""

    def on_line_refused(self, message: str, num_rollouts: int) -> None:
        """An input line cannot be used, so its `num_rollouts` rollouts will be missing."""

    def on_rollout_failed(self, message: str) -> None:
        """A rollout ended with an error. Its record is in the output, and a later run generates it again."""


class _Owner(NamedTuple):
    """Which answer a request of the engine belongs to."""

    job: Job
    sample: int


class FileGenerator:
    """Feeds one engine from one file of prompts and writes the rollouts that it finishes."""

    engine: Engine
    _out: RolloutFile
    _requests: RequestPool[_Owner]

    def __init__(self, options: GenerationOptions, callback: GenerationCallback | None = None) -> None:
        self.options, self.callback = options, callback or GenerationCallback()
        self._num_generated = self._num_existing = self._num_problems = 0
        self._num_wanted: int | None = None
        self._is_loaded, self._began = False, time.perf_counter()

    def run(self) -> GenerationResult:
        """Generates all rollouts that the output does not have yet. A KeyboardInterrupt ends the call early; nothing is lost."""
        options = self.options
        settings = sampling_settings(options)
        check_speculation(options.drafter, options.strategy)
        check_model(options.model)
        name, lines, num_lines = open_prompts(options.prompts)
        if num_lines is not None:
            _require_a_prompt(name, lines)
        interrupted, stats = False, None
        with lines, RolloutFile(options.out, settings) as self._out:
            self._num_wanted = None if num_lines is None else num_lines * options.n
            self.callback.on_begin(self._num_wanted)
            if self._out.damaged:
                places = ", ".join(map(str, self._out.damaged[:5])) + (", …" if len(self._out.damaged) > 5 else "")
                self.callback.on_warning(f"{options.out}: damaged lines removed ({places}); their rollouts are generated again")
            try:
                self._load()
                self._generate(name, lines)
            except KeyboardInterrupt:
                interrupted = True
            if self._is_loaded:
                stats = self.engine.stats()
        return GenerationResult(self._num_generated, self._num_existing, self._num_problems, interrupted, stats,
                                time.perf_counter() - self._began)

    def _load(self) -> None:
        if self.options.threads is not None:
            torch.set_num_threads(self.options.threads)
        self.engine = load_engine(self.options)
        self._is_loaded = True
        limit, context = self.engine.scheduler.max_length, self.engine.model.config.max_context
        if limit < context:
            self.callback.on_warning(f"note: the KV cache holds {limit} tokens, less than the model's context of {context}: "
                                     "longer answers end there (--kv-memory-gb)")
        self._warm_up()
        self._began = time.perf_counter()
        self.callback.on_engine_ready(self.engine)

    def _warm_up(self) -> None:
        """Capture CUDA graphs beforehand as far as the run is long enough for that to pay."""
        if self._num_wanted is not None and self.engine.executor.graphs.enabled:
            seconds = _WARM_UP_SHARE * self._num_wanted * self.options.params.max_new_tokens / _USUAL_RATE
            self.engine.warm_up(self._num_wanted, seconds, self.callback.on_warm_up)

    def _generate(self, name: str, lines: BinaryIO) -> None:
        jobs = iter(JobReader(name, lines, self._refuse))
        with RequestPool[_Owner](self.engine) as self._requests:
            self._refill(jobs)
            for result, finished, _ in self._requests.steps():
                for owner, rollout in finished:
                    self._write(owner, rollout)
                self.callback.on_engine_step(result, self.engine.stats())
                self._refill(jobs)

    def _refill(self, jobs: Iterator[Job]) -> None:
        """Adds enough requests for the scheduler to choose from; the rest of the input is not read yet."""
        while len(self._requests) < 2 * self.engine.scheduler.max_batch:
            job = next(jobs, None)
            if job is None:
                return
            try:
                self._add(job)
            except ValueError as error:
                self._refuse(f"{job.place}: {one_line(error)}")

    def _add(self, job: Job) -> None:
        missing = self._missing(job)
        num_existing = self.options.n - len(missing)
        self._num_existing += num_existing
        self.callback.on_rollouts(num_existing)
        if not missing:
            return
        params = self.options.params if job.seed is None else replace(self.options.params, seed=job.seed)
        prompt_ids = _encode(self.engine, job.prompt)
        seeds = [derive_seed(params.seed, prompt_ids if job.key is None else job.key, sample) for sample in missing]
        self._requests.add(prompt_ids, params, [_Owner(job, sample) for sample in missing], seeds=seeds)

    def _missing(self, job: Job) -> list[int]:
        """Numbers of the job's answers that the output does not have yet."""
        found = {sample: self._out.done.get((str(job.id), sample)) for sample in range(self.options.n)}
        if any(old is not None and old != job.prompt_hash for old in found.values()):
            raise ValueError(f"id {job.id!r}: {self._out.path} has answers to another prompt or seed under this id")
        return [sample for sample, old in found.items() if old is None]

    def _write(self, owner: _Owner, rollout: Rollout) -> None:
        job, sample = owner
        self._out.write(to_record(job, sample, rollout))
        self.callback.on_rollouts(1)
        if rollout.error is None:
            self._num_generated += 1
        else:
            self._num_problems += 1
            self.callback.on_rollout_failed(f"{job.place}: sample {sample}: {one_line(rollout.error)}")

    def _refuse(self, message: str) -> None:
        self._num_problems += 1
        self.callback.on_line_refused(message, self.options.n)


def sampling_settings(options: GenerationOptions) -> dict[str, Any]:
    """Everything that the tokens depend on besides the prompts. Options that change only the speed are not included."""
    params, dtype, device = options.params, parse_dtype(options.dtype), resolve_device(options.device)
    return {
        "model": _model_name(options.model), "weights": _weights_stamp(options.model), "n": options.n, "seed": params.seed,
        "temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p,
        "max_new_tokens": params.max_new_tokens, "stop": list(params.stop), "ignore_eos": params.ignore_eos,
        "raw_logprobs": params.raw_logprobs, **_adjustments(params),
        "dtype": f"auto on {device}" if dtype is None else str(dtype).removeprefix("torch.")}


def _adjustments(params: SamplingParams) -> dict[str, Any]:
    """Penalties, biases and the minimum length, those that are not at their defaults."""
    names = ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words",
             "min_tokens")
    form = {} if params.structured_outputs is None else {"structured_outputs": params.structured_outputs.as_grammar()}
    return {name: getattr(params, name) for name in names if getattr(params, name) != getattr(SamplingParams(), name)} | form


def load_engine(options: GenerationOptions) -> Engine:
    """The engine that the options describe. Running out of memory is a ValueError that says what does not fit."""
    try:
        return Engine.load(options.model, options.device, options.dtype, options.drafter, options.strategy, **options.engine)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or "memory" in str(error):
            raise ValueError(f"{options.model}: weights and KV cache (--kv-memory-gb) do not fit into the memory of "
                             f"{resolve_device(options.device)}") from None
        raise


def _require_a_prompt(name: str, lines: BinaryIO) -> None:
    """Raises a ValueError if no line of a file is a prompt; otherwise rewinds it."""
    refused: list[str] = []
    if next(iter(JobReader(name, lines, refused.append)), None) is None:
        lines.close()
        raise ValueError(f"{refused[0]}; no line is a prompt")
    lines.seek(0)


def _encode(engine: Engine, prompt: Any) -> list[int]:
    is_chat = not isinstance(prompt, str) and isinstance(prompt[0], dict)
    if is_chat and engine.tokenizer is not None and not engine.tokenizer.chat_template:
        raise ValueError("messages: the model's tokenizer has no chat template; pass a prompt or token_ids")
    return engine.encode(prompt)


def _model_name(model: str) -> str:
    path = Path(resolve_model(model)).expanduser()
    return str(path.resolve()) if path.exists() else model


def _weights_stamp(model: str) -> str | None:
    """Total size and latest modification time of a local model's weight files: cheaply detects that the model was exchanged."""
    path = Path(resolve_model(model)).expanduser()
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path] if path.is_file() else []
    if not files:
        return None
    stats = [file.stat() for file in files]
    return f"{sum(s.st_size for s in stats)} bytes, {max(s.st_mtime_ns for s in stats)}"
