"""Triton's other kernels against the torch reference: natively on a GPU, elsewhere through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from interpreted import DTYPES, HALF, close, int32
from trees import assert_same_growth, assert_same_rows, assert_same_walk, random_cache, random_requests

from paceline.drafters.eagle import Eagle, EagleConfig
from paceline.drafters.eagle_drafter import EagleDrafter
from paceline.kernels import Candidates, PagedCache, SamplingTensors, TorchOps
from paceline.kernels.reference.drafting import draft_topk
from paceline.kernels.triton.ops import TritonOps
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder, Rope
from paceline.spot.losses import Heads, target_loss

TORCH = TorchOps()
pytestmark = pytest.mark.usefixtures("triton_device")


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
        temperature=torch.tensor([1, 0.7, 0, 1.3, 0.5, 1, 1, 1, 1]), top_k=int32([0, 0, 0, 50, 7, 0, 0, 0, 5]),
        top_p=torch.tensor([1, 1, 1, 0.9, 0.95, 1, 1, 1, 0.5]), min_p=torch.tensor([0, 0, 0, 0, 0.01, 0.05, 0, 0, 0]))
    token, logprob = ops.sample(logits, params)
    expected, expected_logprob = TORCH.sample(logits, params)
    assert token.tolist() == expected.tolist()
    assert token[6:].tolist() == [-1, -1, -1]
    torch.testing.assert_close(logprob, expected_logprob, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_of_given_tokens_are_those_of_sampled_ones(ops: TritonOps, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    logits = (torch.randn(6, 3001) * 3).to(dtype)
    params = SamplingTensors(
        torch.arange(6) * 7919, torch.arange(6),
        torch.tensor([1.0, 0.0, 0.7, 1.0, 1.3, 1.0]),
        torch.tensor([0, 0, 0, 20, 50, 0], dtype=torch.int32),
        torch.tensor([1.0, 1.0, 0.9, 1.0, 0.95, 1.0]),
        torch.tensor([0.0, 0.0, 0.0, 0.0, 0.02, 0.1]))
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
    close(ops.rms_norm(x, weight, 1e-6), TORCH.rms_norm(x, weight, 1e-6))
    for ours, theirs in zip(ops.add_rms_norm(x, residual, weight, 1e-6), TORCH.add_rms_norm(x, residual, weight, 1e-6),
                            strict=True):
        close(ours, theirs)
    close(ops.silu_mul(gate_up), TORCH.silu_mul(gate_up))


@DTYPES
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "norm"), [(7, 1, 64, False), (4, 2, 48, True)])
def test_rope_write(ops: TritonOps, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, norm: bool) -> None:
    qkv, write = torch.randn(5, (heads + 2 * kv_heads) * dim).to(dtype), torch.tensor([3, 9, 31, 0, 5])
    weights = [torch.rand(dim).to(dtype) if norm else None for _ in "qk"]
    angles = torch.rand(5, dim // 2)
    ours, theirs = (PagedCache(*(torch.zeros(32, kv_heads, dim, dtype=dtype) for _ in "kv"), int32([0]), 16) for _ in "ab")
    results = [family.rope_write(qkv, heads, *weights, 1e-6, angles.cos(), angles.sin(), write, cache)
               for family, cache in ((ops, ours), (TORCH, theirs))]
    close(*results)
    close(ours.k, theirs.k)
    assert torch.equal(ours.v, theirs.v)


# -- trees


@pytest.mark.parametrize(("num_nodes", "depth", "nodes", "fixed"), [
    ([3, 0, 12, 7, 0, 0], 6, 12, True), ([70, 0, 66], 9, 70, False), ([1], 1, 1, False), ([0, 0, 0, 0], 0, 0, True)])
def test_trees_become_rows_and_are_walked(ops: TritonOps, num_nodes: list[int], depth: int, nodes: int, fixed: bool) -> None:
    assert_same_walk(ops, TORCH, num_nodes, depth, nodes, fixed)


@pytest.mark.parametrize(("num_nodes", "depth", "nodes", "fixed"), [([3, 0, 12], 6, 12, True), ([0, 0], 0, 0, True),
                                                                    ([], 0, 0, False)])
@pytest.mark.parametrize("forced", [((4, False), (30, True), (1, True)), ((30, False),)])
def test_forced_rows_are_accepted_without_comparison(ops: TritonOps, num_nodes, depth, nodes, fixed, forced) -> None:
    assert_same_walk(ops, TORCH, num_nodes, depth, nodes, fixed, forced=forced)


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


@pytest.mark.parametrize("window", [1, 40, 100, 4096])
def test_recent_pages(ops: TritonOps, window: int) -> None:
    """Contexts shorter and longer than the window, and lines that reach beyond the page table."""
    requests, cache = random_requests(5, 6), random_cache(8, slots=6)
    tables = [torch.zeros(5, 7, dtype=torch.int32) for _ in range(2)]
    found = [each.recent_pages(requests, cache, window, into) for each, into in zip((ops, TORCH), tables, strict=True)]
    assert torch.equal(*tables) and all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(("depth", "width", "budget", "reduced"), [
    (4, 3, 12, True), (1, 1, 1, False), (5, 1, 5, True), (3, 20, 127, False), (2, 40, 99, True), (18, 7, 50, False)])
def test_a_tree_grows_and_is_chosen(ops: TritonOps, depth: int, width: int, budget: int, reduced: bool) -> None:
    assert_same_growth(ops, TORCH, depth, width, budget, reduced, batch=2)


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


@pytest.mark.parametrize("form", ["eagle", "eagle3"])
def test_a_fused_layer_of_the_drafter_is_what_its_parts_make(ops: TritonOps, form: str) -> None:
    """The fused layer and the separate operations give the same outputs and write the same keys and values, for the rows of the
    roots and for those of one level of a tree."""
    device = ops._counters.device
    shape = ModelConfig("llama", 301, 96, 160, 3, 4, 2, 32, max_context=256)
    policy = Decoder.random(shape, std=0.2, device=device)
    module = Eagle.random(EagleConfig.for_policy(shape, form), 1, 0.2, device=device)  # type: ignore[arg-type]
    for norm in (norm for norm in (module.input_norm, module.hidden_norm, module.mlp_norm) if norm is not None):
        norm.data.uniform_(0.5, 1.5)
    rope = Rope(shape, 256, torch.float32, device)
    batch, width = 3, 4
    requests, cache = random_requests(batch, 6), random_cache(8, slots=6)
    cache = PagedCache(*(torch.randn(len(cache.k), 2, 32) for _ in "kv"), cache.page_table, cache.page_size)
    tokens = torch.randint(0, 301, (6 * 8 * 16,))
    window = TORCH.catch_up_rows(requests, tokens, cache, torch.arange(batch), torch.ones(batch, dtype=torch.int64),
                                 torch.ones(batch, dtype=torch.int64), 1, 77)
    found = Candidates(torch.randint(0, 301, (batch, width)), torch.full((batch, width), -1), torch.randn(batch, width))
    beam = TORCH.select_beam(found, 0, torch.zeros(batch, 1, 2, dtype=torch.int64), requests, cache, 1, width)
    for rows, above, count in ((window, None, batch), (beam.rows, beam.above, batch)):
        state, made = torch.randn(count, 96), []
        for family in (ops, TORCH):
            own = PagedCache(cache.k.clone(), cache.v.clone(), cache.page_table, cache.page_size)
            drafter = EagleDrafter(module, policy, rope, family, None, 0.35)
            assert drafter._layer is not None
            out = family.draft_layer(drafter._layer, rows, state, above, own)
            assert (out is not None) == (family is ops)
            made.append((drafter._run(rows, state, above, own) if out is None else out, own.k, own.v))
        for fused, parts in zip(*made, strict=True):
            largest = parts.abs().max()  # terms of this size may cancel
            close(fused / largest, parts / largest, 2)  # sums of squares are integers in the fused kernels


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
