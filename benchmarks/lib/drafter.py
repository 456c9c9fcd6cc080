"""The drafter that the speculation benchmarks use: loaded from a folder, or trained here on responses of the policy itself."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.lib.long_tail import compose
from benchmarks.lib.prompts import chat, questions
from benchmarks.lib.results import Report
from benchmarks.lib.setup import Budget, Setting
from paceline import SamplingParams
from paceline.config import EngineConfig
from paceline.drafters.checkpoint import load_eagle, save_eagle
from paceline.drafters.eagle import Eagle, EagleConfig
from paceline.engine.pool import RequestPool
from paceline.models.decoder import Decoder
from paceline.spot import FeatureBuffer, SpotConfig, SpotTrainer, capture_layers, fresh_eagle
from paceline.trainer.drafter_eval import coverage_record, held_out_coverage
from paceline.trainer.memory import drafter_training_bytes
from paceline.trainer.standalone_drafter import has_plateaued, standalone_config
from paceline.types import FeatureRecord

_HELD_OUT, _LONG_HELD_OUT = 48, 8
"""Number of prompts, and of those with long responses, whose responses are not trained on: coverage is measured on them."""
_LONG = 4
"""How many times as long as `--train-tokens` the responses to prompts with several problems may be."""
_REPORTS = 12
"""Number of progress lines while training."""
_BUFFER_BYTES = 64 << 30
_PATIENCE = 4
"""Training ends when so many parts of it in a row were no better than an earlier one."""
_CAPTURE_BATCH = 512
"""Number of responses that are generated at once on a GPU: nothing waits for a single one of them."""


class Captured(NamedTuple):
    """Responses of the policy with its features."""

    records: list[FeatureRecord]
    """Responses to train on."""
    held_out: list[FeatureRecord]
    """Responses to other prompts, on which coverage is measured."""
    long_held_out: list[FeatureRecord]
    """Responses to prompts with several problems."""
    seconds: float
    tokens_per_s: float
    """Generated tokens per second, without the first step's compilation."""


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
    parser.add_argument("--train-tokens", type=int, default=512, help="longest response to one problem to train on")
    parser.add_argument("--long-answers", type=int, default=160,
                        help=f"number of responses to several problems to train on, {_LONG} times as long")
    parser.add_argument("--draft-vocab", type=int, default=32768)
    parser.add_argument("--lr", type=float, help="learning rate (default: the trainer's)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="other settings of drafter training")


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
        args.answers, args.long_answers, args.train_seconds, args.train_tokens, args.draft_vocab = 48, 4, 0.5, 12, 0
    changes = dict(change.split("=", 1) for change in args.set)
    config = SpotConfig(**{"form": args.form, "objective": args.objective, "lr": args.lr, **changes})
    long = chat(tokenizer, compose(texts, [_LONG * args.train_tokens] * args.long_answers, 98))
    captured = capture(setting, policy, chat(tokenizer, texts), config, args.answers, args.train_tokens, budget, long)
    setting.free()
    seconds = min(args.train_seconds, max(1.0, budget.left))
    trainer = make_trainer(policy, captured.records, standalone_config(config, seconds=seconds), args.draft_vocab)
    on_gpu = setting.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() if on_gpu else 0
    log = train(trainer, seconds, captured.held_out)
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    drafter = trainer.drafter()
    if args.drafter is not None:
        save_eagle(drafter, args.drafter)
    found = held_out_coverage(drafter, policy, captured.held_out, EngineConfig().tau, config.temperature)
    print(found, flush=True)
    report.content["drafter"] = {
        "answers": len(captured.records), "tokens": sum(len(record.token_ids) for record in captured.records),
        "capture_seconds": captured.seconds, "capture_tokens_per_s": captured.tokens_per_s,
        "train_seconds": sum(entry["seconds"] for entry in log), "steps": trainer.progress.step, "form": args.form,
        "objective": args.objective, "draft_vocab": args.draft_vocab, "log": log, "coverage_by_depth": found.by_depth,
        "memory_gib": {"peak": (peak - held) / 2**30, "planned": drafter_training_bytes(
            config, drafter.config, policy.norm.dtype, setting.device.type) / 2**30},
        "full_tree_tokens_per_verification": {k: values[-1] for k, values in found.accept_length.items()}}
    if captured.long_held_out:
        found = held_out_coverage(drafter, policy, captured.long_held_out, EngineConfig().tau, config.temperature)
        print("long responses:", found, flush=True)
        report.content["drafter"]["long_responses"] = coverage_record(found)
    report.save()
    setting.free()
    return drafter


def capture(setting: Setting, policy: Decoder, prompts: list[list[int]], config: SpotConfig, count: int, new_tokens: int,
            budget: Budget, long: Sequence[list[int]] = ()) -> Captured:
    """Responses with the policy's features. They are taken as they finish, and new ones are requested in their place, until there
    are `count` or a quarter of the time is used; the unfinished ones are dropped. The first prompts are held out. Responses to
    `long`, which take longest, are requested before most others."""
    layers = capture_layers(EagleConfig.for_policy(policy.config, config.module_form))
    on_gpu = policy.norm.device.type == "cuda"
    engine = setting.engine(policy, None, _CAPTURE_BATCH if on_gpu else 64, kv_gb=40 if on_gpu else 1, capture=layers)
    began = budget.used
    engine.generate(prompts[:1], SamplingParams(max_new_tokens=2), keys=["first"])  # compiles kernels
    print(f"first token after {budget.used - began:.1f} s", flush=True)
    num_short, num_long = (8, min(2, len(long))) if setting.tiny else (_HELD_OUT, min(_LONG_HELD_OUT, len(long)))
    num_held_out = num_short + num_long
    params = SamplingParams(temperature=config.temperature, max_new_tokens=new_tokens, seed=1)
    requests = chain(((prompt, params) for prompt in prompts[:num_short]),
                     ((prompt, replace(params, max_new_tokens=_LONG * new_tokens)) for prompt in long),
                     ((prompt, params) for prompt in cycle(prompts[num_short:])))
    waiting = enumerate(islice(requests, count))
    until, began = budget.used + 0.25 * budget.left, budget.used
    found: dict[int, FeatureRecord] = {}
    with RequestPool[int](engine) as asked:  # owners are the numbers of the responses
        while budget.used < until or not found or min(asked.owners.values(), default=count) < num_held_out:
            for number, (prompt, each) in islice(waiting, asked.num_to_add(engine.scheduler.max_batch)):
                asked.add(prompt, each, [number], key=f"train {number}")  # a prompt that comes twice gets two responses
            if not asked:
                break
            found |= {number: rollout.features for number, rollout in asked.step().finished if rollout.features is not None}
    tokens, seconds = engine.stats().generated_tokens, budget.used - began
    print(f"{len(found)} responses captured in {seconds:.1f} s, {tokens / seconds:.0f} tokens/s", flush=True)
    held_out = [[found[i] for i in some if i in found] for some in (range(num_short), range(num_short, num_held_out))]
    return Captured([found[i] for i in sorted(found) if i >= num_held_out], *held_out, seconds, tokens / seconds)


def make_trainer(policy: Decoder, records: list[FeatureRecord], config: SpotConfig, draft_vocab: int) -> SpotTrainer:
    """A trainer for a fresh drafter. The records stay on the policy's device, where they were captured."""
    buffer = FeatureBuffer(_BUFFER_BYTES, device=policy.norm.device)
    for record in records:
        buffer.add(record, 0)
    drafter = fresh_eagle(policy, config.module_form, records, draft_vocab, window=config.window)
    return SpotTrainer(drafter, policy, buffer, config)


def train(trainer: SpotTrainer, seconds: float, held_out: Sequence[FeatureRecord] = ()) -> list[dict[str, float]]:
    """Trains for so many seconds, or until the tokens per verification on some held-out responses no longer rise; returns
    throughput, losses and those of every part of it."""
    log: list[dict[str, float]] = []
    while (left := seconds - sum(entry["seconds"] for entry in log)) > 0:
        report = trainer.run(min(left, seconds / _REPORTS))
        entry = {"seconds": report.seconds, "step": trainer.progress.step, "tokens_per_s": report.tokens_per_second,
                 **report.losses}
        if held_out:
            found = held_out_coverage(trainer.drafter(), trainer.policy, held_out[: _HELD_OUT // 2], EngineConfig().tau,
                                      trainer.config.temperature)
            entry["held_out"] = found.accept_length[max(found.accept_length)][-1]
        log.append(entry)
        print("  ".join(f"{name} {value:.4g}" for name, value in entry.items()), flush=True)
        if has_plateaued([entry["held_out"] for entry in log if "held_out" in entry], _PATIENCE):
            break
    return log
