"""Decoding without speculation on one GPU: Paceline against vLLM and against the memory-bandwidth bound, in one run.

    python benchmarks/gpu/decode.py                                   # Paceline alone
    python benchmarks/gpu/decode.py --vllm-path SITE                  # SITE: a folder in which vLLM is installed

Random weights in bfloat16, prompts of 128 tokens, temperature 1. Figures are of the whole engine, with scheduling, prefill and
outputs. vLLM runs in a process of its own; the two take turns, and neither computes while the other does.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from benchmarks.lib.models import DECODE_SHAPES, H200_BANDWIDTH, TINY, bytes_read_per_step, random_model
from benchmarks.lib.prompts import random_prompts
from benchmarks.lib.results import Report
from benchmarks.lib.setup import Budget, Setting, make_parser
from benchmarks.lib.vllm_gpu import Vllm, add_vllm_arguments
from paceline import Engine, SamplingParams

PROMPT_TOKENS = 128
GOALS = {"7B": ((64, 1.1), (256, 1.3)), "1.5B": ((64, 1.6), (256, 2.0)), "0.5B": ((256, 2.5),), "30B-A3B": ((256, 1.0),)}
"""For each shape, pairs of a largest batch size and the goal up to it, as a multiple of vLLM's rate."""


def main() -> None:
    parser = make_parser(__doc__, "gpu/decode")
    parser.add_argument("--shapes", nargs="+", default=["7B", "1.5B", "0.5B"], choices=list(DECODE_SHAPES))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2)
    add_vllm_arguments(parser)
    args = parser.parse_args()
    setting, budget = Setting.of(args), Budget(args.minutes)
    if args.tiny:
        args.shapes, args.batch, args.new_tokens, args.rounds = ["tiny"], [1, 2], 4, 1
    report = Report(args, setting.device, new_tokens=args.new_tokens, prompt_tokens=PROMPT_TOKENS, shapes={})
    peers = {} if args.tiny else {name: peer for name in args.shapes if (peer := Vllm.of(args, name)) is not None}
    for shape in args.shapes:
        if budget.left < 30:
            print(f"no time left for {shape}", flush=True)
            break
        measure(setting, shape, peers.get(shape), args, report, budget)
        setting.free()
    for peer in peers.values():
        peer.close()


def measure(setting: Setting, shape: str, peer: Vllm | None, args: Any, report: Report, budget: Budget) -> None:
    config = TINY if setting.tiny else DECODE_SHAPES[shape]
    cell: dict[str, Any] = {"floor_ms": bytes_read_per_step(config) / H200_BANDWIDTH * 1e3, "batches": {}}
    report.content["shapes"][shape] = cell
    if peer is not None:
        cell["vllm"] = peer.wait(0.5 * budget.left)
        peer = None if "error" in cell["vllm"] else peer
    model = random_model(config, torch.float32 if setting.tiny else torch.bfloat16, setting.device)
    engine = setting.engine(model, None, max(args.batch), kv_gb=14)
    for batch in args.batch:
        if budget.left < 10:
            print(f"no time left for {shape}, batch {batch}", flush=True)
            break
        rates = rounds(engine, peer, batch, config.vocab_size, args.new_tokens, args.rounds)
        cell["batches"][str(batch)] = summary(shape, batch, rates, cell["floor_ms"])
        report.save()
        print(f"{shape} batch {batch}: {cell['batches'][str(batch)]}", flush=True)
    graphs = engine.graph_report()
    cell["paceline"] = {"graph_mib": graphs.num_bytes / 2**20, "graphs": graphs.num_graphs, "capture_s": graphs.capture_seconds}
    report.save()


def rounds(engine: Engine, peer: Vllm | None, batch: int, vocabulary: int, new_tokens: int,
           num_rounds: int) -> dict[str, list[float]]:
    """Tokens per second of each engine, in turns. The first round is a short one that compiles kernels and captures graphs."""
    rates: dict[str, list[float]] = {name: [] for name in ("paceline", *(["vllm"] if peer is not None else []))}
    for number in range(num_rounds + 1):
        prompts = random_prompts(batch, PROMPT_TOKENS, min(vocabulary, 150_000), 1000 * batch + number)
        count = new_tokens if number else 24
        for name, found in rates.items():
            if name == "vllm":
                assert peer is not None
                seconds = peer.seconds(prompts, [count] * batch)
            else:
                began = time.perf_counter()
                engine.generate(prompts, SamplingParams(max_new_tokens=count, ignore_eos=True))
                seconds = time.perf_counter() - began
            if number:
                found.append(batch * count / seconds)
    return rates


def medians(batch: int, rates: list[float]) -> dict[str, float]:
    rate = statistics.median(rates)
    return {"tokens_per_s": rate, "ms_per_step": 1e3 * batch / rate}


def summary(shape: str, batch: int, rates: dict[str, list[float]], floor_ms: float) -> dict[str, Any]:
    found: dict[str, Any] = {name: medians(batch, each) for name, each in rates.items()}
    ours = found["paceline"]
    ours["share_of_floor"] = floor_ms / ours["ms_per_step"]
    if "vllm" in found:
        found["ratio_to_vllm"] = statistics.median(a / b for a, b in zip(rates["paceline"], rates["vllm"], strict=True))
        found["goal"] = next(goal for most, goal in GOALS[shape] if batch <= most)
    return found


if __name__ == "__main__":
    main()
