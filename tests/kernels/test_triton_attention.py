"""Triton's attention kernels against the torch reference: natively on a GPU, elsewhere through Triton's interpreter."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from interpreted import CUDA, DEVICE, DTYPES, HALF, close, int32, tree_mask
from trees import random_cache

# isort: split
from paceline.kernels import PagedCache, Segments, TorchOps
from paceline.kernels.triton import fixed_attention, fixed_plan
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


MODES = {"blocks": fixed_plan.Limits(1 << 16, 1), "groups": fixed_plan.Limits(0, 0), "whole tiles": fixed_plan.Limits(0, 0, 1)}
"""What a task of fixed attention is -> limits that make it so."""


LONG = 253 if CUDA else 93
"""Tokens of context that are several groups, and some more."""


def _fixed(q: torch.Tensor, cache: PagedCache, segments: Segments, mode: str, block_m: int = 16, trees: bool = False,
           block: int = 32, group: int = 64) -> torch.Tensor:
    heads, (_, kv_heads, dim), limits = q.shape[1], cache.k.shape, MODES[mode]
    plan = fixed_plan.make_plan(segments, len(q), heads, kv_heads, dim, 4600, trees, block_m, limits, block=block, group=group)
    out = fixed_attention.fixed_attention(q, cache, plan, 0.25)
    assert bool(out.isfinite().all())
    return out


@pytest.mark.parametrize(("dtype", "context", "mode"), [
    (HALF, LONG, "blocks"), (HALF, LONG, "groups"), (HALF, LONG, "whole tiles"), (torch.float32, 64, "groups"),
    (torch.float32, 0, "groups"), (HALF, 0, "whole tiles")])
def test_fixed_attention_does_not_see_the_tree(dtype: torch.dtype, context: int, mode: str) -> None:
    """A node's row equals the row of the same token decoded without speculation, and in a prompt chunk: bit for bit on a GPU. A
    product of the interpreter may depend on its shape."""
    heads, kv_heads, dim = 3, 1, 16
    cache, q = random_cache(24, 1, kv_heads, dim, dtype), torch.randn(12, heads, dim).to(dtype)
    mask = torch.tensor(tree_mask([0, 0, 0, 1, 1, 2, 2, 3, 4, 5, 9, 9]))
    no, yes, path = torch.tensor([False]), torch.tensor([True]), [0, 2, 5, 9, 10]
    segments = Segments(int32([0]), int32([12]), int32([0]), int32([context]), no, mask)
    tree = _fixed(q, cache, segments, mode, 32, True)
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
        assert same(_fixed(q[node : node + 1], cache, segments, mode)[0], tree[node])
    before = min(3, context)
    segments = Segments(int32([0]), int32([before + 5]), int32([0]), int32([context - before]), yes, mask[:8])
    chunk = torch.cat([torch.randn(before, heads, dim).to(dtype), q[path]])
    assert same(_fixed(chunk, cache, segments, mode, 64)[before:], tree[path])


def test_rows_between_segments_are_finite() -> None:
    """A learned drafter has a row for each request, also for those that it has nothing to read of."""
    segments = Segments(int32([0, 2, 2]), int32([1, 0, 1]), int32([0, 1, 2]), int32([40, 0, 33]),
                        torch.zeros(3, dtype=torch.bool), torch.tensor([[1, 0]] * 6))
    q, cache = torch.randn(6, 2, 16), random_cache(8, 3, 1, 16)
    for mode in MODES:
        found = _fixed(q, cache, segments, mode)
        close(found[[0, 2]], TORCH.attention(q, cache, segments, 0.25)[[0, 2]])
        assert bool(found[[1, 3, 4, 5]].eq(0).all())


def test_chains_are_computed_by_one_kernel() -> None:
    """A chain attends like forced rows, and a row of a drafter's chain like one with a longer context; both beside a tree."""
    chain = [[(2 << node) - 1, 0] for node in range(5)]
    segments = Segments(int32([0, 5, 6]), int32([5, 1, 4]), int32([0, 1, 2]), int32([61, 90, 33]),
                        torch.zeros(3, dtype=torch.bool), torch.tensor([*chain, [0b111, 0], *tree_mask([0, 0, 0, 1])]))
    q, cache = torch.randn(10, 6, 16), random_cache(8, 3, 2, 16)
    limits = fixed_plan.Limits(0, 0)
    plan = fixed_plan.make_plan(segments, 10, 6, 2, 16, 128, True, 32, limits, block=32, group=128)
    assert plan.record[:, 0].tolist() == [0] * 6 + [2] * 4  # only the rows of the tree are left to the second kernel
    assert plan.record[[4, 5, 9], 3].tolist() == [66, 93, 36]
    close(fixed_attention.fixed_attention(q, cache, plan, 0.25), TORCH.attention(q, cache, segments, 0.25))


