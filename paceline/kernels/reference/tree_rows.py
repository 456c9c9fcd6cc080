"""Trees as rows, in plain torch: drafts to rows, rows to what the model reads, samples to accepted paths. What the fused
kernels of a GPU must equal. Nothing here reads the device."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.base import DecodeRows, DraftTree, Drawn, SamplingTensors, Segments, SlotTensors


def cache_index(of: SlotTensors, slots: Tensor, positions: Tensor) -> Tensor:
    """Token slot in the paged store of (request, position), element by element."""
    return of.page_table[slots, positions // of.page_size].long() * of.page_size + positions % of.page_size


def flatten(tokens: Tensor, parents: Tensor, depths: Tensor, draft: Tensor, tree: DraftTree, max_depth: int) -> None:
    """See `base.Ops.flatten`."""
    line, column, is_root = draft[tree.request], (tree.node - 1).clamp_min(0), tree.node == 0
    root = tree.first[tree.request]
    tree.tokens.copy_(torch.where(is_root, 0, tokens[line, column]))
    tree.depths.copy_(torch.where(is_root, 0, depths[line, column]))
    tree.parents.copy_(torch.where(is_root, root, root + 1 + parents[line, column]))
    tree.mask.copy_(ancestor_masks(tree.parents, tree.node, max_depth))


def ancestor_masks(parents: Tensor, node: Tensor, max_depth: int) -> Tensor:
    """[R, 2] int64: bit i is set when node i of the same request lies on the way from the root to this row."""
    own, above = bit(node), parents
    mask = own
    for _ in range(max_depth):  # walk up one generation at a time; roots stay where they are
        mask = mask | own[above]
        above = parents[above]
    return mask


def bit(index: Tensor) -> Tensor:
    """[...] -> [..., 2] int64 words with that one bit."""
    one = torch.ones_like(index)
    return torch.stack([torch.where(index < 64, one << index.clamp_max(63), 0),
                        torch.where(index >= 64, one << (index - 64).clamp_min(0), 0)], dim=-1)


def build_rows(slots: Tensor, tree: DraftTree, of: SlotTensors) -> DecodeRows:
    """See `base.Ops.build_rows`."""
    slot = slots[tree.request]
    context = of.context[slot]
    segments = Segments(row=tree.first.int(), length=tree.length.int(), slot=slots.int(), context=of.context[slots].int(),
                        causal=torch.zeros_like(slots, dtype=torch.bool), mask=tree.mask)
    positions = context + tree.depths
    sampling = SamplingTensors(of.seed[slot], positions + 1, of.temperature[slot], of.top_k[slot], of.top_p[slot], of.min_p[slot])
    return DecodeRows(torch.where(tree.depths == 0, of.last_token[slot], tree.tokens), positions,
                      cache_index(of, slot, context + tree.node), segments, sampling)


def advance(slots: Tensor, tree: DraftTree, of: SlotTensors, sampled: Tensor, logprobs: Tensor, raw: Tensor | None,
            max_depth: int) -> Drawn:
    """See `base.Ops.advance`."""
    path, count = walk(tree, sampled, max_depth)
    source, target = _moves(slots, tree, of, path, count) if max_depth else (path, path)
    last = path.gather(1, (count - 1).clamp_min(0)[:, None])[:, 0]
    of.context[slots] += count
    of.context[len(of.context) - 1 :].zero_()
    of.last_token[slots] = sampled[last].clamp_min(0)
    return Drawn(sampled[path], logprobs[path], None if raw is None else raw[path], count, source, target)


def _moves(slots: Tensor, tree: DraftTree, of: SlotTensors, path: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Accepted nodes belong at the end of the context, side by side. (from, to), both [B, D + 1]."""
    context = of.context[slots][:, None]
    depth, node = torch.arange(path.shape[1], device=slots.device), tree.node[path]
    moves = (depth < count[:, None]) & (node != depth)
    where = slots[:, None].expand_as(node)
    target = cache_index(of, where, context + torch.where(moves, depth, 0))
    return torch.where(moves, cache_index(of, where, context + torch.where(moves, node, 0)), target), target


def walk(tree: DraftTree, sampled: Tensor, max_depth: int) -> tuple[Tensor, Tensor]:
    """(row of the accepted node at each depth [B, D + 1], beyond the count the root's; accepted rows [B])."""
    if max_depth == 0:  # roots only
        return tree.first[:, None], tree.length
    follows = (tree.depths == 0) | (tree.tokens == sampled[tree.parents])
    alive = follows
    for _ in range(max_depth):
        alive = follows & alive[tree.parents]
    # At most one row per depth is alive: siblings carry distinct tokens. The dead go to a column that is cut off.
    width = max_depth + 2
    column = torch.where(alive, tree.depths, max_depth + 1)
    path = tree.first[:, None].repeat(1, width)
    path.view(-1).scatter_(0, tree.request * width + column, torch.arange(len(tree.tokens), device=sampled.device))
    count = torch.zeros_like(tree.first).index_add_(0, tree.request, alive.long())
    return path[:, :-1], count
