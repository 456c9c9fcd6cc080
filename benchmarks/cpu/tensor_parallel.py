"""What ranks cost on a CPU: two processes of one thread each, against one process with two threads.

    python benchmarks/cpu/tensor_parallel.py                 # 0.1 billion parameters in float32, 1 and 8 requests
    python benchmarks/cpu/tensor_parallel.py --shape 0.5B    # takes 14 GiB

Tokens/s of decoding without a drafter, random weights. The engines take turns; the best of `--rounds` counts, because other load
makes a round longer, never shorter. `shares` is one process that sums by the tree of the ranks, and has their bits.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from benchmarks.lib.figures import print_table
from benchmarks.lib.models import QWEN_SHAPES, SMALL_SHAPE
from benchmarks.lib.results import Report, add_result_arguments
from paceline import Engine, SamplingParams
from paceline.config import EngineConfig
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder

SHAPES = {"small": SMALL_SHAPE, "0.5B": QWEN_SHAPES["0.5B"],
          "0.1B": ModelConfig("qwen2", 32000, 768, 2048, 16, 12, 4, 64, qkv_bias=True, tie_embeddings=True, max_context=4096)}
CASES = {"one process": {}, "shares": {"reduction_shares": 8}, "ranks": {"tensor_parallel": 2}}
"""Engine settings by name. All have as many threads together."""
_PROMPT = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.1B")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    add_result_arguments(parser, "cpu/tensor_parallel")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    report = Report(args, shape=args.shape, threads=args.threads, tokens_per_s={})
    model = Decoder.random(SHAPES[args.shape])
    engines = {name: Engine(model, None, "none", "off", EngineConfig(kv_tokens=8192, profile=False, **options))
               for name, options in CASES.items()}
    for batch in args.batch:
        best = dict.fromkeys(CASES, 0.0)
        for number in range(args.rounds):
            for name, engine in engines.items():
                best[name] = max(best[name], tokens_per_s(engine, batch, args.tokens, number))
        report.content["tokens_per_s"][str(batch)] = best
        report.save()
    rows = [(batch, *found.values(), found["ranks"] / found["one process"])
            for batch, found in report.content["tokens_per_s"].items()]
    print_table("Tensor parallelism on a CPU, tokens/s", ("batch", *CASES, "ranks / one process"), rows)
    print(report.file)
    for engine in engines.values():
        engine.close()


def tokens_per_s(engine: Engine, batch: int, num_tokens: int, number: int) -> float:
    """Tokens per second of steps in which all requests decode."""
    params = SamplingParams(max_new_tokens=num_tokens + 2, seed=number, ignore_eos=True)
    for request in range(batch):
        engine.add([(request * 31 + i * 7 + number) % 1000 for i in range(_PROMPT)], params)
    while len(engine.scheduler.running) < batch or engine.scheduler.waiting:
        engine.step()
    began, made = time.perf_counter(), 0
    while engine.has_work:
        made += sum(map(len, engine.step().tokens.values()))
    return made / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