@pytest.mark.parametrize("mode", MODES)
def test_fixed_attention_of_long_contexts(mode: str) -> None:
    """Boundaries of blocks and groups: single rows."""
    contexts = [2303, 31, 511, 4500]
    segments = Segments(row=int32(range(4)), length=int32([1] * 4), slot=int32([2, 0, 1, 3]), context=int32(contexts),
                        causal=torch.zeros(4, dtype=torch.bool), mask=torch.tensor([[1, 0]] * 4))
    q, cache = torch.randn(4, 2, 16), random_cache(290, 4, 1, 16, torch.float32)
    close(_fixed(q, cache, segments, mode, block=64, group=512), TORCH.attention(q, cache, segments, 0.25))


@pytest.mark.parametrize("trees", [False, True])
def test_tasks_of_fixed_attention(trees: bool) -> None:
    """Whatever a task is, every part of a tile is a task once, and the result has the same bits."""
    q, cache, segments = _mixed_step(torch.float32, 3, 1, 16)
    if not trees:
        rows, contexts, lengths = [0, 1, 2, 3, 0], [290, 37, 0, 129, 0], [1, 1, 1, 1, 0]
        segments = segments._replace(row=int32(rows), context=int32(contexts), length=int32(lengths),
                                     causal=torch.zeros(5, dtype=torch.bool), mask=torch.tensor([[1, 0]] * 16))
    expected, found = TORCH.attention(q, cache, segments, 0.25), []
    real = int(segments.length.sum())
    for number, limits in enumerate((*MODES.values(), fixed_plan.Limits(20, 8))):
        plan = fixed_plan.make_plan(segments, len(q), 3, 1, 16, 400, trees, 16, limits, block=16, group=128)
        found.append(fixed_attention.fixed_attention(q, cache, plan, 0.25))
        count, kind = plan.tasks[0, :2].tolist()
        assert kind == (number if number < 3 else 0)
        tasks = plan.tasks[1 : 1 + count]
        for leader in set(tasks[:, 0].tolist()):  # the tasks of a tile follow one another
            spans = tasks[tasks[:, 0] == leader][:, 3:5].tolist()
            assert spans[0][0] == 0 and all(a[1] == b[0] for a, b in pairwise(spans) if a[1] > a[0])
        assert bool(found[-1].isfinite().all())
    close(found[0][:real], expected[:real])
    assert all(torch.equal(each[:real], found[0][:real]) for each in found)


@DTYPES
def test_fixed_attention_of_mixed_steps(dtype: torch.dtype) -> None:
    check_mixed_step(TritonOps(DEVICE, max_context=600), dtype)


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("mode", ["blocks", "groups"])
def test_fixed_attention_of_forced_rows_beside_others(trees: bool, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured step does not know which of its rows are forced. They have the bits of a step that does: natively on a GPU."""
    heads, kv_heads, dim, dtype = 3, 1, 16, HALF
    chunk, long = (150, 310) if CUDA else (40, 110)
    lengths, contexts = [7 if trees else 1, 1, chunk, 3], [37, long - 20, long, 0]
    first = [sum(lengths[:i]) for i in range(4)]
    masks = tree_mask([0, 0, 0, 1, 2, 2, 5])[: lengths[0]] + [[1, 0]] * (1 + chunk + 3)
    segments = Segments(int32(first), int32(lengths), int32([2, 0, 3, 1]), int32(contexts),
                        torch.tensor([False, False, True, True]), torch.tensor(masks))
    q, cache = torch.randn(sum(lengths), heads, dim).to(dtype), random_cache(30, 4, kv_heads, dim, dtype)
    monkeypatch.setattr(fixed_attention, "TILED", fixed_attention.TILED._replace(limits=MODES[mode]))
    ops = TritonOps(DEVICE, max_context=600)
    plan = ops.plan_step(segments, len(q), heads, cache, [], trees=trees, forced=True)
    found = ops.attention(q, cache, segments, 0.25, plan)
    close(found, TORCH.attention(q, cache, segments, 0.25))
    chunks = [(3, long, chunk), (1, 0, 3)]
    known = ops.attention(q, cache, segments, 0.25, ops.plan_step(segments, len(q), heads, cache, chunks, trees=trees))
    assert torch.equal(found, known) if CUDA else close(found, known) is None
