"""Host overhead of a step: the CPU time that Python takes per request, which on a GPU must stay below the device's time.

    python benchmarks/cpu/host_overhead.py          # 256 and 32 requests, without a drafter and with each drafter

A stand-in replaces the model and the learned drafter and returns prepared tokens at once; one step is always in flight, and its
outputs have the shapes of captured steps, as on a GPU. The benchmark
reports microseconds of CPU time per request and step: the 10th percentile of the steps (other load on the machine makes steps
longer, never shorter) and their mean, the best of `--rounds` engines.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np
import torch

from benchmarks.lib.results import Report, add_result_arguments
from paceline import Engine, SamplingParams, Strategy
from paceline.config import EngineConfig
from paceline.drafters.tree import Drafts
from paceline.engine.graphs import GRAPH_SIZES
from paceline.engine.rows import StepRows
from paceline.kernels import Ops, SampledTokens
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.spot import fresh_eagle

SHAPE = ModelConfig("llama", 50_000, 16, 16, 1, 2, 1, 8, max_context=4096, tie_embeddings=True)
CASES = (("none", "off"), ("suffix", "off"), ("suffix", "auto"), ("learned", "off"), ("learned", "eagle:d1w1v1"),
         ("learned", "eagle:d4w1v4"))
"""Pairs of drafter and strategy. With the learned drafter there is always the suffix drafter, too."""
_GROUP, _PROMPT, _WARM = 8, 100, 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[256, 32], help="numbers of requests, multiples of 8")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    add_result_arguments(parser, "cpu/host_overhead")
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = Report(args, steps=args.steps, us_per_request={})
    for drafter, strategy in CASES:
        for batch in args.batch:
            found = [measure(drafter, strategy, batch, args.steps) for _ in range(args.rounds)]
            low, mean = (1e6 * min(values) / batch for values in zip(*found, strict=True))
            report.content["us_per_request"].setdefault(f"{drafter}, {strategy}", {})[str(batch)] = {"p10": low, "mean": mean}
            report.save()
            print(f"drafter {drafter:7} strategy {strategy:15} {batch:4} requests: {low:5.2f} us, mean {mean:5.2f}", flush=True)


def measure(drafter: str, strategy: str, batch: int, steps: int) -> tuple[float, float]:
    """CPU seconds of a step outside the stand-in: 10th percentile and mean."""
    policy = Decoder.random(SHAPE, 0, 0.1)
    engine = Engine(policy, None, fresh_eagle(policy) if drafter == "learned" else drafter, strategy, EngineConfig(
        max_batch=batch, max_rows=8192, profile=False, pack_weights=False, kv_tokens=batch * 2048))
    device = StandIn(engine.executor.ops)
    engine.executor.graphs.attach(device, GRAPH_SIZES)  # type: ignore[arg-type]
    engine.executor.runner.run = device.run  # type: ignore[method-assign]
    if engine.executor.learned is not None:
        engine.executor.learned._draft_slots = device.draft  # type: ignore[method-assign]
    engine.executor.rows._ops = device  # type: ignore[assignment]
    engine.planner.pipelined = True
    for prompt in range(batch // _GROUP):
        words = np.random.default_rng(prompt).integers(0, SHAPE.vocab_size, _PROMPT).tolist()
        engine.add(words, SamplingParams(max_new_tokens=3000, seed=prompt), _GROUP)
    for _ in range(_WARM):
        engine.step()
    assert len(engine.scheduler.running) == batch
    seconds = []
    for _ in range(steps):
        device.seconds, began = 0.0, time.thread_time()
        engine.step()
        seconds.append(time.thread_time() - began - device.seconds)
    assert len(engine.scheduler.running) == batch, "requests finished while they were measured"
    return sorted(seconds)[steps // 10], sum(seconds) / steps


class StandIn:
    """Replaces policy, learned drafter and device: returns prepared tokens, half of them from a small set, and accepts up to two
    draft tokens of each request. As a graph pool it captures nothing."""

    capture_seconds, num_irregular = 0.0, 0

    def __init__(self, ops: Ops) -> None:
        self.seconds, self._steps, self._draw, self._ops = 0.0, 0, np.random.default_rng(0), ops
        words = self._draw.integers(0, SHAPE.vocab_size, (64, max(GRAPH_SIZES), 16))
        self._words = torch.from_numpy(np.where(self._draw.random(words.shape) < 0.5, words % 200, words))

    def run(self, step: StepRows, chunks: object, want_raw: bool = False, capture_now: bool = False,
            adjustments: object = None) -> SampledTokens:
        began = time.thread_time()
        self._steps += 1
        lines, depth = len(step.slots), step.max_depth
        most = step.tree.length.numpy() - 1 if depth else np.zeros(lines, np.int64)
        tokens = self._words[self._steps % len(self._words), torch.arange(lines) % max(GRAPH_SIZES), : depth + 1]
        counts = torch.from_numpy(1 + np.minimum(np.clip(most, 0, depth), self._draw.integers(0, 3, lines)))
        drawn = SampledTokens(tokens, torch.zeros(tokens.shape), None, counts, tokens, tokens)
        self.seconds += time.thread_time() - began
        return drawn

    def draft(self, slots: np.ndarray, strategy: Strategy, max_missing: int, capture_now: bool = False) -> Drafts:
        """The learned drafter: one path for each request."""
        began, shape = time.thread_time(), (len(slots), strategy.budget)
        node = torch.arange(strategy.budget).expand(shape)
        drafts = Drafts(torch.zeros(shape, dtype=torch.int64), node - 1, node + 1, torch.full(shape, 0.5))
        self.seconds += time.thread_time() - began
        return drafts

    def flatten_drafts(self, *arguments: Any) -> None:
        """The only kernel that is launched while a step is laid out."""
        began = time.thread_time()
        self._ops.flatten_drafts(*arguments)
        self.seconds += time.thread_time() - began


if __name__ == "__main__":
    main()
