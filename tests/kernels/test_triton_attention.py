"""Triton's attention kernels against the torch reference: natively on a GPU, elsewhere through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from interpreted import CUDA, DEVICE, DTYPES, HALF, close, int32, tree_mask
from trees import random_cache

# isort: split
import triton  # after `interpreted`, which skips this file where Triton is not installed
import triton.language as tl

from paceline.kernels import PagedCache, Segments, TorchOps
from paceline.kernels.triton import attention, attention_plan, chunks, fixed_attention
from paceline.kernels.triton.ops import TritonOps

TORCH = TorchOps()
pytestmark = pytest.mark.usefixtures("triton_device")


def _mixed_step(dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> tuple[torch.Tensor, PagedCache, Segments]:
    """A single token with a long context, a tree, a prompt chunk, a drafter level (mask bits beyond its rows), and padding."""
    lengths, contexts = [1, 7, 4, 2, 0], [290, 37, 0, 129, 0]
    masks = [[1, 0]] + tree_mask([0, 0, 0, 1, 2, 2, 5]) + 4 * [[0, 0]] + [[1 | 1 << 40, 1 << 3], [2 | 1 << 41, -(2**63)]]
    segments = Segments(row=int32([0, 1, 8, 12, 0]), length=int32(lengths), slot=int32([2, 0, 3, 1, 0]),
                        context=int32(contexts), causal=torch.tensor([False, False, True, False, False]),
                        mask=torch.tensor(masks + 2 * [[0, 0]]))
    return torch.randn(16, heads, dim).to(dtype), random_cache(20, 4, kv_heads, dim, dtype), segments


@pytest.mark.parametrize(("dtype", "heads", "kv_heads", "dim", "block_m", "splits", "fused"), [
    (torch.float32, 6, 2, 16, 16, 1, True), (torch.float32, 7, 1, 40, 32, 4, True), (HALF, 4, 2, 32, 16, 4, False)])
def test_attention(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, block_m: int, splits: int, fused: bool) -> None:
    q, cache, segments = _mixed_step(dtype, heads, kv_heads, dim)
    plan = attention_plan.make_plan(segments, len(q), heads, kv_heads, block_m, splits)
    ours = attention.attention(q, cache, segments, plan, dim**-0.5, fused)
    close(ours[:14], TORCH.attention(q, cache, segments, dim**-0.5)[:14])
    assert bool(ours.isfinite().all())
    assert not bool(plan.counter.any())
    assert splits == 1 or int(plan.record[0, 5]) < 290  # the long context was split


@DTYPES
@pytest.mark.parametrize(("block_n", "one_loop", "splits"), [(32, False, 4), (32, True, 1), (64, True, 4)])
def test_attention_without_trees_for_all_launch_options(dtype: torch.dtype, block_n: int, one_loop: bool, splits: int) -> None:
    contexts = [290, 0, 63, 64, 127]
    segments = Segments(row=int32([0, 1, 2, 3, 4]), length=int32([1] * 5), slot=int32([2, 0, 3, 1, 4]),
                        context=int32(contexts), causal=torch.zeros(5, dtype=torch.bool), mask=torch.tensor([[1, 0]] * 5))
    q, cache = torch.randn(5, 6, 32).to(dtype), random_cache(20, 5, 2, 32, dtype)
    plan = attention_plan.make_plan(segments, 5, 6, 2, 16, splits)
    launch = attention_plan.Launch(block_n=block_n, one_loop=one_loop)
    expected = TORCH.attention(q, cache, segments, 0.2)
    used = torch.zeros(len(cache.k), dtype=torch.bool)
    for slot, context in zip([2, 0, 3, 1, 4], contexts, strict=True):
        position = torch.arange(context + 1)
        used[cache.page_table[slot].long()[position // 16] * 16 + position % 16] = True
    cache.k[~used], cache.v[~used] = torch.nan, torch.nan
    close(attention.attention(q, cache, segments, plan, 0.2, launch=launch), expected)


def test_unread_keys_may_be_anything(ops: TritonOps) -> None:
    q, cache, segments = _mixed_step(torch.float32, 3, 1, 16)
    expected = TORCH.attention(q, cache, segments, 0.25)
    used = torch.zeros(len(cache.k), dtype=torch.bool)
    for slot, keys in ((2, 291), (0, 44), (3, 4)):
        position = torch.arange(keys)
        used[cache.page_table[slot].long()[position // 16] * 16 + position % 16] = True
    cache.k[~used], cache.v[~used] = torch.nan, torch.nan
    close(ops.attention(q, cache, segments, 0.25)[:12], expected[:12])


def check_mixed_step(ops: TritonOps, dtype: torch.dtype) -> None:
    """Require torch's result of a step with two decode rows, a fresh prompt and the second chunk of another prompt."""
    heads, kv_heads, dim = 4, 2, 16
    cache, q = random_cache(8, 3, kv_heads, dim, dtype), torch.randn(2 + 9 + 20, heads, dim).to(dtype)
    segments = Segments(row=int32([0, 2, 11]), length=int32([2, 9, 20]), slot=int32([0, 1, 2]),
                        context=int32([5, 0, 30]), causal=torch.ones(3, dtype=torch.bool),
                        mask=torch.zeros(31, 2, dtype=torch.int64))
    plan = ops.plan_step(segments, 31, heads, cache, [(1, 0, 9), (2, 30, 20)], trees=True)
    close(ops.attention(q, cache, segments, 0.25, plan), TORCH.attention(q, cache, segments, 0.25))


