"""The drafter that the speculation benchmarks use: loaded from a folder, or trained here on responses of the policy itself."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from benchmarks.lib.prompts import chat, questions
from benchmarks.lib.results import Report
from benchmarks.lib.setup import Budget, Setting
from paceline import SamplingParams
from paceline.config import EngineConfig
from paceline.drafters.checkpoint import load_eagle, save_eagle
from paceline.drafters.eagle import Eagle, EagleConfig
from paceline.models.decoder import Decoder
from paceline.spot import FeatureBuffer, SpotConfig, SpotTrainer, capture_layers, fresh_eagle
from paceline.trainer.drafter_eval import held_out_coverage
from paceline.types import FeatureRecord

_HELD_OUT = 48
"""Number of captured responses that are not trained on and on which coverage is measured."""
_REPORTS = 12
"""Number of progress lines while training."""
_BUFFER_BYTES = 64 << 30


def add_arguments(parser: argparse.ArgumentParser, can_load: bool = True) -> None:
    """`can_load`: whether there is `--drafter`, with which a drafter that was trained earlier is used."""
    parser.add_argument("--model", help="the policy: a folder or GGUF file")
    parser.add_argument("--prompts", type=Path, help="JSON lines with a question each: the prompts that are measured")
    parser.add_argument("--train-prompts", type=Path, help="JSON lines: prompts to train on (default: half of --prompts)")
    if can_load:
        parser.add_argument("--drafter", type=Path, help="folder of a trained drafter; if empty, one is trained and saved there")
    parser.add_argument("--form", choices=["eagle", "hass", "eagle3"], default="hass")
    parser.add_argument("--objective", choices=["agreement", "cross_entropy"], default="agreement")
    parser.add_argument("--answers", type=int, default=3000, help="number of responses to train on")
    parser.add_argument("--train-seconds", type=float, default=160)
    parser.add_argument("--train-tokens", type=int, default=512, help="longest response to train on")
    parser.add_argument("--draft-vocab", type=int, default=32768)
    parser.add_argument("--lr", type=float, help="learning rate (default: the trainer's)")


def split_questions(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Questions to measure on and questions to train on."""
    found = questions(args.prompts)
    if args.train_prompts is not None:
        return found, questions(args.train_prompts)
    half = len(found) // 2
    return found[:half], found[half:]


def obtain(setting: Setting, policy: Decoder, tokenizer: Any, texts: list[str], args: argparse.Namespace, report: Report,
           budget: Budget) -> Eagle:
    """The drafter in `--drafter`, or one trained on the policy's responses to `texts` and written there."""
    if args.drafter is not None and (args.drafter / "model.safetensors").is_file():
        report.content["drafter"] = {"loaded": True}
        return load_eagle(args.drafter, policy)
    if setting.tiny:
        args.answers, args.train_seconds, args.train_tokens, args.draft_vocab = 48, 0.5, 12, 0
    config = SpotConfig(form=args.form, objective=args.objective, lr=args.lr)
    began = time.perf_counter()
    records = capture(setting, policy, chat(tokenizer, texts), config, args.answers, args.train_tokens, budget)
    captured = time.perf_counter() - began
    setting.free()
    print(f"{len(records)} responses captured in {captured:.1f} s", flush=True)
    held = 8 if setting.tiny else _HELD_OUT
    trainer = make_trainer(policy, records[held:], config, args.draft_vocab)
    log = train(trainer, min(args.train_seconds, max(1.0, budget.left)))
    drafter = trainer.drafter()
    if args.drafter is not None:
        save_eagle(drafter, args.drafter)
    found = held_out_coverage(drafter, policy, records[:held], EngineConfig().tau, config.temperature)
    print(found, flush=True)
    report.content["drafter"] = {
        "answers": len(records), "tokens": sum(len(record.token_ids) for record in records), "capture_seconds": captured,
        "train_seconds": sum(entry["seconds"] for entry in log), "steps": trainer.progress.step, "form": args.form,
        "objective": args.objective, "draft_vocab": args.draft_vocab, "log": log, "coverage_by_depth": found.by_depth,
        "full_tree_tokens_per_verification": {k: values[-1] for k, values in found.accept_length.items()}}
    report.save()
    setting.free()
    return drafter


def capture(setting: Setting, policy: Decoder, prompts: list[list[int]], config: SpotConfig, count: int, new_tokens: int,
            budget: Budget) -> list[FeatureRecord]:
    """Responses with the policy's features, generated in blocks until there are `count` or a quarter of the time is used."""
    layers = capture_layers(EagleConfig.for_policy(policy.config, config.module_form))
    engine = setting.engine(policy, None, 256, kv_gb=24, capture=layers)
    began = budget.used
    engine.generate(prompts[:1], SamplingParams(max_new_tokens=2), keys=["first"])  # compiles kernels
    print(f"first token after {budget.used - began:.1f} s", flush=True)
    found: list[FeatureRecord] = []
    block, until = 512, budget.used + 0.25 * budget.left
    for start in range(0, count, block):
        asked = [prompts[i % len(prompts)] for i in range(start, min(count, start + block))]
        keys = [f"train {i}" for i in range(start, start + len(asked))]  # a prompt that comes twice gets two responses
        params = SamplingParams(temperature=config.temperature, max_new_tokens=new_tokens, seed=1)
        groups = engine.generate(asked, params, keys=keys)
        found += [r.features for group in groups for r in group.rollouts if r.features is not None]
        if budget.used > until:
            break
    return found


def make_trainer(policy: Decoder, records: list[FeatureRecord], config: SpotConfig, draft_vocab: int) -> SpotTrainer:
    """A trainer for a fresh drafter. The records stay on the policy's device, where they were captured."""
    buffer = FeatureBuffer(_BUFFER_BYTES, device=policy.norm.device)
    for record in records:
        buffer.add(record, 0)
    drafter = fresh_eagle(policy, config.module_form, records, draft_vocab)
    return SpotTrainer(drafter, policy, buffer, config)


def train(trainer: SpotTrainer, seconds: float) -> list[dict[str, float]]:
    """Trains for so many seconds; returns throughput and losses of every part of it."""
    log: list[dict[str, float]] = []
    while (left := seconds - sum(entry["seconds"] for entry in log)) > 0:
        report = trainer.run(min(left, seconds / _REPORTS))
        log.append({"seconds": report.seconds, "step": trainer.progress.step, "tokens_per_s": report.tokens_per_second,
                    **report.losses})
        print("  ".join(f"{name} {value:.4g}" for name, value in log[-1].items()), flush=True)
    return log
