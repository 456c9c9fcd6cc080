"""Training a drafter outside of an RL run: the policy's answers are generated and captured, then a drafter is trained on them.
Both are kept in one folder that engines load.

A later run with the same settings continues: captured answers are not generated again, and training continues from its last
checkpoint. Besides the drafter (`config.json`, `model.safetensors`) the folder contains `settings.json`, `answers.jsonl`,
`records/`, `held_out/`, `checkpoint/` and `report.json`.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from paceline.config import EngineConfig
from paceline.drafters.checkpoint import save_eagle
from paceline.drafters.eagle import EagleConfig
from paceline.engine import Engine
from paceline.files import DamagedFile, damaged, read_json
from paceline.generation import GenerationOptions, NamedPrompt, read_prompts, sampling_settings
from paceline.generation.prompts import digest
from paceline.models.weights import check_device, check_model, load_model
from paceline.spot import (
    SpotCheckpoints,
    SpotConfig,
    SpotReport,
    SpotTrainer,
    capture_layers,
    fresh_eagle,
    load_snapshot,
    restore,
    snapshot,
)
from paceline.trainer.answer_capture import AnswerCapture, CaptureOptions
from paceline.trainer.drafter_eval import coverage_record, held_out_coverage
from paceline.trainer.run_folder import RunFolder
from paceline.types import EngineStats, FeatureRecord, SamplingParams

SETTINGS_FILE, REPORT_FILE = "settings.json", "report.json"
Phase = Literal["answers", "training"]
LONG_AVERAGE = 0.995
"""Moving average of the weights where the policy stays as it is. During an RL run a shorter one follows the policy."""


DEFAULT_ANSWERS = {"cpu": 512, "cuda": 10240}
"""Number of answers that a drafter is trained on unless said otherwise, by type of device."""
DEFAULT_SECONDS = 120.0
"""Seconds of training unless said otherwise."""
_LEAST_TRAINED = 4.0
"""Seconds of training for every second of evaluation."""


@dataclass(frozen=True, slots=True)
class StandaloneDrafterOptions:
    """Which policy a drafter is trained for, on how many answers, and for how long."""

    model: str
    """Policy: Hugging Face folder, hub id, GGUF file, or `default` for the bundled one."""
    prompts: str
    """File of prompts as JSON lines, or `task:NAME`."""
    out: Path
    """Folder of the drafter."""
    answers: int
    """Number of answers to generate, including those that are held out."""
    n: int
    """Number of answers to a prompt before the next prompt is used."""
    params: SamplingParams
    """How the answers are sampled."""
    spot: SpotConfig
    """How the drafter is trained."""
    seconds: float | None
    """Seconds of training. None: `steps` decides."""
    steps: int | None
    """Number of optimizer steps. None: `seconds` decides."""
    device: str
    """Device, such as `cpu` or `cuda`; `auto`: a GPU if there is one."""
    dtype: str
    """Data type of the policy, or `auto`."""
    threads: int | None = None
    """Number of CPU threads. None: PyTorch's default."""
    report_every: float = 15.0
    """Seconds of training between evaluations; more where these take more than a fifth of the time."""
    patience: int = 4
    """Training ends when so many evaluations in a row were no better than an earlier one. 0: it never ends early."""
    checkpoint_every: float | None = None
    """Seconds between checkpoints. None: 0 on a CPU, 5 on a GPU. 0: after every micro-batch once the last checkpoint is
    written."""
    memory_gb: float = 4.0
    """Memory for captured features in GiB; all of them are on disk."""
    disk_gb: float = 64.0
    """Disk space for captured features in GiB; no more answers are generated once it is used up."""
    kv_memory_gb: float | None = None
    """Memory for the KV cache in GiB. None: the engine's default on a CPU, 16 on a GPU."""
    command: str = ""
    """Command line that is noted in `report.json`."""


