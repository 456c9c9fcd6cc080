"""Every Triton kernel on a GPU: its error against the torch reference in higher precision, and its time. Times are medians of
CUDA-graph replays, with cold caches where it matters.

    python benchmarks/gpu/kernels.py                                # all sections, under four minutes
    python benchmarks/gpu/kernels.py --sections check,attention-7B  # some of them

Each section runs in a process of its own, so a kernel that corrupts the device affects only its section. All sections first run
side by side without timing, which compiles their kernels on all cores. Attention is measured by number of rows, context and
compile options; tile shapes of the matrix products are the subject of `step.py --tune`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
import torch.nn.functional as F

from benchmarks.lib.cuda_timing import COLD_BYTES, replay_us
from benchmarks.lib.models import QWEN_SHAPES
from benchmarks.lib.results import Report, add_result_arguments
from paceline.kernels import PagedCache, SamplingTensors, Segments, TorchOps

ROWS = (1, 8, 32, 64, 128, 256)
CONTEXTS, LONG_CONTEXT = (128, 384, 1024), 9000
VOCAB = 151936


class Shape(NamedTuple):
    """Sizes of a model that its kernels depend on."""

    hidden: int
    heads: int
    kv_heads: int
    dim: int
    intermediate: int


SHAPES = {name: Shape(c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim, c.intermediate_size)
          for name, c in reversed(QWEN_SHAPES.items())}
Cell = dict[str, Any]


class Bench:
    """Collects results and writes them as they come. With `warm` it only compiles kernels: share i of n of all of them."""

    def __init__(self, out: Path, warm: tuple[int, int] | None) -> None:
        self.warm, self.results, self.errors = warm is not None, [], {}  # type: ignore[var-annotated]
        self._out, self._share, self._asked = out, warm or (0, 1), 0

    def add(self, cell: Cell) -> None:
        self.results.append(cell)
        self._out.write_text(json.dumps({"results": self.results, "errors": self.errors}))

    def time_us(self, name: str, calls: list[Callable[[], Any]]) -> float | None:
        """Microseconds per call (see `replay_us`), or None when only compiling or when the kernel fails."""
        self._asked += 1
        if self.warm and self._asked % self._share[1] != self._share[0]:
            return None
        try:
            calls[0]()
            return None if self.warm else replay_us(calls)
        except Exception as error:  # a failing kernel is a result
            self.errors[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:300]}"
            return None

    def check(self, name: str, test: Callable[[], Any]) -> None:
        try:
            self.add({"check": name, "value": test()})
        except Exception:
            self.errors[name] = traceback.format_exc().strip().splitlines()[-1][:300]


def _copies(num_bytes: int, most: int = 64) -> int:
    return min(most, max(1, -(-COLD_BYTES // num_bytes)))


# -- inputs of attention


def _step(shape: Shape, requests: int, rows: int, context: int, copies: int = 1, dtype: torch.dtype = torch.bfloat16
          ) -> tuple[torch.Tensor, list[PagedCache], Segments]:
    """Queries, caches and segments of `requests` draft trees of `rows` rows, each after `context` tokens; one cache per copy."""
    page, pages = 16, (context + rows) // 16 + 1
    table = torch.randperm(requests * pages, device="cuda").view(requests, pages).int()
    caches = [PagedCache(*(torch.randn(requests * pages * page, shape.kv_heads, shape.dim, device="cuda").to(dtype)
                           for _ in "kv"), table, page) for _ in range(copies)]
    first = torch.arange(requests, device="cuda", dtype=torch.int32)
    parents, words = [max(0, (node - 1) // 2) for node in range(rows)], []
    for node in range(rows):
        word, above = 1 << node, node
        while above:
            above = parents[above]
            word |= 1 << above
        words.append([word - (1 << 64) if word >= 1 << 63 else word, 0])
    segments = Segments(first * rows, torch.full_like(first, rows), first, torch.full_like(first, context),
                        torch.zeros(requests, dtype=torch.bool, device="cuda"),
                        torch.tensor(words, device="cuda").repeat(requests, 1))
    q = torch.randn(requests * rows, shape.heads, shape.dim, device="cuda").to(dtype)
    return q, caches, segments


# -- sections


def section_check(bench: Bench, _: str) -> None:
    from paceline.kernels.reference.drafting import draft_topk
    from paceline.kernels.triton import attention, attention_plan
    from paceline.kernels.triton.ops import TritonOps
    from paceline.kernels.triton.tree import movables

    ops, fixed, twin = TritonOps(), TritonOps(deterministic=True, max_context=4096), TorchOps()
    torch.manual_seed(0)

    def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
        return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max())

    def attention_error(shape: Shape, requests: int, rows: int, context: int, block_m: int, fused: bool) -> float:
        q, (cache,), segments = _step(shape, requests, rows, context)
        plan = attention_plan.make_plan(segments, len(q), shape.heads, shape.kv_heads, block_m, 16)
        ours = attention.attention(q, cache, segments, plan, shape.dim**-0.5, fused)
        wide = cache._replace(k=cache.k.double(), v=cache.v.double())
        return error(ours, twin.attention(q.double(), wide, segments, shape.dim**-0.5))

    for name, shape in SHAPES.items():
        for requests, rows, context in ((3, 1, 700), (2, 16, 300), (1, 64, 1500)):
            for block_m in (16, 32, 64):
                for fused in (True, False):
                    bench.check(f"attention {name} {requests}x{rows} behind {context}, tile {block_m}, fused {fused}",
                                lambda a=(shape, requests, rows, context, block_m, fused): attention_error(*a))

    def same_as_committed() -> bool:
        """Whether a tree node's row equals, bit for bit, the row of the same token after its path was committed."""
        shape, context = SHAPES["7B"], 700
        q, (cache,), segments = _step(shape, 2, 40, context)
        tree, path = fixed.attention(q, cache, segments, 0.1), [0, 1, 4, 9, 20]  # binary heap: 20 -> 9 -> 4 -> 1 -> 0
        position = torch.tensor(path, device="cuda") + context
        depth = torch.arange(5, device="cuda") + context
        k, v = cache.k.clone(), cache.v.clone()
        for slot in range(2):
            source, target = (cache.page_table[slot].long()[p // 16] * 16 + p % 16 for p in (position, depth))
            k[target], v[target] = cache.k[source], cache.v[source]
        equal = True
        for d, node in enumerate(path):
            first = torch.arange(2, device="cuda", dtype=torch.int32)
            plain = Segments(first, first * 0 + 1, first, first * 0 + context + d, segments.causal, segments.mask[[0, 0]])
            out = fixed.attention(q[[node, 40 + node]], cache._replace(k=k, v=v), plain, 0.1)
            equal &= torch.equal(out, tree[[node, 40 + node]])
        return equal

    def same_in_any_batch(weight: torch.Tensor) -> bool:
        x = torch.randn(400, weight.shape[1], device="cuda").bfloat16()
        every = fixed.linear(x, weight)
        return all(torch.equal(fixed.linear(x[a:b], weight), every[a:b]) for a, b in ((7, 8), (3, 19), (0, 64), (100, 356)))

    bench.check("deterministic attention equals committed, bit for bit", same_as_committed)
    for out_features, in_features in ((4608, 3584), (3584, 18944), (2048, 1536)):
        weight = torch.randn(out_features, in_features, device="cuda").bfloat16()
        bench.check(f"deterministic linear {out_features}x{in_features} ignores the batch",
                    lambda w=weight: same_in_any_batch(w))

    x, residual, weight = (torch.randn(*s, device="cuda").bfloat16() for s in ((70, 3584), (70, 3584), (3584,)))
    bench.check("rms_norm", lambda: error(ops.rms_norm(x, weight, 1e-6), twin.rms_norm(x.double(), weight, 1e-6)))
    bench.check("add_rms_norm", lambda: [error(a, b) for a, b in zip(
        ops.add_rms_norm(x, residual, weight, 1e-6), twin.add_rms_norm(x, residual, weight, 1e-6), strict=True)])
    bench.check("silu_mul", lambda: error(ops.silu_mul(x), twin.silu_mul(x.double())))

    def rope(shape: Shape, norm: bool) -> list[float]:
        qkv = torch.randn(9, (shape.heads + 2 * shape.kv_heads) * shape.dim, device="cuda").bfloat16()
        angle, write = torch.rand(9, shape.dim // 2, device="cuda"), torch.randperm(64, device="cuda")[:9]
        weights = [torch.rand(shape.dim, device="cuda").bfloat16() if norm else None for _ in "qk"]
        table = torch.zeros(1, 4, dtype=torch.int32, device="cuda")
        caches = [PagedCache(*(torch.zeros(64, shape.kv_heads, shape.dim, device="cuda").bfloat16() for _ in "kv"), table, 16)
                  for _ in "ab"]
        a, b = (family.rope_write(qkv, shape.heads, *weights, 1e-6, angle.cos(), angle.sin(), write, cache)
                for family, cache in ((ops, caches[0]), (twin, caches[1])))
        return [error(a, b), error(caches[0].k, caches[1].k), error(caches[0].v, caches[1].v)]

    for name, shape in SHAPES.items():
        for norm in (False, True):
            bench.check(f"rope_write {name} norm {norm}", lambda a=(shape, norm): rope(*a))

    for name, params in _sampling(64).items():
        for dtype in (torch.bfloat16, torch.float32):
            logits = (3 * torch.randn(64, VOCAB, device="cuda")).to(dtype)

            def sampled(logits: torch.Tensor = logits, params: SamplingTensors = params) -> Cell:
                (token, logprob), (expected, other) = ops.sample(logits, params), twin.sample(logits, params)
                return {"tokens that differ": int((token != expected).sum()), "logprob": float((logprob - other).abs().max())}

            bench.check(f"sample {name} {dtype}", sampled)
    seed, position = torch.randint(-(2**62), 2**62, (32,), device="cuda"), torch.arange(32, device="cuda")
    ids = torch.randperm(VOCAB, device="cuda")[:32000]
    bench.check("gumbel is bitwise", lambda: [torch.equal(ops.gumbel(seed, position, i), twin.gumbel(seed, position, i))
                                              for i in (torch.arange(VOCAB, device="cuda"), ids)])

    def ranked(token_ids: torch.Tensor | None) -> Cell:
        logits = 2 * torch.randn(32, VOCAB if token_ids is None else len(token_ids), device="cuda").bfloat16()
        arguments = (logits, seed, position, torch.ones(32, device="cuda"), 0.35, 8, token_ids)
        a, b = ops.draft_topk(*arguments), draft_topk(*arguments)
        return {"columns that differ": int((a.columns != b.columns).sum()), "value": error(a.values, b.values),
                "logsumexp": error(a.logsumexp, b.logsumexp)}

    bench.check("draft_topk", lambda: ranked(None))
    bench.check("draft_topk, reduced vocabulary", lambda: ranked(ids))

    def moved() -> bool:
        tensors = [torch.randn(4096, 4, 128, device="cuda").bfloat16() for _ in range(8)] + [torch.arange(4096, device="cuda")]
        base = torch.arange(32, device="cuda")[:, None] * 100
        source, target = base + torch.tensor([0, 2, 3, 6, 8, 20, 33], device="cuda"), base + torch.arange(7, device="cuda")
        expected = [tensor.clone() for tensor in tensors]
        for tensor in expected:
            tensor[target.flatten()] = tensor[source.flatten()]
        ops.move_tokens(movables(tensors), source, target)
        return all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))

    bench.check("move_tokens", moved)

    def prefilled() -> float:
        shape = SHAPES["7B"]
        _, (cache,), _ = _step(shape, 2, 1, 900)
        prefill = attention_plan.prefill_chunks(0, [(0, 0, 300), (1, 400, 200)], cache)
        q = torch.randn(500, shape.heads, shape.dim, device="cuda").bfloat16()
        chunks = Segments(*(torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 300], [300, 200], [0, 1], [0, 400])),
                          torch.ones(2, dtype=torch.bool, device="cuda"), torch.zeros(500, 2, dtype=torch.int64, device="cuda"))
        return error(ops.prefill_attention(q, cache, prefill, 0.1), twin.attention(q.float(), cache, chunks, 0.1))

    bench.check("prefill_attention", prefilled)


