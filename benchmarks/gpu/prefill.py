"""Prefill on one GPU against vLLM: seconds until 64 prompts of 1,024 tokens have their first token, with and without a drafter
whose KV cache is filled along the way, and without equal bits (`deterministic=False`). Random weights of the 7B shape.

    python benchmarks/gpu/prefill.py --vllm-path SITE          # SITE: a folder in which vLLM is installed
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from benchmarks.lib.models import QWEN_7B, TINY_TWIN
from benchmarks.lib.prompts import random_prompts
from benchmarks.lib.results import Report
from benchmarks.lib.setup import Budget, Setting, make_parser
from benchmarks.lib.vllm_gpu import Vllm, add_vllm_arguments
from paceline import SamplingParams
from paceline.drafters.eagle import Eagle, EagleConfig
from paceline.models.decoder import Decoder

KV_GB = 8.0


def main() -> None:
    parser = make_parser(__doc__, "gpu/prefill")
    add_vllm_arguments(parser)
    args = parser.parse_args()
    setting, budget = Setting.of(args), Budget(args.minutes)
    report = Report(args, setting.device)
    shape = TINY_TWIN if args.tiny else QWEN_7B
    peer = None if args.tiny else Vllm.of(args, "7B")
    dtype = torch.float32 if args.tiny else torch.bfloat16
    model = Decoder.random(shape, dtype=dtype, device=setting.device)
    drafter = Eagle.random(EagleConfig.for_policy(shape), dtype=dtype, device=setting.device)
    if peer is not None:
        report.content["vllm"] = peer.wait(0.5 * budget.left)
        peer = None if "error" in report.content["vllm"] else peer
    report.content["prefill"] = prefill(setting, model, drafter, peer)
    report.save()
    print("prefill", report.content["prefill"], flush=True)
    if peer is not None:
        peer.close()


def prefill_rounds(vocab_size: int, count: int, length: int) -> list[list[list[int]]]:
    return [random_prompts(count, length, vocab_size, salt) for salt in range(4)]


def prefill(setting: Setting, model: Decoder, drafter: Eagle, peer: Vllm | None) -> dict[str, Any]:
    """Seconds until every prompt has its first token; the first round is a warm-up."""
    count, length = (4, 24) if setting.tiny else (64, 1024)
    found: dict[str, Any] = {"prompts": count, "prompt_tokens": length}
    for name, learned, equal in (("no drafter", None, None), ("any bits", None, False), ("with drafter", drafter, None)):
        engine = setting.engine(model, learned, count, kv_gb=KV_GB, max_context=1040, deterministic=equal)
        seconds = []
        for prompts in prefill_rounds(model.config.vocab_size, count, length):
            began = time.perf_counter()
            engine.generate(prompts, SamplingParams(max_new_tokens=1, ignore_eos=True), strategy="off")
            seconds.append(time.perf_counter() - began)
        found[name] = {"seconds": min(seconds[1:]), "each": seconds, "tokens_per_s": count * length / min(seconds[1:])}
        del engine
        setting.free()
    found["price_of_equal_bits"] = found["no drafter"]["seconds"] / found["any bits"]["seconds"]
    if peer is not None:
        rounds = prefill_rounds(model.config.vocab_size, count, length)
        theirs = min([peer.seconds(prompts, [1] * count) for prompts in rounds][1:])
        found["vllm"] = {"seconds": theirs, "tokens_per_s": count * length / theirs}
        for name in ("no drafter", "with drafter"):
            found[name]["ratio_to_vllm"] = theirs / found[name]["seconds"]
    return found


if __name__ == "__main__":
    main()
