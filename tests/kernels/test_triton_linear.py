"""Triton's matrix products, plain and fused, against the torch reference: natively on a GPU, else through its interpreter."""

from __future__ import annotations

import pytest
import torch
from interpreted import CUDA, DEVICE, DTYPES, HALF, close, int32, tree_mask
from trees import random_cache

from paceline.kernels import Normed, PagedCache, Segments, TorchOps
from paceline.kernels.triton import elementwise, fused_linear, linear
from paceline.kernels.triton.ops import TritonOps
from paceline.models.attend import PagedAttend
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder

TORCH = TorchOps()
pytestmark = pytest.mark.usefixtures("triton_device")


CONFIGS = [linear.TileConfig(16, 32, 64), linear.TileConfig(16, 32, 64, split_k=3),
           linear.TileConfig(16, 64, 32, split_k=2, swap=True),
           linear.TileConfig(16, 64, 64, split_k=2, swap=True, tma=True)]
# The interpreter's dtypes differ in rounding alone: each configuration is tried in one of them.
EVERY_CONFIG = pytest.mark.parametrize(("config", "dtype"), [
    (config, dtype) for number, config in enumerate(CONFIGS) for dtype in (torch.float32, HALF)
    if CUDA or dtype == (torch.float32, HALF)[number % 2]])


@EVERY_CONFIG
def test_linear(dtype: torch.dtype, config: linear.TileConfig) -> None:
    counters = torch.zeros(64, dtype=torch.int32)
    for rows, inputs in ((1, 256), (20, 208)):
        x, weight, bias = ((torch.randn(*shape) / 4).to(dtype) for shape in ((rows, inputs), (70, inputs), (70,)))
        expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
        close(linear.linear(x, weight, bias, config, counters), expected)
    assert not bool(counters.any())