def section_attention(bench: Bench, name: str) -> None:
    from paceline.kernels.triton import attention, attention_plan, fixed_attention
    from paceline.kernels.triton.attention_plan import Launch

    shape = SHAPES[name]
    first = Launch(max_registers=168 if shape.dim > 64 else None)
    plain = {"m16": (16, first), "w2n64": (16, Launch(2)), "w1n32": (16, Launch(1, block_n=32)),
             "w2n32 one": (16, Launch(2, block_n=32, one_loop=True)), "w1n32s3 one": (16, Launch(1, 3, None, 32, True))}
    trees = {"m16": (16, first), "m32": (32, Launch()), "m32n32": (32, Launch(block_n=32)), "m64n32": (64, Launch(block_n=32))}
    cases = [(rows, 1, context) for rows in reversed(ROWS) for context in CONTEXTS]
    cases += [(r, n, c) for r, n in ((1, 16), (8, 8), (1, 64), (16, 16), (32, 8), (64, 4)) for c in CONTEXTS]
    cases += [(r, n, LONG_CONTEXT) for r, n in ((1, 1), (4, 1), (16, 1), (1, 24), (4, 16), (16, 8))]  # the end of a long rollout
    if bench.warm:
        cases = [*((rows, 1, 128) for rows in ROWS), (1, 16, 128), (8, 8, 128), (32, 8, 128)]
    for requests, rows, context in cases:
        num_bytes = requests * context * shape.kv_heads * shape.dim * 4
        q, caches, segments = _step(shape, requests, rows, context, 1 if bench.warm else _copies(num_bytes, 24))
        scale, size = shape.dim**-0.5, (len(q), shape.heads, shape.kv_heads)
        splits = attention_plan.default_splits(len(q), shape.kv_heads)
        cell: Cell = {"kernel": "attention", "shape": name, "requests": requests, "rows each": rows, "context": context,
                      "bytes": num_bytes}
        chosen = (attention_plan.tile_size(len(q), rows > 1), attention_plan.launch_for(len(q), *shape[2:4], rows > 1))
        for label, (block_m, launch) in {**(plain if rows == 1 else trees), "chosen": chosen}.items():
            plan = attention_plan.make_plan(segments, *size, block_m, splits)
            cell[label] = bench.time_us(f"attention {label} {name} {size} {context}", [
                lambda c=c, q=q, g=segments, p=plan, z=scale, at=launch: attention.attention(q, c, g, p, z, launch=at)
                for c in caches])
        plan = fixed_attention.fixed_plan(segments, *size, shape.dim, max(4096, context), rows > 1)
        cell["fixed"] = bench.time_us(f"attention fixed {name} {size}", [
            lambda c=c, q=q, p=plan, z=scale: fixed_attention.fixed_attention(q, c, p, z) for c in caches])
        cell["plan"] = bench.time_us(f"plan {name}", [
            lambda s=segments, z=size, n=splits: attention_plan.make_plan(s, *z, 16, n)])
        if rows == 1 and requests * context <= 1 << 17:
            dense = [tuple(x.view(requests, -1, shape.kv_heads, shape.dim).transpose(1, 2)[:, :, :context] for x in (c.k, c.v))
                     for c in caches]
            cell["torch dense"] = bench.time_us("sdpa", [lambda k=k, v=v, q=q: F.scaled_dot_product_attention(
                q[:, :, None], k, v, enable_gqa=True) for k, v in dense])
        bench.add(cell)
        del caches


