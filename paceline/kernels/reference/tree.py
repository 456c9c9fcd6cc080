"""Draft trees in plain torch: writing drafts into rows, building a step's rows, and verification. The compiled backends must
return exactly the same tensors. Nothing here synchronises with the device, so all of it can be captured in a CUDA graph."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.records import DecodeRows, DraftTree, SampledTokens, SamplingTensors, Segments, SlotTensors, cache_index


def flatten_drafts(tokens: Tensor, parents: Tensor, depths: Tensor, draft: Tensor, tree: DraftTree, max_depth: int) -> None:
    """See `base.Ops.flatten_drafts`."""
    line, column, is_root = draft[tree.request], (tree.node - 1).clamp(0, tokens.shape[1] - 1), tree.node == 0
    root, forced = tree.first[tree.request], _is_forced(tree)
    tree.tokens.copy_(torch.where(forced, tree.tokens, torch.where(is_root, 0, tokens[line, column])))
    tree.depths.copy_(torch.where(forced, tree.depths, torch.where(is_root, 0, depths[line, column])))
    above = torch.where(is_root, root, root + 1 + parents[line, column])
    tree.parents.copy_(torch.where(forced, tree.parents, above))
    masks = ancestor_masks(tree.parents, torch.where(forced, 0, tree.node), max_depth)
    tree.mask.copy_(torch.where(forced[:, None], tree.mask, masks))


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
                        causal=tree.forced > 0, mask=tree.mask)
    positions = context + tree.depths
    at, after = (slot, positions + 1) if tree.sampled is None else (slot[tree.sampled], positions[tree.sampled] + 1)
    sampling = SamplingTensors(of.seed[at], after, of.temperature[at], of.top_k[at], of.top_p[at], of.min_p[at])
    is_root = (tree.depths == 0) & ~_is_forced(tree)
    return DecodeRows(torch.where(is_root, of.last_token[slot], tree.tokens), positions,
                      cache_index(of, slot, context + tree.node), segments, sampling)


def verify(slots: Tensor, tree: DraftTree, of: SlotTensors, sampled: Tensor, logprobs: Tensor, raw: Tensor | None,
           max_depth: int) -> SampledTokens:
    """See `base.Ops.verify`."""
    path, count = accepted_path(tree, sampled, max_depth)
    source, target = _moves(slots, tree, of, path, count) if max_depth else (path, path)
    index = path - tree.first[:, None] + tree.sample.clamp_min(0)[:, None]  # among the sampled rows
    last = index.gather(1, (count - 1).clamp_min(0)[:, None])[:, 0]
    of.last_token[slots] = torch.where(count > 0, sampled[last].clamp_min(0), of.last_token[slots])
    of.context[slots] += torch.where(tree.forced > 0, tree.forced, count)
    of.context[len(of.context) - 1 :].zero_()  # the padding slot stays empty
    return SampledTokens(sampled[index], logprobs[index], None if raw is None else raw[index], count, source, target)


def _is_forced(tree: DraftTree) -> Tensor:
    """Which rows [R] are forced."""
    return tree.forced[tree.request] > 0


def _moves(slots: Tensor, tree: DraftTree, of: SlotTensors, path: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Cache indices (source, target), both [B, D + 1], that bring the accepted nodes side by side to the end of the context."""
    context = of.context[slots][:, None]
    depth, node = torch.arange(path.shape[1], device=slots.device), tree.node[path]
    moves = (depth < count[:, None]) & (node != depth)
    where = slots[:, None].expand_as(node)
    target = cache_index(of, where, context + torch.where(moves, depth, 0))
    return torch.where(moves, cache_index(of, where, context + torch.where(moves, node, 0)), target), target


def accepted_path(tree: DraftTree, sampled: Tensor, max_depth: int) -> tuple[Tensor, Tensor]:
    """The accepted nodes of every request: (row at each depth [B, D + 1], where depths beyond the path repeat the first row;
    number of accepted rows [B]). A request with forced rows has its first row and, if it is sampled from, a count of 1."""
    forced = tree.forced > 0
    if max_depth == 0:  # roots and forced rows only
        return tree.first[:, None], torch.where(forced, (tree.sample >= 0).long(), tree.length)
    by_row = sampled[tree.sample.clamp_min(0)[tree.request] + torch.where(forced[tree.request], 0, tree.node)]
    matches = ((tree.depths == 0) | (tree.tokens == by_row[tree.parents])) & ~forced[tree.request]
    accepted = matches
    for _ in range(max_depth):
        accepted = matches & accepted[tree.parents]
    # At most one row per depth is accepted, because siblings carry distinct tokens. All others go to a column that is cut off.
    width = max_depth + 2
    column = torch.where(accepted, tree.depths, max_depth + 1)
    path = tree.first[:, None].repeat(1, width)
    path.view(-1).scatter_(0, tree.request * width + column, torch.arange(len(tree.tokens), device=sampled.device))
    count = torch.zeros_like(tree.first).index_add_(0, tree.request, accepted.long())
    return path[:, :-1], torch.where(forced, (tree.sample >= 0).long(), count)
