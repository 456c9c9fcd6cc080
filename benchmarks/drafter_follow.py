"""Frozen against adaptive: the same RL run twice from the same trained drafter, which stays as it is in one and follows the
policy in the other. Tokens do not depend on the drafter, so both see the same prompts, answers and weights; what differs is how
many tokens a verification gives.

    python benchmarks/drafter_follow.py --steps 16                                    # the default run, one thread
    python benchmarks/drafter_follow.py --device cuda --config configs/qwen2.5-1.5b-gsm8k.toml --set model=... \\
        --set engine.deterministic=true [--drafter FOLDER]

In bfloat16 tokens are the same with both only if the engine is `deterministic`. Stopped (Ctrl-C, SIGTERM) it sums up what it has.
"""

from __future__ import annotations

import json
import signal
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from gpu_common import Budget, Report, parser_of

from paceline import Engine, SamplingParams
from paceline.commands.policy import policy_source
from paceline.commands.rollouts import Problems, as_prompt
from paceline.commands.settings import read_settings
from paceline.commands.train import train
from paceline.config import TrainConfig
from paceline.drafters.checkpoint import save_eagle
from paceline.drafters.eagle import Eagle
from paceline.models.weights import load_model, parse_dtype
from paceline.report import read_metrics
from paceline.spot import FeatureBuffer, SpotConfig, SpotTrainer, capture_layers, fresh_eagle
from paceline.spot.coverage import coverage
from paceline.tasks import make_task

_TINY = ["steps=2", "rollout.prompts=2", "rollout.group_size=2", "rollout.max_new_tokens=16", "engine.kv_tokens=4096"]


