"""Attention over long contexts on one GPU, one layer: the time that its keys and values need at the memory's bandwidth, the
product's kernels, and the same with other tiles, divisions and compile options. Each is checked against float64 and for equal
bits before it is timed.

    python benchmarks/gpu/attention.py                       # kernels, under two minutes
    python benchmarks/gpu/attention.py --vllm-path SITE      # then milliseconds per step, beside vLLM's

Bits are compared across batch sizes, tiles, draft trees and what a task is. Times are medians of CUDA-graph replays over several
caches, so that keys are not in the second-level cache. Many processes compile the kernels first. A variant that fails, or whose
bits differ, is reported and skipped.
"""

from __future__ import annotations

import argparse
import os
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
from torch import Tensor

from benchmarks.lib.attention_variants import CASES, DIM, HEADS, KV_HEADS, Case, Variant, variants_of
from benchmarks.lib.cuda_timing import replay_us
from benchmarks.lib.models import QWEN_SHAPES
from benchmarks.lib.prompts import random_prompts
from benchmarks.lib.results import Report, add_result_arguments
from benchmarks.lib.vllm_gpu import Vllm, add_vllm_arguments
from paceline import Engine, SamplingParams
from paceline.config import EngineConfig
from paceline.drafters.eagle import Eagle, EagleConfig
from paceline.kernels import PagedCache, SamplingTensors, Segments, TorchOps
from paceline.kernels.triton import fixed_attention, fixed_plan, sampling, tree
from paceline.kernels.triton.fixed_attention import FEW, MANY, TILED, Launch
from paceline.kernels.triton.fixed_plan import FixedPlan, Limits
from paceline.models.decoder import Decoder
from paceline.types import StepResult, Strategy

PAGE, BANDWIDTH = 16, 4.22e12
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = DIM**-0.5
MAX_CONTEXT = 32768


# -- inputs


