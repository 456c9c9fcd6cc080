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
from typing import Any, NamedTuple

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from benchmarks.lib.cuda_timing import COLD_BYTES, replay_us
from benchmarks.lib.models import H200_BANDWIDTH, QWEN_SHAPES, TINY, bytes_read_per_step
from benchmarks.lib.prompts import random_prompts
from benchmarks.lib.results import Report, add_result_arguments
from paceline import Engine, SamplingParams
from paceline.config import EngineConfig
from paceline.kernels import Normed, Ops, PagedCache, Segments, TorchOps, ops_for
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


# -- tuning


class Shape(NamedTuple):
    out_features: int
    in_features: int


PRODUCTS: dict[str, tuple[str, Callable[[ModelConfig], Shape]]] = {
    "qkv": ("qkv", lambda c: Shape((c.num_heads + 2 * c.num_kv_heads) * c.head_dim, c.hidden_size)),
    "o": ("linear_norm", lambda c: Shape(c.hidden_size, c.num_heads * c.head_dim)),
    "gate_up": ("gated", lambda c: Shape(2 * c.intermediate_size, c.hidden_size)),
    "down": ("linear_norm", lambda c: Shape(c.hidden_size, c.intermediate_size)),
    "head": ("linear", lambda c: Shape(c.vocab_size, c.hidden_size)),
}
TUNED_ROWS = (8, 32, 64)
FORMS = {
    True: [(32, 128, 4, 5, False, False), (64, 128, 4, 4, True, False), (16, 256, 4, 4, False, False),
           (16, 128, 4, 6, False, False), (16, 256, 8, 4, False, False), (64, 64, 4, 6, True, True),
           (32, 64, 4, 6, False, False)],
    False: [(64, 128, 4, 5, True, False), (64, 128, 4, 5, True, True), (128, 128, 8, 4, True, True),
            (32, 256, 4, 5, False, False), (32, 128, 4, 6, False, False), (16, 256, 4, 6, False, False),
            (16, 512, 4, 4, False, False), (16, 512, 8, 4, False, False), (32, 256, 8, 4, False, False),
            (64, 256, 4, 5, True, False), (64, 256, 8, 4, True, True), (64, 128, 4, 7, True, True)],
}
"""Whether two tiles are computed -> (block_n, block_k, warps, stages, swap, tma)."""


