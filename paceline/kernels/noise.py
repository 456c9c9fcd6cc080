"""Definition of the sampling noise G(seed, position, token): standard Gumbel noise from the counter-based generator Philox
4x32-10.

    key = the seed's two 32-bit halves (low, high)        counter = (token // 4, position mod 2^32, 0, 0)
    x   = output word token % 4, a uint32
    w   = min((float32(x) + 0.5) * 2^-32, 1 - 2^-24)      E = -log(1 - w)      G = -log(E)

The computation uses only IEEE float32 additions, subtractions and multiplications, each rounded separately (no fused
multiply-add), comparisons and bit operations, in the order written here. So the torch, numba and Triton versions agree bit for
bit. G is in (-2.9, 22.9).
"""

from __future__ import annotations

import torch
from torch import Tensor

PHILOX_M = (0xD2511F53, 0xCD9E8D57)
PHILOX_W = (0x9E3779B9, 0xBB67AE85)
MASK32 = 0xFFFFFFFF

W_SCALE = 2.0**-32
W_MAX = 1.0 - 2.0**-24
W_NEAR = 0.29
"""Below this bound 1 - w is in [sqrt(1/2), 1], and log(1 - w) is evaluated as a polynomial in -w, without cancellation."""

# Coefficients of Cephes logf: log(1 + f) = f - f²/2 + f³ P(f) for 1 + f in [sqrt(1/2), sqrt(2)), and ln 2 split in two parts.
LOG_P = (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
         2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1)
LN2_LOW, LN2_HIGH = -2.12194440e-4, 0.693359375
SQRT_HALF_BITS = 0x3F3504F3


def gumbel(seed: Tensor, position: Tensor, token_ids: Tensor) -> Tensor:
    """The noise of each row at each token id: seed [R], position [R], token_ids [V] int64 -> [R, V] float32."""
    vocab = token_ids.shape[0]
    if torch.equal(token_ids, torch.arange(vocab, device=token_ids.device)):
        return gumbel_all(seed, position, vocab)
    words = torch.stack(_words(seed, position, token_ids // 4))  # [4, R, V]
    lane = (token_ids % 4).expand(1, *words.shape[1:])
    return gumbel_from_bits(words.gather(0, lane)[0])


def gumbel_all(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """The noise of each row at tokens 0..vocab-1: [R, vocab] float32. One Philox call serves four adjacent tokens."""
    counters = torch.arange((vocab + 3) // 4, device=seed.device)
    words = torch.stack(_words(seed, position, counters), dim=-1)  # [R, V / 4, 4]
    return gumbel_from_bits(words.flatten(1)[:, :vocab])


def gumbel_from_bits(x: Tensor) -> Tensor:
    """Standard Gumbel noise in float32 from uniform uint32 bits held in int64."""
    w = ((x.to(torch.float32) + 0.5) * W_SCALE).clamp(max=W_MAX)
    k, f = _split(1.0 - w)
    near = w < W_NEAR
    exponential = -_log_reduced(torch.where(near, 0.0, k), torch.where(near, -w, f))
    return -_log_reduced(*_split(exponential))


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox 4x32 with ten rounds. Every word is a uint32 held in an int64 tensor; shapes broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The products need 64 unsigned bits. int64 wraps around, and the mask removes the sign extension of the upper half.
        p0, p1 = c0 * PHILOX_M[0], c2 * PHILOX_M[1]
        c0, c1, c2, c3 = ((p1 >> 32) & MASK32) ^ c1 ^ k0, p1 & MASK32, ((p0 >> 32) & MASK32) ^ c3 ^ k1, p0 & MASK32
        k0, k1 = (k0 + PHILOX_W[0]) & MASK32, (k1 + PHILOX_W[1]) & MASK32
    return c0, c1, c2, c3


def _words(seed: Tensor, position: Tensor, counter: Tensor) -> tuple[Tensor, ...]:
    """Philox output words for seeds and positions [R] at counters [C]: four tensors [R, C]."""
    seed, position = seed[:, None], position[:, None] & MASK32
    zero = torch.zeros_like(position)
    return philox4x32((counter[None, :] + zero, position, zero, zero), (seed & MASK32, (seed >> 32) & MASK32))


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Decompose a positive normal x = 2^k (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)); returns (k, f), both float32."""
    bits = x.view(torch.int32)
    k = (bits - SQRT_HALF_BITS) >> 23
    return k.to(torch.float32), (bits - (k << 23)).view(torch.float32) - 1.0


def _log_reduced(k: Tensor, f: Tensor) -> Tensor:
    """log(2^k (1 + f)). The order of operations is part of the definition: do not regroup them."""
    z = f * f
    p = torch.full_like(f, LOG_P[0])
    for c in LOG_P[1:]:
        p = p * f
        p = p + c
    y = p * f
    y = y * z
    y = y + k * LN2_LOW
    y = y - z * 0.5
    y = f + y
    return y + k * LN2_HIGH
