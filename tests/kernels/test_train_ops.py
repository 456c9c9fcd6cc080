"""What the trainer computes with: values and gradients against the plain torch reference and autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from packed import HEADS, KV_HEADS, assert_same, normal, rows_of, tables

from paceline.kernels import TorchOps, apply_rope
from paceline.kernels.reference.packed_attention import (
    PackedPlan,
    _strictly_deterministic,
    group_by_length,
    join_rotated,
    packed_attention,
)
from paceline.kernels.reference.training import TrainOps

LENGTHS = (5, 1, 30, 5, 29, 2, 31, 140, 7)
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 4e-2}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", [(7, 24), (5, 3, 16)])
def test_rms_norm(dtype, shape):
    x, residual, weight = (normal(*s, dtype=dtype, seed=i) for i, s in enumerate((shape, shape, shape[-1:])))
    ours, reference = ([lambda x, w, ops=ops: ops.rms_norm(x, w, 1e-5),
                        lambda x, r, w, ops=ops: ops.add_rms_norm(x, r, w, 1e-5)[0],
                        lambda x, r, ops=ops: ops.add_rms_norm(x, r, weight, 1e-5)[1]] for ops in (TrainOps(), TorchOps()))
    for one, other, inputs in zip(ours, reference, ([x, weight], [x, residual, weight], [x, residual]), strict=True):
        assert_same(one, other, inputs, TOLERANCE[dtype])


def test_a_frozen_norm_gets_no_gradient():
    x, weight = normal(4, 8), normal(8, seed=1).detach()
    TrainOps().rms_norm(x, weight, 1e-5).sum().backward()
    assert x.grad is not None and weight.grad is None


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_silu_mul(dtype, narrow):
    assert_same(TrainOps(narrow).silu_mul, TorchOps().silu_mul, [normal(9, 40, dtype=dtype)], TOLERANCE[dtype])


def one_by_one(q, k, v, cos, sin, lengths):
    q, k = (apply_rope(x, cos, sin).to(v.dtype) for x in (q, k))
    out = []
    for parts in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        a, b, c = (x.transpose(0, 1)[None] for x in parts)
        out.append(F.scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("lengths", [LENGTHS, (6, 6, 6), (3,)])
def test_packed_attention_equals_one_sequence_at_a_time(dtype, lengths):
    cos, sin = tables(lengths, dtype)
    plan = PackedPlan(lengths, torch.device("cpu"))

    def packed(q, k, v):
        return packed_attention(join_rotated(q, k, v, cos, sin), HEADS, KV_HEADS, plan)

    assert_same(packed, lambda q, k, v: one_by_one(q, k, v, cos, sin, lengths), rows_of(lengths, dtype), TOLERANCE[dtype])


def test_sequences_do_not_see_each_other():
    q, k, v = rows_of(LENGTHS, torch.float64)
    plan = PackedPlan(LENGTHS, torch.device("cpu"))
    out = packed_attention(join_rotated(q, k, v, *tables(LENGTHS, torch.float64)), HEADS, KV_HEADS, plan)
    third = slice(sum(LENGTHS[:2]), sum(LENGTHS[:3]))
    seen = torch.autograd.grad(out[third].sum(), v)[0].abs().amax(dim=(1, 2)) > 0
    assert seen[third].all() and int(seen.sum()) == LENGTHS[2]


def test_groups_hold_all_and_waste_little():
    lengths = [int(x) for x in torch.randint(1, 400, (200,), generator=torch.Generator().manual_seed(0))]
    groups = group_by_length(lengths)
    assert sum(group.size for group in groups) == len(lengths)
    assert sum(group.size * group.longest for group in groups) < 1.5 * sum(lengths)
    assert len(groups) < 20


@pytest.mark.parametrize(("enabled", "warns", "inside"), [
    (False, False, (False, False)), (True, True, (True, False)), (True, False, (True, False))])
def test_attentions_gradient_is_deterministic_where_others_only_warn(enabled, warns, inside):
    """PyTorch's own switch leaves it as it is if algorithms that are not deterministic cause warnings instead of errors."""

    def flags() -> tuple[bool, bool]:
        return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

    torch.use_deterministic_algorithms(enabled, warn_only=warns)
    try:
        with _strictly_deterministic():
            assert flags() == inside
        assert flags() == (enabled, warns)
    finally:
        torch.use_deterministic_algorithms(False)
