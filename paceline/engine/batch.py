"""One step as a flat list of rows: the decode rows (roots and drafted nodes) first, then chunks of prompts.

Device-side positions come from the slot state, so the host can prepare a step before it knows how the last one ended.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.drafters.tree import DraftTree
from paceline.engine.scheduler import Prefill, StepPlan
from paceline.engine.state import SlotState
from paceline.kernels import SamplingTensors, Segments


class Rows(NamedTuple):
    tokens: Tensor  # [R] int64
    positions: Tensor  # [R] int64
    write: Tensor  # [R] int64 token slot where this row's key, value and features go
    segments: Segments
    num_decode: int  # rows that are sampled, padding included
    slots: Tensor  # [num_decode] int64 slot of each decode row
    requests: Tensor  # [B] int64 slot of each decode request


def build_rows(plan: StepPlan, tree: DraftTree, state: SlotState, page_size: int, trash: int,
               sizes: tuple[int, ...] = ()) -> Rows:
    """`sizes`: the row counts that decode rows are padded to (empty: no padding)."""
    device = state.device
    requests = torch.tensor([item.request.slot for item in plan.decode], dtype=torch.int64, device=device)
    slots = requests[tree.request]
    context = state.context[slots]
    tokens = torch.where(tree.depths == 0, state.last_token[slots], tree.tokens)
    positions = context + tree.depths
    write = state.cache_index(slots, context + tree.node, page_size)
    length = torch.zeros_like(requests).index_add_(0, tree.request, torch.ones_like(tree.request))
    segments = Segments(row=(length.cumsum(0) - length).int(), length=length.int(), slot=requests.int(),
                        context=state.context[requests].int(), causal=torch.zeros_like(requests, dtype=torch.bool),
                        mask=tree.mask)
    padding = padded(len(tokens), sizes) - len(tokens)
    if padding:
        slots = _extend(slots, padding, state.padding)
        tokens, positions, write = (_extend(x, padding, fill) for x, fill in ((tokens, 0), (positions, 0), (write, trash)))
        segments = segments._replace(mask=torch.cat([segments.mask, segments.mask.new_zeros(padding, 2)]))
    rows = Rows(tokens, positions, write, segments, len(tokens), slots, requests)
    return _with_prefill(rows, plan.prefill, state, page_size) if plan.prefill else rows


def padded(rows: int, sizes: tuple[int, ...]) -> int:
    """The smallest size that holds `rows`; beyond the largest, as it is."""
    index = bisect_left(sizes, rows)
    return sizes[index] if index < len(sizes) else rows


def sampling_tensors(rows: Rows, state: SlotState) -> SamplingTensors:
    slots = rows.slots
    return SamplingTensors(seed=state.seed[slots], position=rows.positions[: rows.num_decode] + 1,
                           temperature=state.temperature[slots], top_k=state.top_k[slots], top_p=state.top_p[slots],
                           min_p=state.min_p[slots])


def _with_prefill(rows: Rows, prefill: list[Prefill], state: SlotState, page_size: int) -> Rows:
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
    new_tokens, new_positions, new_slots = (torch.tensor(x, device=state.device) for x in (tokens, positions, slots))
    chunks = torch.tensor([(row, item.num_rows, item.request.slot, item.start)
                           for row, item in zip(starts, prefill, strict=True)], dtype=torch.int32, device=state.device)
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


def _extend(x: Tensor, count: int, fill: int) -> Tensor:
    return torch.cat([x, x.new_full((count,), fill)])
