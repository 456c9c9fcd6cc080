"""What captured graphs cost on one GPU: memory of one strategy, of several each with its own, of several pooled; the delay of
switching speculation on in the middle of a rollout; and prefill beside vLLM. Random weights of the 7B shape: none of this depends
on them.

    python benchmarks/gpu_graphs.py --vllm-path SITE

Published for the same comparison (TLT, 7B): one strategy 7.81 GB, several 30.39 GB, pooled 10.69 GB.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from gpu_common import TINY_TWIN, Budget, Report, Setting, Vllm, add_vllm_arguments, parser_of, random_prompts
from upscale import QWEN_7B

from paceline import SamplingParams, Strategy
from paceline.drafters.eagle import Eagle, EagleConfig
from paceline.engine.graph_memory import compare_graph_memory
from paceline.models.decoder import Decoder
from paceline.types import StepResult, StepView

STRATEGIES = ("eagle:d8w4v48", "eagle:d8w4v32", "eagle:d8w4v16", "eagle:d8w4v8")
BATCHES = (1, 2, 4, 8, 16, 32)
KV_GB = 8.0


def main() -> None:
    parser = parser_of(__doc__ or "", "gpu_graphs")
    add_vllm_arguments(parser)
    parser.add_argument("--sections", nargs="+", choices=["memory", "switch", "prefill"], default=["memory", "switch", "prefill"])
    parser.add_argument("--off-steps", type=int, default=200)
    args = parser.parse_args()
    setting, budget = Setting.of(args), Budget(args.minutes)
    report = Report(args.out, setting.device)
    shape = TINY_TWIN if args.tiny else QWEN_7B
    peer = Vllm.of(args, "7B") if "prefill" in args.sections and not args.tiny else None
    dtype = torch.float32 if args.tiny else torch.bfloat16
    model = Decoder.random(shape, dtype=dtype, device=setting.device)
    drafter = Eagle.random(EagleConfig.for_policy(shape), dtype=dtype, device=setting.device)
    if "prefill" in args.sections:
        if peer is not None:
            report.content["vllm"] = peer.wait(0.5 * budget.left)
            peer = None if "error" in report.content["vllm"] else peer
        report.content["prefill"] = prefill(setting, model, drafter, peer)
        report.save()
        print("prefill", report.content["prefill"], flush=True)
    if "switch" in args.sections:
        for batch in (2,) if args.tiny else (1, 8, 32):
            cells = report.content.setdefault("switch", {})
            cells[str(batch)] = switch(setting, model, drafter, batch, 12 if args.tiny else args.off_steps)
            report.save()
            print(f"switch at batch {batch}", cells[str(batch)], flush=True)
    if "memory" in args.sections:
        memory(setting, model, drafter, report)


# --- memory


def memory(setting: Setting, model: Decoder, drafter: Eagle, report: Report) -> None:
    """Every strategy at every batch size: our way, and the usual way (graphs by strategy and batch size, memory of their own)."""
    if setting.tiny:
        return  # a CPU captures nothing
    engine = setting.engine(model, drafter, max(BATCHES), kv_gb=KV_GB, max_context=1024)
    found = compare_graph_memory(engine, [Strategy.OFF, *map(Strategy.parse, STRATEGIES)], BATCHES)
    report.content["memory"] = {
        "batches": BATCHES, "one_strategy": asdict(found.per_strategy[STRATEGIES[0]]), "all_naive": asdict(found.naive),
        "all_pooled": asdict(found.ours), "each": {name: asdict(each) for name, each in found.per_strategy.items()},
        "pooled_share_of_naive": found.ours.num_bytes / found.naive.num_bytes}
    report.save()
    print("memory", report.content["memory"], flush=True)


# --- switching on


@dataclass(slots=True)
class Late:
    """Off for so many steps, then on. A selector."""

    off_steps: int
    strategy: Strategy
    _seen: int = 0

    def __call__(self, view: StepView) -> Strategy:
        self._seen += view.num_running > 0
        return self.strategy if self._seen > self.off_steps else Strategy.OFF


@dataclass(slots=True)
class Intervals:
    """Wall time between steps as they come out, and which of them speculated."""

    last: float = 0.0
    ms: list[float] = field(default_factory=list)
    speculated: list[bool] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def __call__(self, result: StepResult) -> None:
        now = time.perf_counter()
        if self.last:
            self.ms.append((now - self.last) * 1e3)
            self.speculated.append(result.strategy.drafter != "none" and result.num_requests > 0)
            self.tokens.append(sum(map(len, result.tokens.values())))
        self.last = now


def switch(setting: Setting, model: Decoder, drafter: Eagle, batch: int, off_steps: int) -> dict[str, Any]:
    """Cold: the drafter has never run in this engine. Warm: it has, and the drafter is `off_steps` tokens behind."""
    engine = setting.engine(model, drafter, max(BATCHES), kv_gb=KV_GB, max_context=1024)
    found = {}
    for number, name in enumerate(("cold", "warm", "again")):
        seen = Intervals()
        prompts = random_prompts(batch, 32, model.config.vocab_size, 1000 + number)
        params = SamplingParams(max_new_tokens=off_steps + (8 if setting.tiny else 60), ignore_eos=True)
        engine.generate(prompts, params, strategy=Late(off_steps, Strategy.parse("eagle:d4w2v8")), on_step=seen)
        found[name] = switch_delay(seen)
    del engine
    setting.free()
    return found


def switch_delay(seen: Intervals) -> dict[str, float]:
    """A step's result may come out one call late, so the delay is what the calls around the switch took beyond their usual."""
    first = seen.speculated.index(True)
    usual_off = statistics.median(ms for ms, on in zip(seen.ms[:first], seen.speculated[:first], strict=True) if not on)
    later = [ms for ms, on in zip(seen.ms[first + 3 :], seen.speculated[first + 3 :], strict=True) if on]
    usual_on = statistics.median(later or seen.ms[first:])
    around = seen.ms[max(0, first - 1) : first + 2]
    return {"off_step_ms": usual_off, "on_step_ms": usual_on, "first_ms": max(around),
            "delay_ms": sum(around) - usual_off - (len(around) - 1) * usual_on}


