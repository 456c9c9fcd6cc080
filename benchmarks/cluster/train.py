"""Whole RL steps on several workers, with real generation and real training: `ClusterTrainer` from end to end, beside one worker.

    python benchmarks/cluster/train.py                            # 2 workers on 2 cores, the bundled policy: about 5 minutes
    python benchmarks/cluster/train.py --scenario uneven          # the second worker's steps take three times as long: 4 minutes
    python benchmarks/cluster/train.py --quick                    # smoke run
    python benchmarks/cluster/train.py --model FOLDER --task gsm8k --task-options '{"data": "gsm8k_train.jsonl"}' \\
        --device cuda --dtype bfloat16 --gpus-per-worker 0.5 --runtime processes --prompts 32 --max-new-tokens 1024 --lr 1e-6

- Every variant is a run of its own with the same seed, so all have the same prompts. `one worker` is `Trainer`; `static` gives
  all requests away at once, the answers of a prompt to one worker, and trains the drafter after generation only; the others add
  scheduling by expected length, reallocation of running requests, and training of the drafter on idle workers.
- The first step is not counted. `generate` and `step` are seconds per step; `identical` counts the rollouts that equal those of
  one worker. Updates sum gradients in another order, so in float32 some may differ from the second step on.
- `--runtime processes` starts the workers as plain processes where Ray is not installed. With `--gpus-per-worker 0.5` two workers
  share a GPU; then no variant can be as fast as two GPUs, and what is compared is static assignment with the others.
- Where workers share cores with each other or with anything else, steps become several times slower: run nothing beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median
from typing import Any

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np

from benchmarks.lib.cluster_tables import TRAIN_COLUMNS, train_rows
from benchmarks.lib.figures import print_table
from benchmarks.lib.process_runtime import ProcessRuntime
from benchmarks.lib.results import ROOT, Report, add_result_arguments
from paceline.cluster.runtime import Runtime
from paceline.cluster.trainer import ClusterTrainer, TrainWorkerSpec
from paceline.cluster.worker import Send, Worker
from paceline.config import TrainConfig
from paceline.report import RunFigures, read_traces
from paceline.trainer import RunStatus, Trainer, validation
from paceline.types import StepResult

SLOWDOWN = 3.0
"""How much longer the steps of the last worker take in the scenario `uneven`."""
VARIANTS: dict[str, dict[str, bool] | None] = {
    "one worker": None,
    "static": {"scheduling": False, "reallocation": False, "spot_training": False},
    "+ scheduling": {"scheduling": True, "reallocation": False, "spot_training": False},
    "+ reallocation": {"scheduling": True, "reallocation": True, "spot_training": False},
    "+ spot training": {"scheduling": True, "reallocation": True, "spot_training": True}}


def main() -> None:
    args = parse()
    names = [name for name in VARIANTS if name in args.variants]
    on_gpu = args.device.startswith("cuda")
    marks = [mark for mark, is_set in (("gpu", on_gpu), (args.scenario, args.scenario != "even")) if is_set]
    report = Report(args, args.device, variant="-".join(marks),
                    settings={name: str(value) for name, value in vars(args).items() if name not in ("out", "revision")},
                    scenario=args.scenario, workers=args.workers, on_gpu=on_gpu, cores=os.cpu_count(), variants={})
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))  # for worker processes
    importable = import_module("benchmarks.cluster.train")  # workers cannot find what is defined in a script that is run
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            began = time.perf_counter()
            with ProcessPoolExecutor(1, get_context("spawn")) as process:  # of its own, which leaves no memory behind
                run = process.submit(importable.measure, args, Path(folder), name)
                report.content["variants"][name] = found = run.result()
            report.save()
            print(f"{name}: {found['generate_s']:.2f} s of {found['step_s']:.2f} s per step are generation; "
                  f"{time.perf_counter() - began:.0f} s altogether", flush=True)
    print_table(f"{args.workers} workers, {args.scenario}", TRAIN_COLUMNS, train_rows(report.content))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default", help="policy: a folder, or the bundled one")
    parser.add_argument("--task", default="collatz")
    parser.add_argument("--task-options", type=json.loads, default={})
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus-per-worker", type=float, help="0.5: two workers share a GPU")
    parser.add_argument("--runtime", choices=("ray", "processes"), default="ray")
    parser.add_argument("--scenario", choices=("even", "uneven"), default="even")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=5, help="number of steps, of which the first is not counted")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--max-batch", type=int, default=64, help="largest number of requests that a worker runs at a time")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--drafter", default="learned", help="learned, suffix, or the folder of a learned drafter")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a smoke run: 2 steps, 4 prompts, answers of 32 tokens at most")
    add_result_arguments(parser, "cluster/train")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.prompts, args.max_new_tokens = 2, 4, 32
    return args


def measure(args: argparse.Namespace, folder: Path, name: str) -> dict[str, Any]:
    """Do one run."""
    trainer = make_trainer(args, folder / name.replace(" ", ""), VARIANTS[name])
    result = trainer.run()
    assert result.status is RunStatus.COMPLETED, result.message
    found = figures(result.folder)
    found["identical"], found["compared"] = num_identical(result.folder, folder / "oneworker")
    return found


def make_trainer(args: argparse.Namespace, out: Path, cluster: dict[str, bool] | None) -> Trainer:
    several = {} if cluster is None else {"workers": args.workers, **cluster}
    if several and args.gpus_per_worker is not None:
        several["gpus_per_worker"] = args.gpus_per_worker
    config = TrainConfig(
        model=args.model, task=args.task, task_options=args.task_options, device=args.device, dtype=args.dtype, steps=args.steps,
        seed=args.seed, drafter=args.drafter, out=str(out), cluster=several, checkpoint_every=1000,  # type: ignore[arg-type]
        algorithm_options={"aggregation": "token"}, optimizer={"lr": args.lr}, reward={"workers": 0},  # type: ignore[arg-type]
        rollout={"prompts": args.prompts, "group_size": args.group_size,  # type: ignore[arg-type]
                 "max_new_tokens": args.max_new_tokens},
        engine={"max_batch": args.max_batch, "deterministic": True, "suffix_scope": "all"},  # type: ignore[arg-type]
        learner={"micro_batch_tokens": 4096, "gradient_checkpointing": args.device != "cpu"})  # type: ignore[arg-type]
    if cluster is None:
        return Trainer(config)
    if args.runtime == "processes":
        validation._check_package = lambda package, extra: None  # Ray is not used
    return BenchTrainer(config, args.runtime, SLOWDOWN if args.scenario == "uneven" else 1.0)


class BenchTrainer(ClusterTrainer):
    """A run whose workers may be plain processes, and the last of which may be slow."""

    def __init__(self, config: TrainConfig, runtime: str, slowdown: float) -> None:
        super().__init__(config)
        self._runtime_name, self._slowdown = runtime, slowdown

    def _make_runtime(self) -> Runtime:
        spec, cluster = BenchSpec(self.config, self._slowdown), self.config.cluster
        if self._runtime_name == "processes":
            return ProcessRuntime(cluster.workers, spec, ("gloo", self.config.device))
        from paceline.cluster.ray_runtime import RayRuntime

        gpus = float(self.config.device.startswith("cuda")) if cluster.gpus_per_worker is None else cluster.gpus_per_worker
        return RayRuntime(cluster.workers, spec, None, cluster.cpus_per_worker, gpus)


@dataclass(frozen=True, slots=True)
class BenchSpec:
    """How a worker is made."""

    config: TrainConfig
    slowdown: float

    def build(self, worker_id: int, send: Send) -> Worker:
        worker = TrainWorkerSpec(self.config).build(worker_id, send)
        if self.slowdown > 1 and worker_id == self.config.cluster.workers - 1:
            make_slow(worker, self.slowdown)
        return worker


def make_slow(worker: Worker, factor: float) -> None:
    """Have every step of the worker's engine take `factor` times as long."""
    step = worker.engine.step

    def slow_step() -> StepResult:
        result = step()
        time.sleep((factor - 1) * result.ms / 1e3)
        return replace(result, ms=factor * result.ms)

    worker.engine.step = slow_step  # type: ignore[method-assign]