def candidates(kind: str, rows: int, half: int) -> list[Any]:
    """Tile shapes without split-K."""
    from paceline.kernels.triton.linear import TileConfig

    block_m = min(max(16, 1 << (rows - 1).bit_length()), 64)
    pair = kind in ("qkv", "gated")
    found = []
    for block_n, block_k, warps, stages, swap, tma in FORMS[pair]:
        stages = min(stages, 220_000 // ((block_n * (2 if pair else 1) + block_m) * block_k * 2))
        if stages >= 2 and not (half and half % block_n):
            found.append(TileConfig(block_m, block_n, block_k, 1, warps, stages, swap, tma))
    return found


class Product:
    """One matrix product of a shape, with several copies of its weight, so that none stays in the cache."""

    def __init__(self, name: str, part: str, rows: int, copies: int = 0) -> None:
        from paceline.kernels.triton.linear import MAX_TILES
        from paceline.kernels.triton.ops import TritonOps

        self.config, self.rows = QWEN_SHAPES[name], rows
        self.kind, shape_of = PRODUCTS[part]
        self.shape = shape_of(self.config)
        self.half = self.config.head_dim // 2 if self.kind == "qkv" else 0
        count = copies or min(24, max(2, COLD_BYTES // (2 * self.shape.out_features * self.shape.in_features)))
        device, inputs, outputs = "cuda", self.shape.in_features, self.shape.out_features
        self.weights = [torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16) for _ in range(count)]
        self.x = torch.randn(rows, inputs, device=device).bfloat16()
        self.residual = torch.randn(rows, outputs if self.kind == "linear_norm" else 1, device=device).bfloat16()
        self.norm = torch.ones(outputs if self.kind == "linear_norm" else inputs, device=device).bfloat16()
        squares = torch.ones(max(1, inputs // 64), rows, device=device, dtype=torch.int64)
        self.normed = Normed(self.x, squares, 1e-6)
        heads, dim = self.config.num_kv_heads, self.config.head_dim
        self.angle, self.write = torch.rand(rows, dim // 2, device=device), torch.arange(rows, device=device)
        self.cache = PagedCache(*(torch.zeros(512, heads, dim, device=device).bfloat16() for _ in "kv"), self.write, 16)
        self.ops = TritonOps("cuda")
        self.counters = torch.zeros(MAX_TILES, dtype=torch.int32, device=device)

    def ours(self, config: Any, weight: torch.Tensor) -> Any:
        from paceline.kernels.triton import fused_linear, linear

        options = {"config": config, "counters": self.counters, "pdl": True, "ahead": 16 << 20}
        if self.kind == "linear":
            return linear.linear(self.x, weight, None, **options)
        if self.kind == "linear_norm":
            return fused_linear.linear_norm(self.x, weight, None, self.residual, self.norm, 1e-6, **options)
        if self.kind == "gated":
            return fused_linear.gated_linear(self.normed, weight, None, **options)
        return fused_linear.qkv_rope(self.normed, weight, None, self.config.num_heads, self.angle, self.angle, self.write,
                                     self.cache, **options)

    def library(self, weight: torch.Tensor) -> Any:
        """The product by cuBLAS, followed by the small kernel that the fused product makes unnecessary."""
        from paceline.kernels.triton.exact import library_linear

        out = library_linear(self.x, weight)
        if self.kind == "linear":
            return out
        if self.kind == "linear_norm":
            return self.ops.add_rms_norm(out, self.residual, self.norm, 1e-6)
        if self.kind == "gated":
            return self.ops.silu_mul(out)
        return self.ops.rope_write(out, self.config.num_heads, None, None, 0.0, self.angle, self.angle, self.write, self.cache)

    def candidates(self) -> list[Any]:
        return candidates(self.kind, self.rows, self.half)

    def compile(self) -> None:
        for config in self.candidates():
            try:
                self.ours(config, self.weights[0])
            except Exception as error:  # too large for the GPU: not a candidate
                print(type(error).__name__, tuple(config), file=sys.stderr)
        self.library(self.weights[0])

    def measure(self) -> dict[str, Any]:
        times: dict[Any, float] = {}
        for config in self.candidates():
            try:
                times[config] = replay_us([lambda w=w, c=config: self.ours(c, w) for w in self.weights], 12, 7)
            except Exception as error:
                print(f"  {self.kind} {tuple(config)}: {type(error).__name__} {str(error)[:120]}")
        best = min(times, key=lambda config: times[config])
        return {"kind": self.kind, "rows": self.rows, "N": self.shape.out_features, "K": self.shape.in_features,
                "best": list(best), "us": times[best],
                "library_us": replay_us([lambda w=w: self.library(w) for w in self.weights], 12, 7),
                "floor_us": 2 * self.shape.out_features * self.shape.in_features / H200_BANDWIDTH * 1e6,
                "all": {str(tuple(config)): us for config, us in times.items()}}


def tune(shapes: list[str], report: Report, left: Callable[[], float]) -> None:
    found: list[dict[str, Any]] = []
    report.content["tuned"] = found
    for rows in TUNED_ROWS:
        for shape in shapes:
            for part in PRODUCTS:
                if shape == "tiny":
                    print(part, rows, PRODUCTS[part][1](TINY))
                    continue
                if left() < 3:
                    print("no time left")
                    return
                cell = {"shape": shape, "part": part} | Product(shape, part, rows).measure()
                found.append(cell)
                print(f"{shape} {part} rows {rows}: {cell['us']:.1f} us {tuple(cell['best'])}, library {cell['library_us']:.1f}, "
                      f"floor {cell['floor_us']:.1f}", flush=True)
        report.save()
    print("\nfor ONE_PASS (only where faster than the library):")
    for cell in found:
        if cell["us"] < cell["library_us"]:
            padded = max(16, 1 << (cell["rows"] - 1).bit_length())
            print(f'    ("{cell["kind"]}", {padded}, {cell["N"]}, {cell["K"]}): TileConfig({", ".join(map(str, cell["best"]))}),')


if __name__ == "__main__":
    main()
