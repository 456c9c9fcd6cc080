"""The Triton kernels against the torch reference: natively on a GPU, elsewhere through Triton's interpreter."""

from __future__ import annotations

import warnings

import pytest
import torch
from interpreted import CUDA, DEVICE
from trees import assert_same_growth, assert_same_rows, assert_same_walk, random_cache, random_requests

from paceline.kernels import Candidates, Normed, PagedCache, SamplingTensors, Segments, TorchOps
from paceline.kernels.reference.drafting import draft_topk
from paceline.kernels.triton import attention, attention_plan, elementwise, fixed_attention, fused_linear, linear
from paceline.kernels.triton.ops import TritonOps
from paceline.models.attend import PagedAttend
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.spot.losses import Heads, target_loss

TORCH = TorchOps()
# Triton's interpreter multiplies bfloat16 matrices as if they were integers.
HALF = torch.bfloat16 if CUDA else torch.float16
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, HALF])


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    torch.set_default_device(DEVICE)
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # numpy warns about infinities
    yield
    torch.set_default_device("cpu")


@pytest.fixture
def ops() -> TritonOps:
    return TritonOps(DEVICE, max_context=600)


def _int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    tolerance = TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=tolerance, atol=tolerance)


def _tree_mask(parents: list[int]) -> list[list[int]]:
    words = []
    for node in range(len(parents)):
        word, above = 1 << node, node
        while above:
            above = parents[above]
            word |= 1 << above
        words.append([word, 0])
    return words


# -- noise and sampling


