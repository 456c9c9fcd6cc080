"""One step as a flat list of rows: the decode rows (roots and drafted nodes) first, then chunks of prompts.

Device-side positions come from the slot state, so the host can prepare a step before it knows how the last one ended.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.drafters.tree import DraftTree
from paceline.engine.scheduler import Prefill
from paceline.engine.state import SlotState
from paceline.engine.transfer import upload
from paceline.kernels import SamplingTensors, Segments


class Rows(NamedTuple):
    tokens: Tensor  # [R] int64
    positions: Tensor  # [R] int64
    write: Tensor  # [R] int64 token slot where this row's key, value and features go
    segments: Segments
    slots: Tensor  # [decode rows] int64 slot of each decode row
    requests: Tensor  # [B] int64 slot of each decode request


def decode_rows(requests: Tensor, tree: DraftTree, state: SlotState, page_size: int) -> Rows:
    """The decode rows of one step. requests [B]: slots of those that `tree` speaks of."""
    slots = requests[tree.request]
    context = state.context[slots]
    length = torch.zeros_like(requests).index_add_(0, tree.request, torch.ones_like(tree.request))
    segments = Segments(row=(length.cumsum(0) - length).int(), length=length.int(), slot=requests.int(),
                        context=state.context[requests].int(), causal=torch.zeros_like(requests, dtype=torch.bool),
                        mask=tree.mask)
    return Rows(tokens=torch.where(tree.depths == 0, state.last_token[slots], tree.tokens), positions=context + tree.depths,
                write=state.cache_index(slots, context + tree.node, page_size), segments=segments, slots=slots,
                requests=requests)


def padding(rows: int, sizes: tuple[int, ...]) -> int:
    """Rows missing to the smallest size that holds them; beyond the largest, none."""
    index = bisect_left(sizes, rows)
    return sizes[index] - rows if index < len(sizes) else 0


def sampling_tensors(rows: Rows, state: SlotState) -> SamplingTensors:
    slots = rows.slots
    return SamplingTensors(seed=state.seed[slots], position=rows.positions[: len(slots)] + 1,
                           temperature=state.temperature[slots], top_k=state.top_k[slots], top_p=state.top_p[slots],
                           min_p=state.min_p[slots])


def with_prefill(rows: Rows, prefill: list[Prefill], state: SlotState, page_size: int) -> Rows:
    """Behind the decode rows, one causal segment per chunk."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts: list[int] = []
    for request, start, count in prefill:
        starts.append(len(rows.tokens) + len(tokens))
        tokens += request.tokens[start : start + count]
        positions += range(start, start + count)
        slots += [request.slot] * count
    new_tokens, new_positions, new_slots = (upload(x, state.device) for x in (tokens, positions, slots))
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
        write=torch.cat([rows.write, state.cache_index(new_slots, new_positions, page_size)]), segments=segments)
