"""CUDA graphs on one GPU: memory of the shared pool against one set of graphs per strategy, and the delay of switching
speculation on in the middle of a rollout. Random weights of the 7B shape: none of this depends on them.

    python benchmarks/gpu/graphs.py

Published for the same comparison of memory (TLT, 7B): one strategy 7.81 GB, several 30.39 GB, pooled 10.69 GB.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from benchmarks.lib.graph_memory import compare_graph_memory
from benchmarks.lib.models import QWEN_7B, TINY_TWIN
from benchmarks.lib.prompts import random_prompts
from benchmarks.lib.results import Report
from benchmarks.lib.setup import Setting, make_parser
from paceline import SamplingParams, Strategy
from paceline.drafters.eagle import Eagle, EagleConfig
from paceline.models.decoder import Decoder
from paceline.types import StepResult, StepView

STRATEGIES = ("eagle:d8w4v48", "eagle:d8w4v32", "eagle:d8w4v16", "eagle:d8w4v8")
BATCHES = (1, 2, 4, 8, 16, 32)
KV_GB = 8.0


def main() -> None:
    parser = make_parser(__doc__, "gpu/graphs")
    parser.add_argument("--sections", nargs="+", choices=["memory", "switch"], default=["memory", "switch"])
    parser.add_argument("--off-steps", type=int, default=200, help="steps without speculation before it is switched on")
    args = parser.parse_args()
    setting = Setting.of(args)
    report = Report(args, setting.device)
    shape = TINY_TWIN if args.tiny else QWEN_7B
    dtype = torch.float32 if args.tiny else torch.bfloat16
    model = Decoder.random(shape, dtype=dtype, device=setting.device)
    drafter = Eagle.random(EagleConfig.for_policy(shape), dtype=dtype, device=setting.device)
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
    """Memory of the graphs of every strategy at every batch size: in one pool, and as sets per strategy and batch size."""
    if setting.tiny:
        return  # there are no graphs on a CPU
    engine = setting.engine(model, drafter, max(BATCHES), kv_gb=KV_GB, max_context=1024)
    found = compare_graph_memory(engine, [Strategy.OFF, *map(Strategy.parse, STRATEGIES)], BATCHES)
    report.content["memory"] = {
        "batches": BATCHES, "one_strategy": asdict(found.per_strategy[STRATEGIES[0]]), "all_naive": asdict(found.naive),
        "all_pooled": asdict(found.ours), "each": {name: asdict(each) for name, each in found.per_strategy.items()},
        "pooled_share_of_naive": found.ours.num_bytes / found.naive.num_bytes}
    report.save()
    print("memory", report.content["memory"], flush=True)


# --- switching speculation on


@dataclass(slots=True)
class SwitchOnLate:
    """A selector that speculates only after `off_steps` steps."""

    off_steps: int
    strategy: Strategy
    _seen: int = 0

    def __call__(self, view: StepView) -> Strategy:
        self._seen += view.num_running > 0
        return self.strategy if self._seen > self.off_steps else Strategy.OFF


@dataclass(slots=True)
class Intervals:
    """Wall time between the results of steps, and which of the steps speculated."""

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
    """Delay of switching on. Cold: the drafter has never run in this engine. Warm: it has, and is `off_steps` tokens behind."""
    engine = setting.engine(model, drafter, max(BATCHES), kv_gb=KV_GB, max_context=1024)
    found = {}
    for number, name in enumerate(("cold", "warm", "again")):
        seen = Intervals()
        prompts = random_prompts(batch, 32, model.config.vocab_size, 1000 + number)
        params = SamplingParams(max_new_tokens=off_steps + (8 if setting.tiny else 60), ignore_eos=True)
        engine.generate(prompts, params, strategy=SwitchOnLate(off_steps, Strategy.parse("eagle:d4w2v8")), on_step=seen)
        found[name] = switch_delay(seen)
    del engine
    setting.free()
    return found


def switch_delay(seen: Intervals) -> dict[str, float]:
    """A step's result may arrive one call late, so the delay is the excess of the calls around the switch over their median."""
    first = seen.speculated.index(True)
    usual_off = statistics.median(ms for ms, on in zip(seen.ms[:first], seen.speculated[:first], strict=True) if not on)
    later = [ms for ms, on in zip(seen.ms[first + 3 :], seen.speculated[first + 3 :], strict=True) if on]
    usual_on = statistics.median(later or seen.ms[first:])
    around = seen.ms[max(0, first - 1) : first + 2]
    return {"off_step_ms": usual_off, "on_step_ms": usual_on, "first_ms": max(around),
            "delay_ms": sum(around) - usual_off - (len(around) - 1) * usual_on}


if __name__ == "__main__":
    main()