def test_gumbel_is_bitwise(ops: TritonOps) -> None:
    seed, position = torch.tensor([0, -5, 2**62 + 12345678901, 7]), torch.tensor([0, 1, 2**33 + 5, 99999])
    for ids in (torch.arange(1501), torch.randint(0, 151936, (300,))):
        assert torch.equal(ops.gumbel(seed, position, ids), TORCH.gumbel(seed, position, ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sample(ops: TritonOps, dtype: torch.dtype) -> None:
    logits = (3 * torch.randn(9, 2503)).to(dtype)
    logits[3, :2000] = -torch.inf
    logits[6, 4], logits[7], logits[8, 3] = torch.nan, -torch.inf, torch.inf
    params = SamplingTensors(
        seed=torch.randint(-(2**62), 2**62, (9,)), position=77 * torch.arange(9),
        temperature=torch.tensor([1, 0.7, 0, 1.3, 0.5, 1, 1, 1, 1]), top_k=_int32([0, 0, 0, 50, 7, 0, 0, 0, 5]),
        top_p=torch.tensor([1, 1, 1, 0.9, 0.95, 1, 1, 1, 0.5]), min_p=torch.tensor([0, 0, 0, 0, 0.01, 0.05, 0, 0, 0]))
    token, logprob = ops.sample(logits, params)
    expected, expected_logprob = TORCH.sample(logits, params)
    assert token.tolist() == expected.tolist()
    assert token[6:].tolist() == [-1, -1, -1]
    torch.testing.assert_close(logprob, expected_logprob, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_of_given_tokens_are_those_of_sampled_ones(ops: TritonOps, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    logits = (torch.randn(6, 3001, device=DEVICE) * 3).to(dtype)
    params = SamplingTensors(
        torch.arange(6, device=DEVICE) * 7919, torch.arange(6, device=DEVICE),
        torch.tensor([1.0, 0.0, 0.7, 1.0, 1.3, 1.0], device=DEVICE),
        torch.tensor([0, 0, 0, 20, 50, 0], dtype=torch.int32, device=DEVICE),
        torch.tensor([1.0, 1.0, 0.9, 1.0, 0.95, 1.0], device=DEVICE),
        torch.tensor([0.0, 0.0, 0.0, 0.0, 0.02, 0.1], device=DEVICE))
    token, logprob = ops.sample(logits, params)
    assert torch.equal(ops.logprobs_of(logits, token, params._replace(seed=params.seed + 1)), logprob)
    other = (token + 1) % 3001
    found, expected = (family.logprobs_of(logits, other, params) for family in (ops, TORCH))
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def test_sample_keeps_ties(ops: TritonOps) -> None:
    """The third largest is shared by three tokens: all of them stay."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, -1.0, -2.0, 3.0]]).repeat(10, 1).bfloat16()
    params = SamplingTensors(torch.arange(10), torch.zeros(10, dtype=torch.int64), torch.full((10,), 3.0),
                             torch.full((10,), 3, dtype=torch.int32), torch.ones(10), torch.zeros(10))
    token, _ = ops.sample(logits, params)
    assert token.tolist() == TORCH.sample(logits, params)[0].tolist()
    assert {1, 7} < set(token.tolist()) <= {1, 2, 3, 4, 7}


@pytest.mark.parametrize("reduced", [False, True])
def test_draft_topk(ops: TritonOps, reduced: bool) -> None:
    logits = 2 * torch.randn(4, 2100)
    ids = torch.randperm(50000)[:2100].sort().values if reduced else None
    seed, position, temperature = torch.arange(4) * 2**40, torch.arange(4), torch.tensor([1, 0.6, 0, 2.0])
    for tau in (0.0, 0.35):
        ours = ops.draft_topk(logits, seed, position, temperature, tau, 5, ids)
        theirs = draft_topk(logits, seed, position, temperature, tau, 5, ids)
        assert torch.equal(ours.columns, theirs.columns)
        torch.testing.assert_close(ours.values, theirs.values, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.logsumexp, theirs.logsumexp, rtol=1e-5, atol=1e-5)


# -- elementwise operations


@DTYPES
def test_norms_and_activation(ops: TritonOps, dtype: torch.dtype) -> None:
    x, residual, gate_up = (torch.randn(3, 200).to(dtype) for _ in range(3))
    weight = torch.randn(200).to(dtype)
    _close(ops.rms_norm(x, weight, 1e-6), TORCH.rms_norm(x, weight, 1e-6))
    for ours, theirs in zip(ops.add_rms_norm(x, residual, weight, 1e-6), TORCH.add_rms_norm(x, residual, weight, 1e-6),
                            strict=True):
        _close(ours, theirs)
    _close(ops.silu_mul(gate_up), TORCH.silu_mul(gate_up))


@DTYPES
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "norm"), [(7, 1, 64, False), (4, 2, 48, True)])
def test_rope_write(ops: TritonOps, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, norm: bool) -> None:
    qkv, write = torch.randn(5, (heads + 2 * kv_heads) * dim).to(dtype), torch.tensor([3, 9, 31, 0, 5])
    weights = [torch.rand(dim).to(dtype) if norm else None for _ in "qk"]
    angles = torch.rand(5, dim // 2)
    ours, theirs = (PagedCache(*(torch.zeros(32, kv_heads, dim, dtype=dtype) for _ in "kv"), _int32([0]), 16) for _ in "ab")
    results = [family.rope_write(qkv, heads, *weights, 1e-6, angles.cos(), angles.sin(), write, cache)
               for family, cache in ((ops, ours), (TORCH, theirs))]
    _close(*results)
    _close(ours.k, theirs.k)
    assert torch.equal(ours.v, theirs.v)


# -- attention


def _mixed_step(dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> tuple[torch.Tensor, PagedCache, Segments]:
    """A single token with a long context, a tree, a prompt chunk, a drafter level (mask bits beyond its rows), and padding."""
    lengths, contexts = [1, 7, 4, 2, 0], [290, 37, 0, 129, 0]
    masks = [[1, 0]] + _tree_mask([0, 0, 0, 1, 2, 2, 5]) + 4 * [[0, 0]] + [[1 | 1 << 40, 1 << 3], [2 | 1 << 41, -(2**63)]]
    segments = Segments(row=_int32([0, 1, 8, 12, 0]), length=_int32(lengths), slot=_int32([2, 0, 3, 1, 0]),
                        context=_int32(contexts), causal=torch.tensor([False, False, True, False, False]),
                        mask=torch.tensor(masks + 2 * [[0, 0]]))
    return torch.randn(16, heads, dim).to(dtype), random_cache(20, 4, kv_heads, dim, dtype), segments


@pytest.mark.parametrize(("dtype", "heads", "kv_heads", "dim", "block_m", "splits", "fused"), [
    (torch.float32, 6, 2, 16, 16, 1, True), (torch.float32, 7, 1, 40, 32, 4, True), (HALF, 4, 2, 32, 16, 4, False)])
def test_attention(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, block_m: int, splits: int, fused: bool) -> None:
    q, cache, segments = _mixed_step(dtype, heads, kv_heads, dim)
    plan = attention_plan.make_plan(segments, len(q), heads, kv_heads, block_m, splits)
    ours = attention.attention(q, cache, segments, plan, dim**-0.5, fused)
    _close(ours[:14], TORCH.attention(q, cache, segments, dim**-0.5)[:14])
    assert bool(ours.isfinite().all())
    assert not bool(plan.counter.any())
    assert splits == 1 or int(plan.record[0, 5]) < 290  # the long context was split


@DTYPES
@pytest.mark.parametrize(("block_n", "one_loop", "splits"), [(32, False, 4), (32, True, 1), (64, True, 4)])
def test_attention_without_trees_for_all_launch_options(dtype: torch.dtype, block_n: int, one_loop: bool, splits: int) -> None:
    contexts = [290, 0, 63, 64, 127]
    segments = Segments(row=_int32([0, 1, 2, 3, 4]), length=_int32([1] * 5), slot=_int32([2, 0, 3, 1, 4]),
                        context=_int32(contexts), causal=torch.zeros(5, dtype=torch.bool), mask=torch.tensor([[1, 0]] * 5))
    q, cache = torch.randn(5, 6, 32).to(dtype), random_cache(20, 5, 2, 32, dtype)
    plan = attention_plan.make_plan(segments, 5, 6, 2, 16, splits)
    launch = attention_plan.Launch(block_n=block_n, one_loop=one_loop)
    expected = TORCH.attention(q, cache, segments, 0.2)
    used = torch.zeros(len(cache.k), dtype=torch.bool)
    for slot, context in zip([2, 0, 3, 1, 4], contexts, strict=True):
        position = torch.arange(context + 1)
        used[cache.page_table[slot].long()[position // 16] * 16 + position % 16] = True
    cache.k[~used], cache.v[~used] = torch.nan, torch.nan
    _close(attention.attention(q, cache, segments, plan, 0.2, launch=launch), expected)


def test_unread_keys_may_be_anything(ops: TritonOps) -> None:
    q, cache, segments = _mixed_step(torch.float32, 3, 1, 16)
    expected = TORCH.attention(q, cache, segments, 0.25)
    used = torch.zeros(len(cache.k), dtype=torch.bool)
    for slot, keys in ((2, 291), (0, 44), (3, 4)):
        position = torch.arange(keys)
        used[cache.page_table[slot].long()[position // 16] * 16 + position % 16] = True
    cache.k[~used], cache.v[~used] = torch.nan, torch.nan
    _close(ops.attention(q, cache, segments, 0.25)[:12], expected[:12])


@DTYPES
def test_prefill_attention(ops: TritonOps, dtype: torch.dtype) -> None:
    """Two decode rows, then a fresh prompt and the second chunk of another."""
    heads, kv_heads, dim = 4, 2, 16
    cache, q = random_cache(8, 3, kv_heads, dim, dtype), torch.randn(2 + 9 + 20, heads, dim).to(dtype)
    segments = Segments(row=_int32([0, 2, 11]), length=_int32([2, 9, 20]), slot=_int32([0, 1, 2]),
                        context=_int32([5, 0, 30]), causal=torch.ones(3, dtype=torch.bool),
                        mask=torch.zeros(31, 2, dtype=torch.int64))
    prefill = attention_plan.prefill_chunks(2, [(1, 0, 9), (2, 30, 20)], cache)
    plan = ops.plan(segments, 31, heads, kv_heads, dim, prefill)
    _close(ops.attention(q, cache, segments, 0.25, plan), TORCH.attention(q, cache, segments, 0.25))


@pytest.mark.parametrize(("dtype", "context", "many"), [
    (torch.float32, 10, True), (HALF, 253, True), (HALF, 253, False), (torch.float32, 128, False), (torch.float32, 0, True)])
def test_fixed_attention_does_not_see_the_tree(dtype: torch.dtype, context: int, many: bool) -> None:
    """A node's row equals the row of the same token decoded without speculation, and in a prompt chunk: bit for bit on a GPU. A
    product of the interpreter may depend on its shape."""
    heads, kv_heads, dim = 3, 1, 16
    cache, q = random_cache(24, 1, kv_heads, dim, dtype), torch.randn(12, heads, dim).to(dtype)
    mask = torch.tensor(_tree_mask([0, 0, 0, 1, 1, 2, 2, 3, 4, 5, 9, 9]))
    no, yes, path = torch.tensor([False]), torch.tensor([True]), [0, 2, 5, 9, 10]

    def attend(rows: torch.Tensor, cache: PagedCache, segments: Segments, block_m: int, trees: bool) -> torch.Tensor:
        plan = attention_plan.make_plan(segments, len(rows), heads, kv_heads, block_m, 1, fixed=True)
        return fixed_attention.fixed_attention(rows, cache, plan, 0.25, trees, 600, many=many)

    segments = Segments(_int32([0]), _int32([12]), _int32([0]), _int32([context]), no, mask)
    tree = attend(q, cache, segments, 32, True)
    _close(tree, TORCH.attention(q, cache, segments, 0.25))

    def place(position: torch.Tensor) -> torch.Tensor:
        return cache.page_table[0].long()[position // 16] * 16 + position % 16

    k, v = cache.k.clone(), cache.v.clone()
    source, target = place(context + torch.tensor(path)), place(context + torch.arange(5))
    k[target], v[target] = cache.k[source], cache.v[source]
    cache = cache._replace(k=k, v=v)
    same = torch.equal if CUDA else lambda a, b: _close(a, b) is None
    for depth, node in enumerate(path):
        segments = Segments(_int32([0]), _int32([1]), _int32([0]), _int32([context + depth]), no, mask[:1])
        assert same(attend(q[node : node + 1], cache, segments, 16, False)[0], tree[node])
    before = min(3, context)
    segments = Segments(_int32([0]), _int32([before + 5]), _int32([0]), _int32([context - before]), yes, mask[:8])
    chunk = torch.cat([torch.randn(before, heads, dim).to(dtype), q[path]])
    assert same(attend(chunk, cache, segments, 64, False)[before:], tree[path])


def test_chunks_of_a_context() -> None:
    """The chunks of 128 keys up to 2048, then eight per doubling: as the host counts them."""
    assert [fixed_attention.chunks_until(n) for n in (1, 128, 129, 2048, 2049, 2304, 2305, 4096, 4097, 4609, 32768)] == [
        1, 1, 2, 16, 17, 17, 18, 24, 25, 26, 48]


@pytest.mark.parametrize("many", [False, True])
def test_fixed_attention_of_long_contexts(many: bool) -> None:
    """Contexts whose chunks grow: single rows."""
    contexts = [2047, 2048, 2303, 4500, 1]
    segments = Segments(row=_int32([0, 1, 2, 3, 4]), length=_int32([1] * 5), slot=_int32([2, 0, 3, 1, 4]),
                        context=_int32(contexts), causal=torch.zeros(5, dtype=torch.bool), mask=torch.tensor([[1, 0]] * 5))
    q, cache = torch.randn(5, 2, 16), random_cache(290, 5, 1, 16, torch.float32)
    plan = attention_plan.make_plan(segments, 5, 2, 1, 16, 1, fixed=True)
    ours = fixed_attention.fixed_attention(q, cache, plan, 0.25, False, 4600, many=many)
    _close(ours, TORCH.attention(q, cache, segments, 0.25))
    assert not bool(plan.counter.any())


@DTYPES
def test_fixed_attention_of_mixed_steps(dtype: torch.dtype) -> None:
    """Two decode rows, then a fresh prompt and the second chunk of another."""
    heads, kv_heads, dim = 4, 2, 16
    ops = TritonOps(DEVICE, deterministic=True, max_context=600)
    cache, q = random_cache(8, 3, kv_heads, dim, dtype), torch.randn(2 + 9 + 20, heads, dim).to(dtype)
    segments = Segments(row=_int32([0, 2, 11]), length=_int32([2, 9, 20]), slot=_int32([0, 1, 2]),
                        context=_int32([5, 0, 30]), causal=torch.ones(3, dtype=torch.bool),
                        mask=torch.zeros(31, 2, dtype=torch.int64))
    prefill = attention_plan.prefill_chunks(2, [(1, 0, 9), (2, 30, 20)], cache)
    plan = ops.plan(segments, 31, heads, kv_heads, dim, prefill)
    _close(ops.attention(q, cache, segments, 0.25, plan), TORCH.attention(q, cache, segments, 0.25))


# -- matrix products


CONFIGS = [linear.TileConfig(16, 32, 64), linear.TileConfig(16, 32, 64, split_k=3),
           linear.TileConfig(16, 64, 32, split_k=2, swap=True),
           linear.TileConfig(16, 64, 64, split_k=2, swap=True, tma=True)]


@DTYPES
@pytest.mark.parametrize("config", CONFIGS)
def test_linear(dtype: torch.dtype, config: linear.TileConfig) -> None:
    counters = torch.zeros(64, dtype=torch.int32)
    for rows, inputs in ((1, 256), (20, 208)):
        x, weight, bias = ((torch.randn(*shape) / 4).to(dtype) for shape in ((rows, inputs), (70, inputs), (70,)))
        expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
        _close(linear.linear(x, weight, bias, config, counters), expected)
    assert not bool(counters.any())


def _matrices(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [(torch.randn(*shape) / 4).to(dtype) for shape in shapes]


@DTYPES
@pytest.mark.parametrize("config", CONFIGS)
def test_linear_norm(dtype: torch.dtype, config: linear.TileConfig) -> None:
    """Product, residual and norm: the norm's last factor is left to the next product."""
    counters = torch.zeros(64, dtype=torch.int32)
    for rows, inputs, width in ((1, 256, 128), (20, 208, 70)):
        x, weight, bias, residual, norm = _matrices(dtype, (rows, inputs), (width, inputs), (width,), (rows, width), (width,))
        ours, total = fused_linear.linear_norm(x, weight, bias, residual, norm, 1e-5, config, counters)
        theirs, expected = TORCH.linear_norm(x.double(), weight.double(), bias.double(), residual.double(), norm.double(), 1e-5)
        _close(total, expected)
        _close(ours.complete(), theirs.rows)
    assert not bool(counters.any())


def _half_normed(dtype: torch.dtype, rows: int, width: int) -> Normed:
    """As `linear_norm` leaves it, the sums of squares in three parts."""
    (value,) = _matrices(dtype, (rows, width))
    squares = torch.stack([part.double().square().sum(dim=1) for part in value.split(width // 2, dim=1)] + [torch.zeros(rows)])
    return Normed(value, squares.float(), 1e-5)


@DTYPES
@pytest.mark.parametrize("config", CONFIGS)
def test_gated_linear(dtype: torch.dtype, config: linear.TileConfig) -> None:
    counters = torch.zeros(64, dtype=torch.int32)
    for rows, inputs, width in ((1, 256, 128), (20, 208, 70)):
        weight, bias = _matrices(dtype, (2 * width, inputs), (2 * width,))
        x = _half_normed(dtype, rows, inputs)
        for normed in (x, Normed(x.rows)):
            wide = Normed(normed.complete() if normed.squares is None else Normed(x.rows.double(), x.squares, 1e-5).complete())
            expected = TORCH.gated_linear(Normed(wide.rows.double()), weight.double(), bias.double())
            _close(fused_linear.gated_linear(normed, weight, bias, config, counters), expected)
    assert not bool(counters.any())


@DTYPES
@pytest.mark.parametrize(("dim", "config"), [(64, CONFIGS[0]), (64, CONFIGS[1]), (128, CONFIGS[2]), (128, CONFIGS[3])])
def test_qkv_rope(dtype: torch.dtype, dim: int, config: linear.TileConfig) -> None:
    heads, kv_heads, inputs, counters = 2, 1, 192, torch.zeros(64, dtype=torch.int32)
    for rows in (1, 20):
        weight, bias = _matrices(dtype, ((heads + 2 * kv_heads) * dim, inputs), ((heads + 2 * kv_heads) * dim,))
        x, angles, write = _half_normed(dtype, rows, inputs), torch.rand(rows, dim // 2), torch.randperm(32)[:rows]
        ours = PagedCache(*(torch.zeros(32, kv_heads, dim, dtype=dtype) for _ in "kv"), _int32([0]), 16)
        theirs = PagedCache(*(torch.zeros(32, kv_heads, dim, dtype=torch.float64) for _ in "kv"), _int32([0]), 16)
        q = fused_linear.qkv_rope(x, weight, bias, heads, angles.cos(), angles.sin(), write, ours, config, counters)
        wide = Normed(Normed(x.rows.double(), x.squares, 1e-5).complete())
        expected = TORCH.qkv_rope(wide, weight.double(), bias.double(), heads, angles.cos(), angles.sin(), write, theirs)
        for a, b in ((q, expected), (ours.k, theirs.k), (ours.v, theirs.v)):
            _close(a, b)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_decoder_of_fused_products_computes_the_same(deterministic: bool) -> None:
    """Two requests, one row each, then a tree of four: hidden states, features, keys and values."""
    config = ModelConfig("qwen2", 96, 64, 96, 2, 4, 2, 32, qkv_bias=True, max_context=64)
    model = Decoder.random(config, std=0.2).to(DEVICE)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    segments = Segments(_int32([0, 1]), _int32([1, 4]), _int32([0, 1]), _int32([21, 5]), torch.tensor([False, False]),
                        torch.tensor([[1, 0], *_tree_mask([0, 0, 0, 1])]))
    before = [random_cache(4, 2, 2, 32, torch.float32) for _ in range(2)]
    position = torch.tensor([21, 5, 6, 7, 8])
    write = before[0].page_table[torch.tensor([0, 1, 1, 1, 1]), position // 16].long() * 16 + position % 16
    caches = [[PagedCache(c.k.clone(), c.v.clone(), before[0].page_table, 16) for c in before] for _ in "ab"]
    angles = torch.rand(5, 16)
    results = [model(torch.arange(5), PagedAttend(family, layers, angles.cos(), angles.sin(), write, segments), (0, 1, -1))
               for family, layers in zip((TORCH, TritonOps(DEVICE, deterministic, 600)), caches, strict=True)]
    torch.testing.assert_close(results[1].final, results[0].final, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(results[1].features, results[0].features, rtol=1e-3, atol=1e-3)
    for a, b in zip(*caches, strict=True):
        torch.testing.assert_close(b.k, a.k, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(b.v, a.v, rtol=1e-3, atol=1e-3)


@DTYPES
def test_a_product_in_one_pass_does_not_see_the_batch(dtype: torch.dtype) -> None:
    ops = TritonOps(DEVICE, deterministic=True)
    x, weight, bias = ((torch.randn(*shape) / 4).to(dtype) for shape in ((300, 400), (70, 400), (70,)))
    every = ops.linear(x, weight, bias)
    _close(every, torch.nn.functional.linear(x.double(), weight.double(), bias.double()))
    for rows in (slice(7, 8), slice(5, 90)):
        ours = ops.linear(x[rows], weight, bias)
        _close(ours, every[rows])
        assert not CUDA or torch.equal(ours, every[rows])


@DTYPES
def test_fused_and_separate_products_round_alike(dtype: torch.dtype) -> None:
    """With and without the fused kernels: equal bits on a GPU. A product of the interpreter may depend on its shape."""
    few, separate = TritonOps(DEVICE, deterministic=True), TritonOps(DEVICE, deterministic=True, fused_rows=0)
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
        _close(a, b)
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


# -- trees


@pytest.mark.parametrize(("num_nodes", "depth", "nodes"), [
    ([3, 0, 12, 7, 0, 0], 6, 12), ([70, 0, 66], 9, 70), ([1], 1, 1), ([0, 0, 0, 0], 0, 0)])
@pytest.mark.parametrize("fixed", [False, True])
def test_trees_become_rows_and_are_walked(ops: TritonOps, num_nodes: list[int], depth: int, nodes: int, fixed: bool) -> None:
    assert_same_walk(ops, TORCH, num_nodes, depth, nodes, fixed)


# -- drafting


@pytest.mark.parametrize(("counts", "least"), [([5, 5, 5, 5, 5], 1), ([0, 2, 4, 300, 1], 0), ([1], 1)])
def test_catch_up_rows(ops: TritonOps, counts: list[int], least: int) -> None:
    """Windows longer than the context, empty windows, and contexts that end with the shared pages."""
    batch = len(counts)
    requests, stored = random_requests(batch, 6), torch.randint(0, 1000, (6 * 8 * 16,))
    cache = random_cache(8, slots=6)
    request = torch.repeat_interleave(torch.arange(batch), torch.tensor(counts))
    back = torch.cat([torch.arange(count, 0, -1) for count in counts])
    args = (requests, stored, cache, request, back, torch.tensor(counts), least, 77)
    assert_same_rows(ops.catch_up_rows(*args), TORCH.catch_up_rows(*args))


@pytest.mark.parametrize(("depth", "width", "budget"), [(4, 3, 12), (1, 1, 1), (5, 1, 5), (3, 20, 127), (2, 40, 99), (18, 7, 50)])
@pytest.mark.parametrize("reduced", [False, True])
def test_a_tree_grows_and_is_chosen(ops: TritonOps, depth: int, width: int, budget: int, reduced: bool) -> None:
    assert_same_growth(ops, TORCH, depth, width, budget, reduced, batch=3)


def test_drafting_survives_nan_logits(ops: TritonOps) -> None:
    """Columns stay within the vocabulary and parents within the tree, whatever the logits were."""
    logits = torch.randn(3, 2100)
    logits[1], logits[2, 7] = torch.nan, torch.nan
    zeros = torch.zeros(3, dtype=torch.int64)
    ranked = ops.draft_topk(logits, zeros, zeros, torch.ones(3), 0.35, 4)
    assert bool(((ranked.columns >= 0) & (ranked.columns < 2100)).all())
    room = Candidates(torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3, 4))
    ops.add_candidates(ranked, torch.zeros(3, 1), torch.full((3, 1), -1), None, room, 0)
    cache = random_cache(8, slots=6)
    beam = ops.select_beam(room, 0, torch.zeros(3, 1, 2, dtype=torch.int64), random_requests(3, 6), cache, 1, 4)
    assert beam.origin.sort(dim=1).values.tolist() == [[0, 1, 2, 3]] * 3
    assert ops.select_nodes(room, 4, 3)[1].tolist() == [[-1, -1, -1]] * 3


# -- moving accepted tokens


def test_move_tokens(ops: TritonOps) -> None:
    tensors = [torch.arange(40)] + [torch.randn(40, 2, 16).bfloat16() for _ in range(3)] + [torch.randn(40, 700)]
    source = torch.tensor([[0, 3, 4, 7, 39], [20, 22, 39, 39, 39], [39, 39, 39, 39, 39]])
    target = torch.tensor([[0, 1, 2, 3, 39], [20, 21, 39, 39, 39], [39, 39, 39, 39, 39]])
    expected = [tensor.clone() for tensor in tensors]
    for tensor in expected:
        tensor[target.flatten()] = tensor[source.flatten()]
    plain = [tensor.clone() for tensor in tensors]
    for family, mine in ((ops, tensors), (TORCH, plain)):
        family.move_tokens(family.movable(mine), source, target)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(mine, expected, strict=True)), family.name


@pytest.mark.parametrize("objective", ["agreement", "cross_entropy"])
@pytest.mark.parametrize(("vocabulary", "spread"), [(50, 3.0), (5000, 3.0), (2048, 60.0)])
def test_drafter_loss(objective, vocabulary, spread):
    """Loss, gradient and metrics, including distributions that hardly overlap and rows of weight 0."""
    own, wanted = spread * torch.randn(3, 5, 16) / 4, spread * torch.randn(5, 16) / 4
    own[0, :2] = wanted[:2]
    head = torch.randn(vocabulary, 16).to(HALF)
    weight = torch.rand(3, 5)
    weight[1, 3] = 0.0
    results = []
    for fused in (True, False):
        leaf = own.clone().requires_grad_()
        found = target_loss(leaf, wanted, weight, Heads(head, head, 0.7), objective, max_logits=2 * 3 * vocabulary, fused=fused)
        found.loss.sum().backward()
        results.append((*found, leaf.grad))
    for mine, plain in zip(*results, strict=True):
        assert torch.isfinite(mine).all()
        torch.testing.assert_close(mine, plain, rtol=1e-2, atol=2e-3)
    assert not results[0][-1][1, 3].any()
