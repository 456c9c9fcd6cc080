"""Random draft trees, and what a kernel family makes of them, for the tests that hold one family against another.

Tensors are made on torch's default device."""

from __future__ import annotations

import numpy as np
import torch
from tiny import FakeGraphs
from torch import Tensor

from paceline.drafters.tree import Drafts
from paceline.engine.command import HostDrafts, StepCommand, no_copies, no_pages, no_slots
from paceline.engine.graphs import CudaGraphs
from paceline.engine.rows import INPUTS_PER_ROW, RowBuilder
from paceline.kernels import Candidates, DraftRequests, DraftRows, DraftTree, PagedCache, Segments, SlotTensors, TorchOps
from paceline.kernels.records import RankedTokens

_SLOTS = 9


def slot_tensors(slots: int, pages: int) -> SlotTensors:
    context, table = torch.randint(0, 20, (slots,)), torch.randperm(slots * pages).view(slots, pages).int()
    context[-1] = 0
    return SlotTensors(context, torch.randint(0, 50, (slots,)), torch.randint(-(2**60), 2**60, (slots,)), torch.rand(slots),
                       torch.arange(slots, dtype=torch.int32), torch.rand(slots), torch.rand(slots), torch.zeros_like(context),
                       table, 4)


def random_drafts(lines: int, nodes: int, depth: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, parents and depths [lines, nodes]. Siblings carry distinct tokens, parents stand first."""
    found = []
    for _ in range(lines):
        made: list[tuple[int, int, int]] = []
        while len(made) < nodes:
            parent = int(torch.randint(-1, len(made), ())) if made else -1
            level = 1 + (made[parent][2] if parent >= 0 else 0)
            token = int(torch.randint(0, vocab, ()))
            if level <= depth and all((token, parent) != node[:2] for node in made):
                made.append((token, parent, level))
        found.append(made)
    tokens, parents, depths = torch.tensor(found).unbind(2)
    return tokens.contiguous(), parents.contiguous(), depths.contiguous()


def random_requests(batch: int, slots: int) -> DraftRequests:
    """The second has no committed token: padding."""
    context = torch.tensor([9, 0, 3, 17, 1][:batch])
    return DraftRequests(torch.randperm(slots)[:batch], context, torch.randint(0, 50, (batch,)),
                         torch.randint(-(2**60), 2**60, (batch,)), torch.rand(batch), torch.tensor([4, 0, 3, 0, 0][:batch]))


def random_cache(num_pages: int, slots: int = 1, kv_heads: int = 1, dim: int = 16,
                 dtype: torch.dtype = torch.float32) -> PagedCache:
    k, v = (torch.randn(slots * num_pages * 16, kv_heads, dim).to(dtype) for _ in "kv")
    return PagedCache(k, v, torch.randperm(slots * num_pages).view(slots, num_pages).int(), 16)


def assert_same_tensors(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.dtype == b.dtype and torch.equal(a, b), i


def assert_same_rows(ours: DraftRows, theirs: DraftRows) -> None:
    for name, a, b in zip((*DraftRows._fields[:3], *Segments._fields), (*ours[:3], *ours.segments),
                          (*theirs[:3], *theirs.segments), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), name


Forced = tuple[tuple[int, bool], ...]
"""Number of forced rows of each of the last requests, and whether the last one is sampled from."""


def assert_same_walk(ours: TorchOps, theirs: TorchOps, num_nodes: list[int], depth: int, nodes: int, padded: bool,
                     dtype: torch.dtype = torch.float32, raw: bool = True, forced: Forced = ()) -> None:
    """Both flatten the same random trees, build their rows, forced ones behind them, and walk them after the same draws: every
    number is equal, padding, empty requests and failed logits included."""
    of, drafts = slot_tensors(_SLOTS, 40), random_drafts(len(num_nodes), nodes, depth, 4) if depth else None
    results = [_walk(family, of, drafts, num_nodes, depth, padded, dtype, raw, forced) for family in (ours, theirs)]
    assert_same_tensors(results[0][0], results[1][0])
    if depth > 1 and nodes > 6:
        assert results[0][1] > 1, "nothing was accepted: the walk was not tried"


def step_command(slots: list[int], num_nodes: list[int], depth: int, forced: Forced = ()) -> StepCommand:
    """A step of these slots: the first ones with trees, the last ones with forced rows."""
    trees, total = len(num_nodes), len(num_nodes) + len(forced)
    counts = np.array([0] * trees + [count for count, _ in forced], np.int64)
    samples = np.array([True] * trees + [sampled for _, sampled in forced])
    tokens = np.arange(counts.sum()) % 50
    lines = HostDrafts(np.arange(trees)[::-1].copy(), *[np.zeros(0)] * 2) if depth else None
    return StepCommand(np.array(slots[:total], np.int64), np.array(num_nodes + [0] * len(forced), np.int64), counts, samples,
                       tokens, np.where(samples, -1, 7), np.zeros(total, np.int64), no_slots(), no_pages(), no_copies(), lines,
                       depth)


def _walk(family: TorchOps, of: SlotTensors, drafts: tuple[Tensor, Tensor, Tensor] | None, num_nodes: list[int], depth: int,
          padded: bool, dtype: torch.dtype, with_raw: bool, forced: Forced) -> tuple[list[Tensor], int]:
    """All tensors it leaves, and the most tokens that a request drew."""
    state = SlotTensors(*(x.clone() if isinstance(x, Tensor) else x for x in of))
    graphs = CudaGraphs((160,) if padded else (), _SLOTS - 1, of.context.device, INPUTS_PER_ROW, FakeGraphs() if padded else None)  # type: ignore[arg-type]
    builder = RowBuilder(graphs, family, _SLOTS - 1, of.context.device)
    command = step_command([3, 0, 7, 5, 1, 2, _SLOTS - 1, _SLOTS - 1], num_nodes, depth, forced)
    found = None if drafts is None else Drafts(*drafts, drafts[0].float())
    step = builder.build(command, found)
    tree = DraftTree(*(None if x is None else x.clone() for x in step.tree))
    rows = family.build_rows(step.slots, tree, state)
    torch.manual_seed(1)
    num_sampled = len(rows.sampling.seed)
    sampled, logprobs, raw = torch.randint(0, 4, (num_sampled,)), torch.rand(num_sampled, dtype=dtype), torch.rand(num_sampled)
    sampled[num_sampled // 2] = -1
    drawn = family.verify(step.slots, tree, state, sampled, logprobs, raw if with_raw else None, step.max_depth)
    state.last_token[-1] = 0  # of padding: whatever
    moved = [drawn.source, drawn.target] if depth else []
    left = [*(x for x in tree if x is not None), *rows[:3], *rows.segments, *rows.sampling, drawn.tokens, drawn.logprobs,
            drawn.num_drawn, *moved, *state[:8], *([drawn.raw_logprobs] if with_raw else [])]
    first = len(num_nodes)
    for i, (count, sampled_from) in enumerate(forced, first):  # what verification means for forced rows
        slot = int(command.slots[i])
        assert int(drawn.num_drawn[i]) == sampled_from and int(state.context[slot]) == int(of.context[slot]) + count
        if sampled_from:
            assert int(drawn.tokens[i, 0]) == int(sampled[tree.sample[i]])
            assert int(state.last_token[slot]) == max(0, int(drawn.tokens[i, 0]))
        else:
            assert int(state.last_token[slot]) == int(of.last_token[slot])
    return left, int(drawn.num_drawn.max())


def assert_same_growth(ours: TorchOps, theirs: TorchOps, depth: int, width: int, budget: int, reduced: bool,
                       dtype: torch.dtype = torch.float32, batch: int = 5) -> None:
    """Both grow trees level by level from the same random ranks, and choose the same nodes of them."""
    requests, cache = random_requests(batch, 6), random_cache(12, slots=6)
    ids = torch.randperm(5000)[:400] if reduced else None
    total = width + (depth - 1) * width**2
    rooms = [Candidates(*(torch.zeros(batch, total, dtype=t) for t in (torch.int64, torch.int64, torch.float32))) for _ in "ab"]
    nodes, first, bits = 1, 0, torch.zeros(batch, 1, 2, dtype=torch.int64)
    scores, origin = torch.zeros(batch, 1), torch.full((batch, 1), -1)
    for d in range(1, depth + 1):
        rows = batch * nodes
        ranked = RankedTokens(torch.randn(rows, width, dtype=dtype), torch.randint(0, 400, (rows, width)),
                        torch.full((rows,), 9.0, dtype=dtype))
        for family, room in zip((ours, theirs), rooms, strict=True):
            family.add_candidates(ranked, scores, origin, ids, room, first)
        if d < depth:
            beam, twin = (family.select_beam(room, first, bits, requests, cache, d, width)
                          for family, room in zip((ours, theirs), rooms, strict=True))
            assert_same_rows(beam.rows, twin.rows)
            assert all(torch.equal(a, b) for a, b in zip(beam[1:], twin[1:], strict=True)), d
            first += nodes * width
            nodes, bits, scores, origin = width, beam.rows.segments.mask.view(batch, width, 2), beam.scores, beam.origin
    assert all(torch.equal(a, b) for a, b in zip(*rooms, strict=True))
    *chosen, survival = ours.select_nodes(rooms[0], width, budget)
    *expected, expected_survival = theirs.select_nodes(rooms[0], width, budget)
    assert_same_tensors(chosen, expected)
    torch.testing.assert_close(survival, expected_survival)
    tokens, parents, depths = chosen
    assert tokens.shape == (batch, min(budget, total)) and bool((parents < torch.arange(tokens.shape[1])).all())
    assert int(depths.min()) == 1