def figures(folder: Path) -> dict[str, Any]:
    """What a run's metrics and timeline say, from the second step on."""
    _, *steps = read_lines(folder / "metrics.jsonl")
    timeline = folder / "timeline.jsonl"
    pauses = [event["pause_s"] for event in read_lines(timeline) if event["event"] == "migrated"] if timeline.is_file() else []

    def mean(name: str) -> float:
        return fmean(step.get(name, 0.0) for step in steps)

    return {"generate_s": mean("time/generate"), "generate_median_s": median(step["time/generate"] for step in steps),
            "step_s": mean("time/step"), "train_s": mean("time/train"), "drafter_s": mean("time/drafter"),
            "tokens": mean("generated_tokens"), "accept_length": mean("accept_length"), "idle": mean("cluster/idle"),
            "training": mean("cluster/training"), "idle_training_s": mean("drafter/beside_seconds"), "moves": len(pauses),
            "pause_ms": 1e3 * float(np.median(pauses)) if pauses else None,
            "pause_p90_ms": 1e3 * float(np.quantile(pauses, 0.9)) if pauses else None,
            "drafter_accept_length": RunFigures.of(steps, read_traces(folder, steps)).drafter_accept_length}


def num_identical(folder: Path, reference: Path) -> tuple[int | None, int]:
    """Number of rollouts that equal those of one worker (None if there is no such run), and of all rollouts."""
    found, expected = rollouts(folder), rollouts(reference)
    return sum(expected[key] == tokens for key, tokens in found.items()) if expected else None, len(found)


def rollouts(folder: Path) -> dict[tuple[Any, ...], list[int]]:
    return {(line["step"], line["id"], line["sample"]): line["token_ids"] for file in sorted(folder.glob("rollouts-*.jsonl"))
            for line in read_lines(file)}


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
