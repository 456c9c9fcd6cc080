"""Training operations that exist only on a CUDA device."""

from __future__ import annotations

import torch
from packed import HEADS, KV_HEADS, assert_same, rows_of, tables

from paceline.kernels.reference.packed_attention import PackedPlan, join_rotated, packed_attention


def test_variable_length_kernel_equals_groups():
    lengths, dim = (200, 3, 77, 1, 512, 40), 64
    cos, sin = tables(lengths, torch.bfloat16, "cuda", dim)
    plan = PackedPlan(lengths, torch.device("cuda"))

    def packed(q, k, v):
        return packed_attention(join_rotated(q, k, v, cos, sin), HEADS, KV_HEADS, plan)

    def wide(q, k, v):
        return packed(q.float(), k.float(), v.float()).to(v.dtype)

    assert_same(packed, wide, rows_of(lengths, torch.bfloat16, "cuda", dim), 4e-2)
