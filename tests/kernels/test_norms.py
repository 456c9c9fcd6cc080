"""Norms, the gated activation and linear layers with packed weights: CPU kernels against the torch reference."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from paceline.kernels import Normed, ops_for
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
    assert not ops.fuses(5, 64, 16) and torch.allclose(total, expected_total, atol=1e-5)
    assert torch.allclose(got.complete(), expected, atol=1e-4)
    half_done = Normed(total * norm, total.square().sum(dim=1)[None], 1e-5)
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_linear(dtype, with_bias):
    ops = CpuOps()
    weight, bias = normal(200, 96, dtype=dtype), normal(200, dtype=dtype, seed=1) if with_bias else None
    assert ops.pack(weight) == (dtype in (torch.float32, torch.bfloat16))
    for num_rows in (0, 1, 2, 7, 8, 17, 64, 65, 300):
        x = normal(num_rows, 96, dtype=dtype, seed=num_rows)
        got = ops.linear(x, weight, bias)
        expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        tolerance = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 0.15}[dtype]  # values up to about 40
        assert got.shape == expected.shape and got.dtype == dtype
        assert num_rows == 0 or (got.double() - expected).abs().max() < tolerance
        strided = torch.cat((x, x), dim=1)[:, :96]
        assert torch.allclose(ops.linear(strided, weight, bias), got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_copies_do_not_outlive_a_change(dtype):
    ops = CpuOps()
    weight, x = normal(32, 16, dtype=dtype), normal(4, 16, dtype=dtype, seed=1)
    ops.pack(weight)
    weight.mul_(2)  # noticed by its version
    assert close(ops.linear(x, weight), F.linear(x, weight))
    ops.pack(weight)
    weight.data.mul_(2)
    ops.prepare([])
    assert close(ops.linear(x, weight), F.linear(x, weight))


def test_ops_for():
    assert ops_for("cpu", torch.float32).name == "cpu" and ops_for("cpu", torch.float16).name == "torch"
    x, weight = normal(2, 8, dtype=torch.float16), torch.ones(8, dtype=torch.float16)
    assert torch.equal(CpuOps().rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("rows", "width"), [(16, 128), (128, 128), (640, 128), (128, 320), (576, 1536), (61, 32)])
def test_a_row_of_a_deterministic_product_does_not_depend_on_its_neighbours(threads, rows, width):
    from paceline.kernels.cpu.ops import CpuOps

    if not torch.backends.mkl.is_available():
        pytest.skip("this torch was built without MKL")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    draw = torch.Generator().manual_seed(rows)
    weight, bias = torch.randn(rows, width, generator=draw), torch.randn(rows, generator=draw)
    x, ops = torch.randn(131, width, generator=draw), CpuOps(deterministic=True)
    ops.prepare([weight])
    whole = ops.linear(x, weight, bias)
    torch.testing.assert_close(whole, torch.nn.functional.linear(x, weight, bias), rtol=1e-4, atol=1e-4)
    for start, count in ((0, 1), (5, 1), (3, 2), (130, 1), (64, 3), (17, 64), (2, 65), (1, 129), (60, 16), (0, 130)):
        assert torch.equal(ops.linear(x[start : start + count], weight, bias), whole[start : start + count]), (start, count)
    torch.set_num_threads(before)
