"""Drafter training in the background of generation: tokens per second of both, alone and together.

On a CPU the trainer runs in a thread and in a process of its own, with generation on one core. On a GPU it runs in a thread, on
the default CUDA stream and on a low-priority stream while generation has a high-priority stream.

    OMP_NUM_THREADS=1 python benchmarks/cpu/background_training.py             # the policy that comes with the package
    python benchmarks/gpu/background_training.py --model FOLDER --drafter FOLDER --prompts questions.jsonl
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from benchmarks.lib.models import TINY
from benchmarks.lib.prompts import chat, questions
from benchmarks.lib.results import Report
from benchmarks.lib.setup import Budget, make_parser
from paceline import Engine, SamplingParams
from paceline.bundled import resolve_model
from paceline.config import EngineConfig
from paceline.drafters.checkpoint import load_eagle
from paceline.drafters.eagle import Eagle
from paceline.generation import plain_prompt
from paceline.models.decoder import Decoder
from paceline.models.weights import load_model
from paceline.spot import FeatureBuffer, SpotConfig, SpotTrainer, capture_layers, fresh_eagle
from paceline.spot.background import (
    BackgroundProcess,
    BackgroundReport,
    BackgroundThread,
    generation_stream,
    low_priority_stream,
)
from paceline.spot.buffer import BufferLimits
from paceline.tasks import make_task
from paceline.trainer.rollouts import PromptStream
from paceline.types import FeatureRecord


class Work(NamedTuple):
    """The generation that is repeated in every round, with the same prompts and seeds."""

    engine: Engine
    prompts: list[Any]
    params: SamplingParams
    n: int

    def run(self) -> tuple[list[list[int]], float]:
        """Generated tokens and tokens per second."""
        began = time.perf_counter()
        groups = self.engine.generate(self.prompts, self.params, self.n)
        tokens = [rollout.token_ids for group in groups for rollout in group.rollouts]
        return tokens, sum(map(len, tokens)) / (time.perf_counter() - began)


class BackgroundTrainer(NamedTuple):
    """One way to train in the background."""

    start: Callable[[], None]
    stop: Callable[[], BackgroundReport]
    stream: torch.cuda.Stream | None = None
    """CUDA stream that generation runs on."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, "background_training")
    parser.add_argument("--model", help="the policy: a folder or GGUF file (default: the one in the package)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--drafter", type=Path, help="folder of a trained drafter (default: an untrained one)")
    parser.add_argument("--prompts", type=Path, help="JSON lines with a question each (needs --model)")
    parser.add_argument("--batch", type=int, default=8, help="number of concurrent prompts, as in the tail of a rollout")
    parser.add_argument("--tokens", type=int, default=256, help="response length")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(arguments)
    device = torch.device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # the other core is for training
    work, records, start = setting(args, device)
    report = Report(args, device, model=args.model or ("tiny" if args.tiny else "default"), batch=len(work.prompts) * work.n)
    report.content["modes"] = measure(work, records, start, 1 if args.tiny else args.rounds, Budget(args.minutes))
    report.save()
    show(report.content["modes"])


def setting(args: Any, device: torch.device) -> tuple[Work, list[FeatureRecord], Eagle]:
    """Generation as in an RL run, which captures features for the drafter; those features; and the drafter to start with."""
    if args.tiny:
        policy, tokenizer = Decoder.random(TINY, std=0.3), None
        prompts: list[Any] = chat(None, questions(None))[:2]
        new_tokens = 24
    else:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        policy, tokenizer = load_model(args.model or resolve_model("default"), device, dtype)
        new_tokens = args.tokens
        prompts = [] if args.prompts is None else chat(tokenizer, questions(args.prompts))[: args.batch]
    start = fresh_eagle(policy) if args.drafter is None else load_eagle(args.drafter, policy)
    config = EngineConfig(max_batch=64, kv_memory_gb=20.0 if device.type == "cuda" else 0.5, capture=capture_layers(start.config),
                          max_context=min(policy.config.max_context, 2048))
    engine = Engine(policy, tokenizer, start, "off", config)
    if not prompts:
        prompts = [plain_prompt(engine, p.prompt) for p in PromptStream(make_task("collatz"), 0, None).take(0, args.batch)]
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    groups = engine.generate(prompts, params, 4)  # also compiles kernels and captures graphs
    records = [r.features for group in groups for r in group.rollouts if r.features is not None]
    return Work(engine, prompts, params, 1), records, start