def section_small(bench: Bench, name: str) -> None:
    from paceline.kernels.triton.ops import TritonOps
    from paceline.kernels.triton.tree import movables

    shape, ops, twin = SHAPES[name], TritonOps(), TorchOps()
    for rows in ROWS:
        x, residual = (torch.randn(rows, shape.hidden, device="cuda").bfloat16() for _ in "ab")
        weight = torch.randn(shape.hidden, device="cuda").bfloat16()
        gate_up = torch.randn(rows, 2 * shape.intermediate, device="cuda").bfloat16()
        qkv = torch.randn(rows, (shape.heads + 2 * shape.kv_heads) * shape.dim, device="cuda").bfloat16()
        angle, write = torch.rand(rows, shape.dim // 2, device="cuda"), torch.arange(rows, device="cuda")
        cache = PagedCache(*(torch.zeros(512, shape.kv_heads, shape.dim, device="cuda").bfloat16() for _ in "kv"), write, 16)
        calls: dict[str, tuple[Any, ...]] = {
            "rms_norm": (x, weight, 1e-6), "add_rms_norm": (x, residual, weight, 1e-6), "silu_mul": (gate_up,),
            "rope_write": (qkv, shape.heads, None, None, 1e-6, angle.cos(), angle.sin(), write, cache)}
        for kernel, arguments in calls.items():
            ours, theirs = (bench.time_us(f"{family.name} {kernel} {name} {rows}", [
                lambda f=family, k=kernel, a=arguments: getattr(f, k)(*a)]) for family in (ops, twin))
            bench.add({"kernel": kernel, "shape": name, "rows": rows, "triton": ours, "torch": theirs})
    tensors = [torch.zeros(1 << 14, shape.kv_heads, shape.dim, device="cuda").bfloat16() for _ in range(56)]
    where = movables(tensors)
    for requests in (1, 32, 256):
        base = torch.arange(requests, device="cuda")[:, None] * 64
        source, target = base + torch.arange(8, device="cuda") * 3, base + torch.arange(8, device="cuda")
        bench.add({"kernel": "move_tokens", "shape": name, "rows": requests,
                              "triton": bench.time_us("move", [lambda s=source, t=target: ops.move_tokens(where, s, t)])})


def _sampling(rows: int) -> dict[str, SamplingTensors]:
    one = torch.ones(rows, device="cuda")
    plain = SamplingTensors(torch.randint(-(2**62), 2**62, (rows,), device="cuda"), torch.arange(rows, device="cuda"), one,
                            torch.zeros(rows, dtype=torch.int32, device="cuda"), one, 0 * one)
    return {"plain": plain, "greedy": plain._replace(temperature=0 * one), "warm": plain._replace(temperature=0.7 * one),
            "top-k": plain._replace(top_k=plain.top_k + 50), "top-p": plain._replace(top_p=0.9 * one),
            "all": plain._replace(top_k=plain.top_k + 200, top_p=0.95 * one, min_p=0.02 * one, temperature=0.8 * one)}


def section_sample(bench: Bench, _: str) -> None:
    from paceline.kernels.triton import sampling
    from paceline.kernels.triton.ops import TritonOps

    ops, ids = TritonOps(), torch.randperm(VOCAB, device="cuda")[:32000].sort().values
    for rows in ROWS:
        for dtype in (torch.bfloat16, torch.float32):
            logits = [(3 * torch.randn(rows, VOCAB, device="cuda")).to(dtype) for _ in range(2)]
            cell: Cell = {"kernel": "sample", "rows": rows, "dtype": str(dtype)}
            for name, params in _sampling(rows).items():
                cell[name] = bench.time_us(f"sample {name} {rows}", [lambda x=x, p=params: ops.sample(x, p) for x in logits])
            params = _sampling(rows)["plain"]
            cell["told plain"] = bench.time_us("sample told plain", [
                lambda x=x, p=params: sampling.sample(x, p, filtered=False) for x in logits])
            for k in (1, 4, 8):
                cell[f"draft k={k}"] = bench.time_us(f"draft_topk {rows} {k}", [lambda x=x, p=params, k=k: ops.draft_topk(
                    x, p.seed, p.position, p.temperature, 0.35, k) for x in logits])
            few = logits[0][:, :32000].contiguous()
            cell["draft k=8 of 32000"] = bench.time_us("draft_topk reduced", [lambda x=few, p=params: ops.draft_topk(
                x, p.seed, p.position, p.temperature, 0.35, 8, ids)])
            bench.add(cell)


SECTIONS: dict[str, tuple[Callable[[Bench, str], None], str]] = {
    "check": (section_check, ""), "sample": (section_sample, ""),
    **{f"attention-{name}": (section_attention, name) for name in ("7B", "1.5B", "0.5B")},
    **{f"small-{name}": (section_small, name) for name in ("7B", "0.5B")}}


# -- tables


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def report(section: str, results: list[Cell], errors: dict[str, str]) -> None:
    """Prints a few lines for a section; everything measured is in the result file."""
    kind, lines = section.split("-")[0], {}  # type: ignore[var-annotated]
    if kind == "check":
        bad = [f"  {r['check']}: {r['value']}" for r in results if _worst(r["value"]) > 0.02]
        lines[f"{len(results) - len(bad)} of {len(results)} within 2 % of the largest value, or equal where asked"] = bad[:30]
    for cell in results if kind != "check" else []:
        if kind == "attention":
            best, label = min((v, k) for k, v in cell.items() if k[0] in "mwc" and v) if cell.get("m16") else (None, "")
            rate = "" if best is None else f" {cell['bytes'] / best / 1e6:.2f} TB/s"
            text = f"{cell['context']}: {_us(cell['m16'])}/{_us(best)} {label}{rate}, fixed {_us(cell['fixed'])}"
            dense = f", torch {_us(cell['torch dense'])}" if "torch dense" in cell else ""
            lines.setdefault(f"{cell['requests']}x{cell['rows each']}, context: us m16/best", []).append(text + dense)
        elif kind == "small":
            lines.setdefault(f"{cell['kernel']}, rows: us", []).append(
                f"{cell['rows']}: {_us(cell['triton'])}" + (f"/torch {_us(cell['torch'])}" if "torch" in cell else ""))
        elif cell["dtype"] == "torch.bfloat16":
            times = (f"{k} {_us(v)}" for k, v in cell.items() if k not in ("kernel", "rows", "dtype"))
            lines[f"{cell['rows']} rows, us"] = list(times)
    print(f"\n== {section}")
    for title, parts in lines.items():
        print(f"{title}  " + ("\n" if kind == "check" else "  ").join(parts))
    for name, error in list(errors.items())[:10]:
        print(f"  FAILED {name}: {error}")


def _worst(value: Any) -> float:
    if isinstance(value, bool):
        return 0.0 if value else 1.0
    if isinstance(value, dict):
        return max(_worst(v) for v in value.values())
    if isinstance(value, list):
        return max(_worst(v) for v in value)
    return float("inf") if value != value else float(value)


# -- processes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_result_arguments(parser, "gpu/kernels")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="sections, separated by commas")
    parser.add_argument("--budget", type=float, default=230.0, help="time budget of the whole run in seconds")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # "time", or which share to compile: "2/5"
    args = parser.parse_args()
    names = args.sections.split(",")
    if args.child:
        share = None if args.child == "time" else tuple(map(int, args.child.split("/")))
        run, argument = SECTIONS[names[0]]
        with torch.inference_mode():
            run(Bench(args.out, share), argument)  # type: ignore[arg-type]
        return
    result = Report(args, "cuda")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        shares = max(1, (os.cpu_count() or 2) // len(names))
        warm = [_child(name, f"{i}/{shares}", Path(folder)) for name in names for i in range(shares)]
        for process in warm:
            _finish(process, max(5.0, args.budget * 0.6 - (time.monotonic() - began)))
        print(f"compiled in {time.monotonic() - began:.0f} s")
        found = {}
        for name in names:
            left = args.budget - (time.monotonic() - began)
            problem = _finish(_child(name, "time", Path(folder)), left) if left > 8 else "no time left"
            path = Path(folder) / f"{name}-time.json"
            found[name] = json.loads(path.read_text()) if path.exists() else {"results": [], "errors": {"section": problem}}
            report(name, **found[name])
    result.content["sections"] = found
    result.save()
    print(f"{time.monotonic() - began:.0f} s in all")


def _child(name: str, mode: str, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--child", mode, "--sections", name, "--out",
               str(folder / f"{name}-{mode.replace('/', '-')}.json")]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def _finish(process: subprocess.Popen[str], timeout: float) -> str:
    try:
        _, errors = process.communicate(timeout=timeout)
        return errors[-600:]
    except subprocess.TimeoutExpired:
        process.kill()
        return f"stopped after {timeout:.0f} s"


if __name__ == "__main__":
    main()
