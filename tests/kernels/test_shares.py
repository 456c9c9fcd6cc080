"""Products whose depth is cut into shares: one call has the bits of one product after another, summed as a tree."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from paceline.kernels.cpu.ops import CpuOps
from paceline.kernels.reference.ops import add_in_tree, at_least_float32


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 33])
@pytest.mark.parametrize(("width", "depth", "shares"), [(96, 64, 8), (700, 2048, 4), (33, 24, 1), (50, 30, 8), (40, 6, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_bits_of_one_product_after_another(dtype, width, depth, shares, num_rows, threads):
    draw = torch.Generator().manual_seed(depth)
    weight, x = (torch.randn(rows, depth, generator=draw).to(dtype) for rows in (width, num_rows))
    ops, before = CpuOps(deterministic=True), torch.get_num_threads()
    ends = [depth * i // shares for i in range(shares + 1)]
    parts = [ops.linear(x[:, a:b].contiguous(), weight[:, a:b].contiguous()) if a < b else x.new_zeros(num_rows, width)
             for a, b in pairwise(ends)]
    torch.set_num_threads(threads)
    try:
        found = ops.linear_shares(x, weight, shares)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, add_in_tree([at_least_float32(part) for part in parts]))
    assert torch.equal(found[:1], ops.linear_shares(x[:1], weight, shares)), "rows do not depend on each other"
