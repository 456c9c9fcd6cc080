"""Inputs of the operations of training on packed sequences, and the comparison of values and gradients."""

from __future__ import annotations

import torch

HEADS, KV_HEADS, DIM = 4, 2, 8


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


def rows_of(lengths: tuple[int, ...], dtype: torch.dtype, device: str = "cpu", dim: int = DIM) -> list[torch.Tensor]:
    total = sum(lengths)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return [normal(total, count, dim, dtype=dtype, seed=i, device=device) for i, count in enumerate(heads)]


def tables(lengths: tuple[int, ...], dtype: torch.dtype, device: str = "cpu",
           dim: int = DIM) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.cat([torch.arange(n) for n in lengths])[:, None] * torch.linspace(1.0, 0.1, dim // 2)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return angles.cos().to(device, wide), angles.sin().to(device, wide)
