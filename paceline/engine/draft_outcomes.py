"""Outcomes of draft tokens, token by token: which were tested, and which were accepted. Selectors calibrate themselves with them.

`ObservedDrafts` reads the outcomes of draft tokens that a step verified. `ShadowDrafts` drafts with the suffix drafter without
verifying anything, and scores these drafts against the tokens that are generated later. Both report a `Watched` record.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paceline.drafters.tree import Drafts
from paceline.engine.batch import StepBatch
from paceline.engine.drafting import Drafting
from paceline.engine.request import Request, Status
from paceline.engine.runner import Download
from paceline.engine.scheduler import StepPlan
from paceline.types import Strategy, Watched

_MAX_SHADOW_REQUESTS = 16
"""Largest number of requests in a shadow draft: more would add little information."""


class ObservedDrafts(NamedTuple):
    """The draft tokens of one step, on their way to the host. The download starts between drafting and verification, because
    captured graphs share memory, and verification may overwrite what the drafter's graph left there."""

    strategy: Strategy
    lines: np.ndarray  # [L] indices of the decode requests that were drafted for
    first_rows: np.ndarray  # [L] row of each one's root
    num_nodes: np.ndarray  # [L] number of draft tokens
    quality: np.ndarray  # [L]
    nodes: Download | None  # tokens, parents, depths [R] of the rows, survival [lines of the drafts, N]; None: no draft tokens
    drafts: np.ndarray  # [L] line of the drafts

    @classmethod
    def start(cls, plan: StepPlan, batch: StepBatch) -> ObservedDrafts:
        """Start the download of a step's draft tokens."""
        counts = np.array(batch.num_nodes, int)
        wanted = np.array(plan.num_nodes, int) > 0
        first = np.cumsum(counts + 1) - counts - 1
        quality = np.array([request.quality for request in plan.decode], int)
        tree, nodes = batch.inputs.tree, None
        if batch.survival is not None:
            nodes = Download.start(tree.tokens, tree.parents, tree.depths, batch.survival)
        lines = wanted.nonzero()[0]
        drafts = np.array(batch.draft_lines, int)
        return cls(plan.strategy, lines, first[lines], counts[lines], quality[lines], nodes, drafts[lines])

    def result(self, sampled: Download) -> tuple[Watched, float]:
        """Return the outcomes, and the number of draft tokens that the drafter's own estimates expect to be accepted. `sampled`:
        the outputs of the step."""
        if self.nodes is None:
            none = np.zeros(0, int)
            return Watched(self.strategy, len(self.lines), self.quality, none, none, none, none, none.astype(float),
                           none.astype(bool), none.astype(bool)), 0.0
        tokens, parents, depths, survival = self.nodes.arrays()
        found = sampled.arrays()
        generated, count = found[0][self.lines], found[-1][self.lines]
        line = np.repeat(np.arange(len(self.lines)), self.num_nodes)
        node = np.arange(len(line)) - np.repeat(np.cumsum(self.num_nodes) - self.num_nodes, self.num_nodes)
        row = self.first_rows[line] + 1 + node
        base = row - np.arange(len(row))  # row minus index of the draft token: constant within a line
        depth, token = depths[row], tokens[row]
        parent = np.where(depth == 1, -1, parents[row] - base)
        estimate = survival[self.drafts[line], node]
        outcomes = _outcomes(self.strategy, self.quality, line, parent, depth, estimate, token, generated, count)
        return outcomes, float(estimate.sum())


class _ShadowDraft(NamedTuple):
    strategy: Strategy
    requests: list[Request]
    lengths: list[int]  # number of tokens of each request when the draft was made
    quality: np.ndarray  # [L]
    drafts: Drafts


class ShadowDrafts:
    """Shadow drafting: suffix drafts that are never verified, scored against the tokens generated later. At most one shadow draft
    is pending at a time. It costs no rows and no device time."""

    def __init__(self) -> None:
        self._pending: _ShadowDraft | None = None

    @property
    def is_pending(self) -> bool:
        return self._pending is not None

    def start(self, strategy: Strategy, running: list[Request], drafting: Drafting) -> None:
        """Draft for some of the running requests, unless a shadow draft is pending."""
        if self.is_pending or not running:
            return
        some = running[:: -(-len(running) // _MAX_SHADOW_REQUESTS)]
        drafts = drafting.draft_suffix(some, [strategy.budget] * len(some), strategy)
        quality = np.array([request.quality for request in some], int)
        self._pending = _ShadowDraft(strategy, some, [len(request.tokens) for request in some], quality, drafts)

    def result(self) -> Watched | None:
        """Return the outcomes once every request of the shadow draft has generated enough tokens or has stopped decoding;
        requests with too few tokens are left out. None: not yet, or nothing to report."""
        if self._pending is None:
            return None
        strategy, requests, lengths, quality, drafts = self._pending
        later = [request.tokens[length : length + strategy.depth] for request, length in zip(requests, lengths, strict=True)]
        complete = [len(tokens) == strategy.depth for tokens in later]
        if not all(enough or request.status is not Status.DECODE for enough, request in zip(complete, requests, strict=True)):
            return None
        self._pending = None
        if not any(complete):
            return None
        generated = np.array([tokens for tokens, enough in zip(later, complete, strict=True) if enough])
        tokens, parents, depths, survival, counts = (part.numpy()[complete] for part in drafts)
        real = np.arange(tokens.shape[1]) < counts[:, None]
        lines = real.nonzero()[0]
        first = (np.cumsum(counts) - counts)[lines]
        parent = np.where(parents[real] < 0, -1, parents[real] + first)
        return _outcomes(strategy, quality[complete], lines, parent, depths[real], survival[real], tokens[real], generated,
                         np.full(len(generated), strategy.depth + 1))


def _outcomes(strategy: Strategy, quality: np.ndarray, line: np.ndarray, parent: np.ndarray, depth: np.ndarray,
              estimate: np.ndarray, token: np.ndarray, generated: np.ndarray, count: np.ndarray) -> Watched:
    """Compare draft tokens [M] with the tokens `generated` [L, D] for their requests, of which the first `count` [L] less one
    may be accepted draft tokens. `estimate` [M]: the drafter's own estimates that its draft tokens are accepted."""
    estimate = np.maximum(estimate.astype(float), 1e-12)
    above = np.where(parent < 0, 1.0, estimate[parent])
    matches = token == generated[line, np.minimum(depth, generated.shape[1]) - 1]
    hit, tested = np.zeros(len(line), bool), parent < 0
    for level in range(1, int(depth.max(initial=0)) + 1):
        here = depth == level
        if level > 1:
            tested[here] = hit[parent[here]]
        hit[here] = tested[here] & matches[here] & (count[line[here]] > level)
    return Watched(strategy, len(quality), quality, line, parent, depth, _ranks(line, parent), np.minimum(estimate / above, 1.0),
                   tested, hit)


def _ranks(line: np.ndarray, parent: np.ndarray) -> np.ndarray:
    """Return each draft token's rank among its siblings, which are in the drafter's order."""
    family = line * (len(line) + 1) + parent + 1
    order = np.argsort(family, kind="stable")
    first = np.r_[True, family[order][1:] != family[order][:-1]] if len(order) else np.zeros(0, bool)
    place = np.arange(len(order))
    rank = np.empty(len(order), np.int64)
    rank[order] = place - np.maximum.accumulate(np.where(first, place, 0)) if len(order) else place
    return rank
