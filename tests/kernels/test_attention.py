"""Paged tree attention and the cache write before it: the numba kernels against the torch reference."""

from __future__ import annotations

import pytest
import torch

from paceline.kernels.cpu import ops as cpu_ops
from paceline.kernels.cpu.ops import CpuOps
from paceline.kernels.records import AttentionForm, PagedCache, Segments
from paceline.kernels.reference.ops import TorchOps, apply_rope

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 1e-2}
DTYPES = list(TOLERANCE)


def make_cache(g: torch.Generator, dtype: torch.dtype, slots: int, pages: int, page_size: int, num_kv_heads: int,
               head_dim: int) -> PagedCache:
    """Pages lie in random order; index 0's page stays unused, as padding's would."""
    shape = ((slots * pages + 1) * page_size, num_kv_heads, head_dim)
    table = (torch.randperm(slots * pages, generator=g) + 1).view(slots, pages).int()
    k, v = (torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for _ in range(2))
    return PagedCache(k, v, table, page_size)


def make_segments(g: torch.Generator, shapes: list[tuple[int, int, bool]]) -> Segments:
    """shapes: (length, context, causal) of each; trees get a random parent per row and see their ancestors."""
    row, rows, mask = 0, [], []
    for length, _, causal in shapes:
        rows.append(row)
        row += length
        seen: list[int] = []
        for j in range(length):
            parent = int(torch.randint(0, j, (1,), generator=g)) if j else -1
            seen.append((seen[parent] if j else 0) | 1 << j)
        for bits in [0] * length if causal else seen:
            words = bits & (2**64 - 1), bits >> 64
            mask.append([w - 2**64 if w >= 2**63 else w for w in words])
    lengths, contexts, causals = zip(*shapes, strict=True)
    slot = torch.randperm(len(shapes), generator=g)
    return Segments(torch.tensor(rows).int(), torch.tensor(lengths).int(), slot.int(), torch.tensor(contexts).int(),
                    torch.tensor(causals), torch.tensor(mask))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "page_size"), [
    (9, 3, 64, 16), (4, 4, 8, 5), (6, 1, 20, 7), (4, 2, 128, 1)])
