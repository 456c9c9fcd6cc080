"""The price of log-probabilities with the engine's bits (`learner.exact_logprobs`): seconds of a forward and backward pass, peak
memory, and how far trainer and engine are apart.

    python benchmarks/gpu/exact_logprobs.py --shapes 1.5B 7B

An engine with random bfloat16 weights of each shape generates answers, which fill one micro-batch. Four learners in turn compute
their log-probabilities and gradients: one whose products the library may split along K, an ordinary one, which sums K in one pass
as the engine does, one that recomputes activations (`gradient_checkpointing`), and an exact one, which recomputes them, too.
7B is trained with LoRA adapters: its gradients in float32 would leave no room for three rounds.
`price` is the time of forward and backward over that of the ordinary learner; `price_recomputing` over that of the one that
recomputes; `price_one_pass` is the time of the ordinary learner over that of the one that splits K.

Goals: a difference of exactly 0 with `exact_logprobs`; 1.15 times the time of gradient checkpointing at most.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from benchmarks.lib.figures import Goal, print_goals, print_table
from benchmarks.lib.models import QWEN_SHAPES, TINY, random_model
from benchmarks.lib.results import Report
from benchmarks.lib.setup import Budget, Setting, make_parser
from paceline import Engine, SamplingParams
from paceline.config import EngineConfig, LearnerConfig, OptimizerConfig
from paceline.kernels.reference.ops import TorchOps
from paceline.models.config import ModelConfig
from paceline.rl import Learner, make_algorithm, pack, samples_of
from paceline.rl.batch import MicroBatch
from paceline.rl.models import train_ops

LEARNERS: dict[str, dict[str, bool]] = {
    "split K": {}, "ordinary": {}, "recomputing": {"gradient_checkpointing": True}, "exact": {"exact_logprobs": True}}


def main() -> None:
    args = parse()
    setting, budget = Setting.of(args), Budget(args.minutes)
    report = Report(args, setting.device, answers=args.answers, new_tokens=args.new_tokens, prompt_tokens=args.prompt_tokens,
                    rounds=args.rounds, shapes={})
    for name in ["tiny"] if args.tiny else args.shapes:
        if report.content["shapes"] and budget.left <= 0:
            print(f"no time left for {name}", flush=True)
            continue
        report.content["shapes"][name] = measure(TINY if args.tiny else QWEN_SHAPES[name], args, setting, name == "7B")
        report.content["seconds"] = budget.used
        report.save()
    show(report.content)


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__, "gpu/exact_logprobs", minutes=3.0)
    parser.add_argument("--shapes", nargs="+", choices=list(QWEN_SHAPES), default=["1.5B"])
    parser.add_argument("--answers", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=896)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.tiny:
        args.answers, args.new_tokens, args.prompt_tokens, args.rounds = 3, 12, 5, 1
    return args


def measure(shape: ModelConfig, args: argparse.Namespace, setting: Setting, lora: bool) -> dict[str, Any]:
    """Figures of all learners for one shape."""
    batch = generate(shape, args, setting)
    setting.free()
    found: dict[str, Any] = {"lora": lora, "rows": len(batch.tokens), "learners": {}}
    for name, options in LEARNERS.items():
        products = mock.patch.object(type(train_ops(setting.device.type)), "linear", TorchOps.linear)
        with products if name == "split K" else nullcontext():
            found["learners"][name] = measure_learner(shape, {**options, "lora_rank": 16 if lora else 0}, batch, args, setting)
        setting.free()
    seconds = {name: figures["seconds"] for name, figures in found["learners"].items()}
    return found | {"price": seconds["exact"] / seconds["ordinary"],
                    "price_recomputing": seconds["exact"] / seconds["recomputing"],
                    "price_one_pass": seconds["ordinary"] / seconds["split K"]}


def generate(shape: ModelConfig, args: argparse.Namespace, setting: Setting) -> MicroBatch:
    """Answers of several lengths, as one micro-batch, with the log-probabilities that they were sampled with."""
    config = EngineConfig(max_batch=args.answers, deterministic=True, profile=False,
                          **({"kv_tokens": 1024} if args.tiny else {"kv_memory_gb": 8.0}))
    engine = Engine(random_model(shape, torch.bfloat16, setting.device), None, "none", "off", config)
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, shape.vocab_size, (args.prompt_tokens,), generator=draw).tolist() for _ in range(args.answers)]
    params = [SamplingParams(max_new_tokens=args.new_tokens - i * args.new_tokens // (2 * args.answers), seed=i, ignore_eos=True)
              for i in range(args.answers)]
    groups = engine.generate(prompts, params)
    for group in groups:
        group.rollouts[0].reward = 1.0
    (batch,) = pack(samples_of(groups, torch.float32), 1 << 30, device=setting.device)
    return batch


def measure_learner(shape: ModelConfig, options: dict[str, Any], batch: MicroBatch, args: argparse.Namespace,
                    setting: Setting) -> dict[str, float]:
    model = random_model(shape, torch.bfloat16, setting.device)
    learner = Learner(model if options["lora_rank"] else model.float(), make_algorithm("grpo", args.new_tokens),
                      LearnerConfig(**options), OptimizerConfig(), 10, 1.0, torch.bfloat16)
    learner.warm_up()
    times: list[tuple[float, float]] = []
    logprobs = torch.zeros(0)
    for number in range(args.rounds + 1):  # the first compiles
        if number == 1 and setting.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        setting.synchronize()
        began = time.perf_counter()
        logprobs, _ = learner.policy.logprobs(batch, 1.0)
        setting.synchronize()
        middle = time.perf_counter()
        logprobs.mean().backward()
        setting.synchronize()
        times.append((middle - began, time.perf_counter() - began))
        for parameter in learner.policy.parameters():
            parameter.grad = None
    away = (logprobs.detach() - batch.sampled).abs()
    peak = torch.cuda.max_memory_allocated() / 2**30 if setting.device.type == "cuda" else 0.0
    return {"forward_seconds": statistics.median(forward for forward, _ in times[1:]),
            "seconds": statistics.median(both for _, both in times[1:]), "first_seconds": times[0][1], "peak_gib": peak,
            "logprob_difference_mean": float(away.mean()), "logprob_difference_max": float(away.max())}


def show(content: dict[str, Any]) -> None:
    names = ("forward_seconds", "seconds", "peak_gib", "logprob_difference_mean", "logprob_difference_max")
    goals = []
    for shape, found in content["shapes"].items():
        rows: list[Sequence[object]] = [(name, *(figures[key] for key in names)) for name, figures in found["learners"].items()]
        print_table(f"{shape}, {found['rows']:,} rows{', LoRA' if found['lora'] else ''}",
                    ("learner", *(name.replace("_", " ") for name in names)), rows)
        largest = found["learners"]["exact"]["logprob_difference_max"]
        goals.append(Goal(f"{shape}: largest difference", largest, 0.0, at_least=False))
        goals.append(Goal(f"{shape}: exact / recomputing", found["price_recomputing"], 1.15, at_least=False))
    print_goals(goals)


if __name__ == "__main__":
    main()
