"""What the trainer computes with: values and gradients against the plain torch reference and autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from paceline.kernels import TorchOps, apply_rope
from paceline.kernels.reference.packed_attention import PackedPlan, join_rotated, packed_attention, similar
from paceline.kernels.reference.train_ops import TrainOps

LENGTHS = (5, 1, 30, 5, 29, 2, 31, 140, 7)
HEADS, KV_HEADS, DIM = 4, 2, 8
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 4e-2}


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(device, dtype).requires_grad_()


def assert_same(make, other, inputs: list[torch.Tensor], tolerance: float) -> None:
    """Equal outputs, and equal gradients of a random projection of them."""
    out, expected = make(*inputs), other(*inputs)
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    direction = normal(*out.shape, dtype=out.dtype, seed=9, device=str(out.device)).detach()
    found, wanted = (torch.autograd.grad(x, inputs, direction) for x in (out, expected))
    for a, b in zip(found, wanted, strict=True):
        scale = float(b.abs().max()) + 1e-6
        torch.testing.assert_close(a / scale, b / scale, rtol=tolerance, atol=tolerance)


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


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_silu_mul(dtype):
    assert_same(TrainOps().silu_mul, TorchOps().silu_mul, [normal(9, 40, dtype=dtype)], TOLERANCE[dtype])


def rows_of(lengths: tuple[int, ...], dtype: torch.dtype, device: str = "cpu", dim: int = DIM) -> list[torch.Tensor]:
    total = sum(lengths)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return [normal(total, count, dim, dtype=dtype, seed=i, device=device) for i, count in enumerate(heads)]


def tables(lengths: tuple[int, ...], dtype: torch.dtype, device: str = "cpu",
           dim: int = DIM) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.cat([torch.arange(n) for n in lengths])[:, None] * torch.linspace(1.0, 0.1, dim // 2)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return angles.cos().to(device, wide), angles.sin().to(device, wide)


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
    groups = similar(lengths)
    assert sum(group.size for group in groups) == len(lengths)
    assert sum(group.size * group.longest for group in groups) < 1.5 * sum(lengths)
    assert len(groups) < 20


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_variable_length_kernel_equals_groups():
    lengths, dim = (200, 3, 77, 1, 512, 40), 64
    cos, sin = tables(lengths, torch.bfloat16, "cuda", dim)
    plan = PackedPlan(lengths, torch.device("cuda"))

    def packed(q, k, v):
        return packed_attention(join_rotated(q, k, v, cos, sin), HEADS, KV_HEADS, plan)

    def wide(q, k, v):
        return packed(q.float(), k.float(), v.float()).to(v.dtype)

    assert_same(packed, wide, rows_of(lengths, torch.bfloat16, "cuda", dim), 4e-2)