def test_numba_equals_torch(dtype, num_heads, num_kv_heads, head_dim, page_size, deterministic):
    g = torch.Generator().manual_seed(num_heads * head_dim)
    shapes = [(1, 200, False), (17, 63, False), (0, 0, False), (1, 0, True), (30, 0, True), (11, 64, True), (128, 3, False),
              (0, 9, True), (70, 130, True), (65, 0, False), (140, 0, True), (120, 50, True)]
    cache = make_cache(g, dtype, len(shapes), -(-220 // page_size), page_size, num_kv_heads, head_dim)
    segments = make_segments(g, shapes)
    q = torch.randn(int(segments.length.sum()), num_heads, head_dim, generator=g, dtype=torch.float64).to(dtype)
    scale = head_dim**-0.5
    expected = TorchOps().attention(q, cache, segments, scale)
    got = CpuOps(deterministic).attention(q, cache, segments, scale)
    assert got.dtype == dtype
    # Relative beyond 1: bfloat16's own step is 0.0156 from 2 to 4.
    assert ((got - expected).abs() <= TOLERANCE[dtype] * expected.abs().clamp(min=1)).all()


FORMS = {"window": AttentionForm(window=5), "long window": AttentionForm(window=70), "cap": AttentionForm(soft_cap=1.5),
         "all": AttentionForm(window=9, soft_cap=2.0, sinks=torch.tensor([0.3, -1.0, 4.0, 0.0]))}


def cast(form: AttentionForm, dtype: torch.dtype) -> AttentionForm:
    return form if form.sinks is None else form._replace(sinks=form.sinks.to(dtype))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", list(FORMS.values()), ids=list(FORMS))
def test_windows_caps_and_sinks_equal_torch(dtype, form, deterministic):
    g, form = torch.Generator().manual_seed(3), cast(form, dtype)
    shapes = [(1, 200, False), (17, 63, False), (0, 0, False), (1, 0, True), (30, 0, True), (11, 64, True), (128, 3, False),
              (70, 130, True), (65, 0, False), (140, 0, True)]
    cache = make_cache(g, dtype, len(shapes), 44, 5, 2, 20)
    segments = make_segments(g, shapes)
    q = torch.randn(int(segments.length.sum()), 4, 20, generator=g, dtype=torch.float64).to(dtype)
    expected = TorchOps().attention(q, cache, segments, 0.3, None, form)
    got = CpuOps(deterministic).attention(q, cache, segments, 0.3, None, form)
    assert ((got - expected).abs() <= TOLERANCE[dtype] * expected.abs().clamp(min=1)).all()


@pytest.mark.parametrize("form", list(FORMS.values()), ids=list(FORMS))
def test_the_reference_of_windows_caps_and_sinks_equals_the_formula(form):
    """A tree's row: its window is its last positions, whichever rows of the tree they are."""
    g, form = torch.Generator().manual_seed(0), cast(form, torch.float64)
    cache = make_cache(g, torch.float64, 1, 40, 3, 2, 4)
    segments = make_segments(g, [(20, 11, False)])
    q = torch.randn(20, 4, 4, generator=g, dtype=torch.float64)
    got = TorchOps().attention(q, cache, segments, 0.5, None, form)
    for j in range(20):
        path = [*range(11), *(11 + m for m in range(20) if int(segments.mask[j, 0]) >> m & 1)]
        path = path[-form.window :] if form.window else path
        index = [int(cache.page_table[0, p // 3]) * 3 + p % 3 for p in path]
        for h in range(4):
            scores = cache.k[index, h // 2] @ q[j, h] * 0.5
            scores = form.soft_cap * (scores / form.soft_cap).tanh() if form.soft_cap else scores
            weights = scores.exp() / (scores.exp().sum() + (0 if form.sinks is None else form.sinks[h].exp()))
            assert torch.allclose(got[j, h], weights @ cache.v[index, h // 2], atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("form", list(FORMS.values()), ids=list(FORMS))
def test_windows_caps_and_sinks_have_the_same_bits_in_trees_and_chunks(dtype, form):
    """Deterministic: a chain verified at once, a prompt's chunk, and the rows one by one."""
    g, form = torch.Generator().manual_seed(7), cast(form, dtype)
    cache = make_cache(g, dtype, 1, 20, 8, 2, 64)
    q, ops = torch.randn(20, 4, 64, generator=g, dtype=dtype), CpuOps(deterministic=True)
    chunk = ops.attention(q, cache, make_segments(g, [(20, 100, True)]), 0.125, None, form)
    chain = torch.tensor([[(1 << (j + 1)) - 1, 0] for j in range(20)])
    tree = ops.attention(q, cache, make_segments(g, [(20, 100, False)])._replace(mask=chain), 0.125, None, form)
    steps = [ops.attention(q[j : j + 1], cache, make_segments(g, [(1, 100 + j, True)]), 0.125, None, form) for j in range(20)]
    assert torch.equal(chunk, tree) and torch.equal(chunk, torch.cat(steps))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_look_beyond_their_segment(dtype):
    """A drafter's level: three rows that see the context, scattered ancestors of earlier levels and themselves."""
    g = torch.Generator().manual_seed(5)
    cache = make_cache(g, dtype, 1, 30, 5, 2, 16)
    bits = [[1 | 1 << 9, 0], [1 << 3 | -(2**63), 1], [1 << 40, 1 << 40]]
    one = torch.tensor([0]).int()
    segments = Segments(one, torch.tensor([3]).int(), one, torch.tensor([11]).int(), torch.tensor([False]), torch.tensor(bits))
    q = torch.randn(3, 4, 16, generator=g, dtype=torch.float64).to(dtype)
    got = CpuOps().attention(q, cache, segments, 0.25)
    place = cache.page_table[0].long()[torch.arange(150) // 5] * 5 + torch.arange(150) % 5
    for row, seen in enumerate([[0, 9], [3, 63, 64], [40, 104]]):
        index = place[[*range(11), *(11 + i for i in seen)]]
        k, v = (x[index].double().repeat_interleave(2, dim=1) for x in (cache.k, cache.v))
        weights = (torch.einsum("hd,lhd->hl", q[row].double(), k) * 0.25).softmax(-1)
        expected = torch.einsum("hl,lhd->hd", weights, v)
        assert (got[row].double() - expected).abs().max() < TOLERANCE[dtype] * 4


def test_reference_equals_plain_softmax():
    """The reference itself, against a loop over what each row may see."""
    g = torch.Generator().manual_seed(0)
    cache = make_cache(g, torch.float64, 2, 4, 3, 2, 4)
    segments = make_segments(g, [(4, 5, False), (3, 2, True)])
    q = torch.randn(7, 4, 4, generator=g, dtype=torch.float64)
    got = TorchOps().attention(q, cache, segments, 0.5)
    for i in range(2):
        row, length, context = (int(t[i]) for t in (segments.row, segments.length, segments.context))
        for j in range(length):
            seen = [m for m in range(length) if (m <= j if segments.causal[i] else int(segments.mask[row + j, 0]) >> m & 1)]
            positions = [*range(context), *(context + m for m in seen)]
            index = [int(cache.page_table[segments.slot[i], p // 3]) * 3 + p % 3 for p in positions]
            for h in range(4):
                weights = (cache.k[index, h // 2] @ q[row + j, h] * 0.5).softmax(0)
                assert torch.allclose(got[row + j, h], weights @ cache.v[index, h // 2], atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_chain_gives_the_same_bits_in_one_segment_or_many_steps(dtype):
    """A row's result depends on the keys it sees, not on the rows beside it: decoding, verifying a drafted chain and a
    prompt's chunk agree to the last bit."""
    g = torch.Generator().manual_seed(7)
    cache = make_cache(g, dtype, 1, 20, 8, 3, 64)
    q = torch.randn(20, 9, 64, generator=g, dtype=dtype)
    ops = CpuOps()
    chunk = ops.attention(q, cache, make_segments(g, [(20, 100, True)]), 0.125)
    chain = torch.tensor([[(1 << (j + 1)) - 1, 0] for j in range(20)])
    tree = ops.attention(q, cache, make_segments(g, [(20, 100, False)])._replace(mask=chain), 0.125)
    steps = [ops.attention(q[j : j + 1], cache, make_segments(g, [(1, 100 + j, True)]), 0.125) for j in range(20)]
    assert torch.equal(chunk, tree) and torch.equal(chunk, torch.cat(steps))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("context", [0, 63, 64, 150])
def test_a_row_of_a_tree_has_the_bits_of_its_path_decoded_alone(dtype, context):
    """Deterministic: the tree's rows share the context's blocks, but a path's keys count as if they lay side by side."""
    g = torch.Generator().manual_seed(context)
    cache = make_cache(g, dtype, 1, 40, 6, 2, 32)
    segments = make_segments(g, [(30, context, False)])  # more rows than one tile has
    q, ops = torch.randn(30, 4, 32, generator=g, dtype=dtype), CpuOps(deterministic=True)
    tree = ops.attention(q, cache, segments, 0.2)
    place = cache.page_table[0].long().repeat_interleave(6) * 6 + torch.arange(6).repeat(40)  # of each position
    for row in range(30):
        path = [j for j in range(30) if int(segments.mask[row, 0]) >> j & 1]
        source, target = place[[context + j for j in path]], place[context : context + len(path)]
        alone = cache._replace(k=cache.k.clone(), v=cache.v.clone())
        alone.k[target], alone.v[target] = cache.k[source], cache.v[source]
        one = make_segments(g, [(1, context + len(path) - 1, False)])
        assert torch.equal(tree[row], ops.attention(q[row : row + 1], alone, one, 0.2)[0]), (row, path)


def test_long_prefill_equals_the_kernel(monkeypatch):
    g = torch.Generator().manual_seed(9)
    cache = make_cache(g, torch.float32, 2, 40, 8, 3, 64)
    segments = make_segments(g, [(150, 40, True), (160, 0, True)])
    q = torch.randn(310, 9, 64, generator=g)
    long = CpuOps().attention(q, cache, segments, 0.125)
    monkeypatch.setattr(cpu_ops, "LONG_SEGMENT", 10**6)
    assert (CpuOps().attention(q, cache, segments, 0.125) - long).abs().max() < 1e-5


def test_rows_outside_segments_are_finite():
    g = torch.Generator().manual_seed(1)
    cache = make_cache(g, torch.float32, 1, 4, 4, 1, 8)
    segments = make_segments(g, [(2, 3, True)])
    segments = segments._replace(mask=torch.zeros(5, 2, dtype=torch.int64))
    q = torch.full((5, 2, 8), torch.nan)
    q[:2] = 1.0
    for ops in (TorchOps(), CpuOps()):
        assert ops.attention(q, cache, segments, 1.0).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("num_rows", "head_dim"), [(5, 64), (40, 12)])
def test_rope_write(dtype, normed, num_rows, head_dim):
    g = torch.Generator().manual_seed(num_rows)
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    num_heads, num_kv_heads = 6, 2
    qkv = torch.randn(num_rows, (num_heads + 2 * num_kv_heads) * head_dim, generator=g, dtype=torch.float64).to(dtype)
    angle = torch.rand(num_rows, head_dim // 2, generator=g, dtype=torch.float64) * 6
    cos, sin = angle.cos().to(acc), angle.sin().to(acc)
    q_norm, k_norm = (torch.rand(head_dim, generator=g, dtype=torch.float64).to(dtype) + 0.5 for _ in range(2))
    write = torch.randperm(64, generator=g)[:num_rows]
    results = []
    for ops in (TorchOps(), CpuOps()):
        cache = make_cache(torch.Generator().manual_seed(3), dtype, 1, 16, 4, num_kv_heads, head_dim)
        q = ops.rope_write(qkv, num_heads, q_norm if normed else None, k_norm if normed else None, 1e-6, cos, sin, write,
                           cache)
        results.append((q, cache.k, cache.v))
    for expected, got in zip(*results, strict=True):
        # bfloat16: one rounding step of values up to about 8
        assert (got - expected).abs().max() < (0.04 if dtype == torch.bfloat16 else TOLERANCE[dtype])
    assert torch.equal(results[0][2], results[1][2])
    v = qkv.view(num_rows, -1, head_dim)[:, num_heads + num_kv_heads :]
    assert torch.equal(results[1][2][write], v)


def test_rope_is_the_rotation_of_halves():
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    cos, sin = torch.tensor([[0.6, 0.0]]), torch.tensor([[0.8, 1.0]])
    assert torch.allclose(apply_rope(x, cos, sin), torch.tensor([[[0.6 - 2.4, -4.0, 1.8 + 0.8, 2.0]]]))
