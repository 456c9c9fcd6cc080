"""Speculative decoding with a trained drafter on one GPU, by batch size: off, fixed strategies and auto, on a real policy and on
its upscaled twin with the cost of a 7B model.

    python benchmarks/gpu/speculate.py --model FOLDER --prompts gsm8k_test.jsonl --train-prompts gsm8k_train.jsonl \\
        --drafter build/drafter        # trains the drafter and writes it there; a second run loads it

FOLDER holds Qwen2.5-1.5B (Coder, Instruct, …). Prompts are grade-school problems through the chat template, temperature 1. A
measurement runs `batch` responses that are long enough (known from a first pass with the same seeds; the engine does not know
it). It counts from the step in which all of them decode until the first one has `--new-tokens` tokens, where all are broken off:
decoding only, at a constant batch size, on real text. In every
round all strategies get the same prompts and seeds, auto first, and no prompt is used twice, so the suffix drafter inside auto
has never seen a response. Responses that differ from those of off are counted (`flips_per_million`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.lib import drafter as trained_drafter
from benchmarks.lib.models import QWEN_7B, TINY_TWIN
from benchmarks.lib.prompts import chat
from benchmarks.lib.results import Report
from benchmarks.lib.setup import Budget, Setting, make_parser
from benchmarks.lib.speculation import BatchBench, fixed_strategies, long_responses, show
from benchmarks.lib.upscale import upscale, upscale_drafter
from paceline import Engine
from paceline.drafters.eagle import Eagle
from paceline.models.decoder import Decoder

FIRST_BATCHES, OTHER_BATCHES = (1, 8, 32, 128, 256), (2, 4, 16, 64)


def main() -> None:
    parser = make_parser(__doc__, "gpu/speculate")
    trained_drafter.add_arguments(parser)
    parser.add_argument("--new-tokens", type=int, default=192, help="tokens of each response that count")
    parser.add_argument("--batch", type=int, nargs="+", help="batch sizes (default: 1 to 256)")
    parser.add_argument("--models", nargs="+", choices=["twin", "policy"], default=["twin", "policy"])
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    setting, budget = Setting.of(args), Budget(args.minutes)
    first, other = (args.batch, ()) if args.batch else ((2,), ()) if args.tiny else (FIRST_BATCHES, OTHER_BATCHES)
    if args.tiny:
        args.new_tokens, args.rounds = 10, 1
    report = Report(args, setting.device, new_tokens=args.new_tokens, models={})
    policy, tokenizer = setting.policy(args.model)
    asked, training = trained_drafter.split_questions(args)
    drafter = trained_drafter.obtain(setting, policy, tokenizer, training, args, report, budget)
    warm = chat(tokenizer, training[: max(*first, *other, 1)])
    wanted = 8 if args.tiny else len(asked)
    pool, past_end = long_responses(setting, policy, chat(tokenizer, asked[:wanted]), args.new_tokens)
    report.content["share_past_end"] = past_end
    benches: dict[str, BatchBench] = {}
    for name, batch in plan(args.models, first, other):
        if budget.left < 20:
            print(f"no time left for {name} at batch {batch}", flush=True)
            continue
        if name not in benches:
            report.content["models"][name] = {"batches": {}}
            benches[name] = make_bench(setting, name, policy, drafter, pool, warm, args, max(*first, *other, 1))
        fixed = fixed_strategies(batch)
        cell = benches[name].measure(batch, args.rounds, budget, fixed[-2:] if args.tiny else fixed)
        report.content["models"][name]["batches"][str(batch)] = cell
        report.content["models"][name]["flips_per_million"] = benches[name].flips.summary()
        report.content["seconds"] = budget.used
        report.save()
        show(name, batch, cell)


def plan(models: Sequence[str], first: Sequence[int], other: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Models and batch sizes in the order in which they are measured: those that matter most come first."""
    for batches in (first, other):
        yield from (("twin", batch) for batch in batches if "twin" in models)
    for batches in (first, other):
        yield from (("policy", batch) for batch in batches if "policy" in models)


def make_bench(setting: Setting, name: str, policy: Decoder, drafter: Eagle, pool: list[list[int]], warm: list[list[int]],
               args: Any, max_batch: int) -> BatchBench:
    model = policy
    if name == "twin":
        model = upscale(policy, TINY_TWIN if setting.tiny else QWEN_7B)
        drafter = upscale_drafter(drafter, model.config)

    def engine() -> Engine:
        made = setting.engine(model, drafter, max_batch)
        made.warm_up()
        return made

    others = {"no drafter": (setting.engine(model, None, max_batch, kv_gb=12), "off")}
    return BatchBench(engine, pool, warm, args.new_tokens, others)


if __name__ == "__main__":
    main()
