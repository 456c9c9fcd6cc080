"""One decode step without speculation on one GPU, with each optimization (programmatic dependent launch, fused kernels, prefetch)
on and off in the same process.

    python benchmarks/gpu/step.py                           # milliseconds per step, kernels of a step, agreement with torch
    python benchmarks/gpu/step.py --tune --out tune.json    # tile shapes of the matrix products, ready for ONE_PASS
    python benchmarks/gpu/step.py --tiny                    # smoke run on a CPU

Random weights in bfloat16, prompts of 256 tokens. Milliseconds are of the whole engine, with scheduling and outputs, next to the
time that reading the weights takes at the bandwidth of the memory. Many processes compile the kernels first.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from benchmarks.lib.models import H200_BANDWIDTH, QWEN_SHAPES, TINY, bytes_read_per_step
from benchmarks.lib.product_tuning import PRODUCTS, TUNED_ROWS, Product, tune
from benchmarks.lib.prompts import random_prompts
from benchmarks.lib.results import Report, add_result_arguments
from paceline import Engine, SamplingParams
from paceline.config import EngineConfig
from paceline.kernels import Ops, PagedCache, Segments, TorchOps, ops_for
from paceline.models.attend import PagedAttend
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder

PROMPT = 256
VARIANTS: dict[str, dict[str, Any]] = {
    "before": {"pdl": False, "fused": False},
    "pdl": {"pdl": True, "fused": False},
    "fused": {"pdl": False, "fused": True},
    "both": {"pdl": True, "fused": True},
    "both, nothing ahead": {"pdl": True, "fused": True, "ahead": 0},
    "both, 8 MB ahead": {"pdl": True, "fused": True, "ahead": 8 << 20},
    "both, 64 rows": {"pdl": True, "fused": True, "fused_rows": 64},
}
FEW = ["before", "pdl", "fused", "both"]
CASES = {1: [*FEW, "both, nothing ahead", "both, 8 MB ahead"], 8: FEW, 32: ["before", "both"],
         64: ["before", "both, 64 rows"], 256: ["before"]}
PROFILED = [("7B", 1, "both"), ("1.5B", 1, "both"), ("7B", 256, "before"), ("1.5B", 256, "before")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="smoke run: a tiny random model on the CPU, figures mean nothing")
    parser.add_argument("--tune", action="store_true", help="search tile shapes instead of timing steps")
    parser.add_argument("--shapes", nargs="+", default=list(QWEN_SHAPES), choices=list(QWEN_SHAPES))
    parser.add_argument("--budget", type=float, default=140.0, help="time budget in seconds: nothing further starts after it")
    add_result_arguments(parser, "gpu/step")
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.warm:
        with torch.inference_mode():
            warm(args.warm, args.tune)
        return
    if not args.tiny and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here; --tiny runs the script on a CPU")
    began = time.monotonic()
    report = Report(args, "cpu" if args.tiny else "cuda", "tune" if args.tune else "")

    def left() -> float:
        return args.budget - (time.monotonic() - began)

    if args.tiny:
        torch.set_num_threads(1)
    else:
        compile_all(args.shapes, args.tune, left)
        print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
    shapes = ["tiny"] if args.tiny else args.shapes
    with torch.inference_mode():
        if args.tune:
            tune(shapes, report, left)
        else:
            steps(shapes, report, left)
    report.save()
    print(f"{time.monotonic() - began:.0f} s in all")


# -- compiling


def compile_all(shapes: list[str], tuning: bool, left: Callable[[], float]) -> None:
    """Compiles the kernels of all variants, or of all products, in many processes, which fill Triton's cache."""
    parts = list(PRODUCTS) if tuning else [*VARIANTS]
    rows = TUNED_ROWS if tuning else [0]
    waiting = [f"{shape}:{part}:{count}" for shape in shapes for part in parts for count in rows]
    command = [sys.executable, __file__, *(["--tune"] if tuning else []), "--warm"]
    running = [subprocess.Popen([*command, "|".join(waiting[i::14])], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                text=True) for i in range(min(14, len(waiting)))]
    for process in running:
        try:
            _, errors = process.communicate(timeout=max(5.0, left() - 60))
            if process.returncode:
                print("compiling failed:", errors[-1500:], flush=True)
        except subprocess.TimeoutExpired:
            process.kill()