@DTYPES
def test_prefill_attention(ops: TritonOps, dtype: torch.dtype) -> None:
    check_mixed_step(ops, dtype)


@pytest.mark.parametrize(("dtype", "context", "programs"), [
    (HALF, 253, 528), (HALF, 253, 3), (HALF, 317, 5), (HALF, 253, 0), (torch.float32, 128, 1), (torch.float32, 128, 528),
    (torch.float32, 0, 528)])
def test_fixed_attention_does_not_see_the_tree(dtype: torch.dtype, context: int, programs: int) -> None:
    """A node's row equals the row of the same token decoded without speculation, and in a prompt chunk: bit for bit on a GPU. A
    product of the interpreter may depend on its shape."""
    heads, kv_heads, dim = 3, 1, 16
    cache, q = random_cache(24, 1, kv_heads, dim, dtype), torch.randn(12, heads, dim).to(dtype)
    mask = torch.tensor(tree_mask([0, 0, 0, 1, 1, 2, 2, 3, 4, 5, 9, 9]))
    no, yes, path = torch.tensor([False]), torch.tensor([True]), [0, 2, 5, 9, 10]

    def attend(rows: torch.Tensor, cache: PagedCache, segments: Segments, block_m: int, trees: bool) -> torch.Tensor:
        """`programs` = 0: tiles are not divided."""
        plan = attention_plan.make_plan(segments, len(rows), heads, kv_heads, block_m, max(programs, len(rows)), fixed=True,
                                        trees=trees, max_chunks=6 if programs else 1)
        return fixed_attention.fixed_attention(rows, cache, plan, 0.25)

    segments = Segments(int32([0]), int32([12]), int32([0]), int32([context]), no, mask)
    tree = attend(q, cache, segments, 32, True)
    close(tree, TORCH.attention(q, cache, segments, 0.25))

    def place(position: torch.Tensor) -> torch.Tensor:
        return cache.page_table[0].long()[position // 16] * 16 + position % 16

    k, v = cache.k.clone(), cache.v.clone()
    source, target = place(context + torch.tensor(path)), place(context + torch.arange(5))
    k[target], v[target] = cache.k[source], cache.v[source]
    cache = cache._replace(k=k, v=v)
    same = torch.equal if CUDA else lambda a, b: close(a, b) is None
    for depth, node in enumerate(path):
        segments = Segments(int32([0]), int32([1]), int32([0]), int32([context + depth]), no, mask[:1])
        assert same(attend(q[node : node + 1], cache, segments, 16, False)[0], tree[node])
    before = min(3, context)
    segments = Segments(int32([0]), int32([before + 5]), int32([0]), int32([context - before]), yes, mask[:8])
    chunk = torch.cat([torch.randn(before, heads, dim).to(dtype), q[path]])
    assert same(attend(chunk, cache, segments, 64, False)[before:], tree[path])


def test_chunks_of_a_context() -> None:
    """As the host counts them."""
    assert [chunks.chunks_until(n) for n in (1, 128, 129, 2048, 2049, 2304, 2305, 4096, 4097, 4609, 8192, 8193, 32768)] == [
        1, 1, 2, 16, 17, 17, 18, 24, 25, 27, 40, 41, 72]


@triton.jit
def _chunks_kernel(positions, of, starts, ends, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chunk = chunks.chunk_of(tl.load(positions + i))
    tl.store(of + i, chunk)
    tl.store(starts + i, chunks.chunk_start(chunk))
    tl.store(ends + i, chunks.chunk_start(chunk + 1))


def test_chunks_on_the_device_are_those_of_the_host() -> None:
    """Around every boundary up to 400,000 tokens: a chunk follows the one before it, and the host counts as many."""
    edges = {*range(0, 4097, 128), *(n for k in range(12, 19) for n in range(1 << k, 2 << k, 1 << (k - 4)))}
    near = sorted({max(0, edge + step) for edge in edges for step in (-1, 0, 1, 31)})
    positions = int32(near + [0] * (-len(near) % 256))
    of, starts, ends = (torch.empty_like(positions) for _ in range(3))
    _chunks_kernel[(len(positions) // 256,)](positions, of, starts, ends, BLOCK=256)
    assert bool(((starts <= positions) & (positions < ends)).all())
    assert of[: len(near)].tolist() == [chunks.chunks_until(position + 1) - 1 for position in near]
    assert not bool((starts % attention_plan.FIXED_BLOCK).any()) and int(of.max()) < attention_plan.MAX_PARTS


@pytest.mark.parametrize("programs", [1, 7, 528])
def test_fixed_attention_of_long_contexts(programs: int) -> None:
    """Contexts whose chunks grow: single rows."""
    contexts = [2048, 2303, 4500, 8700]
    segments = Segments(row=int32(range(4)), length=int32([1] * 4), slot=int32([2, 0, 1, 3]), context=int32(contexts),
                        causal=torch.zeros(4, dtype=torch.bool), mask=torch.tensor([[1, 0]] * 4))
    q, cache = torch.randn(4, 2, 16), random_cache(550, 4, 1, 16, torch.float32)
    launch = fixed_attention.Launch(4, 5, programs)
    plan = fixed_attention.fixed_plan(segments, 4, 2, 1, 16, 8800, False, launch=launch)
    ours = fixed_attention.fixed_attention(q, cache, plan, 0.25)
    close(ours, TORCH.attention(q, cache, segments, 0.25))
    assert not bool(plan.counter.any())


@pytest.mark.parametrize("trees", [False, True])
def test_parts_of_fixed_attention(trees: bool) -> None:
    """However the tiles of a step are divided, every part is a task once, and the result has the same bits."""
    q, cache, segments = _mixed_step(torch.float32, 3, 1, 16)
    if not trees:
        rows, contexts, lengths = [0, 1, 2, 3, 0], [290, 37, 0, 129, 0], [1, 1, 1, 1, 0]
        segments = segments._replace(row=int32(rows), context=int32(contexts), length=int32(lengths),
                                     causal=torch.zeros(5, dtype=torch.bool), mask=torch.tensor([[1, 0]] * 16))
    expected, found = TORCH.attention(q, cache, segments, 0.25), []
    for programs in (1, 16, 40, 528):
        launch = fixed_attention.Launch(4, 5, programs)
        plan = fixed_attention.fixed_plan(segments, len(q), 3, 1, 16, 400, trees, launch=launch)
        found.append(fixed_attention.fixed_attention(q, cache, plan, 0.25))
        count, per = plan.tasks[:2].tolist()
        tasks = plan.tasks[2 : 2 + count].tolist()
        leads = {row: -(-chunks.chunks_until(max(1, plan.record[row, 3] // 32 * 32 if trees else plan.record[row, 3] + 1)) // per)
                 for row in range(16) if plan.record[row, 0] > 0}
        padding = {} if trees else dict.fromkeys([row for row in range(16) if plan.record[row, 0] < 0], 1)
        parts = [(row, part) for row, count in (leads | padding).items() for part in range(count)]
        assert tasks == [row * attention_plan.MAX_PARTS + part for row, part in parts]
        assert not bool(plan.counter.any()) and bool(found[-1].isfinite().all())
    real = int(segments.length.sum())
    close(found[0][:real], expected[:real])
    assert all(torch.equal(each, found[0]) for each in found)


@DTYPES
def test_fixed_attention_of_mixed_steps(dtype: torch.dtype) -> None:
    check_mixed_step(TritonOps(DEVICE, deterministic=True, max_context=600), dtype)


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("programs", [40, *(n if CUDA else pytest.param(n, marks=pytest.mark.slow) for n in (1, 528))])
def test_fixed_attention_of_forced_rows_beside_others(trees: bool, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured step does not know which of its rows are forced. They have the bits of a step that does: natively on a GPU."""
    heads, kv_heads, dim, dtype = 3, 1, 16, HALF
    chunk = 150 if CUDA else 40
    lengths, contexts = [7 if trees else 1, 1, chunk, 3], [37, 290, 310, 0]
    first = [sum(lengths[:i]) for i in range(4)]
    masks = tree_mask([0, 0, 0, 1, 2, 2, 5])[: lengths[0]] + [[1, 0]] * (1 + chunk + 3)
    segments = Segments(int32(first), int32(lengths), int32([2, 0, 3, 1]), int32(contexts),
                        torch.tensor([False, False, True, True]), torch.tensor(masks))
    q, cache = torch.randn(sum(lengths), heads, dim).to(dtype), random_cache(30, 4, kv_heads, dim, dtype)
    launch = fixed_attention.Launch(4, 5, programs)
    monkeypatch.setattr(fixed_attention, "tree_launch", lambda num_rows: launch)
    ops = TritonOps(DEVICE, deterministic=True, max_context=600)
    plan = ops.plan_step(segments, len(q), heads, cache, [], trees=trees, forced=True)
    found = ops.attention(q, cache, segments, 0.25, plan)
    close(found, TORCH.attention(q, cache, segments, 0.25))
    chunks = [(3, 310, chunk), (1, 0, 3)]
    known = ops.attention(q, cache, segments, 0.25, ops.plan_step(segments, len(q), heads, cache, chunks, trees=trees))
    assert torch.equal(found, known) if CUDA else close(found, known) is None
