"""The drafter that the speculation benchmarks use: loaded from a folder, or trained here on answers of the policy itself."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from drafter_coverage import coverage
from drafter_training import Answer, TrainOptions, answers_of, train
from gpu_common import Budget, Report, Setting, chat, questions

from paceline import SamplingParams
from paceline.config import EngineConfig
from paceline.drafters.checkpoint import load_eagle, save_eagle
from paceline.drafters.eagle import Eagle
from paceline.models.decoder import Decoder

_HELD_OUT = 48
"""Answers on which coverage is measured."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="the policy: a folder or GGUF file")
    parser.add_argument("--prompts", type=Path, help="JSON lines with a question each: what is measured on")
    parser.add_argument("--train-prompts", type=Path, help="likewise: what the drafter is trained on (default: the second half)")
    parser.add_argument("--drafter", type=Path, help="a trained drafter's folder; it is written there if there is none yet")
    parser.add_argument("--answers", type=int, default=3000, help="answers to train on")
    parser.add_argument("--train-seconds", type=float, default=160)
    parser.add_argument("--train-tokens", type=int, default=512, help="longest answer to train on")
    parser.add_argument("--draft-vocab", type=int, default=32768)
    parser.add_argument("--lr", type=float, default=TrainOptions().lr)
    parser.add_argument("--cross-weight", type=float, default=TrainOptions().cross_weight)


def split_questions(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """(to measure on, to train on)."""
    found = questions(args.prompts)
    if args.train_prompts is not None:
        return found, questions(args.train_prompts)
    half = len(found) // 2
    return found[:half], found[half:]


def obtain(setting: Setting, policy: Decoder, tokenizer: Any, texts: list[str], args: argparse.Namespace, report: Report,
           budget: Budget) -> Eagle:
    """texts: questions to train on."""
    if args.drafter is not None and (args.drafter / "model.safetensors").is_file():
        report.content["drafter"] = {"loaded": True}
        return load_eagle(args.drafter, policy)
    if setting.tiny:
        args.answers, args.train_seconds, args.train_tokens, args.draft_vocab = 48, 0.5, 12, 0
    began = time.perf_counter()
    answers = capture(setting, policy, chat(tokenizer, texts), args.answers, args.train_tokens, budget)
    captured = time.perf_counter() - began
    setting.free()
    options = TrainOptions(seconds=args.train_seconds, draft_vocab=args.draft_vocab, lr=args.lr, cross_weight=args.cross_weight)
    print(f"{len(answers)} answers captured in {captured:.1f} s", flush=True)
    trained = train(policy, answers[_HELD_OUT // 2 if setting.tiny else _HELD_OUT :], options, _say)
    if args.drafter is not None:
        save_eagle(trained.drafter, args.drafter)
    found = coverage(trained.drafter, policy, answers[: 8 if setting.tiny else _HELD_OUT], EngineConfig().tau)
    print(found, flush=True)
    report.content["drafter"] = {
        "answers": len(answers), "tokens": sum(len(answer.tokens) for answer in answers), "capture_seconds": captured,
        "train_seconds": trained.seconds, "steps": trained.steps, "draft_vocab": args.draft_vocab, "log": trained.log,
        "coverage_by_depth": found.by_depth, "full_tree_tokens_per_verification": found.tokens_per_verification}
    report.save()
    setting.free()
    return trained.drafter


def capture(setting: Setting, policy: Decoder, prompts: list[list[int]], count: int, new_tokens: int,
            budget: Budget) -> list[Answer]:
    """Answers with the policy's features, block by block until there are `count` or a quarter of the time is gone."""
    engine = setting.engine(policy, None, 256, kv_gb=24, capture=(-1,))
    found: list[Answer] = []
    block, until = 512, budget.used + 0.25 * budget.left
    for start in range(0, count, block):
        asked = [prompts[i % len(prompts)] for i in range(start, min(count, start + block))]
        keys = [f"train {i}" for i in range(start, start + len(asked))]  # a prompt asked twice gets two answers
        params = SamplingParams(temperature=1.0, max_new_tokens=new_tokens, seed=1)
        found += answers_of(engine.generate(asked, params, keys=keys))
        if budget.used > until:
            break
    return found


def _say(line: str) -> None:
    print(line, flush=True)
