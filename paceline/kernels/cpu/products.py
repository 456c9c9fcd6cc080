"""Matrix products on a CPU: our own kernel on panels, or in bfloat16 oneDNN's where the processor multiplies bfloat16 itself.

In float32 our kernel is as fast as MKL's packed product and faster than OpenBLAS's, so there it is the only one: the sums of a
row do not depend on the rows beside it, and nothing private of torch is needed. In bfloat16 it widens to float32, which a
processor with matrix instructions for bfloat16 outruns; `find_library` asks once whether torch can use them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache as memoise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.cpu.call import Program, address, run
from paceline.kernels.cpu.jit.matmul import panels
from paceline.kernels.reference.ops import add_in_tree, at_least_float32

LIBRARY_ROWS = 6
"""From so many rows on, a library's product is faster than ours: below, reading the weights is what takes the time."""
_PACKED_ROWS = 64  # what oneDNN lays the weights out for
PARALLEL_PRODUCTS = 1 << 20
"""A product takes one thread if it has fewer multiplications."""


class Library(NamedTuple):
    """A packed matrix product of torch's, for one dtype."""

    name: str
    pack: Callable[[Tensor], Tensor]
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor]  # x, packed, bias


@memoise
def find_library(dtype: torch.dtype) -> Library | None:
    """The library whose product outruns ours for this dtype on this machine; None: there is none."""
    pack, product = _operator("mkldnn", "_reorder_linear_weight"), _operator("mkldnn", "_linear_pointwise")
    supported = _operator("mkldnn", "_is_mkldnn_bf16_supported")
    if dtype != torch.bfloat16 or None in (pack, product, supported) or not supported():
        return None
    return Library("oneDNN", lambda weight: pack(weight, _PACKED_ROWS),
                   lambda x, packed, bias: product(x, packed, bias, "none", [], ""))


def _operator(namespace: str, name: str) -> Any:
    """An operator of torch's, or None where this build does not have it."""
    return getattr(getattr(torch.ops, namespace), name, None)


class Weights:
    """Second copies of weights in the layouts that products read, by weight.

    A copy is stale once the weight has been written in place; that is noticed by the tensor's version counter (not for inference
    tensors or writes through `.data`: `prepare` must be called then).
    """

    def __init__(self, library: Library | None) -> None:
        self.library = library
        self._copies: dict[int, _Copy] = {}
        self._shares: dict[tuple[int, int], Shares] = {}

    def prepare(self, weights: list[Tensor]) -> None:
        """Copy these weights [N, K], or [E, N, K] of experts; copies of others are dropped."""
        self._shares.clear()
        self._copies = {id(weight): _Copy(weight, self.library) for weight in weights if _usable(weight)}

    def find(self, weight: Tensor) -> _Copy | None:
        """The copy of this weight; None: there is none, or it is stale."""
        copy = self._copies.get(id(weight))
        return None if copy is None or copy.is_stale() else copy

    def find_or_make(self, weight: Tensor) -> _Copy:
        """The copy of this weight, made where there is none."""
        copy = self.find(weight)
        if copy is None:
            copy = self._copies[id(weight)] = _Copy(weight, self.library)
        return copy

    def shares(self, weight: Tensor, count: int) -> Shares:
        """The product with this weight in so many shares of its depth."""
        found = self._shares.get((id(weight), count))
        if found is None or found.is_stale():
            found = self._shares[id(weight), count] = Shares(weight, count)
        return found

    def panels(self, weight: Tensor) -> Tensor | None:
        copy = self.find(weight)
        return None if copy is None else copy.panels


class _Copy:
    def __init__(self, weight: Tensor, library: Library | None) -> None:
        self.weight = weight  # held, so that its id stays its own
        self._version = None if weight.is_inference() else weight._version
        matrices = weight.detach()
        self.panels = panels(matrices) if weight.dim() == 2 else torch.cat([panels(matrix) for matrix in matrices])
        self.packed = None if library is None or weight.dim() != 2 else library.pack(matrices)

    def is_stale(self) -> bool:
        # An inference tensor has no version, and asking for it raises.
        return self._version is not None and self._version != self.weight._version


