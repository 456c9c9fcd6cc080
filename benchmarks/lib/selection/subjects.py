"""The policies that the selection benchmark measures, with their drafters and prompts, by setting."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import NamedTuple

import torch

from benchmarks.lib import drafter as trained_drafter
from benchmarks.lib.long_tail import compose
from benchmarks.lib.models import QWEN_7B, TINY_TWIN
from benchmarks.lib.prompts import chat
from benchmarks.lib.results import Report
from benchmarks.lib.selection.workloads import Sizes, Texts, looping
from benchmarks.lib.setup import Budget, Setting
from benchmarks.lib.speculation import long_responses
from benchmarks.lib.upscale import upscale, upscale_drafter
from paceline.bench.demo import PROMPTS
from paceline.bundled import resolve_model
from paceline.config import EngineConfig
from paceline.drafters.checkpoint import load_eagle, save_eagle
from paceline.drafters.eagle import Eagle
from paceline.engine import Engine
from paceline.generation import encode_prompt, read_prompts
from paceline.models.decoder import Decoder
from paceline.models.weights import load_model
from paceline.spot import SpotConfig

SIZES = {"default": Sizes(16, 160, 64, 512, True), "smollm2": Sizes(8, 64, 32, 192, False),
         "gpu": Sizes(16, 512, 64, 1024, False), "tiny": Sizes(2, 12, 4, 24, False)}


class Subject(NamedTuple):
    """A policy with its drafter and its prompts."""

    name: str
    model: Decoder
    drafter: Eagle | None
    texts: Texts


def subjects(args: argparse.Namespace, report: Report, budget: Budget) -> Iterator[Subject]:
    """The policies of the setting, one after the other, so that a twin can use the memory of the one before."""
    if args.setting in ("default", "smollm2"):
        yield cpu_subject(args, report, budget)
        return
    setting = Setting.of(args)
    policy, tokenizer = setting.policy(args.model)
    asked, training = trained_drafter.split_questions(args)
    drafter = trained_drafter.obtain(setting, policy, tokenizer, training, args, report, budget)
    sizes = SIZES[args.setting]
    prompts = compose(asked, [sizes.tokens] * 40 * sizes.batch, 0)  # several problems each: one is answered in fewer tokens
    pool, report.content["share_past_end"] = long_responses(setting, policy, chat(tokenizer, prompts), sizes.tokens)
    repeating = [looping(prompt[:64], 3) for prompt in pool[: sizes.batch]]
    if tokenizer is not None:
        texts = [f"Write this text again and again, word for word:\n\n{text}" for text in training[: sizes.batch]]
        repeating = chat(tokenizer, texts)
    for name in args.models:
        model, learned = policy, drafter
        if name == "twin":
            model = upscale(policy, TINY_TWIN if args.tiny else QWEN_7B)
            learned = upscale_drafter(drafter, model.config)
        yield Subject(name, model, learned, Texts(pool, repeating, policy.config.vocab_size))


def cpu_subject(args: argparse.Namespace, report: Report, budget: Budget) -> Subject:
    """A policy in float32, where tokens do not depend on the strategy (`EngineConfig.deterministic`)."""
    source = resolve_model(args.model or "default")
    model, tokenizer = load_model(source, "cpu", "float32")
    engine = Engine(model, tokenizer, "none", "off", EngineConfig(max_batch=1, kv_memory_gb=0.1))
    if args.setting == "smollm2":
        texts = [[{"role": "user", "content": text}] if tokenizer.chat_template else text for text in PROMPTS]
        prompts = [engine.encode(text) for text in texts]
        if args.prompts is not None:
            prompts = [encode_prompt(engine, each) for each in read_prompts(str(args.prompts), print)]
        repeating = [engine.encode(text) for text in texts[::3]]
        drafter = None if args.drafter is None else load_eagle(args.drafter, model)
        return Subject("policy", model, drafter, Texts(prompts, repeating, model.config.vocab_size))
    prompts = [encode_prompt(engine, each) for each in read_prompts("task:collatz", print)]
    return Subject("policy", model, cpu_drafter(model, prompts, args, report, budget),
                   Texts(prompts, prompts[: SIZES["default"].batch], model.config.vocab_size))


def cpu_drafter(model: Decoder, prompts: list[list[int]], args: argparse.Namespace, report: Report, budget: Budget) -> Eagle:
    """The drafter in `--drafter`, or one trained as `paceline drafter train` does and written there."""
    if args.drafter is not None and (args.drafter / "model.safetensors").is_file():
        return load_eagle(args.drafter, model)
    setting, config = Setting(torch.device("cpu"), False), SpotConfig(form=args.form, objective=args.objective, lr=args.lr)
    captured = trained_drafter.capture(setting, model, prompts, config, 512, 512, budget)
    trainer = trained_drafter.make_trainer(model, captured.records, config, 0)
    log = trained_drafter.train(trainer, args.train_seconds)
    report.content["drafter"] = {"answers": len(captured.records), "train_seconds": sum(entry["seconds"] for entry in log)}
    drafter = trainer.drafter()
    if args.drafter is not None:
        save_eagle(drafter, args.drafter)
    return drafter