def step(case: Case, copies: int, device: str = DEVICE, dtype: torch.dtype = torch.bfloat16
         ) -> tuple[Tensor, list[PagedCache], Segments]:
    """Queries, caches and segments."""
    pages = -(-(case.context + 128) // (16 * PAGE)) * 16  # a multiple of 16: one specialisation of the kernels
    table = torch.randperm(case.requests * pages, device=device).view(case.requests, pages).int()
    caches = [PagedCache(*(torch.randn(case.requests * pages * PAGE, KV_HEADS, DIM, device=device, dtype=dtype) for _ in "kv"),
                         table, PAGE) for _ in range(copies)]
    first = torch.arange(case.requests, device=device, dtype=torch.int32)
    parents = [max(0, node - 1) if case.kind == "chain" else max(0, (node - 1) // 2) for node in range(case.rows)]
    words: list[list[int]] = []
    for node in range(case.rows):
        word, above = 1 << node, node
        while above:
            above = parents[above]
            word |= 1 << above
        words.append([word, 0])
    segments = Segments(first * case.rows, torch.full_like(first, case.rows), first, torch.full_like(first, case.context),
                        torch.zeros(case.requests, dtype=torch.bool, device=device),
                        torch.tensor(words, device=device).repeat(case.requests, 1))
    return torch.randn(case.requests * case.rows, HEADS, DIM, device=device, dtype=dtype), caches, segments


def plan_of(variant: Variant, case: Case, segments: Segments, limits: Limits | None = None) -> FixedPlan:
    size = case.requests * case.rows, HEADS, KV_HEADS, DIM, MAX_CONTEXT
    return fixed_plan.make_plan(segments, *size, case.kind != "plain", variant.block_m, limits or variant.launch.limits,
                                block=variant.block, group=variant.group)


def run(variant: Variant, q: Tensor, cache: PagedCache, plan: FixedPlan) -> Tensor:
    return fixed_attention.fixed_attention(q, cache, plan, SCALE, variant.pdl, variant.launch)


def reference(q: Tensor, cache: PagedCache, segments: Segments) -> Tensor:
    wide = cache._replace(k=cache.k.double(), v=cache.v.double())
    return TorchOps().attention(q.double(), wide, segments, SCALE)


def error(ours: Tensor, expected: Tensor) -> float:
    return float((ours.double() - expected).norm() / expected.norm())


# -- bits


MODES = {"groups": Limits(0, 0), "blocks": Limits(1 << 16, 1), "whole tiles": Limits(0, 0, 1)}


def bits(report: Report) -> None:
    """Whether rows have the same bits in any batch, tile and tree, and whatever a task is."""
    try:
        equal: Any = equal_bits()
        differ = [name for name, value in equal.items() if not value]
    except Exception as problem:
        equal = differ = [f"{type(problem).__name__}: {str(problem)[-300:]}"]
    report.content["bits"] = equal
    print(f"bits: not equal: {differ}" if differ else f"bits: equal in all {len(equal)} comparisons", flush=True)
    report.save()


def equal_bits() -> dict[str, bool]:
    plain, case, found = Variant(MANY), Case(12, 1, 3333), {}
    q, (cache,), segments = step(case, 1)
    segments = segments._replace(context=segments.context - 211 * torch.arange(12, device=DEVICE, dtype=torch.int32))
    every = run(plain, q, cache, plan_of(plain, case, segments))
    found["error"] = error(every, reference(q, cache, segments)) < 0.01
    for mode, limits in MODES.items():
        found[mode] = torch.equal(every, run(plain, q, cache, plan_of(plain, case, segments, limits)))
    few = Variant(FEW)
    found["few"] = torch.equal(every, run(few, q, cache, plan_of(few, case, segments)))
    part = segments._replace(**{name: getattr(segments, name)[:3] for name in ("row", "length", "slot", "context", "causal")})
    for name, variant in (("few", few), ("many", plain), ("few, 3 blocks per task", few)):
        limits = Limits(2 * 3 * 20, 8) if "blocks" in name else None
        plan = plan_of(variant, Case(3, 1, 3333), part, limits)
        found[f"batch, {name}"] = torch.equal(every[:3], run(variant, q[:3], cache, plan))
    for kind, rows in (("tree", 9), ("chain", 9), ("tree", 21)):
        for m in (16, 64, 128):
            equal = tree_bits(plain, Case(3, rows, 1400 if rows == 9 else 1020, kind), m)
            found |= {f"{kind} of {rows}, tile {m}, {mode}": value for mode, value in equal.items()}
    return found


def tree_bits(plain: Variant, case: Case, block_m: int) -> dict[str, bool]:
    """Whether a node's row has the bits of the row of the same token after its path was committed."""
    q, (cache,), segments = step(case, 1)
    path = list(range(5)) if case.kind == "chain" else [0, 1, 4] if case.rows < 20 else [0, 1, 4, 9, 20]
    tiled = Variant(Launch(8, 2, 255, 132, TILED.limits) if block_m > 64 else TILED if block_m > 16 else MANY, block_m)
    single = Case(case.requests, 1, case.context)
    outputs = {mode: run(tiled, q, cache, plan_of(tiled, case, segments, limits)) for mode, limits in MODES.items()}
    position, k, v = case.context + torch.tensor(path, device=DEVICE), cache.k.clone(), cache.v.clone()
    depth = case.context + torch.arange(len(path), device=DEVICE)
    for slot in range(case.requests):
        source, target = (cache.page_table[slot].long()[p // PAGE] * PAGE + p % PAGE for p in (position, depth))
        k[target], v[target] = cache.k[source], cache.v[source]
    equal = dict.fromkeys(MODES, True)
    first = torch.arange(case.requests, device=DEVICE, dtype=torch.int32)
    for d, node in enumerate(path):
        rows = [case.rows * r + node for r in range(case.requests)]
        mask = segments.mask[:1].repeat(case.requests, 1)
        alone = Segments(first, first * 0 + 1, first, first * 0 + case.context + d, segments.causal, mask)
        expected = run(plain, q[rows], cache._replace(k=k, v=v), plan_of(plain, single, alone))
        for mode, output in outputs.items():
            equal[mode] &= torch.equal(output[rows], expected)
    return equal


# -- times


def kernels(report: Report, left: Callable[[], float]) -> None:
    cells: list[dict[str, Any]] = report.content.setdefault("kernels", [])
    for case in CASES:
        if left() < 8:
            print("no time left for", case, flush=True)
            continue
        num_bytes = case.requests * case.context * KV_HEADS * DIM * 4
        q, caches, segments = step(case, min(8, max(2, -(-(256 << 20) // num_bytes))))
        cell: dict[str, Any] = {**case._asdict(), "bytes": num_bytes, "floor_us": num_bytes / BANDWIDTH * 1e6, "us": {},
                                "error": {}, "failed": {}}
        cells.append(cell)
        expected = reference(q, caches[0], segments)
        first: dict[tuple[int, int], Tensor] = {}
        for name, variant in variants_of(case).items():
            if left() < 4:
                break
            try:
                plan = plan_of(variant, case, segments)
                out = run(variant, q, caches[0], plan)
                cell["error"][name] = error(out, expected)
                same = torch.equal(first.setdefault(variant.division, out), out)
                again = torch.equal(out, run(variant, q, caches[0], plan))
                if not same or not again or not cell["error"][name] < 0.01:
                    cell["failed"][name] = f"same bits {same}, repeatable {again}, error {cell['error'][name]:.5f}"
                if name == "ours":  # the clocks rise
                    replay_us([lambda c=c, v=variant, p=plan, q=q: run(v, q, c, p) for c in caches], 16, 20)
                cell["us"][name] = replay_us([lambda c=c, v=variant, p=plan, q=q: run(v, q, c, p) for c in caches], 16, 9)
                cell.setdefault("tasks", {})[name] = plan.tasks[0, :2].tolist()
            except Exception as problem:
                cell["failed"][name] = f"{type(problem).__name__}: {str(problem).strip()[-200:]}"
        best = sorted(cell["us"].items(), key=lambda item: item[1])
        print(f"{case.requests} x {case.rows} rows after {case.context}, {case.kind}: floor {cell['floor_us']:.1f} us; "
              + "; ".join(f"{name} {us:.1f}" for name, us in best[:5]) + f"; ours {cell['us'].get('ours', 0):.1f}"
              + "".join(f"; FAILED {name}: {text}" for name, text in list(cell["failed"].items())[:3]), flush=True)
        report.save()
        del caches, expected, first


def others(report: Report) -> None:
    """What a step with draft trees does after its last layer: sampling, and moving accepted keys and values."""
    cell: dict[str, float] = report.content.setdefault("others", {})
    vocab, config = 151936, QWEN_SHAPES["1.5B"]
    for rows in (1, 16, 64, 144, 256, 512):
        logits = [torch.randn(rows, vocab, device=DEVICE).bfloat16() for _ in range(2)]
        one, zero = torch.ones(rows, device=DEVICE), torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        seed = torch.randint(-(2**62), 2**62, (rows,), device=DEVICE)
        params = SamplingTensors(seed, torch.arange(rows, device=DEVICE), one, zero, one, 0 * one)
        for filtered in (True, False):
            cell[f"sample {rows}, filtered {filtered}"] = replay_us(
                [lambda x=x, p=params, f=filtered: sampling.sample(x, p, f) for x in logits], 8, 7)
    size = 1 << 14
    tensors = [torch.zeros(size, KV_HEADS, DIM, device=DEVICE).bfloat16() for _ in range(2 * config.num_layers + 2)]
    tensors += [torch.zeros(size, 3 * config.hidden_size, device=DEVICE).bfloat16(), torch.zeros(size, 1, device=DEVICE).long()]
    where = tree.movables(tensors)
    for requests, columns in ((16, 9), (256, 9), (256, 2), (1, 9)):
        base = torch.arange(requests, device=DEVICE)[:, None] * 32
        target = base + torch.arange(columns, device=DEVICE)
        cell[f"move nothing {requests}x{columns}"] = replay_us([lambda t=target: tree.move_tokens(where, t, t)], 8, 7)
        source = base + 2 * torch.arange(columns, device=DEVICE)
        cell[f"move {requests}x{columns}"] = replay_us([lambda s=source, t=target: tree.move_tokens(where, s, t)], 8, 7)
    print("\n".join(f"{name}: {us:.1f} us" for name, us in cell.items()), flush=True)
    report.save()


# -- steps


STEPS = ((16, 7000, ("off", "eagle:d4w2v8", "eagle:d3w1v3")), (1, 7000, ("off", "eagle:d4w2v8", "eagle:d4w1v4")),
         (256, 300, ("off", "eagle:d1w1v1")), (1, 300, ("off", "eagle:d4w2v8", "eagle:d4w1v4")),
         (8, 300, ("off", "eagle:d4w2v8", "eagle:d4w1v4")), (16, 16000, ("off", "eagle:d4w2v8")))
NEW_TOKENS = 96


def steps(report: Report, args: argparse.Namespace, left: Callable[[], float], peer: Vllm | None) -> None:
    """Milliseconds per step of the whole engine with a random drafter, whose tokens are hardly ever accepted, and vLLM's without
    speculation: time of long minus time of short answers."""
    cells: dict[str, Any] = report.content.setdefault("steps", {})
    config = replace(QWEN_SHAPES["1.5B"], max_context=MAX_CONTEXT)
    model = Decoder.random(config, dtype=torch.bfloat16, device="cuda")
    drafter = Eagle.random(EagleConfig.for_policy(config), dtype=torch.bfloat16, device="cuda")
    engine = Engine(model, None, drafter, "off", EngineConfig(max_batch=256, kv_memory_gb=24.0, max_context=MAX_CONTEXT))
    if peer is not None:
        cells["vllm"] = peer.wait(max(10.0, left() - 25))
        peer = None if "error" in cells["vllm"] else peer
    for batch, context, strategies in STEPS:
        cell: dict[str, float] = cells.setdefault(f"{batch} x {context}", {})
        prompts = random_prompts(batch, context, 150000, batch + context)
        for name in strategies:
            if left() < 5:
                break
            for _ in range(2):  # the first one compiles and captures
                cell[name] = ours_ms(engine, prompts, Strategy.parse(name))
        if peer is not None and context <= 7000 and left() > 10:
            seconds = {}
            for count in (8, 8, NEW_TOKENS + 8):
                seconds[count] = peer.seconds(prompts, [count] * batch)
            cell["vllm"] = (seconds[NEW_TOKENS + 8] - seconds[8]) / NEW_TOKENS * 1e3
        print(f"step, {batch} x {context}: " + ", ".join(f"{name} {ms:.3f} ms" for name, ms in cell.items()), flush=True)
        report.save()


def ours_ms(engine: Engine, prompts: list[list[int]], strategy: Strategy) -> float:
    engine.generate(prompts, SamplingParams(max_new_tokens=1), strategy="off")  # from now on in the cache: all begin at once
    times: list[float] = []

    def note(result: StepResult) -> None:
        if result.num_requests == len(prompts) and len(result.tokens) == len(prompts):
            times.append(time.perf_counter())

    engine.generate(prompts, SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True), strategy=strategy, on_step=note)
    return (times[-3] - times[8]) / (len(times) - 11) * 1e3


# -- compiling


def compile_all(left: Callable[[], float]) -> None:
    """Compiles all kernels in many processes, which fill Triton's cache."""
    count = max(1, min(14, (os.cpu_count() or 2) - 1))
    shares = ["bits", *(f"{i}/{count}" for i in range(count))]
    running = [subprocess.Popen([sys.executable, __file__, "--warm", share], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                text=True) for share in shares]
    for process in running:
        try:
            _, errors = process.communicate(timeout=max(2.0, left() - 95))
            if process.returncode:
                print("compiling failed:", errors[-500:], flush=True)
        except subprocess.TimeoutExpired:
            process.kill()


def warm(share: str) -> None:
    torch.cuda.set_per_process_memory_fraction(0.05)
    if share == "bits":
        equal_bits()
        return
    index, count = map(int, share.split("/"))
    cases = Case(2, 1, 600), Case(40, 1, 100), Case(2, 9, 600, "tree"), Case(2, 2, 100, "chain"), Case(16, 9, 100, "tree")
    jobs = [(case, variant) for case in cases for variant in variants_of(case).values()]
    for case, variant in jobs[index::count]:
        q, (cache,), segments = step(case, 1)
        try:
            run(variant, q, cache, plan_of(variant, case, segments))
        except Exception as problem:
            print(variant, problem, file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.4, help="time budget: no further measurement starts after it")
    parser.add_argument("--steps", action="store_true", help="also measure steps of the whole engine (always with vLLM)")
    parser.add_argument("--steps-only", action="store_true", help="measure nothing but steps of the whole engine")
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    add_result_arguments(parser, "gpu/attention")
    add_vllm_arguments(parser)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device here")
    if args.warm:
        with torch.inference_mode():
            warm(args.warm)
        return
    began = time.monotonic()
    report = Report(args, "cuda")

    def left() -> float:
        return 60 * args.minutes - (time.monotonic() - began)

    with_steps = args.steps or args.steps_only or args.vllm_path is not None or args.vllm_at is not None
    if not args.steps_only:
        compile_all(left)
        print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
        with torch.inference_mode():
            bits(report)
            kernels(report, lambda: left() - (70 if with_steps else 12))
            others(report)
    if with_steps:
        torch.cuda.empty_cache()
        steps(report, args, left, Vllm.of(args, "1.5B", max_context=8192, kv_gb=6.0))
    report.save()
    print(f"{time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    main()