class DrafterTrainingCallback:
    """Told how a `StandaloneDrafterTrainer` proceeds. All methods do nothing by default."""

    def on_phase_begin(self, phase: Phase, total: int | None, unit: str) -> None:
        """Generating answers or training begins; `total` is counted in `unit`."""

    def on_phase_end(self, phase: Phase) -> None:
        """Generating answers or training has ended."""

    def on_progress(self, count: int) -> None:
        """`count` more units of the phase are done."""

    def on_engine_step(self, stats: EngineStats) -> None:
        """The engine that generates answers has made a step."""

    def on_micro_batch(self, step: int, seconds: float) -> None:
        """A micro-batch is done: `step` optimizer steps and `seconds` of training so far."""

    def on_message(self, message: str) -> None:
        """Something the user should know."""


class StandaloneDrafterTrainer:
    """Generates whatever is missing of the answers, then does whatever is missing of the training."""

    def __init__(self, options: StandaloneDrafterOptions, callback: DrafterTrainingCallback | None = None) -> None:
        if (options.seconds is None) == (options.steps is None):
            raise ValueError("seconds, steps: exactly one of them is required")
        if options.params.temperature == 0:
            raise ValueError("temperature: must be > 0, not 0; a drafter learns the policy's distribution, and greedy answers do "
                             "not follow it")
        self.options, self.callback = options, callback or DrafterTrainingCallback()
        self._evaluation_seconds = 0.0
        """Duration of the last evaluation."""

    def run(self, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Returns True when the drafter is finished. `stopped` is asked between engine steps and micro-batches; once it is true,
        everything is saved and False is returned."""
        options = self.options
        check_device(options.device)
        check_model(options.model)
        prompts = read_prompts(options.prompts, self.callback.on_message)
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        with RunFolder(options.out) as self._folder:
            _write_or_compare_settings(self._folder, _settings(options, prompts))
            self._load(prompts)
            try:
                for phase in (self._capture_answers, self._train):
                    phase(stopped)
                    if stopped():
                        return False
            finally:
                self._capture.close()
        return True

    def _load(self, prompts: list[NamedPrompt]) -> None:
        options = self.options
        self._model, self._tokenizer = load_model(options.model, options.device, options.dtype)
        self._on_gpu = self._model.norm.device.type == "cuda"
        self._capture = AnswerCapture(self._folder.path, prompts, CaptureOptions(
            options.answers, options.n, options.params, int(options.memory_gb * 2**30), int(options.disk_gb * 2**30),
            self._model.norm.device))
        self._report = _read_report(self._folder.path, options.command)

    def _capture_answers(self, stopped: Callable[[], bool]) -> None:
        capture, options, callback = self._capture, self.options, self.callback
        if not capture.missing:
            return
        layers = capture_layers(EagleConfig.for_policy(self._model.config, options.spot.module_form))
        callback.on_phase_begin("answers", options.answers, "answers")
        callback.on_progress(capture.num_done)
        kv_memory_gb = options.kv_memory_gb or (16.0 if self._on_gpu else None)
        engine = Engine(self._model, self._tokenizer, config=EngineConfig(capture=layers, kv_memory_gb=kv_memory_gb))
        began = time.perf_counter()

        def on_step(engine: Engine, num_finished: int) -> None:
            callback.on_progress(num_finished)
            callback.on_engine_step(engine.stats())

        capture.run(engine, on_step, stopped)
        seconds, tokens = time.perf_counter() - began, engine.stats().generated_tokens
        self._report["capture"] = {"answers": capture.num_done, "tokens": capture.buffer.num_tokens, "seconds_last_run": seconds,
                                   "tokens_per_s": tokens / max(1e-9, seconds)}
        for line in capture.refused[:3]:
            callback.on_message(f"left out: {line}")
        if capture.is_full:
            callback.on_message(f"disk_gb {options.disk_gb:g}: used up by {capture.num_done} answers; training uses those")
        callback.on_phase_end("answers")
        del engine
        if self._on_gpu:
            torch.cuda.empty_cache()

    def _train(self, stopped: Callable[[], bool]) -> None:
        options, capture = self.options, self._capture
        capture.require_enough()
        size = options.spot.draft_vocab_for(self._model.config.vocab_size)
        start = fresh_eagle(self._model, options.spot.module_form, capture.some(), size, options.spot.seed, options.spot.window)
        trainer = SpotTrainer(start, self._model, capture.buffer, standalone_config(options.spot, options.steps, options.seconds))
        every = options.checkpoint_every if options.checkpoint_every is not None else 5.0 if self._on_gpu else 0.0
        training = CheckpointedTraining(trainer, self._folder.path / "checkpoint", every)
        held_out = capture.held_out()
        unit, total = ("s", round(options.seconds)) if options.seconds is not None else ("steps", options.steps)
        self.callback.on_phase_begin("training", total, unit)
        try:
            if not self._report["slices"]:
                self._evaluate(training, held_out, None)
            if self._is_done(training) and self._report["slices"][-1]["step"] == trainer.progress.step:
                self.callback.on_message(f"{options.out} is finished: {trainer.progress.step} steps, {training.seconds:.0f} s of "
                                         "training; more --seconds or --steps continue it")
            while not self._is_done(training) and not stopped():
                self._train_slice(training, held_out, stopped)
                if self._has_plateaued():
                    self.callback.on_message(f"training ends early: {options.patience} evaluations in a row were no better than "
                                             "an earlier one; more --answers help, --patience 0 goes on")
            if self._report["slices"][-1]["step"] != trainer.progress.step:
                self._evaluate(training, held_out, None)  # an earlier run was killed between training and evaluation
        finally:
            training.close()
            self.callback.on_phase_end("training")

    def _train_slice(self, training: CheckpointedTraining, held_out: list[FeatureRecord], stopped: Callable[[], bool]) -> None:
        options, trainer = self.options, training.trainer
        remaining = float("inf") if options.seconds is None else options.seconds - training.seconds
        reported = self._position(training)

        def on_micro_batch() -> None:
            nonlocal reported
            now = self._position(training)
            self.callback.on_progress(now - reported)
            reported = now
            self.callback.on_micro_batch(trainer.progress.step, training.seconds)

        seconds = min(max(options.report_every, _LEAST_TRAINED * self._evaluation_seconds), remaining)
        report = training.run(seconds, lambda: stopped() or self._is_done(training), on_micro_batch)
        if report.micro_batches:
            self._evaluate(training, held_out, report)

    def _evaluate(self, training: CheckpointedTraining, held_out: list[FeatureRecord], report: SpotReport | None) -> None:
        """Writes the drafter as trained so far, and measures and reports its coverage of the held-out answers."""
        drafter, began = training.trainer.drafter(), time.perf_counter()
        save_eagle(drafter, self._folder.path, self._model)
        found = held_out_coverage(drafter, self._model, held_out, EngineConfig().tau, self.options.params.temperature)
        self._evaluation_seconds = time.perf_counter() - began
        progress = training.trainer.progress
        line: dict[str, Any] = {"step": progress.step, "seconds": training.seconds}
        if report is not None:
            line |= {"tokens": report.tokens, "tokens_per_s": report.tokens_per_second, "losses": report.losses,
                     "longest_micro_batch_ms": 1e3 * report.max_micro_batch_s,
                     "checkpoint_stall_ms": {"median": median(training.stalls_ms), "most": max(training.stalls_ms),
                                             "checkpoints": len(training.stalls_ms)}}
            training.stalls_ms.clear()
        self._report["slices"].append(line | {"coverage": coverage_record(found)})
        self._report |= {"seconds": training.seconds, "steps": progress.step, "skipped": progress.skipped}
        self._folder.write(REPORT_FILE, json.dumps(self._report, indent=1) + "\n")
        speed = "" if report is None else f", {report.tokens_per_second:.0f} tokens/s"
        self.callback.on_message(f"step {line['step']}, {training.seconds:.0f} s{speed}: {len(held_out)} answers held out, "
                                 f"{found}")

    def _position(self, training: CheckpointedTraining) -> int:
        """How far training is, in the unit of its progress."""
        return training.trainer.progress.step if self.options.seconds is None else int(training.seconds)

    def _has_plateaued(self) -> bool:
        """Whether the held-out answers' tokens per verification no longer rise."""
        found = [list(line["coverage"]["tokens_per_verification"].values())[-1][-1] for line in self._report["slices"]]
        return has_plateaued(found, self.options.patience)

    def _is_done(self, training: CheckpointedTraining) -> bool:
        options = self.options
        if self._has_plateaued():
            return True
        if options.seconds is not None:
            return training.seconds >= options.seconds
        assert options.steps is not None
        return training.trainer.progress.step >= options.steps


def standalone_config(spot: SpotConfig, steps: int | None = None, seconds: float | None = None) -> SpotConfig:
    """How a drafter is trained for a policy that does not change, for so many steps or seconds."""
    average = spot.average if "average" in spot.model_fields_set else LONG_AVERAGE
    return spot.model_copy(update={"total_steps": steps, "total_seconds": seconds, "average": average})


def has_plateaued(values: Sequence[float], patience: int) -> bool:
    """Whether none of the last `patience` values is larger than an earlier one; never with a patience of 0."""
    return 0 < patience < len(values) and max(values[-patience:]) <= max(values[:-patience])


class CheckpointedTraining:
    """A spot trainer that runs in slices of time and saves checkpoints between micro-batches, so that a run killed at any
    moment can be continued."""

    def __init__(self, trainer: SpotTrainer, folder: Path, checkpoint_every: float) -> None:
        """A checkpoint in `folder` is continued. `checkpoint_every` is in seconds; 0: after every micro-batch for which the last
        checkpoint is already written."""
        self.trainer, self.checkpoints = trainer, SpotCheckpoints(folder)
        self.stalls_ms: list[float] = []
        """Milliseconds that training waited for each checkpoint."""
        self._every, self._saved_at = checkpoint_every, time.perf_counter()
        found = load_snapshot(folder)
        if found is not None:
            restore(trainer, found)

    @property
    def seconds(self) -> float:
        """Seconds of training so far, including earlier runs."""
        return self.trainer.progress.seconds

    def run(self, seconds: float, done: Callable[[], bool], on_micro_batch: Callable[[], None]) -> SpotReport:
        """Trains for so many seconds, or until `done()`. The checkpoint at the end is on disk when this returns."""
        began = time.perf_counter()

        def between() -> None:
            if not self.checkpoints.busy and time.perf_counter() - self._saved_at >= self._every:
                self._save()
            on_micro_batch()

        report = self.trainer.run(lambda: done() or time.perf_counter() - began >= seconds, on_micro_batch=between)
        self._save()
        self.checkpoints.wait()
        return report

    def close(self) -> None:
        """Waits until the last checkpoint is written."""
        self.checkpoints.close()

    def _save(self) -> None:
        self.stalls_ms.append(self.checkpoints.save(snapshot(self.trainer)))
        self._saved_at = time.perf_counter()


def _settings(options: StandaloneDrafterOptions, prompts: list[NamedPrompt]) -> dict[str, Any]:
    """Everything that must not change from one run in a folder to the next. More answers and longer training are allowed."""
    generation = GenerationOptions(options.model, options.prompts, options.out, options.n, options.params,
                                   "auto", "suffix", options.dtype, options.device)
    return {**sampling_settings(generation), "prompts": digest(prompts),
            "training": options.spot.model_dump(mode="json")}


def _write_or_compare_settings(folder: RunFolder, settings: dict[str, Any]) -> None:
    """Writes the settings into a new folder; an existing folder must have been made with the same ones."""
    path = folder.path / SETTINGS_FILE
    if not path.is_file():
        if not folder.is_new:
            raise ValueError(f"{folder.path}: is not empty, and not a folder of drafter training; choose another")
        folder.write(SETTINGS_FILE, json.dumps(settings, indent=1) + "\n")
        return
    before = read_json(path)
    changed = [f"{name} {before.get(name)!r}, now {value!r}" for name, value in settings.items() if before.get(name) != value]
    if changed:
        raise ValueError(f"{folder.path}: was made with other settings ({changed[0]}); choose another folder")


def _read_report(folder: Path, command: str) -> dict[str, Any]:
    """The report of earlier runs in this folder, with this run's command, date and versions."""
    path = folder / REPORT_FILE
    before = read_json(path) if path.is_file() else {"slices": []}
    slices = before.get("slices")
    if not isinstance(slices, list) or not all(isinstance(line, dict) and "step" in line for line in slices):
        raise DamagedFile(damaged(path, "it holds no evaluations") + "; without it the same command continues")
    packages = ("paceline", "torch", "transformers")
    return before | {"command": command, "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                     "versions": {"python": platform.python_version()} | {name: metadata.version(name) for name in packages}}
