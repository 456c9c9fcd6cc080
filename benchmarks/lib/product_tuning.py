"""Searches tile shapes of the matrix products of decoding, for `ONE_PASS`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks.lib.cuda_timing import COLD_BYTES, replay_us
from benchmarks.lib.models import H200_BANDWIDTH, QWEN_SHAPES, TINY
from benchmarks.lib.results import Report
from paceline.kernels import Normed, PagedCache
from paceline.models.config import ModelConfig


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
