"""The drafters of one engine behind one door: it follows the requests, and turns a plan into a draft tree.

Drafters may be wrong, late or missing; the tokens do not depend on them. So nothing here is ever repaired. The suffix drafter
works on the host and must know the text; the learned one works on the device and is never waited for: how many nodes it drafts is
known beforehand, and where it starts from is the device's business.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.cache.store import PagedStore
from paceline.drafters.eagle_drafter import DraftView, EagleDrafter, lines_of
from paceline.drafters.suffix import SuffixDrafter
from paceline.drafters.tree import Drafts, merge
from paceline.engine.batch import padding
from paceline.engine.graphs import GraphPool, coarse, rehearsal
from paceline.engine.inputs import InputBuffers, StepInputs
from paceline.engine.request import Request
from paceline.engine.scheduler import Prefill, StepPlan
from paceline.engine.state import SlotState
from paceline.kernels import Ops, PagedCache
from paceline.kernels.upload import upload, upload_into
from paceline.types import DrafterName, Strategy

_USUAL_NODES, _USUAL_DEPTH = 48, 8


class Drafted(NamedTuple):
    inputs: StepInputs
    num_nodes: list[int]
    """Drafted nodes of each decode request."""
    most_accepted: list[int]
    """How many of them can be accepted: no more than the tree is deep."""
    max_depth: int
    lines: list[int]
    """Which of the drafts is each request's."""
    survival: Tensor | None = None
    """[drafts, N] what the drafter thinks of its nodes."""

    @property
    def num_rows(self) -> int:
        """Decode rows, padding included."""
        return len(self.inputs.tree.tokens)


