"""Trees as rows and the choice of draft tokens on a CPU, one call each.

The reference is `kernels/reference/{tree,drafting}.py`. Where scores are equal the lower candidate wins; a
score that is not a number counts as the worst.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels.cpu.call import address, run
from paceline.kernels.records import (
    Beam,
    Candidates,
    DecodeRows,
    DraftRequests,
    DraftRows,
    DraftTree,
    PagedCache,
    RankedTokens,
    SampledTokens,
    SamplingTensors,
    Segments,
    SlotTensors,
)
from paceline.kernels.reference import drafting
from paceline.kernels.reference.ops import TorchOps

PARALLEL_NOISE = 1 << 12
"""Noise numbers below which ranking takes one thread."""
INT, HALF, REAL = torch.int64, torch.int32, torch.float32
WIDE = {torch.float32: torch.float32, torch.bfloat16: torch.float32, torch.float64: torch.float64}
"""Element type in memory -> type that the kernels compute with."""
SEGMENT_WORDS = ("segment_row", "segment_length", "segment_slot", "segment_context", "segment_causal")
"""Arguments of kernels: the tensors of `Segments` but the mask."""


class Movable(NamedTuple):
    """Tensors whose token slots move together."""

    tensors: list[Tensor]
    places: Tensor  # [N] int64 addresses
    sizes: Tensor  # [N] int64 bytes of a token slot


class RowOps(TorchOps):
    """The part of `base.Ops` between matrix products."""

    def flatten_drafts(self, tokens: Tensor, parents: Tensor, depths: Tensor, draft: Tensor, tree: DraftTree,
                       max_depth: int) -> None:
        num_rows = len(tree.tokens)
        if not num_rows:
            return
        tokens, parents, depths = tokens.contiguous(), parents.contiguous(), depths.contiguous()
        run("flatten_drafts", INT, 1, tokens=address(INT, tokens), parents=address(INT, parents), depths=address(INT, depths),
            draft=address(INT, draft), first=address(INT, tree.first), request=address(INT, tree.request),
            node=address(INT, tree.node), forced=address(INT, tree.forced), row_tokens=address(INT, tree.tokens),
            row_parents=address(INT, tree.parents), row_depths=address(INT, tree.depths), mask=address(INT, tree.mask),
            num_rows=num_rows, num_nodes=tokens.shape[1], max_depth=max_depth)

    def build_rows(self, slots: Tensor, tree: DraftTree, of: SlotTensors) -> DecodeRows:
        num_rows, num_requests = len(tree.tokens), len(slots)
        num_sampled = num_rows if tree.sampled is None else len(tree.sampled)
        tokens, positions, write = torch.empty(3, num_rows, dtype=INT).unbind()
        seed, following = torch.empty(2, num_sampled, dtype=INT).unbind()
        temperature, top_p, min_p = torch.empty(3, num_sampled, dtype=REAL).unbind()
        top_k = torch.empty(num_sampled, dtype=HALF)
        segments = _segments(num_requests, tree.mask)
        run("build_rows", INT, 1, slots=address(INT, slots), request=address(INT, tree.request), node=address(INT, tree.node),
            depths=address(INT, tree.depths), tokens=address(INT, tree.tokens), first=address(INT, tree.first),
            length=address(INT, tree.length), forced=address(INT, tree.forced), sampled=address(INT, tree.sampled),
            context=address(INT, of.context), last_token=address(INT, of.last_token), seed=address(INT, of.seed),
            temperature=address(REAL, of.temperature), top_k=address(HALF, of.top_k),
            top_p=address(REAL, of.top_p), min_p=address(REAL, of.min_p), page_table=address(HALF, of.page_table),
            row_tokens=tokens.data_ptr(), positions=positions.data_ptr(), write=write.data_ptr(), row_seed=seed.data_ptr(),
            next_position=following.data_ptr(), row_temperature=temperature.data_ptr(), row_top_p=top_p.data_ptr(),
            row_min_p=min_p.data_ptr(), row_top_k=top_k.data_ptr(), **segment_addresses(segments), num_rows=num_rows,
            num_requests=num_requests, num_sampled=num_sampled, page_size=of.page_size,
            table_columns=of.page_table.shape[1])
        return DecodeRows(tokens, positions, write, segments,
                          SamplingTensors(seed, following, temperature, top_k, top_p, min_p))

    def verify(self, slots: Tensor, tree: DraftTree, of: SlotTensors, sampled: Tensor, logprobs: Tensor, raw: Tensor | None,
               max_depth: int) -> SampledTokens:
        batch, columns, num_rows = len(slots), max_depth + 1, len(tree.tokens)
        if num_rows == 0 or logprobs.element_size() < 4 or (raw is not None and raw.element_size() < 4):
            return super().verify(slots, tree, of, sampled, logprobs, raw, max_depth)
        tokens, source, target = torch.empty(3, batch, columns, dtype=INT).unbind()
        drawn = SampledTokens(tokens, logprobs.new_empty(batch, columns), None if raw is None else raw.new_empty(batch, columns),
                      torch.empty(batch, dtype=INT), source, target)
        logprobs, raw = logprobs.contiguous(), None if raw is None else raw.contiguous()
        run("verify", INT, 1, slots=address(INT, slots), first=address(INT, tree.first), length=address(INT, tree.length),
            forced=address(INT, tree.forced), sample=address(INT, tree.sample), tokens=address(INT, tree.tokens),
            parents=address(INT, tree.parents), sampled=address(INT, sampled),
            logprobs=logprobs.data_ptr(), raw=0 if raw is None else raw.data_ptr(), context=address(INT, of.context),
            last_token=address(INT, of.last_token), page_table=address(HALF, of.page_table), out_tokens=tokens.data_ptr(),
            out_logprobs=drawn.logprobs.data_ptr(), out_raw=0 if drawn.raw_logprobs is None else drawn.raw_logprobs.data_ptr(),
            num_drawn=drawn.num_drawn.data_ptr(), source=source.data_ptr(), target=target.data_ptr(), num_requests=batch,
            num_rows=num_rows, num_sampled=len(sampled), num_columns=columns, padding_slot=len(of.context) - 1,
            page_size=of.page_size, table_columns=of.page_table.shape[1], wide_logprobs=logprobs.element_size() == 8,
            wide_raw=raw is not None and raw.element_size() == 8)
        return drawn

    def movable(self, tensors: list[Tensor]) -> Movable:
        assert all(tensor.is_contiguous() for tensor in tensors)
        return Movable(tensors, torch.tensor([tensor.data_ptr() for tensor in tensors]),
                       torch.tensor([tensor[0].numel() * tensor.element_size() for tensor in tensors]))

    def move_tokens(self, what: Movable, source: Tensor, target: Tensor) -> None:
        num_lines, num_columns = source.shape
        run("move_tokens", INT, 1, tensors=address(INT, what.places), sizes=address(INT, what.sizes), source=address(INT, source),
            target=address(INT, target), num_tensors=len(what.tensors), num_lines=num_lines, num_columns=num_columns)

    def draft_topk(self, logits: Tensor, seed: Tensor, position: Tensor, temperature: Tensor, tau: float | Tensor, k: int,
                   token_ids: Tensor | None = None) -> RankedTokens:
        wide = WIDE.get(logits.dtype)
        num_rows, vocab = logits.shape
        if wide is None or num_rows == 0 or not 0 < k <= vocab:
            return super().draft_topk(logits, seed, position, temperature, tau, k, token_ids)
        logits = logits.contiguous()
        ranked = RankedTokens(torch.empty(num_rows, k, dtype=wide), torch.empty(num_rows, k, dtype=INT),
                        torch.empty(num_rows, dtype=wide))
        threads = 1 if num_rows * vocab < PARALLEL_NOISE else min(num_rows, torch.get_num_threads())
        tau_address, tau_value = (address(REAL, tau), 0.0) if isinstance(tau, Tensor) else (0, tau)
        run("draft_topk", logits.dtype, threads, logits=logits.data_ptr(), seed=address(INT, seed),
            position=address(INT, position), temperature=address(REAL, temperature), draft_ids=address(INT, token_ids),
            values=ranked.values.data_ptr(), columns=ranked.columns.data_ptr(), logsumexp=ranked.logsumexp.data_ptr(),
            num_rows=num_rows, vocab=vocab, k=k, tau=tau_address, tau_value=tau_value)
        return ranked

    def catch_up_rows(self, requests: DraftRequests, stored: Tensor, cache: PagedCache, request: Tensor, back: Tensor,
                      counts: Tensor, least: int, spare: int) -> DraftRows:
        num_rows, num_lines = len(request), len(counts)
        tokens, positions, write = torch.empty(3, num_rows, dtype=INT).unbind()
        segments = _segments(num_lines, torch.empty(num_rows, 2, dtype=INT))
        run("catch_up_rows", INT, 1, slots=address(INT, requests.slots), context=address(INT, requests.context),
            last_token=address(INT, requests.last_token), shared=address(INT, requests.shared), stored=address(INT, stored),
            page_table=address(HALF, cache.page_table), request=address(INT, request), back=address(INT, back),
            counts=address(INT, counts), tokens=tokens.data_ptr(), positions=positions.data_ptr(), write=write.data_ptr(),
            mask=segments.mask.data_ptr(), **segment_addresses(segments), num_rows=num_rows, num_lines=num_lines, least=least,
            spare=spare, page_size=cache.page_size, table_columns=cache.page_table.shape[1])
        return DraftRows(tokens, positions, write, segments)

    def add_candidates(self, ranked: RankedTokens, scores: Tensor, origin: Tensor, ids: Tensor | None, into: Candidates,
                       first: int) -> None:
        (batch, nodes), width = scores.shape, ranked.columns.shape[1]
        assert ranked.values.dtype == ranked.logsumexp.dtype and ranked.values.is_contiguous()
        run("add_candidates", INT, 1, values=ranked.values.data_ptr(), columns=address(INT, ranked.columns),
            logsumexp=ranked.logsumexp.data_ptr(), scores=address(REAL, scores), origin=address(INT, origin),
            draft_ids=address(INT, ids), tokens=address(INT, into.tokens), parents=address(INT, into.parents),
            candidate_scores=address(REAL, into.scores), num_lines=batch, num_nodes=nodes, width=width, first=first,
            num_candidates=into.tokens.shape[1], wide_values=ranked.values.element_size() == 8, shrink=drafting.SHRINK)

    def select_beam(self, found: Candidates, first: int, bits: Tensor, requests: DraftRequests, cache: PagedCache, depth: int,
                    width: int) -> Beam:
        batch, nodes = len(requests.slots), bits.shape[1]
        tokens, positions, write, above, origin, seed, following = torch.empty(7, batch * width, dtype=INT).unbind()
        temperature, scores = torch.empty(2, batch * width, dtype=REAL).unbind()
        segments = _segments(batch, torch.empty(batch * width, 2, dtype=INT))
        run("select_beam", INT, 1, tokens=address(INT, found.tokens), scores=address(REAL, found.scores), bits=address(INT, bits),
            slots=address(INT, requests.slots), context=address(INT, requests.context), seed=address(INT, requests.seed),
            temperature=address(REAL, requests.temperature), page_table=address(HALF, cache.page_table),
            row_tokens=tokens.data_ptr(), positions=positions.data_ptr(), write=write.data_ptr(), above=above.data_ptr(),
            origin=origin.data_ptr(), row_seed=seed.data_ptr(), next_position=following.data_ptr(),
            mask=segments.mask.data_ptr(), row_temperature=temperature.data_ptr(), row_scores=scores.data_ptr(),
            **segment_addresses(segments), num_lines=batch, num_candidates=found.tokens.shape[1], first=first, num_nodes=nodes,
            width=width, depth=depth, page_size=cache.page_size, table_columns=cache.page_table.shape[1])
        return Beam(DraftRows(tokens, positions, write, segments), above, scores.view(batch, width), origin.view(batch, width),
                    seed, following, temperature)

    def select_nodes(self, found: Candidates, width: int, budget: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        batch, total = found.tokens.shape
        count = min(budget, total)
        tokens, parents, depths = torch.empty(3, batch, count, dtype=INT).unbind()
        survival = torch.empty(batch, count, dtype=REAL)
        run("select_nodes", INT, 1, tokens=address(INT, found.tokens), parents=address(INT, found.parents),
            scores=address(REAL, found.scores), out_tokens=tokens.data_ptr(), out_parents=parents.data_ptr(),
            out_depths=depths.data_ptr(), survival=survival.data_ptr(), num_lines=batch, num_candidates=total, num_kept=count,
            width=width)
        return tokens, parents, depths, survival


def segment_addresses(segments: Segments) -> dict[str, int]:
    """The arguments of a kernel that are a step's segments, the mask apart."""
    for name, wanted in zip(Segments._fields, (HALF, HALF, HALF, HALF, torch.bool, INT), strict=True):
        tensor = getattr(segments, name)
        assert tensor.dtype == wanted and tensor.is_contiguous(), f"segments.{name}: {tensor.dtype}"
    return {name: tensor.data_ptr() for name, tensor in zip(SEGMENT_WORDS, segments, strict=False)}


def _segments(count: int, mask: Tensor) -> Segments:
    row, length, slot, context = torch.empty(4, count, dtype=HALF).unbind()
    return Segments(row, length, slot, context, torch.empty(count, dtype=torch.bool), mask)