def main() -> None:
    parser = parser_of(__doc__, "drafter_follow")
    parser.add_argument("--config", type=Path, help="a training configuration; default: the one that comes with the package")
    parser.add_argument("--set", action="append", default=[], help="change it, like optimizer.lr=1e-5")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--mode", default="between", help="when the adaptive one trains: between, beside, stream")
    parser.add_argument("--strategy", default="eagle:d6w1v6", help="one for both, so that only the drafter differs")
    parser.add_argument("--drafter", type=Path, help="begin with this one; default: one trained here, for so long:")
    parser.add_argument("--warm-seconds", type=float, default=30.0, help="training of the drafter before the run")
    parser.add_argument("--warm-prompts", type=int, default=48)
    args = parser.parse_args()
    changes = [f"steps={args.steps}", f"device={args.device}", f"strategy={args.strategy}", f"drafter_mode={args.mode}",
               "compare_off=false", *(["threads=1"] if args.device == "cpu" else []), *(_TINY if args.tiny else []), *args.set]
    config = read_settings(args.config, changes)
    report = Report(args.out, torch.device(config.device), steps=config.steps, strategy=config.strategy, mode=args.mode,
                    model=config.model, task=config.task)
    budget = Budget(args.minutes)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if config.engine.deterministic:  # the learner, too
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.use_deterministic_algorithms(True, warn_only=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as scratch:
        start = args.drafter
        if start is None:
            start, (seconds, prompts) = Path(scratch) / "start", (0.5, 2) if args.tiny else (args.warm_seconds, args.warm_prompts)
            report.content["warm_up"] = warm_up(config, start, seconds, prompts)
        for name, follow in (("frozen", False), ("adaptive", True)):
            out = Path(scratch) / name
            began = time.perf_counter()
            code = train(config.model_copy(update={"out": str(out), "drafter": str(start), "drafter_follow": follow}))
            report.content[name] = figures(out, time.perf_counter() - began)
            report.save()
            if code:
                break
        if "adaptive" in report.content:
            report.content |= compared(report.content, Path(scratch))
    report.content["minutes"] = budget.used / 60
    report.save()
    show(report.content)


def warm_up(config: TrainConfig, folder: Path, seconds: float, prompts: int) -> dict[str, Any]:
    """A drafter for the policy that the run begins with, trained on answers to other problems."""
    policy, tokenizer = load_model(policy_source(config.model), config.device, parse_dtype(config.dtype) or torch.float32)
    options = SpotConfig(**{"temperature": config.rollout.temperature, **config.spot})
    start = fresh_eagle(policy, options.module_form)
    engine = Engine(policy, tokenizer, "none", "off", config.engine.model_copy(update={"capture": capture_layers(start.config)}))
    problems = Problems(make_task(config.task, **config.task_options), config.seed + 1, None).take(0, prompts)
    params = SamplingParams(temperature=config.rollout.temperature, max_new_tokens=config.rollout.max_new_tokens,
                            seed=config.seed + 1)
    groups = engine.generate([as_prompt(engine, p) for p in problems], params, config.rollout.group_size)
    records = [r.features for group in groups for r in group.rollouts if r.features is not None]
    held_out = records[:: max(2, len(records) // 16)][:16]
    buffer = FeatureBuffer(4 << 30)
    for record in records:
        if not any(record is other for other in held_out):
            buffer.add(record, 0)
    trainer = SpotTrainer(start, policy, buffer, options)
    found = trainer.run(seconds)
    drafter: Eagle = trainer.drafter()
    save_eagle(drafter, folder)
    expected = coverage(drafter, policy, held_out, config.engine.tau, 6, (1,), config.rollout.temperature).expected[1][-1]
    print(f"drafter: {found.seconds:.0f} s, {buffer.num_tokens} tokens, {expected:.2f} tokens per verification", flush=True)
    return {"seconds": found.seconds, "tokens": buffer.num_tokens, "expected_tokens_per_verification": expected}


def figures(out: Path, seconds: float) -> dict[str, Any]:
    records = read_metrics(out)
    trained = [r.get("drafter/seconds", r.get("drafter/beside_seconds", 0.0)) for r in records]
    return {"accept_length": [r["accept_length"] for r in records], "reward": [r["reward/mean"] for r in records],
            "generate_s": [r["time/generate"] for r in records], "drafter_s": [r.get("time/drafter", 0.0) for r in records],
            "trained_s": trained, "alarms": {r["step"]: r["alarms"] for r in records if "alarms" in r}, "seconds": seconds}


def compared(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Over the steps that both have; at the end: the last quarter of them."""
    lengths = {side: content[side]["accept_length"] for side in ("frozen", "adaptive")}
    steps = min(map(len, lengths.values()))
    last = max(1, steps // 4)
    ends = {f"{side}_at_end": fmean(each[steps - last : steps]) for side, each in lengths.items()}
    same = [rollouts(folder / "frozen", step) == rollouts(folder / "adaptive", step) for step in range(1, steps + 1)]
    return {"steps_compared": steps, **ends, "identical_rollouts": all(same), "steps_identical": sum(same)}


def rollouts(out: Path, step: int) -> list[list[int]]:
    return [json.loads(line)["token_ids"] for line in (out / f"rollouts-{step:06d}.jsonl").read_text().splitlines()]


def show(content: dict[str, Any]) -> None:
    if "adaptive" not in content:
        return
    frozen, adaptive = content["frozen"], content["adaptive"]
    print(f"{'step':>5}{'frozen':>9}{'adaptive':>9}{'trained s':>11}")
    lines = zip(frozen["accept_length"], adaptive["accept_length"], adaptive["trained_s"], strict=False)
    for step, (a, b, s) in enumerate(lines, 1):
        print(f"{step:5d}{a:9.3f}{b:9.3f}{s:11.1f}")
    print(f"last quarter of {content['steps_compared']} steps: frozen {content['frozen_at_end']:.3f}, adaptive "
          f"{content['adaptive_at_end']:.3f}; rollouts identical in {content['steps_identical']}; generation "
          f"{sum(frozen['generate_s']):.1f} s and {sum(adaptive['generate_s']):.1f} s, training the drafter "
          f"{sum(adaptive['trained_s']):.1f} s")


if __name__ == "__main__":
    main()