# --- prefill


def prefill_rounds(vocabulary: int, count: int, length: int) -> list[list[list[int]]]:
    return [random_prompts(count, length, vocabulary, salt) for salt in range(4)]


def prefill(setting: Setting, model: Decoder, drafter: Eagle, peer: Vllm | None) -> dict[str, Any]:
    """Seconds until every prompt has its first token; the first round warms up."""
    count, length = (4, 24) if setting.tiny else (64, 1024)
    found: dict[str, Any] = {"prompts": count, "prompt_tokens": length}
    for name, learned in (("no drafter", None), ("with drafter", drafter)):
        engine = setting.engine(model, learned, count, kv_gb=KV_GB, max_context=1040)
        seconds = []
        for prompts in prefill_rounds(model.config.vocab_size, count, length):
            began = time.perf_counter()
            engine.generate(prompts, SamplingParams(max_new_tokens=1, ignore_eos=True), strategy="off")
            seconds.append(time.perf_counter() - began)
        found[name] = {"seconds": min(seconds[1:]), "each": seconds, "tokens_per_s": count * length / min(seconds[1:])}
        del engine
        setting.free()
    if peer is not None:
        rounds = prefill_rounds(model.config.vocab_size, count, length)
        theirs = min([peer.seconds(prompts, [1] * count) for prompts in rounds][1:])
        found["vllm"] = {"seconds": theirs, "tokens_per_s": count * length / theirs}
        for name in ("no drafter", "with drafter"):
            found[name]["ratio_to_vllm"] = theirs / found[name]["seconds"]
    return found


if __name__ == "__main__":
    main()
