"""The CPU family's part between the products: trees as rows, a drafter's rows and choices, with one call each. Twins:
`tree_rows`, `draft_rows` and `draft_rank`. Where scores are equal the lower candidate wins; a score that is no number counts as
the worst."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels.base import (
    Beam,
    Candidates,
    DecodeRows,
    DraftRows,
    DraftTree,
    Drawn,
    Lines,
    PagedCache,
    SamplingTensors,
    Segments,
    SlotTensors,
)
from paceline.kernels.cpu.call import addresses, double, run
from paceline.kernels.reference import draft_rows
from paceline.kernels.reference.draft_rank import Ranked
from paceline.kernels.reference.ops import TorchOps

PARALLEL_NOISE = 1 << 12
"""Fewer numbers of noise than this are made on one thread."""
INT, HALF, REAL = torch.int64, torch.int32, torch.float32
_WIDE = {torch.float32: torch.float32, torch.bfloat16: torch.float32, torch.float64: torch.float64}


class Movable(NamedTuple):
    tensors: list[Tensor]
    places: Tensor  # [N] int64 addresses
    sizes: Tensor  # [N] int64 bytes of a token slot


class TreeOps(TorchOps):
    """See `base.Ops`."""

    def flatten(self, tokens: Tensor, parents: Tensor, depths: Tensor, draft: Tensor, tree: DraftTree, max_depth: int) -> None:
        num_rows = len(tree.tokens)
        if num_rows:
            run("flatten", INT, 1, *addresses(
                INT, tokens.contiguous(), parents.contiguous(), depths.contiguous(), draft, tree.first, tree.request, tree.node,
                tree.tokens, tree.parents, tree.depths, tree.mask), num_rows, tokens.shape[1], max_depth)

    def build_rows(self, slots: Tensor, tree: DraftTree, of: SlotTensors) -> DecodeRows:
        num_rows, num_requests = len(tree.tokens), len(slots)
        tokens, positions, write, seed, following = torch.empty(5, num_rows, dtype=INT).unbind()
        temperature, top_p, min_p = torch.empty(3, num_rows, dtype=REAL).unbind()
        top_k = torch.empty(num_rows, dtype=HALF)
        segments = _segments(num_requests, tree.mask)
        run("build_rows", INT, 1, *addresses(INT, slots, tree.request, tree.node, tree.depths, tree.tokens, tree.first,
                                             tree.length, of.context, of.last_token, of.seed),
            *addresses(REAL, of.temperature), *addresses(HALF, of.top_k), *addresses(REAL, of.top_p, of.min_p), 0,
            *addresses(HALF, of.page_table), *(t.data_ptr() for t in (
                tokens, positions, write, seed, following, temperature, top_p, min_p, top_k, *segments[:5])),
            num_rows, num_requests, of.page_size, of.page_table.shape[1])
        return DecodeRows(tokens, positions, write, segments,
                          SamplingTensors(seed, following, temperature, top_k, top_p, min_p))

    def advance(self, slots: Tensor, tree: DraftTree, of: SlotTensors, sampled: Tensor, logprobs: Tensor, raw: Tensor | None,
                max_depth: int) -> Drawn:
        batch, columns, num_rows = len(slots), max_depth + 1, len(tree.tokens)
        if num_rows == 0 or logprobs.element_size() < 4 or (raw is not None and raw.element_size() < 4):
            return super().advance(slots, tree, of, sampled, logprobs, raw, max_depth)
        tokens, source, target = torch.empty(3, batch, columns, dtype=INT).unbind()
        drawn = Drawn(tokens, logprobs.new_empty(batch, columns), None if raw is None else raw.new_empty(batch, columns),
                      torch.empty(batch, dtype=INT), source, target)
        first = addresses(INT, slots, tree.first, tree.length, tree.tokens, tree.parents, sampled)
        logprobs = logprobs.contiguous()
        raw_from = raw_to = 0
        if raw is not None and drawn.raw_logprobs is not None:
            raw = raw.contiguous()
            raw_from, raw_to = raw.data_ptr(), drawn.raw_logprobs.data_ptr()
        run("advance", INT, 1, *first, logprobs.data_ptr(), raw_from, *addresses(INT, of.context, of.last_token),
            *addresses(HALF, of.page_table), tokens.data_ptr(), drawn.logprobs.data_ptr(), raw_to,
            drawn.num_drawn.data_ptr(), source.data_ptr(), target.data_ptr(), batch, num_rows, columns, len(of.context) - 1,
            of.page_size, of.page_table.shape[1], logprobs.element_size() == 8, raw is not None and raw.element_size() == 8)
        return drawn

    def movable(self, tensors: list[Tensor]) -> Movable:
        assert all(tensor.is_contiguous() for tensor in tensors)
        return Movable(tensors, torch.tensor([tensor.data_ptr() for tensor in tensors]),
                       torch.tensor([tensor[0].numel() * tensor.element_size() for tensor in tensors]))

    def move_tokens(self, what: Movable, source: Tensor, target: Tensor) -> None:
        lines, columns = source.shape
        run("move_tokens", INT, 1, *addresses(INT, what.places, what.sizes, source, target), len(what.tensors), lines, columns)

    def draft_topk(self, logits: Tensor, seed: Tensor, position: Tensor, temperature: Tensor, tau: float | Tensor, k: int,
                   token_ids: Tensor | None = None) -> Ranked:
        wide = _WIDE.get(logits.dtype)
        num_rows, vocab = logits.shape
        if wide is None or num_rows == 0 or not 0 < k <= vocab:
            return super().draft_topk(logits, seed, position, temperature, tau, k, token_ids)
        logits = logits.contiguous()
        ranked = Ranked(torch.empty(num_rows, k, dtype=wide), torch.empty(num_rows, k, dtype=INT),
                        torch.empty(num_rows, dtype=wide))
        threads = 1 if num_rows * vocab < PARALLEL_NOISE else min(num_rows, torch.get_num_threads())
        trust = (*addresses(REAL, tau), 0) if isinstance(tau, Tensor) else (0, double(tau))
        run("draft_topk", logits.dtype, threads, logits.data_ptr(), *addresses(INT, seed, position),
            *addresses(REAL, temperature), 0 if token_ids is None else addresses(INT, token_ids)[0],
            *(t.data_ptr() for t in ranked), num_rows, vocab, k, *trust)
        return ranked

    def follow_rows(self, lines: Lines, stored: Tensor, cache: PagedCache, request: Tensor, back: Tensor, counts: Tensor,
                    least: int, spare: int) -> DraftRows:
        num_rows, num_lines = len(request), len(counts)
        tokens, positions, write = torch.empty(3, num_rows, dtype=INT).unbind()
        segments = _segments(num_lines, torch.empty(num_rows, 2, dtype=INT))
        run("follow_rows", INT, 1, *addresses(INT, lines.slots, lines.context, lines.last_token, lines.shared, stored),
            *addresses(HALF, cache.page_table), *addresses(INT, request, back, counts),
            *(t.data_ptr() for t in (tokens, positions, write, segments.mask, *segments[:5])), num_rows, num_lines, least, spare,
            cache.page_size, cache.page_table.shape[1])
        return DraftRows(tokens, positions, write, segments)

    def collect(self, ranked: Ranked, scores: Tensor, origin: Tensor, ids: Tensor | None, into: Candidates, first: int) -> None:
        (batch, nodes), width = scores.shape, ranked.columns.shape[1]
        assert ranked.values.dtype == ranked.logsumexp.dtype and ranked.values.is_contiguous()
        run("collect", INT, 1, ranked.values.data_ptr(), *addresses(INT, ranked.columns), ranked.logsumexp.data_ptr(),
            *addresses(REAL, scores), *addresses(INT, origin), 0 if ids is None else addresses(INT, ids)[0],
            *addresses(INT, into.tokens, into.parents), *addresses(REAL, into.scores), batch, nodes, width, first,
            into.tokens.shape[1], ranked.values.element_size() == 8, double(draft_rows.SHRINK))

    def grow(self, found: Candidates, first: int, bits: Tensor, lines: Lines, cache: PagedCache, depth: int, width: int) -> Beam:
        batch, nodes = len(lines.slots), bits.shape[1]
        tokens, positions, write, above, origin, seed, following = torch.empty(7, batch * width, dtype=INT).unbind()
        temperature, scores = torch.empty(2, batch * width, dtype=REAL).unbind()
        segments = _segments(batch, torch.empty(batch * width, 2, dtype=INT))
        run("grow", INT, 1, *addresses(INT, found.tokens), *addresses(REAL, found.scores),
            *addresses(INT, bits, lines.slots, lines.context, lines.seed), *addresses(REAL, lines.temperature),
            *addresses(HALF, cache.page_table), *(t.data_ptr() for t in (
                tokens, positions, write, above, origin, seed, following, segments.mask, temperature, scores, *segments[:5])),
            batch, found.tokens.shape[1], first, nodes, width, depth, cache.page_size, cache.page_table.shape[1])
        return Beam(DraftRows(tokens, positions, write, segments), above, scores.view(batch, width), origin.view(batch, width),
                    seed, following, temperature)

    def choose(self, found: Candidates, width: int, budget: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        batch, total = found.tokens.shape
        count = min(budget, total)
        tokens, parents, depths = torch.empty(3, batch, count, dtype=INT).unbind()
        survival = torch.empty(batch, count, dtype=REAL)
        run("choose", INT, 1, *addresses(INT, found.tokens, found.parents), *addresses(REAL, found.scores),
            *(t.data_ptr() for t in (tokens, parents, depths, survival)), batch, total, count, width)
        return tokens, parents, depths, survival


def _segments(count: int, mask: Tensor) -> Segments:
    row, length, slot, context = torch.empty(4, count, dtype=HALF).unbind()
    return Segments(row, length, slot, context, torch.empty(count, dtype=torch.bool), mask)
