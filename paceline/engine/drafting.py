"""The drafters of one engine behind one door: it follows the requests, and turns a plan into a draft tree.

Drafters may be wrong, late or missing; the tokens do not depend on them. So nothing here is ever waited for or repaired.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from paceline.cache.store import PagedStore
from paceline.drafters.speculate import DraftView, EagleDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.drafters.tree import Drafts, DraftTree, flatten, merge, roots_only
from paceline.engine.batch import padding
from paceline.engine.request import Request
from paceline.engine.scheduler import Decode, Prefill, StepPlan
from paceline.engine.state import SlotState
from paceline.kernels import PagedCache
from paceline.types import DrafterName


class Drafted(NamedTuple):
    tree: DraftTree
    num_nodes: list[int]
    """Drafted nodes of each decode request; behind them padding requests, which have none."""
    max_depth: int


class Drafting:
    def __init__(self, state: SlotState, store: PagedStore, suffix: SuffixDrafter | None, eagle: EagleDrafter | None,
                 suffix_tau: float) -> None:
        self.suffix, self.eagle, self.suffix_tau = suffix, eagle, suffix_tau
        self._state, self._store = state, store
        self._seen: dict[int, int] = {}  # request -> positions that the learned drafter has in its cache

    @property
    def available(self) -> tuple[DrafterName, ...]:
        names: list[DrafterName] = []
        if self.suffix is not None:
            names.append("suffix")
        if self.eagle is not None:
            names.append("eagle")
        return (*names, "both") if len(names) == 2 else tuple(names)

    def begin(self, request: Request) -> None:
        """In a slot, with `num_computed` tokens found in the cache (the drafter's part of it included)."""
        self._seen[request.id] = request.num_computed
        if self.suffix is not None and request.num_preemptions == 0:
            self.suffix.start(request.id, request.prompt_ids, request.output_ids)

    def extend(self, request: Request, tokens: list[int]) -> None:
        if self.suffix is not None:
            self.suffix.extend(request.id, tokens)

    def end(self, request: Request) -> None:
        if self._seen.pop(request.id, None) is not None and self.suffix is not None:
            self.suffix.finish(request.id)

    def draft(self, plan: StepPlan, row_sizes: tuple[int, ...]) -> Drafted:
        """A tree for every planned decode request that has room for one, padded to one of `row_sizes`."""
        name = plan.strategy.drafter
        chosen = [i for i, item in enumerate(plan.decode) if item.num_nodes > 0 and name != "none"]
        if name in ("eagle", "both"):
            chosen = [i for i in chosen if plan.decode[i].request.num_computed > 0]
        drafts, counts = self._counted(plan, chosen) if chosen else (None, [0] * len(plan.decode))
        counts += [0] * padding(len(counts) + sum(counts), row_sizes)
        if drafts is None or not any(counts):
            return Drafted(roots_only(len(counts), self._state.device), counts, 0)
        depth = min(plan.strategy.depth, max(counts))
        return Drafted(flatten(_spread(drafts, chosen, len(counts)), counts, depth), counts, depth)

    def _counted(self, plan: StepPlan, chosen: list[int]) -> tuple[Drafts, list[int]]:
        """Drafts of the chosen, and how many nodes each planned request brings."""
        items = [plan.decode[i] for i in chosen]
        drafts = self._drafts(items, plan)
        limits = torch.tensor([item.num_nodes for item in items])
        found = torch.minimum(drafts.num_nodes.cpu(), limits).tolist()  # level order: a cut tree is still a tree
        counts = [0] * len(plan.decode)
        for i, count in zip(chosen, found, strict=True):
            counts[i] = count
        return drafts, counts

    def prefilled(self, chunks: list[Prefill]) -> None:
        """The policy has just computed these chunks: the learned drafter follows, so that it can start at any step and
        shared prompts are complete."""
        if self.eagle is None or not chunks:
            return
        device = self._state.device
        ends = torch.tensor([start + count for _, start, count in chunks], device=device)
        follows = torch.tensor([request.tokens[start + count] for request, start, count in chunks], device=device)
        view = self._view([request for request, _, _ in chunks])._replace(context=ends, last_token=follows)
        self.eagle.catch_up(view, [count for _, _, count in chunks])
        for request, start, count in chunks:
            self._seen[request.id] = start + count

    def _drafts(self, items: list[Decode], plan: StepPlan) -> Drafts:
        match plan.strategy.drafter:
            case "suffix":
                return self._from_suffix(items, plan)
            case "eagle":
                return self._from_eagle(items, plan)
            case _:
                return merge(self._from_eagle(items, plan), self._from_suffix(items, plan), plan.strategy.budget)

    def _from_suffix(self, items: list[Decode], plan: StepPlan) -> Drafts:
        assert self.suffix is not None
        requests, strategy = [item.request for item in items], plan.strategy
        found = self.suffix.draft(
            [request.id for request in requests], strategy.depth, strategy.width,
            np.array([item.num_nodes for item in items], np.int32),
            np.array([request.params.seed & (2**64 - 1) for request in requests], np.uint64).view(np.int64),
            np.array([len(request.tokens) for request in requests], np.int64),
            np.array([request.params.temperature for request in requests], np.float32), self.suffix_tau,
            strategy.min_survival)
        arrays = (found.tokens, found.parents, found.depths, found.survival, found.num_nodes)
        tokens, parents, depths, survival, count = (torch.from_numpy(a).to(self._state.device) for a in arrays)
        return Drafts(tokens.long(), parents.long(), depths.long(), survival, count.long())

    def _from_eagle(self, items: list[Decode], plan: StepPlan) -> Drafts:
        assert self.eagle is not None
        requests, strategy = [item.request for item in items], plan.strategy
        # At least the last position: its output is where the tree starts from.
        missing = [max(1, request.num_computed - self._seen[request.id]) for request in requests]
        drafts = self.eagle.draft(self._view(requests), missing, strategy.depth, strategy.width, strategy.budget)
        for request in requests:
            self._seen[request.id] = request.num_computed
        return drafts

    def _view(self, requests: list[Request]) -> DraftView:
        state, store = self._state, self._store
        slots = torch.tensor([request.slot for request in requests], device=state.device)
        assert store.features is not None
        layer = store.layers[-1]
        return DraftView(slots, state.context[slots], state.last_token[slots], state.seed[slots], state.temperature[slots],
                         store.tokens, store.features, PagedCache(layer.k, layer.v, state.page_table, store.page_size))


def _spread(drafts: Drafts, chosen: list[int], batch: int) -> Drafts:
    """Rows of the drafting requests to their places among all."""
    if len(chosen) == batch:
        return drafts
    index = torch.tensor(chosen, device=drafts.tokens.device)
    return Drafts(*(x.new_zeros(batch, *x.shape[1:]).index_copy_(0, index, x) for x in drafts))
