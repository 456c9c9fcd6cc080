"""Cold start on one GPU: seconds from the start of a process until its first token and until everything is captured and
profiled, and tokens per second right then. With empty caches of kernels and cost curves, with what that run left, and with empty
caches again, but kernels compiled one after the other when they are first launched (`one by one`), not ahead and in parallel.

    python benchmarks/gpu/cold_start.py

Random weights: nothing of this depends on them. Reading a model from a disk is not included.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from benchmarks.lib.models import QWEN_SHAPES, TINY
from benchmarks.lib.prompts import random_prompts
from benchmarks.lib.results import Report
from benchmarks.lib.setup import Setting, make_parser
from paceline import SamplingParams
from paceline.drafters.eagle import Eagle, EagleConfig
from paceline.models.decoder import Decoder


def main() -> None:
    parser = make_parser(__doc__, "gpu/cold_start")
    parser.add_argument("--shapes", nargs="+", default=["1.5B"], choices=list(QWEN_SHAPES))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--one-by-one", action="store_true", help="compile nothing ahead; the benchmark itself passes it")
    parser.add_argument("--began", type=float, help="time at which this process was started; the benchmark itself passes it")
    args = parser.parse_args()
    setting = Setting.of(args)
    if args.began is not None:
        print(json.dumps(start(setting, args.shapes[0], args.batch, args.began, args.one_by_one)))
        return
    report = Report(args, setting.device, batch=args.batch, shapes={})
    for shape in args.shapes:
        cell = report.content["shapes"][shape] = dict[str, Any]()
        with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
            for name, caches in (("empty caches", first), ("filled caches", first), ("one by one", second)):
                cell[name] = in_process(args, shape, Path(caches), name == "one by one")
                report.save()
                print(shape, name, cell[name], flush=True)


def in_process(args: Any, shape: str, caches: Path, one_by_one: bool) -> dict[str, float]:
    """`start` in a process of its own, with its caches in a folder."""
    script = str(Path(__file__).resolve())
    command = [sys.executable, script, "--shapes", shape, "--batch", str(args.batch), "--began", str(time.time())]
    command += [*(["--tiny"] if args.tiny else []), *(["--one-by-one"] if one_by_one else [])]
    found = {"TRITON_CACHE_DIR": "triton", "XDG_CACHE_HOME": "cache", "NUMBA_CACHE_DIR": "numba"}
    environment = os.environ | {name: str(caches / folder) for name, folder in found.items()}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.decode().splitlines()[-1])


def start(setting: Setting, shape: str, batch: int, began: float, one_by_one: bool) -> dict[str, float]:
    """Seconds since `began` at which a new engine is ready, and tokens per second of two batches that follow."""
    found = {"imports": time.time() - began}

    def mark(name: str) -> None:
        setting.synchronize()
        found[name] = time.time() - began

    config = TINY if setting.tiny else QWEN_SHAPES[shape]
    model = Decoder.random(config, dtype=torch.float32 if setting.tiny else torch.bfloat16, device=setting.device)
    drafter = Eagle.random(EagleConfig.for_policy(config), dtype=model.norm.dtype, device=setting.device)
    mark("model")
    engine = setting.engine(model, drafter, batch, kv_gb=8, strategy="auto")
    if one_by_one:
        engine.dummy_steps.compile_ahead = lambda: None  # type: ignore[method-assign]
    mark("engine")
    engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=1, ignore_eos=True))
    mark("first_token")
    engine.warm_up()
    mark("warm")
    for number in (1, 2):
        prompts = random_prompts(batch, 16 if setting.tiny else 128, config.vocab_size, number)
        count = 8 if setting.tiny else 128
        generated = time.perf_counter()
        engine.generate(prompts, SamplingParams(max_new_tokens=count, ignore_eos=True), strategy="off")
        found[f"tokens_per_s_{number}"] = batch * count / (time.perf_counter() - generated)
    return found


if __name__ == "__main__":
    main()
