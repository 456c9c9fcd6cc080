"""Mixtures of experts: the compiled kernels against the reference, and bits that no other row has an influence on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.kernels import ExpertWeights
from paceline.kernels.cpu import products
from paceline.kernels.cpu.ops import CpuOps
from paceline.kernels.reference.ops import TorchOps

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 0.05}


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weights(count: int, hidden: int, size: int, dtype: torch.dtype, bias: bool = False,
            activation: str = "silu") -> ExpertWeights:
    def draw(*shape: int, seed: int) -> Tensor:
        return (normal(*shape, seed=seed) * shape[-1] ** -0.5).to(dtype)

    return ExpertWeights(draw(count, 2 * size, hidden, seed=1), draw(count, 2 * size, seed=2) if bias else None,
                         draw(count, hidden, size, seed=3), draw(count, hidden, seed=4) if bias else None, activation)


def prepared(dtype: torch.dtype, of: ExpertWeights, deterministic: bool = False) -> CpuOps:
    ops = CpuOps(deterministic, products.find_library(dtype))
    ops.prepare([of.gate_up, of.down])
    return ops


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize(("count", "active"), [(5, 2), (128, 8), (3, 3), (1, 1)])
def test_routes_are_the_references(dtype, normalised, count, active):
    for num_rows in (0, 1, 7, 40):
        logits = normal(num_rows, count, dtype=dtype, seed=num_rows) * 4
        shares, chosen = CpuOps().route(logits, active, normalised)
        wanted_shares, wanted = TorchOps().route(logits, active, normalised)
        assert torch.equal(chosen, wanted) and shares.dtype == wanted_shares.dtype
        assert torch.allclose(shares, wanted_shares, atol=1e-6 if dtype != torch.float64 else 1e-13)
        if normalised and num_rows:
            assert torch.allclose(shares.sum(dim=1), torch.ones(num_rows, dtype=shares.dtype))


def test_equal_logits_choose_the_lower_index():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0] * 5, [-torch.inf] * 5, [1.0, -torch.inf, -torch.inf, 2.0, 0.0]])
    for ops in (CpuOps(), TorchOps()):
        assert ops.route(logits, 3, True)[1].tolist() == [[1, 2, 4], [0, 1, 2], [0, 1, 2], [3, 0, 4]]


def test_experts_of_logits_that_are_no_numbers_exist():
    chosen = CpuOps().route(torch.full((2, 6), torch.nan), 4, True)[1]
    assert chosen.min() >= 0 and chosen.max() < 6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "active", "hidden", "size"), [(6, 2, 24, 20), (16, 4, 130, 72), (2, 2, 17, 1), (1, 1, 64, 16)])
@pytest.mark.parametrize(("bias", "activation"), [(False, "silu"), (True, "clamped_silu"), (False, "gelu_tanh")])
def test_experts_are_the_references(dtype, count, active, hidden, size, bias, activation):
    of = weights(count, hidden, size, dtype, bias, activation)
    for num_rows in (0, 1, 3, 33):
        x = normal(num_rows, hidden, dtype=dtype, seed=num_rows)
        shares, chosen = TorchOps().route(normal(num_rows, count, dtype=dtype, seed=9), active, True)
        wide = ExpertWeights(*(part.double() if isinstance(part, Tensor) else part for part in of))
        wanted = TorchOps().experts(x.double(), wide, shares.double(), chosen)
        for ops in (TorchOps(), prepared(dtype, of), prepared(dtype, of, deterministic=True)):
            got = ops.experts(x, of, shares, chosen)
            assert got.dtype == dtype and got.shape == x.shape
            assert num_rows == 0 or (got.double() - wanted).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_bits_do_not_depend_on_who_else_chooses_its_experts(dtype, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    count, active, hidden, size = 12, 3, 80, 48
    of = weights(count, hidden, size, dtype)
    ops, x = prepared(dtype, of, deterministic=True), normal(60, hidden, dtype=dtype)
    logits = normal(60, count, dtype=dtype, seed=5)
    logits[20:40] = logits[0]  # all of them choose the same

    def run(rows: Tensor) -> Tensor:
        return ops.experts(x[rows], of, *ops.route(logits[rows], active, True))

    whole, draw = run(torch.arange(60)), torch.Generator().manual_seed(1)
    for size in (1, 2, 5, 31, 60):
        rows = torch.randperm(60, generator=draw)[:size]
        assert torch.equal(run(rows), whole[rows])
    torch.set_num_threads(before)


def test_changed_experts_are_noticed():
    of, x = weights(4, 32, 16, torch.float32), normal(9, 32)
    ops = prepared(torch.float32, of)
    shares, chosen = ops.route(normal(9, 4, seed=3), 2, True)
    before = ops.experts(x, of, shares, chosen)
    of.down.mul_(2)
    assert torch.allclose(ops.experts(x, of, shares, chosen), 2 * before, atol=1e-5)
    ops.prepare([of.gate_up, of.down])
    assert torch.allclose(ops.experts(x, of, shares, chosen), 2 * before, atol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_silu"])
def test_gradients_of_experts_are_those_of_the_formula(activation):
    """Against every expert applied to every row, with zero weights for those that were not chosen."""
    of = weights(4, 6, 5, torch.float64, bias=True, activation=activation)
    leaves = [part.requires_grad_() for part in of if isinstance(part, Tensor)]
    x, logits = normal(7, 6, dtype=torch.float64).requires_grad_(), normal(7, 4, dtype=torch.float64, seed=2).requires_grad_()
    ops = TorchOps()
    shares, chosen = ops.route(logits, 2, True)
    got = torch.autograd.grad(ops.experts(x, of, shares, chosen).square().sum(), [x, logits, *leaves])
    every = torch.zeros(7, 4, dtype=torch.float64).scatter(1, chosen, logits.gather(1, chosen).softmax(dim=-1))
    inner = torch.einsum("rk,enk->ren", x, of.gate_up) + of.gate_up_bias
    outer = torch.einsum("reni,eki->renk", ops.gated(inner, activation)[:, :, None], of.down)[:, :, 0] + of.down_bias
    wanted = torch.autograd.grad((outer * every[..., None]).sum(dim=1).square().sum(), [x, logits, *leaves])
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)
