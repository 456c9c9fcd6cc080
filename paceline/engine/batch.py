"""One step as a flat list of rows: the decode rows (roots and drafted nodes) first, then chunks of prompts.

Device-side positions come from the slot state, so the host can prepare a step before it knows how the last one ended.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import torch

from paceline.engine.scheduler import Prefill
from paceline.engine.state import SlotState
from paceline.kernels import DecodeRows, Segments
from paceline.kernels.reference.tree_rows import cache_index
from paceline.kernels.upload import upload


def padding(rows: int, sizes: tuple[int, ...]) -> int:
    """Rows missing to the smallest size that holds them; beyond the largest, none."""
    index = bisect_left(sizes, rows)
    return sizes[index] - rows if index < len(sizes) else 0


def with_prefill(rows: DecodeRows, prefill: list[Prefill], state: SlotState) -> DecodeRows:
    """Behind the decode rows, one causal segment per chunk. They are not sampled after."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts: list[int] = []
    for request, start, count in prefill:
        starts.append(len(rows.tokens) + len(tokens))
        tokens += request.tokens[start : start + count]
        positions += range(start, start + count)
        slots += [request.slot] * count
    new_tokens, new_positions, new_slots = upload(np.array([tokens, positions, slots]), state.device)
    chunks = upload(np.array([(row, item.num_rows, item.request.slot, item.start)
                              for row, item in zip(starts, prefill, strict=True)], np.int32), state.device)
    old = rows.segments
    row, length, slot, context = (
        torch.cat([field, chunks[:, i]]) for i, field in enumerate((old.row, old.length, old.slot, old.context)))
    segments = Segments(
        row, length, slot, context,
        causal=torch.cat([old.causal, torch.ones(len(chunks), dtype=torch.bool, device=state.device)]),
        mask=torch.cat([old.mask, old.mask.new_zeros(len(tokens), 2)]))
    return rows._replace(
        tokens=torch.cat([rows.tokens, new_tokens]), positions=torch.cat([rows.positions, new_positions]),
        write=torch.cat([rows.write, cache_index(state.tensors, new_slots, new_positions)]), segments=segments)
