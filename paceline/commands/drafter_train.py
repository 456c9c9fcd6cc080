"""`paceline drafter train`: answers of the policy, a drafter trained on them, both in one folder that engines load.

Run again with the same arguments it goes on: captured answers are not generated again, training continues from its last
checkpoint. Beside the drafter (`config.json`, `model.safetensors`) the folder holds `settings.json`, `answers.jsonl`, `records/`,
`held_out/`, `checkpoint/` and `report.json`.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import torch
from pydantic import ValidationError

from paceline.commands.drafter_capture import Capture, CaptureOptions
from paceline.commands.drafter_prompts import Asked, digest, read_prompts
from paceline.commands.drafter_slices import Slices, coverage_record, judged
from paceline.commands.generate import GenerateOptions, check_device, token_settings
from paceline.commands.policy import policy_source
from paceline.commands.progress import ProgressView
from paceline.commands.run_folder import RunFolder
from paceline.commands.settings import apply_change, first_problem
from paceline.commands.stopping import Stopping
from paceline.config import EngineConfig
from paceline.drafters.checkpoint import save_eagle
from paceline.drafters.eagle import EagleConfig
from paceline.engine import Engine
from paceline.models.weights import load_model
from paceline.spot import SpotConfig, SpotReport, SpotTrainer, capture_layers, fresh_eagle
from paceline.types import FeatureRecord, SamplingParams

SETTINGS, REPORT = "settings.json", "report.json"
OK, INTERRUPTED = 0, 130


@dataclass(frozen=True, slots=True)
class DrafterTrainOptions:
    model: str
    prompts: str
    out: Path
    answers: int
    n: int
    params: SamplingParams
    spot: SpotConfig
    seconds: float | None
    """Of training; None: `steps` decides."""
    steps: int | None
    draft_vocab: int
    device: str
    dtype: str
    threads: int | None = None
    report_every: float = 15.0
    checkpoint_every: float | None = None
    """Seconds; None: 0 on a CPU, 5 on a GPU."""
    memory_gb: float = 4.0
    disk_gb: float = 64.0
    kv_memory_gb: float | None = None


def spot_config(changes: Sequence[str], **fixed: Any) -> SpotConfig:
    raw = dict(fixed)
    for change in changes:
        apply_change(raw, change)
    try:
        return SpotConfig(**raw)
    except ValidationError as error:
        raise ValueError(f"--set {first_problem(error)}") from None


def train_drafter(options: DrafterTrainOptions) -> int:
    """Exit code: 0, also when it was finished already; 130 when interrupted."""
    check_device(options.device)
    if (options.seconds is None) == (options.steps is None):
        raise ValueError("--seconds, --steps: one of them says how long to train")
    if options.params.temperature == 0:
        raise ValueError("--temperature: 0 is not > 0; a drafter learns the policy's distribution, greedy answers have none")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with RunFolder(options.out) as folder, Stopping() as stop:
        prompts = read_prompts(options.prompts, lambda line: print(f"paceline: {line}", file=sys.stderr))
        take_up(folder, settings_of(options, prompts))
        room = Room(options, folder, prompts)
        try:
            for phase in (room.capture_answers, room.train):
                phase(stop)
                if stop.asked:
                    print(f"paceline: interrupted; what is in {options.out} is kept, the same command goes on", file=sys.stderr)
                    return INTERRUPTED
        finally:
            room.close()
    return OK


class Room:
    """One process's share: whatever is missing of the answers, then whatever is missing of the training."""

    def __init__(self, options: DrafterTrainOptions, folder: RunFolder, prompts: list[Asked]) -> None:
        self.options, self.folder = options, folder
        self.model, self.tokenizer = load_model(policy_source(options.model), options.device, options.dtype)
        self.on_gpu = self.model.norm.device.type == "cuda"
        self.captured = Capture(folder.path, prompts, CaptureOptions(
            options.answers, options.n, options.params, int(options.memory_gb * 2**30), int(options.disk_gb * 2**30),
            self.model.norm.device))
        self.report = read_report(folder.path)
        self.tau = EngineConfig().tau

    def capture_answers(self, stop: Stopping) -> None:
        captured, options = self.captured, self.options
        if not captured.missing:
            return
        layers = capture_layers(EagleConfig.for_policy(self.model.config, options.spot.module_form))
        with ProgressView("answers", options.answers, unit="answers") as progress:
            progress.add_done(captured.num_done)
            kv_memory_gb = options.kv_memory_gb or (16.0 if self.on_gpu else None)
            engine = Engine(self.model, self.tokenizer, config=EngineConfig(capture=layers, kv_memory_gb=kv_memory_gb))
            progress.restart_clock()

            def on_step(engine: Engine, finished: int) -> None:
                progress.add_done(finished)
                progress.update(engine.stats(), "captured")

            captured.run(engine, on_step, stop)
            tokens = engine.stats().generated_tokens
            self.report["capture"] = {"answers": captured.num_done, "tokens": captured.buffer.num_tokens,
                                      "seconds_last_run": progress.seconds, "tokens_per_s": tokens / max(1e-9, progress.seconds)}
            for line in captured.refused[:3]:
                progress.say(f"left out: {line}")
            if captured.is_full:
                progress.say(f"--disk-gb {options.disk_gb:g}: full with {captured.num_done} answers, going on with those")
        del engine
        if self.on_gpu:
            torch.cuda.empty_cache()

    def train(self, stop: Stopping) -> None:
        options, captured = self.options, self.captured
        captured.require_enough()
        fresh = fresh_eagle(self.model, options.spot.module_form, captured.some(), options.draft_vocab, options.spot.seed)
        trainer = SpotTrainer(fresh, self.model, captured.buffer, options.spot)
        every = options.checkpoint_every if options.checkpoint_every is not None else 5.0 if self.on_gpu else 0.0
        slices = Slices(trainer, self.folder.path / "checkpoint", every)
        held_out = captured.held_out()
        unit, total = ("s", round(options.seconds)) if options.seconds is not None else ("steps", options.steps)
        try:
            with ProgressView("training", total, unit=unit) as progress:
                if not self.report["slices"]:
                    self._judge(slices, held_out, None, progress)
                if self._is_done(slices) and self.report["slices"][-1]["step"] == trainer.progress.step:
                    progress.say(f"{options.out} is finished: {trainer.progress.step} steps, {slices.seconds:.0f} s of training; "
                                 "more --seconds or --steps go on from there")
                while not self._is_done(slices) and not stop.asked:
                    self._slice(slices, held_out, stop, progress)
                if self.report["slices"][-1]["step"] != trainer.progress.step:
                    self._judge(slices, held_out, None, progress)  # it was killed between training and publishing
        finally:
            slices.close()

    def close(self) -> None:
        self.captured.close()

    def _slice(self, slices: Slices, held_out: list[FeatureRecord], stop: Stopping, progress: ProgressView) -> None:
        options, trainer = self.options, slices.trainer
        left = options.report_every if options.seconds is None else min(options.report_every, options.seconds - slices.seconds)
        shown = self._position(slices)

        def on_micro_batch() -> None:
            nonlocal shown
            now = self._position(slices)
            progress.add_done(now - shown)
            shown = now
            progress.show(f"step {trainer.progress.step}, {slices.seconds:.0f} s")

        report = slices.run(left, lambda: stop.asked or self._is_done(slices), on_micro_batch)
        if report.micro_batches:
            self._judge(slices, held_out, report, progress)

    def _judge(self, slices: Slices, held_out: list[FeatureRecord], report: SpotReport | None, progress: ProgressView) -> None:
        """Publishes what has been learned, says what it is worth."""
        drafter = slices.trainer.drafter()
        save_eagle(drafter, self.folder.path)
        found = judged(drafter, self.model, held_out, self.tau, self.options.params.temperature)
        line: dict[str, Any] = {"step": slices.trainer.progress.step, "seconds": slices.seconds}
        if report is not None:
            line |= {"tokens": report.tokens, "tokens_per_s": report.tokens_per_second, "losses": report.losses,
                     "longest_micro_batch_ms": 1e3 * report.max_micro_batch_s,
                     "checkpoint_stall_ms": {"median": median(slices.stalls_ms), "most": max(slices.stalls_ms),
                                             "checkpoints": len(slices.stalls_ms)}}
            slices.stalls_ms.clear()
        self.report["slices"].append(line | {"coverage": coverage_record(found)})
        done = slices.trainer.progress
        self.report |= {"seconds": slices.seconds, "steps": done.step, "skipped": done.skipped}
        self.folder.write(REPORT, json.dumps(self.report, indent=1) + "\n")
        speed = "" if report is None else f", {report.tokens_per_second:.0f} tokens/s"
        progress.say(f"step {line['step']}, {slices.seconds:.0f} s{speed}: {len(held_out)} answers held out, {found}")

    def _position(self, slices: Slices) -> int:
        return slices.trainer.progress.step if self.options.seconds is None else int(slices.seconds)

    def _is_done(self, slices: Slices) -> bool:
        options = self.options
        if options.seconds is not None:
            return slices.seconds >= options.seconds
        assert options.steps is not None
        return slices.trainer.progress.step >= options.steps