def measure(work: Work, records: list[FeatureRecord], start: Eagle, rounds: int = 5,
            budget: Budget | None = None) -> dict[str, dict[str, Any]]:
    """For each way to train: tokens per second of generation and training alone and together (medians over rounds), the longest
    wait when training is stopped, and whether generation gave the same tokens."""
    policy, found = work.engine.model, {}
    seconds = max(0.2, 2 * sum(map(len, work.run()[0])) / work.run()[1])
    for name, make in ways(policy.norm.device).items():
        if budget is not None and budget.left < 0:
            break
        buffer = FeatureBuffer(4 << 30)
        for record in records:
            buffer.add(record, 0)
        trainer, close = make(start, policy, buffer, records)
        found[name] = _one(work, trainer, rounds, seconds)
        close()
    return found


def _one(work: Work, trainer: BackgroundTrainer, rounds: int, seconds: float) -> dict[str, Any]:
    figures: dict[str, list[float]] = {"generate": [], "generate_beside": [], "train": [], "train_beside": [], "stop_ms": [],
                                       "longest_micro_batch_ms": []}
    same = True
    trainer.start()  # the first run allocates what training needs
    time.sleep(min(2.0, seconds))
    trainer.stop()
    for _ in range(rounds):
        with torch.cuda.stream(trainer.stream) if trainer.stream is not None else nullcontext():
            alone, rate = work.run()
            figures["generate"].append(rate)
            trainer.start()
            together, rate = work.run()
        beside = trainer.stop()
        same = same and alone == together
        figures["generate_beside"].append(rate)
        figures["train_beside"].append(beside.trained.tokens_per_second)
        figures["stop_ms"].append(beside.stop_ms)
        figures["longest_micro_batch_ms"].append(1e3 * beside.trained.max_micro_batch_s)
        trainer.start()
        time.sleep(seconds)
        figures["train"].append(trainer.stop().trained.tokens_per_second)
    result: dict[str, Any] = {name: median(values) for name, values in figures.items()}
    result |= {"longest_stop_ms": max(figures["stop_ms"]), "same_tokens": same,
               "generation_kept": result["generate_beside"] / result["generate"],
               "training_kept": result["train_beside"] / result["train"]}
    return result


def ways(device: torch.device) -> dict[str, Callable[..., tuple[BackgroundTrainer, Callable[[], None]]]]:
    def thread(start: Eagle, policy: Decoder, buffer: FeatureBuffer, records: list[FeatureRecord],
               low: bool = False) -> tuple[BackgroundTrainer, Callable[[], None]]:
        stream = low_priority_stream(device) if low else None
        beside = BackgroundThread(SpotTrainer(start, policy, buffer, _config(start), stream))
        return BackgroundTrainer(beside.start, beside.stop, generation_stream(device) if low else None), lambda: None

    def process(start: Eagle, policy: Decoder, buffer: FeatureBuffer,
                records: list[FeatureRecord]) -> tuple[BackgroundTrainer, Callable[[], None]]:
        beside = BackgroundProcess(start, policy, _config(start), BufferLimits(4 << 30))
        for record in records:
            beside.add(record, 0)
        beside.drafter()  # waits until the process is up
        return BackgroundTrainer(beside.start, beside.stop), beside.close

    if device.type == "cuda":
        return {"thread": thread, "stream": lambda *given: thread(*given, low=True)}
    return {"thread": thread, "process": process}


def _config(start: Eagle) -> SpotConfig:
    return SpotConfig(form="eagle3") if start.config.form == "eagle3" else SpotConfig()


def show(found: dict[str, dict[str, Any]]) -> None:
    print(f"{'':10}{'generation, tokens/s':>28}{'training, tokens/s':>28}{'stop ms':>10}{'micro-batch ms':>16}")
    for name, f in found.items():
        generation = f"{f['generate']:.0f} → {f['generate_beside']:.0f} ({100 * f['generation_kept']:.0f} %)"
        training = f"{f['train']:.0f} → {f['train_beside']:.0f} ({100 * f['training_kept']:.0f} %)"
        print(f"{name:10}{generation:>28}{training:>28}{f['stop_ms']:10.1f}{f['longest_micro_batch_ms']:16.1f}"
              + ("" if f["same_tokens"] else "  TOKENS DIFFER"))


if __name__ == "__main__":
    main()
