"""Masks of attention on a CPU: which keys a row of a draft tree sees, as bits of two words."""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import intrinsic

from paceline.kernels.cpu.jit.base import inlined


@intrinsic
def count_ones(typingctx, bits):  # type: ignore[no-untyped-def]
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.ctpop(args[0])

    return types.int64(types.uint64), codegen


@inlined
def row_position(mask, r, context, first, causal):  # type: ignore[no-untyped-def]
    """Position of a row's token: of a tree row, the last one of its path."""
    return context + (first + r if causal else count_ones(mask[r, 0]) + count_ones(mask[r, 1]) - 1)


@inlined
def newest_bits(low, high, count):  # type: ignore[no-untyped-def]
    """The `count` highest bits that are set in a row's mask: its nearest ancestors and itself."""
    for _ in range(count_ones(low) + count_ones(high) - count):
        if low:
            low &= low - np.uint64(1)
        else:
            high &= high - np.uint64(1)
    return low, high


@inlined
def is_chain(mask):  # type: ignore[no-untyped-def]
    """Whether each of these rows sees all positions behind the context up to a last one."""
    one = np.uint64(1)
    for r in range(mask.shape[0]):
        low, high = mask[r, 0], mask[r, 1]
        if low & (low + one) or high & (high + one) or (high and low + one):
            return False
    return True


@inlined
def span_bits(mask):  # type: ignore[no-untyped-def]
    """How far behind the context these rows look: their highest bit + 1."""
    low, high = np.uint64(0), np.uint64(0)
    for r in range(mask.shape[0]):
        low |= mask[r, 0]
        high |= mask[r, 1]
    word, length = (high, 64) if high else (low, 0)
    while word:
        word >>= np.uint64(1)
        length += 1
    return length


@inlined
def low_bits(count):  # type: ignore[no-untyped-def]
    """The lowest `count` bits, none to all."""
    if count <= 0:
        return np.uint64(0)
    return np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(max(0, 64 - count))


@inlined
def visible_bits(low, high, context):  # type: ignore[no-untyped-def]
    """Bit j: the row sees the block's key j. `context` keys (all the more if beyond 64; none, and some of the segment's keys lie
    before the block, if negative) come before the one that bit 0 of the mask is about."""
    if context >= 64:
        return low_bits(64)
    if context >= 0:
        return low_bits(context) | (low << np.uint64(context))
    if context > -64:
        return (low >> np.uint64(-context)) | (high << np.uint64(64 + context))
    return high >> np.uint64(-context - 64) if context > -128 else np.uint64(0)


@inlined
def hide_unseen(s, total, seen):  # type: ignore[no-untyped-def]
    """Scores whose bit is not set become -inf."""
    if seen & (seen + np.uint64(1)) == 0:  # the lowest bits, as for every row that sees a plain context
        for j in range(count_ones(seen), total):
            s[j] = -np.inf
        return
    for j in range(total):
        if (seen >> np.uint64(j)) & np.uint64(1) == 0:
            s[j] = -np.inf
