"""Triton's kernels for mixtures of experts against the torch reference: natively on a GPU, else through its interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from interpreted import CUDA, DEVICE, HALF, int32, tree_mask
from torch import Tensor
from trees import random_cache

from paceline.engine.build import _require_kernels
from paceline.kernels import ExpertWeights, PagedCache, Segments, TorchOps
from paceline.kernels.triton import experts
from paceline.kernels.triton.ops import TritonOps
from paceline.models.attend import PagedAttend
from paceline.models.config import ExpertsSpec, LayerSpec, ModelConfig
from paceline.models.decoder import Decoder

TORCH = TorchOps()
pytestmark = pytest.mark.usefixtures("triton_device")


def weights(count: int, hidden: int, size: int, dtype: torch.dtype, bias: bool, activation: str) -> ExpertWeights:
    gate_up, down = torch.randn(count, 2 * size, hidden) / 4, torch.randn(count, hidden, size) / 4
    biases = (torch.randn(count, 2 * size).to(dtype), torch.randn(count, hidden).to(dtype)) if bias else (None, None)
    return ExpertWeights(gate_up.to(dtype), biases[0], down.to(dtype), biases[1], activation)


@pytest.mark.parametrize(("count", "active", "normalised"), [(5, 2, True), (128, 8, False), (3, 3, True), (1, 1, False)])
def test_routes_are_the_references(count, active, normalised):
    for dtype in (torch.float32, HALF):
        logits = (torch.randn(9, count) * 3).to(dtype)
        logits[0] = 1.0
        shares, chosen = TritonOps(DEVICE).route(logits, active, normalised)
        wanted, which = TORCH.route(logits, active, normalised)
        assert torch.equal(chosen, which) and (shares - wanted).abs().max() < 1e-5
    assert TritonOps(DEVICE).route(torch.full((2, count), torch.nan), active, normalised)[1].max() < count


@pytest.mark.parametrize("rows", [experts.FEW, experts.MANY])
@pytest.mark.parametrize(("num_rows", "count", "active"), [(1, 4, 2), (40, 4, 3), (3, 128, 8), (200, 2, 1), (33, 16, 1)])
def test_every_pair_is_in_one_tile_of_its_expert(num_rows, count, active, rows):
    chosen = torch.rand(num_rows, count).argsort(dim=1)[:, :active]
    chosen[num_rows // 2 :] = chosen[0].clone()  # busy experts, and some that nobody chooses
    plan = experts.plan_experts(chosen, count, rows)
    order, of = plan.order.cpu(), plan.expert.cpu()
    seen = []
    for tile, expert in enumerate(of.tolist()):
        if expert >= 0:
            pairs = [pair for pair in order[tile].tolist() if pair < num_rows * active]
            assert pairs and {int(chosen.flatten()[pair]) for pair in pairs} == {expert}
            seen += pairs
    assert sorted(seen) == list(range(num_rows * active))


@pytest.mark.parametrize(("hidden", "size", "bias", "activation"), [
    (64, 48, False, "silu"), (70, 33, True, "clamped_silu"), (130, 72, False, "gelu_tanh")])
def test_experts_are_the_references(hidden, size, bias, activation):
    for dtype, num_rows in ((torch.float32, 5), (HALF, 40), (torch.float32, 0)):
        of = weights(6, hidden, size, dtype, bias, activation)
        x, logits = torch.randn(num_rows, hidden).to(dtype), torch.randn(num_rows, 6)
        shares, chosen = TORCH.route(logits, 2, True)
        wide = ExpertWeights(*(part.double() if isinstance(part, Tensor) else part for part in of))
        expected = TORCH.experts(x.double(), wide, shares.double(), chosen)
        difference = (TritonOps(DEVICE).experts(x, of, shares, chosen).double() - expected).abs()
        assert bool((difference <= (1e-4 if dtype == torch.float32 else 0.03) * expected.abs().clamp(min=1)).all())


def test_a_rows_bits_do_not_depend_on_who_else_chooses_its_experts():
    """Nor on the tile: on a GPU the largest batch takes large ones. (numpy, with which the interpreter multiplies, sums tiles of
    other shapes in another order.)"""
    ops, of = TritonOps(DEVICE), weights(3, 64, 32, HALF, False, "silu")
    ops._small_tiles = set() if CUDA else {(HALF, of.down.shape)}
    x, logits = torch.randn(120, 64).to(HALF), torch.randn(120, 3)
    assert experts.tile_rows(240, 3) == experts.MANY and experts.tile_rows(14, 3) == experts.FEW

    def run(rows: Tensor) -> Tensor:
        return ops.experts(x[rows], of, *ops.route(logits[rows], 2, True))

    whole = run(torch.arange(120))
    for size in (1, 7, 30):
        rows = torch.randperm(120)[:size]
        assert torch.equal(run(rows), whole[rows])


def test_a_decoder_with_experts_computes_the_same():
    """A tree of four rows; the second layer is dense."""
    config = ModelConfig("qwen3_moe", 61, 32, 48, 2, 2, 1, 16, max_context=64, qk_norm=True,
                         layers=(LayerSpec(experts=ExpertsSpec(6, 2, 16)), LayerSpec()))
    model = Decoder.random(config, std=0.2, device=DEVICE)
    segments = Segments(int32([0]), int32([4]), int32([0]), int32([5]), torch.tensor([False]),
                        torch.tensor(tree_mask([0, 0, 0, 1])))
    before, position = [random_cache(4, 1, 1, 16, torch.float32) for _ in range(2)], torch.tensor([5, 6, 7, 8])
    write = before[0].page_table[0, position // 16].long() * 16 + position % 16
    angles, results = torch.rand(4, 8), []
    for ops in (TORCH, TritonOps(DEVICE, 64)):
        caches = [PagedCache(c.k.clone(), c.v.clone(), before[0].page_table, 16) for c in before]
        results.append(model(torch.arange(4), PagedAttend(ops, caches, angles.cos(), angles.sin(), write, segments), (1, -1)))
    torch.testing.assert_close(results[1].features, results[0].features, rtol=1e-3, atol=1e-3)


def test_windows_sinks_and_caps_are_refused_where_no_kernel_has_them():
    config = ModelConfig("llama", 61, 32, 48, 2, 2, 1, 16, max_context=64, layers=(LayerSpec(), LayerSpec(window=8)))
    with pytest.raises(ValueError, match="layer 1 has a sliding window, sinks or a cap"):
        _require_kernels(Decoder.random(config), TritonOps(DEVICE))
    _require_kernels(Decoder.random(replace(config, max_context=8)), TritonOps(DEVICE))
    _require_kernels(Decoder.random(config), TORCH)


def test_gradients_and_float64_fall_back_to_torch():
    of = weights(3, 16, 8, torch.float64, False, "silu")
    x = torch.randn(5, 16, dtype=torch.float64).requires_grad_()
    shares, chosen = TritonOps(DEVICE).route(torch.randn(5, 3, dtype=torch.float64), 2, True)
    TritonOps(DEVICE).experts(x, of, shares, chosen).sum().backward()
    assert x.grad is not None and bool(x.grad.abs().sum() > 0)