def warm(jobs: str, tuning: bool) -> None:
    torch.cuda.set_per_process_memory_fraction(0.1)
    for job in jobs.split("|"):
        shape, part, rows = job.split(":")
        if tuning:
            Product(shape, part, int(rows), copies=1).compile()
            continue
        shallow = replace(QWEN_SHAPES[shape], num_layers=2)
        engine = make_engine(Decoder.random(shallow, dtype=torch.bfloat16, device="cuda"), kv_gb=2.0)
        for batch in [batch for batch, variants in CASES.items() if part in variants]:
            use(engine, part)
            engine.generate(random_prompts(batch, 40, 1000, batch), SamplingParams(max_new_tokens=4, ignore_eos=True))
        del engine


# -- steps


def steps(shapes: list[str], report: Report, left: Callable[[], float]) -> None:
    results: dict[str, Any] = report.content.setdefault("shapes", {})
    for shape in shapes:
        config = TINY if shape == "tiny" else QWEN_SHAPES[shape]
        tiny = shape == "tiny"
        agree = agreement(config, tiny)
        print(f"\n{shape}: relative error beside torch: " + "  ".join(f"{k} {v:.4f}" for k, v in agree.items()))
        model = Decoder.random(config, dtype=torch.float32 if tiny else torch.bfloat16, device="cpu" if tiny else "cuda")
        engine = make_engine(model, kv_gb=0.05 if tiny else 30.0)
        floor = bytes_read_per_step(config) / H200_BANDWIDTH * 1e3
        cell: dict[str, Any] = {"floor_ms": floor, "relative_error": agree, "batches": {}}
        results[shape] = cell
        for batch, variants in {1: ["before"], 2: ["before"]}.items() if tiny else CASES.items():
            times: dict[str, float] = {}
            for name in variants:
                if left() < 4:
                    break
                if not tiny:
                    use(engine, name)
                times[name] = step_ms(engine, batch, 8 if tiny else 32, config)
                if (shape, batch, name) in PROFILED:
                    cell.setdefault("kernels", {})[f"{batch}, {name}"] = kernels_of(engine, batch, config)
            if not tiny and "both" in variants and left() > 4:
                use(engine, "both")
                cell.setdefault("repeatable", {})[batch] = repeatable(engine, batch, config)
            cell["batches"][batch] = times
            print(f"{shape} batch {batch}: " + "  ".join(
                f"{name} {ms:.3f} ms ({floor / ms:.0%} of the floor)" for name, ms in times.items())
                + f"  same tokens twice: {cell.get('repeatable', {}).get(batch)}", flush=True)
            report.save()
        for name, rows in cell.get("kernels", {}).items():
            print(f"{shape}, batch {name}: us a step (with overlap counted twice), launches, kernel")
            print("\n".join(f"  {us:8.1f} {count:6.1f} {kernel}" for kernel, us, count in rows))
        del engine, model
        if not tiny:
            torch.cuda.empty_cache()


def make_engine(model: Decoder, kv_gb: float) -> Engine:
    return Engine(model, drafter=None, strategy="off", config=EngineConfig(max_batch=256, kv_memory_gb=kv_gb))


def use(engine: Engine, variant: str) -> None:
    """Switches the engine to the kernels of a variant; all graphs are captured again."""
    from paceline.kernels.triton.ops import TritonOps

    engine.executor.ops = engine.executor.runner.ops = TritonOps("cuda", max_context=4096, **VARIANTS[variant])
    assert engine.executor.graphs.enabled
    torch.cuda.synchronize()
    engine.executor.graphs.clear()


