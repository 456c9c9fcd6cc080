"""The largest runs that one GPU holds: full-weight RL of a 7B shape and LoRA RL of a 32B shape, three steps each, and the peak
memory of every phase against the memory plan.

    python benchmarks/gpu/memory.py --lengths deepseek_r1_output_lengths.csv

Runs are those of `paceline train` with random weights, made on the device: answers of up to 4,096 tokens (the plan, the KV cache
and the size of micro-batches are for those), activations recomputed, an engine that sleeps during updates, no speculation. To
bound the time, answers end at drawn lengths, the longest being --max-length. A phase's peak is of tensors (`peak_gib`) and of
what the process has reserved (`reserved_gib`); `planned_gib` is the plan's sum, with the KV cache as it was allocated.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from benchmarks.lib.figures import print_table
from benchmarks.lib.models import QWEN_7B, QWEN_32B, TINY, random_model, word_tokenizer, write_shape
from benchmarks.lib.prompts import long_tailed_lengths
from benchmarks.lib.results import Report
from benchmarks.lib.rl_run import GivenLengthsTask, GivenLengthsTrainer, MeasuredBackend, run_steps
from benchmarks.lib.setup import Budget, Setting, make_parser
from paceline.models.config import ModelConfig
from paceline.models.weights import open_checkpoint, parse_dtype
from paceline.rl.learner import Learner
from paceline.trainer import TrainConfig, Trainer, TrainerCallback
from paceline.trainer.memory import MemoryPlan, plan_for
from paceline.trainer.parts import learner_for, master_dtype

GIB = 2**30


class Case(NamedTuple):
    """One run."""

    shape: ModelConfig
    prompts: int
    max_length: int
    """Length of the longest answer that is generated."""
    prompt_tokens: int
    learner: dict[str, Any]


CASES = {"7B, full weights": Case(QWEN_7B, 32, 1024, 64, {}), "32B, LoRA": Case(QWEN_32B, 4, 384, 256, {"lora_rank": 16})}
"""Each fills at least one micro-batch of the default size."""
TINY_CASES = {"full weights": Case(TINY, 2, 12, 6, {}), "LoRA": Case(TINY, 2, 12, 6, {"lora_rank": 2})}
WORDS = 100
"""Size of the tokenizer's vocabulary, which only prompts need."""