class Drafting:
    def __init__(self, state: SlotState, store: PagedStore, ops: Ops, suffix: SuffixDrafter | None, eagle: EagleDrafter | None,
                 suffix_tau: float, row_sizes: tuple[int, ...], graphs: GraphPool | None) -> None:
        """row_sizes: decode rows are padded to one of them, with trees to every other; with `graphs`, steps of that size are
        captured."""
        self.suffix, self.eagle, self.suffix_tau = suffix, eagle, suffix_tau
        self._state, self._store, self._ops, self.graphs, self.row_sizes = state, store, ops, graphs, row_sizes
        self.tree_sizes = coarse(row_sizes)
        captured = max(row_sizes, default=0) if graphs is not None else 0
        self._buffers = InputBuffers(captured, state.padding, state.device)
        self._slots = torch.full((captured,), state.padding, device=state.device)  # what captured drafting reads
        self._behind: dict[int, int] = {}  # request -> tokens that may have been committed since the learned drafter followed it
        self._followed: set[int] = set()  # by the newest step
        self._tau: float | None = None  # what the learned drafter has been told last

    @property
    def available(self) -> tuple[DrafterName, ...]:
        names: list[DrafterName] = []
        if self.suffix is not None:
            names.append("suffix")
        if self.eagle is not None:
            names.append("eagle")
        return (*names, "both") if len(names) == 2 else tuple(names)

    def set_tau(self, tau: float) -> None:
        """From the next draft on."""
        if self.eagle is not None and tau != self._tau:
            self._tau = tau
            self.eagle.tau.fill_(tau)

    def begin(self, request: Request) -> None:
        """In a slot, with `num_computed` tokens found in the cache (the drafter's part of it included)."""
        self._behind[request.id] = 0
        if self.suffix is not None and request.num_preemptions == 0:
            self.suffix.start(request.id, request.prompt_ids, request.output_ids)

    def extend(self, requests: list[Request], most_accepted: list[int], appended: dict[int, list[int]]) -> None:
        """What a step of these requests drew has been read. appended: tokens by request, of those that still ran."""
        if self.eagle is not None and any(most_accepted):  # otherwise each has got what it was said to get
            for request, most in zip(requests, most_accepted, strict=True):
                if request.num_steps_in_flight and request.id in self._followed:
                    continue  # the bound counts from that step on
                if request.id in appended:
                    self._behind[request.id] -= 1 + most - len(appended[request.id])
        if self.suffix is not None:
            self.suffix.extend_all(appended)

    def end(self, request: Request) -> None:
        if self._behind.pop(request.id, None) is not None and self.suffix is not None:
            self.suffix.finish(request.id)

    def draft(self, plan: StepPlan) -> Drafted:
        """A tree for every planned decode request that has room for one, padded to one of the row sizes."""
        chosen = self._chosen(plan)
        drafts, found = self._drafts(plan, chosen) if chosen else (None, [])
        num_nodes, lines = [0] * len(plan.decode), [0] * len(plan.decode)
        for line, (i, count) in enumerate(zip(chosen, found, strict=True)):
            num_nodes[i], lines[i] = count, line
        drafted = self._lay_out([request.slot for request in plan.decode], num_nodes, lines, drafts, plan.strategy)
        follows = plan.strategy.drafter in ("eagle", "both")
        self._followed = {plan.decode[i].id for i in chosen} if follows else set()
        if self.eagle is not None:
            for request, most in zip(plan.decode, drafted.most_accepted, strict=True):
                self._behind[request.id] = 1 + most + (0 if request.id in self._followed else self._behind[request.id])
        return drafted

    def prefilled(self, chunks: list[Prefill]) -> None:
        """The policy has just computed these chunks: the learned drafter follows, so that it can start at any step and
        shared prompts are complete."""
        if self.eagle is None or not chunks:
            return
        host = np.array([(request.slot, start + count, request.tokens[start + count]) for request, start, count in chunks])
        slots, ends, next_tokens = upload(np.ascontiguousarray(host.T), self._state.device)
        view = self._view(slots)
        view = view._replace(lines=view.lines._replace(context=ends, last_token=next_tokens))
        self.eagle.catch_up(view, [count for _, _, count in chunks])
        for request, _, _ in chunks:
            self._behind[request.id] = 0

    def rehearse(self, batch: int, strategy: Strategy, exact: bool = False) -> Drafted:
        """A step of so many requests, all of them padding, with trees of the strategy's size. exact: no more rows than that."""
        drafts = self._bush(strategy) if strategy.budget else None
        return self._lay_out([self._state.padding] * batch, [strategy.budget] * batch, [0] * batch, drafts, strategy, exact)

    def rehearse_drafting(self, batch: int, strategy: Strategy) -> None:
        """Likewise, what the learned drafter does before."""
        if strategy.drafter in ("eagle", "both"):
            self._from_slots([self._state.padding] * batch, strategy, at_once=True)

    def _bush(self, strategy: Strategy) -> Drafts:
        """One path of full depth, and leaves."""
        node = torch.arange(strategy.budget, device=self._state.device)[None]
        on_path = node < strategy.depth
        zero = torch.zeros_like(node)
        return Drafts(zero, torch.where(on_path, node - 1, -1), torch.where(on_path, node + 1, 1), zero.float(), zero[:, 0])

    def _chosen(self, plan: StepPlan) -> list[int]:
        if plan.strategy.drafter in ("eagle", "both"):  # which starts from the features of a committed token
            return [i for i, (request, nodes) in enumerate(zip(plan.decode, plan.num_nodes, strict=True))
                    if nodes and request.num_computed + request.num_steps_in_flight]
        return [i for i, nodes in enumerate(plan.num_nodes) if nodes]

    def _lay_out(self, slots: list[int], num_nodes: list[int], lines: list[int], drafts: Drafts | None,
                 strategy: Strategy, exact: bool = False) -> Drafted:
        plain = drafts is None or not any(num_nodes)
        pad = 0 if exact else padding(len(slots) + sum(num_nodes), self.row_sizes if plain else self.tree_sizes)
        padded = slots + [self._state.padding] * pad
        if drafts is None or plain:
            return Drafted(self._buffers.roots(padded), num_nodes, [0] * len(slots), 0, lines)
        inputs = self._buffers.trees(padded, num_nodes + [0] * pad, lines + [0] * pad)
        depth = min(strategy.depth, strategy.budget if inputs.fixed else max(num_nodes))
        most_accepted = [count if count < depth else depth for count in num_nodes]
        if inputs.fixed:  # captured: one depth serves all that are usual
            depth = max(_USUAL_DEPTH, 1 << (depth - 1).bit_length())
        self._ops.flatten(drafts.tokens, drafts.parents, drafts.depths, inputs.draft, inputs.tree, depth)
        return Drafted(inputs, num_nodes, most_accepted, depth, lines, drafts.survival)

    def _drafts(self, plan: StepPlan, chosen: list[int]) -> tuple[Drafts, list[int]]:
        """Drafts for the chosen of its requests, on the device, and how many nodes of each are to be verified: the likeliest come
        first, parents before their children, so a cut tree is still a tree."""
        strategy, requests, wanted = plan.strategy, [plan.decode[i] for i in chosen], [plan.num_nodes[i] for i in chosen]
        if strategy.drafter == "eagle":
            drafts = self._from_eagle(requests, strategy)
            return drafts, np.minimum(wanted, drafts.tokens.shape[1]).tolist()
        drafts = self.guesses(requests, wanted, strategy)
        if strategy.drafter == "both":
            learned = Drafts(*(x[: len(requests)].cpu() for x in self._from_eagle(requests, strategy)))
            drafts = merge(learned, drafts, strategy.budget)
        counts = list(map(min, wanted, drafts.num_nodes.tolist()))
        nodes = upload(torch.stack([drafts.tokens, drafts.parents, drafts.depths]).numpy(), self._state.device)
        return drafts._replace(tokens=nodes[0], parents=nodes[1], depths=nodes[2]), counts

    def guesses(self, requests: list[Request], num_nodes: list[int], strategy: Strategy) -> Drafts:
        """The suffix drafter's, on the host."""
        assert self.suffix is not None
        found = self.suffix.draft(
            [request.id for request in requests], strategy.depth, strategy.width, np.array(num_nodes, np.int32),
            np.array([request.params.seed & (2**64 - 1) for request in requests], np.uint64).view(np.int64),
            np.array([len(request.tokens) for request in requests], np.int64),
            np.array([request.params.temperature for request in requests], np.float32), self.suffix_tau,
            strategy.min_survival)
        tokens, parents, depths, survival, count = (torch.from_numpy(array) for array in found)
        return Drafts(tokens, parents.long(), depths.long(), survival, count.long())

    def _from_eagle(self, requests: list[Request], strategy: Strategy) -> Drafts:
        """On the device, perhaps with lines of padding behind those of the requests. Whom it has not followed for long it catches
        up with first: one layer over what it missed."""
        assert self.eagle is not None
        window = _window(strategy)
        late = [request for request in requests if self._behind[request.id] > window]
        if late:
            view = self._view(upload([request.slot for request in late], self._state.device))
            self.eagle.catch_up(view, [self._behind[request.id] for request in late])
        return self._from_slots([request.slot for request in requests], strategy)

    def _from_slots(self, slots: list[int], strategy: Strategy, at_once: bool = False) -> Drafts:
        size = len(slots) + padding(len(slots), self.tree_sizes)
        if self.graphs is not None and size <= len(self._slots):
            return self._captured(size, slots, strategy, at_once)
        return self._draft(upload(slots, self._state.device), strategy)

    def _captured(self, size: int, slots: list[int], strategy: Strategy, at_once: bool) -> Drafts:
        """One graph from catching up to the chosen nodes, keyed by the padded number of requests and the tree's shape: how many
        of its nodes are verified is the host's business."""
        assert self.graphs is not None
        place = upload_into(self._slots[:size], np.array(slots + [self._state.padding] * (size - len(slots)), np.int64))
        key = ("draft", size, strategy.depth, strategy.width, _num_chosen(strategy))
        return self.graphs.run(key, lambda: self._draft(place, strategy), rehearsal(place, self._state.padding), at_once)

    def _draft(self, slots: Tensor, strategy: Strategy) -> Drafts:
        assert self.eagle is not None
        return self.eagle.draft(self._view(slots), _window(strategy), strategy.depth, strategy.width, _num_chosen(strategy))

    def _view(self, slots: Tensor) -> DraftView:
        state, store = self._state.tensors, self._store
        assert store.features is not None
        cache = PagedCache(store.layers[-1].k, store.layers[-1].v, state.page_table, store.page_size)
        return DraftView(lines_of(slots, state), store.tokens, store.features, cache, store.spare_page * store.page_size)


def _window(strategy: Strategy) -> int:
    """Positions that may be new after one step of this strategy."""
    return strategy.depth + 1


def _num_chosen(strategy: Strategy) -> int:
    """Nodes that drafting puts in order: alike for all budgets of a shape that are usual, so that they share a graph."""
    return max(strategy.budget, min(_USUAL_NODES, strategy.width + (strategy.depth - 1) * strategy.width**2))