class Shares:
    """A product whose depth is cut into shares, each of which is one sum; shares are added as a binary tree."""

    def __init__(self, weight: Tensor, count: int) -> None:
        self.weight = weight  # held, so that its id stays its own
        self._version = None if weight.is_inference() else weight._version
        columns = [slice(weight.shape[1] * i // count, weight.shape[1] * (i + 1) // count) for i in range(count)]
        self._parts = [(part, panels(weight.detach()[:, part]) if part.start < part.stop else weight) for part in columns]
        is_even, adds = weight.shape[1] % count == 0, weight.dtype in (torch.float32, torch.float64)
        self._program = self._one_call() if is_even and adds else None

    def is_stale(self) -> bool:
        return self._version is not None and self._version != self.weight._version

    def product(self, x: Tensor) -> Tensor:
        """x [R, K] times the weight [N, K], in float32 or better."""
        num_rows, count = x.shape[0], len(self._parts)
        parts = x.new_zeros(count, num_rows, self.weight.shape[0])
        if self._program is None:
            for out, (columns, own) in zip(parts, self._parts, strict=True):
                if columns.start < columns.stop:
                    panel_product(x[:, columns].contiguous(), own, None, out)
            return add_in_tree(list(at_least_float32(parts).unbind()))
        cut = x.contiguous() if num_rows == 1 else x.unflatten(1, (count, -1)).transpose(0, 1).contiguous()
        places = {f"{name}{i}": tensor.data_ptr() + tensor.nbytes // count * i
                  for name, tensor in (("x", cut), ("out", parts)) for i in range(count)}
        self._program.run(threads_for(num_rows * self.weight.numel()), num_rows=num_rows, **places)
        return parts[0]

    def _one_call(self) -> Program:
        """All products and sums, which end in the first share's place."""
        program, (width, depth), count, dtype = Program(), self.weight.shape, len(self._parts), self.weight.dtype
        for i, (_, own) in enumerate(self._parts):
            program.add("linear", dtype, x=f"x{i}", weight=own.data_ptr(), bias=0, out=f"out{i}", num_rows="num_rows",
                        depth=depth // count, width=width)
        distance = 1
        while distance < count:
            for i in range(0, count, 2 * distance):
                program.add("add", dtype, x=f"out{i}", y=f"out{i + distance}", out=f"out{i}", num_rows="num_rows", width=width)
            distance *= 2
        return program


def _usable(weight: Tensor) -> bool:
    return (weight.device.type == "cpu" and weight.dim() in (2, 3) and weight.is_contiguous() and weight.numel() > 0
            and weight.dtype in (torch.float32, torch.float64, torch.bfloat16))


def panel_linear(x: Tensor, weight: Tensor, weight_panels: Tensor, bias: Tensor | None) -> Tensor:
    """x [R, K] times the weight [N, K] by our own kernel."""
    (num_rows, depth), width = x.shape, weight.shape[0]
    if depth != weight.shape[1]:
        raise ValueError(f"columns of x: {depth} and {weight.shape[1]} should be equal")
    out = x.new_empty(num_rows, width)
    panel_product(x.contiguous(), weight_panels, bias, out)
    return out


def panel_product(x: Tensor, weight_panels: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write x [R, K] times a weight [N, K], given as panels, into out [R, N]. Both are contiguous."""
    (num_rows, depth), width, dtype = x.shape, out.shape[1], x.dtype
    run("linear", dtype, threads_for(num_rows * depth * width), x=x.data_ptr(), weight=weight_panels.data_ptr(),
        bias=address(dtype, bias), out=out.data_ptr(), num_rows=num_rows, depth=depth, width=width)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, weights: Weights, deterministic: bool) -> Tensor:
    """x [R, K] times the weight, by whichever product serves it."""
    if x.dim() != 2 or weight.dim() != 2 or x.dtype != weight.dtype or not _usable(weight):
        if deterministic:
            raise ValueError(f"deterministic: no product for {tuple(x.shape)} {x.dtype} and a weight {tuple(weight.shape)} "
                             f"{weight.dtype}")
        return F.linear(x, weight, bias)
    copy = weights.find_or_make(weight) if deterministic else weights.find(weight)
    if copy is None:
        return F.linear(x, weight, bias)
    if deterministic or copy.packed is None or weights.library is None or x.shape[0] < LIBRARY_ROWS:
        return panel_linear(x, weight, copy.panels, bias)
    return weights.library.product(x, copy.packed, bias)


def threads_for(num_products: int) -> int:
    return 1 if num_products < PARALLEL_PRODUCTS else torch.get_num_threads()
