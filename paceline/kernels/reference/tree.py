"""Draft trees in plain torch: writing drafts into rows, building a step's rows, and verification. The compiled backends must
return exactly the same tensors. Nothing here synchronises with the device, so all of it can be captured in a CUDA graph."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.base import DecodeRows, DraftTree, SampledTokens, SamplingTensors, Segments, SlotTensors, cache_index


def flatten_drafts(tokens: Tensor, parents: Tensor, depths: Tensor, draft: Tensor, tree: DraftTree, max_depth: int) -> None:
    """See `base.Ops.flatten_drafts`."""
    line, column, is_root = draft[tree.request], (tree.node - 1).clamp_min(0), tree.node == 0
    root = tree.first[tree.request]
    tree.tokens.copy_(torch.where(is_root, 0, tokens[line, column]))
    tree.depths.copy_(torch.where(is_root, 0, depths[line, column]))
    tree.parents.copy_(torch.where(is_root, root, root + 1 + parents[line, column]))
    tree.mask.copy_(ancestor_masks(tree.parents, tree.node, max_depth))


def ancestor_masks(parents: Tensor, node: Tensor, max_depth: int) -> Tensor:
    """Attention masks of a tree: [R, 2] int64, bit i is set when node i of the same request is the row itself or an ancestor."""
    own, above = bit_mask(node), parents
    mask = own
    for _ in range(max_depth):  # go up one generation per iteration; a root is its own parent
        mask = mask | own[above]
        above = parents[above]
    return mask


def bit_mask(index: Tensor) -> Tensor:
    """128-bit masks with one bit set: index [...] in 0..127 -> [..., 2] int64."""
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


def verify(slots: Tensor, tree: DraftTree, of: SlotTensors, sampled: Tensor, logprobs: Tensor, raw: Tensor | None,
           max_depth: int) -> SampledTokens:
    """See `base.Ops.verify`."""
    path, count = accepted_path(tree, sampled, max_depth)
    source, target = _moves(slots, tree, of, path, count) if max_depth else (path, path)
    last = path.gather(1, (count - 1).clamp_min(0)[:, None])[:, 0]
    of.context[slots] += count
    of.context[len(of.context) - 1 :].zero_()  # the padding slot stays empty
    of.last_token[slots] = sampled[last].clamp_min(0)
    return SampledTokens(sampled[path], logprobs[path], None if raw is None else raw[path], count, source, target)


def _moves(slots: Tensor, tree: DraftTree, of: SlotTensors, path: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Cache indices (source, target), both [B, D + 1], that bring the accepted nodes side by side to the end of the context."""
    context = of.context[slots][:, None]
    depth, node = torch.arange(path.shape[1], device=slots.device), tree.node[path]
    moves = (depth < count[:, None]) & (node != depth)
    where = slots[:, None].expand_as(node)
    target = cache_index(of, where, context + torch.where(moves, depth, 0))
    return torch.where(moves, cache_index(of, where, context + torch.where(moves, node, 0)), target), target


def accepted_path(tree: DraftTree, sampled: Tensor, max_depth: int) -> tuple[Tensor, Tensor]:
    """The accepted nodes of every request: (row at each depth [B, D + 1], where depths beyond the path repeat the root's row;
    number of accepted rows [B])."""
    if max_depth == 0:  # roots only
        return tree.first[:, None], tree.length
    matches = (tree.depths == 0) | (tree.tokens == sampled[tree.parents])
    accepted = matches
    for _ in range(max_depth):
        accepted = matches & accepted[tree.parents]
    # At most one row per depth is accepted, because siblings carry distinct tokens. All others go to a column that is cut off.
    width = max_depth + 2
    column = torch.where(accepted, tree.depths, max_depth + 1)
    path = tree.first[:, None].repeat(1, width)
    path.view(-1).scatter_(0, tree.request * width + column, torch.arange(len(tree.tokens), device=sampled.device))
    count = torch.zeros_like(tree.first).index_add_(0, tree.request, accepted.long())
    return path[:, :-1], count