def main() -> None:
    args = parse()
    setting, budget = Setting.of(args), Budget(args.minutes)
    report = Report(args, setting.device, max_new_tokens=args.max_new_tokens, group=args.group, cases={},
                    capacity_gib=capacity(setting.device) / GIB)
    cases = TINY_CASES if args.tiny else {name: case for name, case in CASES.items() if name.split(",")[0] in args.cases}
    for number, (name, case) in enumerate(cases.items(), start=1):
        with tempfile.TemporaryDirectory() as scratch:
            report.content["cases"][name] = run_case(case, args, setting, budget.until(args.minutes * number / len(cases)),
                                                     Path(scratch))
        setting.free()
        report.content["seconds"] = budget.used
        report.save()
        show(name, report.content["cases"][name])


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__, "gpu/memory", minutes=3.5)
    parser.add_argument("--cases", nargs="+", choices=["7B", "32B"], default=["7B", "32B"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--group", type=int, default=8, help="number of answers per prompt")
    parser.add_argument("--max-new-tokens", type=int, default=4096, help="longest answer that memory is planned for")
    parser.add_argument("--max-length", type=int, help="longest answer that is generated (default: by case)")
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--lengths", type=Path, help="CSV with output_tokens and probability (default: a made-up heavy tail)")
    parser.add_argument("--optimizer", choices=["adamw", "adamw_8bit"], default="adamw")
    args = parser.parse_args()
    if args.tiny:
        args.steps, args.group, args.max_new_tokens, args.micro_batch_tokens = 2, 4, 64, 64
    return args


def run_case(case: Case, args: argparse.Namespace, setting: Setting, budget: Budget, scratch: Path) -> dict[str, Any]:
    """Steps of one run, and the peak memory of their phases. Where memory is not enough, `error` says so."""
    config = train_config(case, args, setting, scratch)
    plan = plan_for(config, case.shape, capacity(setting.device))
    found: dict[str, Any] = {"plan": {item.what: item.num_bytes / GIB for item in plan.items},
                             "savings": {what: saved / GIB for what, saved in plan.savings}}
    peaks = PhasePeaks(setting.device, plan)
    task = make_task(case, args)
    found["longest_generated"] = max(max(problem.truth.lengths) for problem in task.problems)
    trainer = RandomTrainer(config, callbacks=[peaks], task=task)
    try:
        found["steps"] = run_steps(trainer, args.steps, budget).steps
    except (torch.OutOfMemoryError, ValueError) as error:  # a ValueError: the plan refuses the run
        found["error"] = str(error)
    return found | {"phases": peaks.phases, "kv_gib": peaks.kv_bytes / GIB}


def train_config(case: Case, args: argparse.Namespace, setting: Setting, scratch: Path) -> TrainConfig:
    engine: dict[str, Any] = {"max_batch": case.prompts * args.group, "max_rows": 2048,
                              "max_context": args.max_new_tokens + case.prompt_tokens + 1}
    if args.tiny:
        engine |= {"kernels": "torch", "kv_tokens": 2048}
    return TrainConfig(
        model=str(write_shape(case.shape, scratch / "model")), task="given lengths", steps=1000, checkpoint_every=1000,
        out=str(scratch / "run"), strategy="off", drafter="none", dtype="bfloat16", device=setting.device.type,
        sleep_during_update=True, reward={"workers": 0}, optimizer={"lr": 1e-6, "kind": args.optimizer},
        rollout={"prompts": case.prompts, "group_size": args.group, "max_new_tokens": args.max_new_tokens}, engine=engine,
        learner={"micro_batch_tokens": args.micro_batch_tokens, "gradient_checkpointing": True, **case.learner},
        threads=1 if args.tiny else None)


def make_task(case: Case, args: argparse.Namespace) -> GivenLengthsTask:
    draw = random.Random(0)
    words = [f"t{i}" for i in range(3, WORDS)]
    lengths = long_tailed_lengths(args.lengths, case.prompts * args.group, args.max_length or case.max_length)
    groups = [lengths[i : i + args.group] for i in range(0, len(lengths), args.group)]
    prompts = [" ".join(draw.choices(words, k=case.prompt_tokens)) for _ in range(args.steps * case.prompts)]
    return GivenLengthsTask(prompts, groups * args.steps)


class RandomTrainer(GivenLengthsTrainer):
    """A run whose policy has the shape of its model's folder and random weights."""

    def _make_backend(self) -> RandomBackend:
        return RandomBackend(self.config, self.folder.path)


class RandomBackend(MeasuredBackend):
    def _make_learner(self, checkpoint: Path | None) -> tuple[Learner, Any]:
        assert checkpoint is None
        shape = open_checkpoint(self.config.model).config
        master = master_dtype(self.config)
        dtype = (parse_dtype(self.config.dtype) or master) if self.config.learner.lora_rank else master
        tokenizer = word_tokenizer(WORDS)
        return learner_for(self.config, random_model(shape, dtype, self.config.device), tokenizer), tokenizer


@dataclass
class PhasePeaks(TrainerCallback):
    """Peak memory of every phase of a run, the largest over its steps. `start` is loading and warm-up; `publish` is the part of
    the training phase in which the engine wakes and gets the new weights."""

    device: torch.device
    plan: MemoryPlan
    phases: dict[str, dict[str, float]] = field(default_factory=dict)
    kv_bytes: int = 0
    _phase: str = "start"

    def on_run_begin(self, trainer: Trainer) -> None:
        self.kv_bytes = sum(tensor.nbytes for tensor in trainer.engine.executor.store.tensors())

    def on_phase(self, phase: str) -> None:
        if phase.startswith("capturing"):
            return
        self._end_phase()
        self._phase = phase

    def on_step_end(self, step: int, metrics: Any, groups: Any) -> None:
        self._end_phase()
        self._phase = "report"

    def _end_phase(self) -> None:
        peak, reserved = peak_memory(self.device)
        found = self.phases.setdefault(self._phase, {"planned_gib": self._planned() / GIB, "peak_gib": 0.0, "reserved_gib": 0.0})
        found["peak_gib"], found["reserved_gib"] = max(found["peak_gib"], peak / GIB), max(found["reserved_gib"], reserved / GIB)

    def _planned(self) -> int:
        return self.plan.update_bytes if self._phase in ("infer", "train") else self.plan.generation_bytes + self.kv_bytes


def peak_memory(device: torch.device) -> tuple[int, int]:
    """Largest number of bytes that tensors had, and that were reserved, since the last call. On a CPU: of the process so far."""
    if device.type != "cuda":
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return resident, resident
    found = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    return found


def capacity(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 8 * GIB


def show(name: str, case: dict[str, Any]) -> None:
    if "error" in case:
        print(f"{name}: {case['error']}", flush=True)
    rows = [(phase, *(f"{found[key]:.1f}" for key in ("planned_gib", "peak_gib", "reserved_gib")))
            for phase, found in case["phases"].items()]
    print_table(f"{name}: GiB, {len(case.get('steps', []))} steps", ("phase", "planned", "peak", "reserved"), rows)


if __name__ == "__main__":
    main()