def start(engine: Engine, batch: int, config: ModelConfig, length: int) -> list[int]:
    """Adds requests and steps until all are prefilled and the first graphs are captured. Returns the ids of the requests."""
    params = SamplingParams(max_new_tokens=length, ignore_eos=True)
    ids = [i for prompt in random_prompts(batch, min(PROMPT, config.max_context // 4), min(config.vocab_size, 150000), batch)
           for i in engine.add(prompt, params)]
    decoding: set[int] = set()
    while len(decoding) < batch:
        decoding |= set(engine.step().tokens)
    for _ in range(6):
        engine.step()
    return ids


def step_ms(engine: Engine, batch: int, count: int, config: ModelConfig) -> float:
    ids = start(engine, batch, config, count + 30)
    synchronize()
    began = time.perf_counter()
    for _ in range(count):
        engine.step()
    synchronize()
    took = (time.perf_counter() - began) * 1e3 / count
    engine.abort(ids)
    return took


def kernels_of(engine: Engine, batch: int, config: ModelConfig, count: int = 4) -> list[tuple[str, float, float]]:
    """Name, microseconds per step and launches per step of the kernels, the most expensive first."""
    ids = start(engine, batch, config, count + 30)
    synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(count):
            engine.step()
        synchronize()
    engine.abort(ids)
    rows = [(row.key[:90], row.self_device_time_total / count, row.count / count) for row in profile.key_averages()]
    return sorted(rows, key=lambda row: -row[1])[:15]


def repeatable(engine: Engine, batch: int, config: ModelConfig) -> bool:
    """Whether repeated runs, which share no prefix, give the same tokens. Kernels that overlap wrongly would not."""
    params = SamplingParams(max_new_tokens=60, ignore_eos=True, seed=5)
    prompts, drawn = random_prompts(batch, 100, config.vocab_size, 7), []
    for _ in range(4):
        engine.scheduler.drop_prefixes()
        drawn.append([r.token_ids for g in engine.generate(prompts, params) for r in g.rollouts])
    return all(other == drawn[0] for other in drawn)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def agreement(config: ModelConfig, tiny: bool) -> dict[str, float]:
    """Relative error against torch of the final hidden states and of the new keys and values together: two layers of the shape,
    three requests of one row and one draft tree of five."""
    device, dtype = ("cpu", torch.float32) if tiny else ("cuda", torch.bfloat16)
    shallow = replace(config, num_layers=2)
    model = Decoder.random(shallow, seed=3, std=0.03, dtype=dtype, device=device)
    torch.manual_seed(0)
    contexts, slots = [300, 17, 1000, 130], torch.arange(4, device=device)
    table = torch.randperm(4 * 70, device=device).view(4, 70).int()
    keys, values = (torch.randn(2, 4 * 70 * 16, config.num_kv_heads, config.head_dim, device=device).to(dtype) for _ in "kv")
    position = torch.tensor([*contexts[:3], *(contexts[3] + i for i in range(5))], device=device)
    slot = torch.tensor([0, 1, 2, 3, 3, 3, 3, 3], device=device)
    write = table[slot, position // 16].long() * 16 + position % 16
    words = [1, 1, 1, 1, 0b11, 0b101, 0b1011, 0b10101]
    segments = Segments(slots.int(), torch.tensor([1, 1, 1, 5], device=device).int(), slots.int(),
                        torch.tensor(contexts, device=device).int(), torch.zeros(4, dtype=torch.bool, device=device),
                        torch.tensor([[word, 0] for word in words], device=device))
    angle = torch.rand(8, config.head_dim // 2, device=device)

    def run(ops: Ops) -> torch.Tensor:
        caches = [PagedCache(keys[i].clone(), values[i].clone(), table, 16) for i in range(2)]
        hidden = model(torch.arange(8, device=device), PagedAttend(ops, caches, angle.cos(), angle.sin(), write, segments), ())
        return torch.cat([hidden.final.flatten(), caches[1].k[write].flatten(), caches[1].v[write].flatten()]).double()

    expected = run(TorchOps())
    if tiny:
        return {"cpu": float((run(ops_for("cpu", dtype)) - expected).norm() / expected.norm())}
    from paceline.kernels.triton.ops import TritonOps

    found = {name: run(TritonOps("cuda", **options)) for name, options in VARIANTS.items()}
    return {name: float((value - expected).norm() / expected.norm()) for name, value in found.items()}


if __name__ == "__main__":
    main()
