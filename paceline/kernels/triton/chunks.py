# mypy: allow-untyped-defs
"""The chunks of fixed attention: where the keys of a row are cut. The boundaries depend on the position alone."""

from __future__ import annotations

import triton
import triton.language as tl


def chunks_until(length: int) -> int:
    """Number of chunks of a context of `length` keys: chunks of 128 keys up to position 2048, of 256 up to 8192, then sixteen per
    doubling of the position."""
    if length <= 2048:
        return -(-length // 128)
    if length <= 4096:
        return 16 + -(-(length - 2048) // 256)
    octave = ((length - 1) // 4096).bit_length() - 1
    return 24 + 16 * octave + -(-(length - (4096 << octave)) // (256 << octave))


@triton.jit
def chunk_start(chunk):
    """Position of the first key of a chunk."""
    octave = tl.maximum(chunk - 24, 0) // 16
    late = (4096 + (chunk - 24) % 16 * 256) << octave
    return tl.where(chunk < 16, chunk * 128, tl.where(chunk < 24, chunk * 256 - 2048, late))


@triton.jit
def chunk_of(position):
    """The chunk in which a position lies."""
    octave = position * 0
    for i in tl.static_range(12):
        octave += (position >= (8192 << i)).to(tl.int32)
    late = 24 + 16 * octave + ((position >> octave) - 4096) // 256
    return tl.where(position < 2048, position // 128, tl.where(position < 4096, 8 + position // 256, late))