def _matrices(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [(torch.randn(*shape) / 4).to(dtype) for shape in shapes]


@EVERY_CONFIG
def test_linear_norm(dtype: torch.dtype, config: linear.TileConfig) -> None:
    """Product, residual and norm: the norm's last factor is left to the next product."""
    counters = torch.zeros(64, dtype=torch.int32)
    for rows, inputs, width in ((1, 256, 128), (20, 208, 70)):
        x, weight, bias, residual, norm = _matrices(dtype, (rows, inputs), (width, inputs), (width,), (rows, width), (width,))
        ours, total = fused_linear.linear_norm(x, weight, bias, residual, norm, 1e-5, config, counters)
        theirs, expected = TORCH.linear_norm(x.double(), weight.double(), bias.double(), residual.double(), norm.double(), 1e-5)
        close(total, expected)
        close(ours.complete(), theirs.rows)
    assert not bool(counters.any())


def _half_normed(dtype: torch.dtype, rows: int, width: int) -> Normed:
    """As `linear_norm` leaves it, the sums of squares in three parts."""
    (value,) = _matrices(dtype, (rows, width))
    squares = torch.stack([part.double().square().sum(dim=1) for part in value.split(width // 2, dim=1)] + [torch.zeros(rows)])
    return Normed(value, (squares * 2**26).round().long(), 1e-5)


@EVERY_CONFIG
def test_gated_linear(dtype: torch.dtype, config: linear.TileConfig) -> None:
    counters = torch.zeros(64, dtype=torch.int32)
    for rows, inputs, width in ((1, 256, 128), (20, 208, 70)):
        weight, bias = _matrices(dtype, (2 * width, inputs), (2 * width,))
        x = _half_normed(dtype, rows, inputs)
        for normed in (x, Normed(x.rows)):
            wide = Normed(normed.complete() if normed.squares is None else Normed(x.rows.double(), x.squares, 1e-5).complete())
            expected = TORCH.gated_linear(Normed(wide.rows.double()), weight.double(), bias.double())
            close(fused_linear.gated_linear(normed, weight, bias, config, counters), expected)
    assert not bool(counters.any())


@EVERY_CONFIG
def test_qkv_rope(dtype: torch.dtype, config: linear.TileConfig) -> None:
    dim = 128 if config.swap else 64
    heads, kv_heads, inputs, counters = 2, 1, 192, torch.zeros(64, dtype=torch.int32)
    for rows in (1, 20):
        weight, bias = _matrices(dtype, ((heads + 2 * kv_heads) * dim, inputs), ((heads + 2 * kv_heads) * dim,))
        x, angles, write = _half_normed(dtype, rows, inputs), torch.rand(rows, dim // 2), torch.randperm(32)[:rows]
        ours = PagedCache(*(torch.zeros(32, kv_heads, dim, dtype=dtype) for _ in "kv"), int32([0]), 16)
        theirs = PagedCache(*(torch.zeros(32, kv_heads, dim, dtype=torch.float64) for _ in "kv"), int32([0]), 16)
        q = fused_linear.qkv_rope(x, weight, bias, heads, angles.cos(), angles.sin(), write, ours, config, counters)
        wide = Normed(Normed(x.rows.double(), x.squares, 1e-5).complete())
        expected = TORCH.qkv_rope(wide, weight.double(), bias.double(), heads, angles.cos(), angles.sin(), write, theirs)
        for a, b in ((q, expected), (ours.k, theirs.k), (ours.v, theirs.v)):
            close(a, b, 2)  # the product is rounded before it is rotated


def test_a_decoder_of_fused_products_computes_the_same() -> None:
    """Two requests, one row each, then a tree of four: hidden states, features, keys and values."""
    config = ModelConfig("qwen2", 96, 64, 96, 2, 4, 2, 32, qkv_bias=True, max_context=64)
    model = Decoder.random(config, std=0.2).to(DEVICE)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    segments = Segments(int32([0, 1]), int32([1, 4]), int32([0, 1]), int32([21, 5]), torch.tensor([False, False]),
                        torch.tensor([[1, 0], *tree_mask([0, 0, 0, 1])]))
    before = [random_cache(4, 2, 2, 32, torch.float32) for _ in range(2)]
    position = torch.tensor([21, 5, 6, 7, 8])
    write = before[0].page_table[torch.tensor([0, 1, 1, 1, 1]), position // 16].long() * 16 + position % 16
    caches = [[PagedCache(c.k.clone(), c.v.clone(), before[0].page_table, 16) for c in before] for _ in "ab"]
    angles = torch.rand(5, 16)
    results = [model(torch.arange(5), PagedAttend(family, layers, angles.cos(), angles.sin(), write, segments), (0, 1, -1))
               for family, layers in zip((TORCH, TritonOps(DEVICE, 600)), caches, strict=True)]
    torch.testing.assert_close(results[1].final, results[0].final, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(results[1].features, results[0].features, rtol=1e-3, atol=1e-3)
    for a, b in zip(*caches, strict=True):
        torch.testing.assert_close(b.k, a.k, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(b.v, a.v, rtol=1e-3, atol=1e-3)


@DTYPES
def test_a_product_in_one_pass_does_not_see_the_batch(dtype: torch.dtype) -> None:
    ops = TritonOps(DEVICE)
    x, weight, bias = ((torch.randn(*shape) / 4).to(dtype) for shape in ((300, 400), (70, 400), (70,)))
    every = ops.linear(x, weight, bias)
    close(every, torch.nn.functional.linear(x.double(), weight.double(), bias.double()))
    for rows in (slice(7, 8), slice(5, 90)):
        ours = ops.linear(x[rows], weight, bias)
        close(ours, every[rows])
        assert not CUDA or torch.equal(ours, every[rows])


@DTYPES
def test_fused_and_separate_products_round_alike(dtype: torch.dtype) -> None:
    """With and without the fused kernels: equal bits on a GPU. A product of the interpreter may depend on its shape."""
    few, separate = TritonOps(DEVICE), TritonOps(DEVICE, fused_rows=0)
    width, heads, dim = 96, 4, 32
    assert linear.shares_of(width, 512) == 4
    x, residual, norm = torch.randn(5, 512).to(dtype), torch.randn(5, width).to(dtype), torch.rand(width).to(dtype)
    weights = [(torch.randn(n, k) / 8).to(dtype) for n, k in ((width, 512), (2 * 40, width), ((heads + 4) * dim, width))]
    biases = [torch.randn(len(weight)).to(dtype) for weight in weights]
    cos, sin, write = torch.rand(5, dim // 2), torch.rand(5, dim // 2), torch.arange(5)
    results = []
    for ops in (few, separate):
        cache = random_cache(4, 2, 2, dim, dtype)
        cache.k.zero_(), cache.v.zero_()
        normed, total = ops.linear_norm(x, weights[0], biases[0], residual, norm, 1e-6)
        gated = ops.gated_linear(normed, weights[1], biases[1])
        q = ops.qkv_rope(normed, weights[2], biases[2], heads, cos, sin, write, cache)
        results.append((total, normed.rows, normed.complete(), gated, q, cache.k, cache.v))
    for a, b in zip(*results, strict=True):
        close(a, b)
        assert not CUDA or torch.equal(a, b)


def test_parts_of_a_product_are_added_in_order() -> None:
    parts, bias, residual = torch.randn(3, 4, 80), torch.randn(80), torch.randn(4, 80)
    product = elementwise.add_parts(parts, bias, torch.float32)
    assert torch.equal(product, parts[0] + parts[1] + parts[2] + bias)
    ours = elementwise.add_norm(parts, residual, torch.ones(80), 1e-6, bias)
    expected = elementwise.add_norm(product, residual, torch.ones(80), 1e-6)
    assert torch.equal(ours[1], expected[1]) and torch.equal(ours[0].squares, expected[0].squares)


def test_the_rest_of_a_product_is_applied_later() -> None:
    """`silu_mul` with the factor and the bias of a product that lacks them."""
    normed, total = elementwise.add_norm(torch.randn(3, 80), torch.randn(3, 80), torch.rand(80), 1e-6)
    weight, bias = torch.randn(2 * 24, 80), torch.randn(2 * 24)
    ours = elementwise.silu_mul(normed.rows @ weight.T, False, normed, bias)
    expected = TORCH.rms_norm(total, torch.ones(80), 1e-6)
    torch.testing.assert_close(normed.complete(), expected * (normed.rows / total), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours, TORCH.silu_mul(normed.complete() @ weight.T + bias), rtol=1e-4, atol=1e-4)
