"""The self-check of exact products, without a GPU: which differences it finds, what serves a shape afterwards, and that torch's
switches are put back. The library and Paceline's own kernel are replaced by products that are computed row by row, so that they
have the same bits for every number of rows unless a test makes them differ."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from interpreted import DEVICE
from torch import Tensor

from paceline.kernels.triton import exact, linear
from paceline.kernels.triton.ops import TritonOps

SWITCHES = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
pytestmark = pytest.mark.usefixtures("triton_device")


def by_row(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.stack([F.linear(row[None], weight, bias)[0] for row in x])


def different_at(wrong: Callable[[int], bool]) -> Callable[..., Tensor]:
    """A product in which one bit differs if `wrong` is true of its number of rows."""

    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = by_row(x, weight, bias)
        if wrong(len(x)):
            out.view(torch.uint8)[0, -out.element_size()] ^= 1  # the last bit of the row's last value
        return out

    return product


# -- rows_agree


def test_products_without_a_difference_agree():
    assert exact.rows_agree(by_row, torch.randn(8, 24))


@pytest.mark.parametrize("rows", exact.CHECKED_ROWS)
def test_one_last_bit_at_one_number_of_rows_is_found(rows):
    weight, calls = torch.randn(8, 24), Counter[int]()

    def is_wrong(num_rows: int) -> bool:
        calls[num_rows] += 1
        return num_rows == rows and calls[num_rows] == 1  # of the largest one, which is computed twice, once

    assert not exact.rows_agree(different_at(is_wrong), weight)


# -- torch's switches


class Blas:
    """In place of `torch.backends.cuda.preferred_blas_library`, which refuses cuBLASLt on a CPU."""

    def __init__(self, library: str) -> None:
        self.library = library

    def __call__(self, library: str | None = None) -> str:
        self.library = library or self.library
        return self.library


def switches() -> dict[str, tuple[bool, bool]]:
    matmul = torch.backends.cuda.matmul
    return {name: (getattr(matmul, name), getattr(matmul, f"{name}_split_k")) for name in SWITCHES}


@pytest.fixture(params=[(True, True), (False, True), (False, False)], ids=str)
def before(request, monkeypatch):
    """The switches as a caller may have set them: whether reductions in half precision, and split-K, are allowed."""
    own, matmul = switches(), torch.backends.cuda.matmul
    blas = Blas("cublas")
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", blas)
    matmul.allow_bf16_reduced_precision_reduction = request.param
    yield SimpleNamespace(blas=blas, switches=switches())
    for name, value in own.items():
        setattr(matmul, name, value)


def test_switches_are_off_inside_and_put_back_afterwards(before):
    with exact.without_split_k():
        assert set(switches().values()) == {(False, False)} and before.blas.library == "cublaslt"
    assert switches() == before.switches and before.blas.library == "cublas"


def test_switches_are_put_back_after_an_exception(before):
    with pytest.raises(KeyError, match="inside"), exact.without_split_k():
        raise KeyError("inside")
    assert switches() == before.switches and before.blas.library == "cublas"
    with pytest.raises(RuntimeError, match="shapes"):
        exact.library_linear(torch.zeros(3, 8), torch.zeros(4, 9))
    assert switches() == before.switches and before.blas.library == "cublas"


# -- what serves a shape


class Products:
    """Counts the calls of the library and of Paceline's own kernel by the shape of the weight."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.library, self.own = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()
        self.bad: set[tuple[int, ...]] = set()
        """Shapes for which the library has other bits from 100 rows on."""
        self.own_is_bad = False
        monkeypatch.setattr(exact, "library_linear", self.library_linear)
        monkeypatch.setattr(exact, "library_parts", self.library_parts)
        monkeypatch.setattr(linear, "linear", self.own_linear)

    def library_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        shape = tuple(weight.shape)
        self.library[shape] += 1
        return different_at(lambda rows: shape in self.bad and rows >= 100)(x, weight, bias)

    def library_parts(self, x: Tensor, weight: Tensor, shares: int) -> Tensor:
        first = self.library_linear(x, weight).float()
        return torch.stack([first, *[torch.zeros_like(first)] * (shares - 1)])

    def own_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, *_: object) -> Tensor:
        self.own[tuple(weight.shape)] += 1
        return different_at(lambda rows: self.own_is_bad and rows == 40)(x, weight, bias)

    def reset(self) -> None:
        self.library.clear()
        self.own.clear()


@pytest.fixture
def products(monkeypatch):
    return Products(monkeypatch)


@pytest.fixture
def ops(triton_device):
    """As on a GPU, with the library for many rows."""
    made = TritonOps(DEVICE, max_context=64)
    made._uses_library = True
    return made


def weight_of(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns).half()


def test_a_shape_that_fails_the_check_is_served_by_own_kernels_from_then_on(products, ops, caplog):
    caplog.set_level(logging.INFO, "paceline.kernels.triton.ops")
    good, bad = weight_of(16, 16), weight_of(24, 16)
    products.bad.add((24, 16))
    ops.prepare([good, bad, bad.clone()])
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "products of (24, 16) differ" in record.getMessage()
    products.reset()
    x = torch.randn(200, 16).half()
    assert torch.equal(ops.linear(x, bad), by_row(x, bad)) and torch.equal(ops.linear(x, good), by_row(x, good))
    assert products.library == {(16, 16): 1} and products.own == {(24, 16): 1}


def test_every_shape_and_dtype_is_checked_once(products, ops, caplog):
    products.bad.add((24, 16))
    weight = weight_of(24, 16)
    ops.prepare([weight])
    products.reset()
    ops.prepare([weight, weight.clone()])  # as after every update of the policy's weights
    assert not products.library and not products.own and len(caplog.records) == 1
    ops.prepare([weight.bfloat16()])
    assert products.library and len(caplog.records) == 2


def test_a_product_next_to_a_norm_does_without_the_library_as_well(products, ops):
    """The weight has many more columns than rows. For such a shape `linear_norm` adds up several shares of K, and each share is
    a product of the library until the self-check fails."""
    weight, norm = weight_of(64, 384), torch.ones(64).half()
    x, residual = torch.randn(80, 384).half() / 8, torch.zeros(80, 64).half()
    assert linear.shares_of(64, 384) > 1
    for expected in ("library", "own"):
        products.reset()
        ops.linear_norm(x, weight, None, residual, norm, 1e-5)
        assert {name for name in ("library", "own") if getattr(products, name)} == {expected}
        products.bad.add((64, 384))
        ops.prepare([weight])


def test_it_is_an_error_if_own_kernels_differ_too(products, ops, caplog):
    products.bad.add((24, 16))
    products.own_is_bad = True
    ops.prepare([weight_of(24, 16)])
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.ERROR]
    assert "own kernels, too" in caplog.records[-1].getMessage()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_the_library_never_serves_gives_no_warning(products, ops, caplog, dtype):
    products.bad.add((24, 16))
    ops.prepare([weight_of(24, 16).to(dtype)])
    assert not products.library and not caplog.records
