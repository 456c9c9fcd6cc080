"""Norms, the gated activation and linear layers with packed weights: CPU kernels against the torch reference."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from paceline.kernels import Normed
from paceline.kernels.cpu.ops import CpuOps
from paceline.kernels.reference.ops import TorchOps

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
REFERENCE = TorchOps()


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Within a few roundings of the dtype; bfloat16 within one."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    relative = {torch.float32: 3e-6, torch.float64: 1e-14, torch.bfloat16: 8e-3}[got.dtype]
    return bool(((got - expected).abs() <= relative * (expected.abs() + 1e-2)).all())


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 576), (7, 33), (60, 576)])
def test_norms(dtype, num_rows, width):
    ops = CpuOps()
    x, residual = normal(num_rows, width, dtype=dtype), normal(num_rows, width, dtype=dtype, seed=1) * 3
    weight = normal(width, dtype=dtype, seed=2)
    assert close(ops.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
    assert close(ops.rms_norm(x * 1e-3, weight, 1e-5), REFERENCE.rms_norm(x * 1e-3, weight, 1e-5))  # eps counts
    (out, total), (expected, expected_total) = (o.add_rms_norm(x, residual, weight, 1e-5) for o in (ops, REFERENCE))
    assert torch.equal(total, expected_total) and close(out, expected)


def test_reference_norm_is_torchs():
    x, weight = normal(3, 8, dtype=torch.float64), normal(8, dtype=torch.float64, seed=1)
    assert torch.allclose(REFERENCE.rms_norm(x, weight, 1e-5), F.rms_norm(x, (8,), weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 5), (9, 96), (30, 1536)])
def test_silu_mul(dtype, num_rows, width):
    gate_up = normal(num_rows, 2 * width, dtype=dtype) * 6
    gate_up[0, 0], gate_up[0, 1] = -300.0, 300.0
    assert close(CpuOps().silu_mul(gate_up), REFERENCE.silu_mul(gate_up))


def test_fused_products_fall_back_to_their_parts():
    """The CPU has no kernels of its own for these; the norm that is left half done is completed first."""
    ops, dtype = CpuOps(), torch.float32
    x, residual, norm = normal(5, 32, dtype=dtype), normal(5, 24, dtype=dtype, seed=1), normal(24, dtype=dtype, seed=2)
    weight, other = normal(24, 32, dtype=dtype, seed=3), normal(96, 24, dtype=dtype, seed=4)
    got, total = ops.linear_norm(x, weight, None, residual, norm, 1e-5)
    expected, expected_total = REFERENCE.add_rms_norm(F.linear(x, weight), residual, norm, 1e-5)
    assert not ops.should_fuse(5, 64, 16) and torch.allclose(total, expected_total, atol=1e-5)
    assert torch.allclose(got.complete(), expected, atol=1e-4)
    half_done = Normed(total * norm, (total.square() * 2**26).round().long().sum(dim=1)[None], 1e-5)
    assert torch.allclose(half_done.complete(), expected, atol=1e-4)
    expected = REFERENCE.silu_mul(F.linear(expected, other))
    assert torch.allclose(ops.gated_linear(half_done, other, None), expected, rtol=1e-3, atol=1e-3)


def test_strided_input_is_read_right():
    x, weight = normal(6, 64, dtype=torch.float32)[:, ::2], torch.ones(32)
    assert close(CpuOps().rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))


def test_gradients_flow():
    ops = CpuOps()
    x, weight = normal(3, 8, dtype=torch.float64).requires_grad_(), normal(8, dtype=torch.float64).requires_grad_()
    matrix = normal(16, 8, dtype=torch.float64, seed=4).requires_grad_()

    def through(x, weight, matrix):
        hidden, total = ops.add_rms_norm(x, x * 2, weight, 1e-5)
        return ops.silu_mul(ops.linear(hidden, matrix)) + ops.rms_norm(total, weight, 1e-5)

    assert torch.autograd.gradcheck(through, (x, weight, matrix))


def test_other_dtypes_fall_through_to_torch():
    x, weight = normal(2, 8, dtype=torch.float16), torch.ones(8, dtype=torch.float16)
    assert torch.equal(CpuOps().rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
