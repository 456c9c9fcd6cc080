"""The host's part of a step: what Python costs for each request beside the model; on a GPU it must be less than the device takes.

    python benchmarks/host.py                       # 256 and 32 requests, without a drafter and with the suffix drafter

The model is a stand-in that answers at once with prepared tokens, and one step is always in flight, as on a GPU. Microseconds of
CPU time per request and step: the 10th percentile of the steps (what else the machine does makes steps longer, never shorter)
and their mean; the best of `--rounds` engines.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import numpy as np
import torch
from gpu_common import ROOT, Report

from paceline import Engine, SamplingParams
from paceline.config import EngineConfig
from paceline.engine.drafting import Drafted
from paceline.engine.graphs import GRAPH_SIZES
from paceline.engine.scheduler import StepPlan
from paceline.kernels import Drawn
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder

SHAPE = ModelConfig("llama", 50_000, 16, 16, 1, 2, 1, 8, max_context=4096, tie_embeddings=True)
CASES = (("none", "off"), ("suffix", "off"), ("suffix", "auto"))
"""Drafter, strategy."""
_GROUP, _PROMPT, _WARM = 8, 100, 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[256, 32], help="multiples of 8")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/host.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = Report(args.out, torch.device("cpu"), steps=args.steps, us_per_request={})
    for drafter, strategy in CASES:
        for batch in args.batch:
            found = [measure(drafter, strategy, batch, args.steps) for _ in range(args.rounds)]
            low, mean = (1e6 * min(values) / batch for values in zip(*found, strict=True))
            report.content["us_per_request"].setdefault(f"{drafter}, {strategy}", {})[str(batch)] = {"p10": low, "mean": mean}
            report.save()
            print(f"drafter {drafter:7} strategy {strategy:15} {batch:4} requests: {low:5.2f} us, mean {mean:5.2f}", flush=True)


def measure(drafter: str, strategy: str, batch: int, steps: int) -> tuple[float, float]:
    """Seconds of a step: 10th percentile, mean."""
    engine = Engine(Decoder.random(SHAPE, 0, 0.1), None, drafter, strategy, EngineConfig(
        max_batch=batch, max_rows=8192, profile=False, row_sizes=GRAPH_SIZES, pack_weights=False, kv_tokens=batch * 2048))
    device = StandIn(batch)
    engine.runner.run = device.run  # type: ignore[method-assign]
    engine._pipelined = True
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
    assert len(engine.scheduler.running) == batch, "answers ended while they were measured"
    return sorted(seconds)[steps // 10], sum(seconds) / steps


class StandIn:
    """In place of policy and device: draws prepared tokens, half of them from few, and accepts up to two nodes of a request."""

    def __init__(self, batch: int) -> None:
        self.seconds, self._steps, self._draw = 0.0, 0, np.random.default_rng(0)
        words = self._draw.integers(0, SHAPE.vocab_size, (64, max(GRAPH_SIZES), 16))
        self._words = torch.from_numpy(np.where(self._draw.random(words.shape) < 0.5, words % 200, words))
        assert batch <= max(GRAPH_SIZES)

    def run(self, plan: StepPlan, drafted: Drafted, want_raw: bool) -> Drawn | None:
        began = time.thread_time()
        if not plan.decode:
            return None
        self._steps += 1
        lines, depth = len(drafted.inputs.slots), drafted.max_depth
        most = np.zeros(lines, np.int64)
        most[: len(drafted.most_accepted)] = drafted.most_accepted
        tokens = self._words[self._steps % len(self._words), torch.arange(lines) % max(GRAPH_SIZES), : depth + 1]
        counts = torch.from_numpy(1 + np.minimum(most, self._draw.integers(0, 3, lines)))
        drawn = Drawn(tokens, torch.zeros(tokens.shape), None, counts, tokens, tokens)
        self.seconds += time.thread_time() - began
        return drawn


if __name__ == "__main__":
    main()
