# mypy: allow-untyped-defs
"""Moving accepted tokens to the end of their context in every layer with one launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_WORDS = 8192
"""32-bit words that one program holds: so many of each of a line's tokens."""


class Movables(NamedTuple):
    """Where the tensors lie that are indexed by token slot. Made anew whenever one of them is allocated anew."""

    address: Tensor  # [N] int64
    words: Tensor  # [N] int32: 32-bit words per token slot
    max_words: int


def movables(tensors: list[Tensor]) -> Movables:
    """tensors: each [T, ...], contiguous, a multiple of four bytes per token slot."""
    sizes = [tensor[0].numel() * tensor.element_size() for tensor in tensors]
    for tensor, size in zip(tensors, sizes, strict=True):
        assert tensor.is_contiguous() and size % 4 == 0, (tensor.shape, tensor.dtype)
    device = tensors[0].device
    return Movables(torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64, device=device),
                    torch.tensor([size // 4 for size in sizes], dtype=torch.int32, device=device), max(sizes) // 4)


def move_tokens(where: Movables, source: Tensor, target: Tensor) -> None:
    """Token slots source [B, M] -> target [B, M] int64 in every tensor; a pair of equal slots is left alone. Within a line
    all are read before any is written; lines (requests) must not touch each other's slots."""
    num_lines, num_moves = source.shape
    if num_lines and num_moves:
        moves = triton.next_power_of_2(num_moves)
        words = min(512, TILE_WORDS // moves)
        grid = (num_lines, len(where.address), triton.cdiv(where.max_words, words))
        _move_kernel[grid](where.address, where.words, source.contiguous(), target.contiguous(), num_moves, MOVES=moves,
                           WORDS=words, num_warps=4)


@triton.jit(do_not_specialize=["num_moves"])
def _move_kernel(address, words, source, target, num_moves, MOVES: tl.constexpr, WORDS: tl.constexpr):
    line, which = tl.program_id(0), tl.program_id(1)
    word = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    size = tl.load(words + which)
    i = tl.arange(0, MOVES)
    a = tl.load(source + line * num_moves + i, mask=i < num_moves, other=0)
    b = tl.load(target + line * num_moves + i, mask=i < num_moves, other=0)
    moves = (a != b) & (i < num_moves)
    if (tl.program_id(2) * WORDS >= size) | (tl.max(moves.to(tl.int32), axis=0) == 0):
        return
    base = tl.load(address + which).to(tl.pointer_type(tl.int32))
    wanted = moves[:, None] & (word < size)[None, :]
    value = tl.load(base + a[:, None] * size + word[None, :], mask=wanted, other=0)
    tl.debug_barrier()  # a target may be another pair's source: nothing is written before everything is read
    tl.store(base + b[:, None] * size + word[None, :], value, mask=wanted)