def settings_of(options: DrafterTrainOptions, prompts: list[Asked]) -> dict[str, Any]:
    """All that must not change from one run to the next; more answers and longer training are welcome."""
    asked = GenerateOptions(str(policy_source(options.model)), options.prompts, options.out, options.n, options.params, "auto",
                            "suffix", options.dtype, options.device)
    return {**token_settings(asked), "prompts": digest(prompts), "draft_vocab": options.draft_vocab,
            "training": options.spot.model_dump(mode="json")}


def take_up(folder: RunFolder, settings: dict[str, Any]) -> None:
    """Settings written down, or compared with those of the run before."""
    path = folder.path / SETTINGS
    if not path.is_file():
        if not folder.is_fresh:
            raise ValueError(f"--out {folder.path}: is not empty, and not a folder of this command; choose another")
        folder.write(SETTINGS, json.dumps(settings, indent=1) + "\n")
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    changed = [f"{name} {before.get(name)!r}, now {value!r}" for name, value in settings.items() if before.get(name) != value]
    if changed:
        raise ValueError(f"--out {folder.path}: was made with other settings ({changed[0]}); choose another folder")


def read_report(folder: Path) -> dict[str, Any]:
    """Of the runs before, with this one's command."""
    path = folder / REPORT
    before: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"slices": []}
    packages = ("paceline", "torch", "transformers")
    return before | {"command": " ".join(["paceline", *sys.argv[1:]]), "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                     "versions": {"python": platform.python_version()} | {name: metadata.version(name) for name in packages}}
