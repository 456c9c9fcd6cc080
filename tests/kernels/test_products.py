"""Matrix products on a CPU: right, the same for every batch where that is asked for, and chosen without assuming any library."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from paceline.kernels import choose_backend, ops_for
from paceline.kernels.cpu import call, products
from paceline.kernels.cpu.ops import CpuOps

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 0.15}  # of values up to about 40


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def families(dtype: torch.dtype) -> list[CpuOps]:
    """With the library of this machine, if there is one, without, and deterministic."""
    return [CpuOps(library=products.find_library(dtype)), CpuOps(), CpuOps(deterministic=True)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("width", "depth"), [(200, 96), (14, 128), (33, 1), (64, 50), (1, 7)])
def test_a_product_is_right_for_any_shape(dtype, with_bias, width, depth):
    weight, bias = normal(width, depth, dtype=dtype), normal(width, dtype=dtype, seed=1) if with_bias else None
    for ops in families(dtype):
        ops.prepare([weight])
        for num_rows in (0, 1, 2, 3, 7, 17, 64, 65):
            x = normal(num_rows, depth, dtype=dtype, seed=num_rows)
            got = ops.linear(x, weight, bias)
            expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
            assert got.shape == expected.shape and got.dtype == dtype
            assert num_rows == 0 or (got.double() - expected).abs().max() < TOLERANCE[dtype]
            strided = torch.cat((x, x), dim=1)[:, :depth]
            assert torch.equal(ops.linear(strided, weight, bias), got)


@pytest.mark.parametrize("dtype", DTYPES)
def test_float32_and_float64_products_never_depend_on_the_rows(dtype):
    """Without `deterministic`, too: there is no other product. In bfloat16 that holds where no library is used."""
    weight, x = normal(1024, 576, dtype=dtype), normal(70, 576, dtype=dtype, seed=1)
    for ops in families(dtype) if dtype != torch.bfloat16 else [CpuOps()]:
        ops.prepare([weight])
        whole = ops.linear(x, weight)
        assert all(torch.equal(ops.linear(x[a:b], weight), whole[a:b]) for a, b in ((0, 1), (5, 9), (6, 70)))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "depth"), [(16, 128), (640, 128), (61, 32), (1024, 576), (2048, 70)])
def test_a_row_of_a_deterministic_product_does_not_depend_on_its_neighbours(threads, dtype, width, depth):
    """Also above 2^17 elements, where it once silently did."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    weight, bias = normal(width, depth, dtype=dtype), normal(width, dtype=dtype, seed=1)
    x = normal(131, depth, dtype=dtype, seed=2)
    ops = CpuOps(deterministic=True)
    ops.prepare([weight])
    whole = ops.linear(x, weight, bias)
    for start, count in ((0, 1), (5, 1), (3, 2), (130, 1), (64, 3), (17, 64), (2, 65), (1, 129), (60, 16), (0, 130)):
        assert torch.equal(ops.linear(x[start : start + count], weight, bias), whole[start : start + count]), (start, count)
    torch.set_num_threads(before)


def test_a_deterministic_product_needs_no_preparation():
    weight, x = normal(300, 500), normal(9, 500, seed=1)
    ops = CpuOps(deterministic=True)
    assert torch.equal(ops.linear(x, weight)[:1], ops.linear(x[:1], weight))
    with pytest.raises(ValueError, match="deterministic: no product"):
        ops.linear(x.half(), weight.half())


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_do_not_outlive_a_change(dtype):
    for ops in families(dtype):
        weight, x = normal(32, 16, dtype=dtype), normal(4, 16, dtype=dtype, seed=1)
        ops.prepare([weight])
        weight.mul_(2)  # noticed by its version
        assert (ops.linear(x, weight) - F.linear(x, weight)).abs().max() <= 0.1
        ops.prepare([weight])
        weight.data.mul_(2)  # not noticed: prepared again
        ops.prepare([weight])
        assert (ops.linear(x, weight) - F.linear(x, weight)).abs().max() <= 0.2


def test_the_portable_kernels_can_be_forced(monkeypatch):
    monkeypatch.delenv("PACELINE_KERNELS", raising=False)
    assert choose_backend("cpu", torch.float32, "portable").name == "portable"
    assert choose_backend("cpu", torch.float16).name == "torch" and choose_backend("cpu", torch.float32, "torch").name == "torch"
    monkeypatch.setenv("PACELINE_KERNELS", "portable")
    backend = choose_backend("cpu", torch.float32)
    assert backend.name == "portable" and "PACELINE_KERNELS" in backend.reason
    assert isinstance(ops := ops_for("cpu", torch.float32), CpuOps) and ops.weights.library is None
    monkeypatch.setenv("PACELINE_KERNELS", "fast")
    with pytest.raises(ValueError, match="PACELINE_KERNELS: fast is not one of auto, portable, torch"):
        choose_backend("cpu", torch.float32)


def test_the_reference_refuses_to_be_deterministic():
    with pytest.raises(ValueError, match="deterministic: the torch kernels cannot promise it"):
        ops_for("cpu", torch.float32, deterministic=True, kernels="torch")


def test_no_private_operator_is_assumed_to_exist(monkeypatch):
    """As on a machine whose torch was built without MKL and oneDNN."""
    monkeypatch.setattr(products, "_operator", lambda namespace, name: None)
    products.find_library.cache_clear()
    try:
        for dtype in DTYPES:
            backend = choose_backend("cpu", dtype)
            assert backend.name == "portable" and ("no library here" in backend.reason or "PACELINE" in backend.reason)
    finally:
        products.find_library.cache_clear()


def test_without_openmp_kernels_run_on_one_thread(monkeypatch):
    """As on macOS, where the runtime cannot be reached."""
    weight, x = normal(640, 640), normal(40, 640, seed=1)
    ops = CpuOps()
    ops.prepare([weight])
    expected = ops.linear(x, weight)
    monkeypatch.setattr(call, "_FORK", None)
    assert torch.equal(ops.linear(x, weight), expected)
