"""Outcomes of draft tokens, one by one: which were accepted. Selectors and the drafter's monitor learn from them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paceline.engine.batch import StepBatch
from paceline.engine.runner import Download
from paceline.engine.scheduler import StepPlan
from paceline.types import DraftOutcomes, Strategy


class ObservedDrafts(NamedTuple):
    """The draft tokens of one step, on their way to the host. The download starts between drafting and verification, because
    captured graphs share memory, and verification may overwrite what the drafter's graph left there."""

    strategy: Strategy
    lines: np.ndarray  # [L] indices of the decode requests that were drafted for
    first_rows: np.ndarray  # [L] row of each one's root
    num_nodes: np.ndarray  # [L] number of draft tokens
    nodes: Download | None  # tokens, parents, depths [R] of the rows, survival [lines of the drafts, N]; None: no draft tokens
    drafts: np.ndarray  # [L] line of the drafts

    @classmethod
    def start(cls, plan: StepPlan, batch: StepBatch) -> ObservedDrafts:
        """Start the download of a step's draft tokens."""
        counts = np.array(batch.num_nodes, int)
        first = np.cumsum(counts + 1) - counts - 1
        tree, nodes = batch.inputs.tree, None
        if batch.survival is not None:
            nodes = Download.start(tree.tokens, tree.parents, tree.depths, batch.survival)
        lines = (np.array(plan.num_nodes, int) > 0).nonzero()[0]
        drafts = np.array(batch.draft_lines, int)
        return cls(plan.strategy, lines, first[lines], counts[lines], nodes, drafts[lines])

    def result(self, sampled: Download) -> DraftOutcomes:
        """Return the outcomes. `sampled`: the outputs of the step."""
        if self.nodes is None:
            none = np.zeros(0, int)
            return DraftOutcomes(self.strategy, len(self.lines), none, none, none, np.zeros(0), np.zeros(0, bool))
        tokens, parents, depths, survival = self.nodes.arrays()
        found = sampled.arrays()
        generated, count = found[0][self.lines], found[-1][self.lines]
        line = np.repeat(np.arange(len(self.lines)), self.num_nodes)
        node = np.arange(len(line)) - np.repeat(np.cumsum(self.num_nodes) - self.num_nodes, self.num_nodes)
        row = self.first_rows[line] + 1 + node
        depth = depths[row]
        parent = np.where(depth == 1, -1, parents[row] - row + np.arange(len(row)))
        matches = tokens[row] == generated[line, np.minimum(depth, generated.shape[1]) - 1]
        accepted, width = _walk(line, parent, depth, matches & (count[line] > depth))
        return DraftOutcomes(self.strategy, len(self.lines), line, depth, width,
                             survival[self.drafts[line], node].astype(float), accepted)


def _walk(line: np.ndarray, parent: np.ndarray, depth: np.ndarray, matches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which draft tokens [M] were accepted, because they and all of their ancestors match, and the smallest width of a
    tree that contains each: one more than the largest rank among its siblings on its path. Siblings are in the drafter's
    order."""
    order = np.lexsort((parent, line))  # stable
    new_family = np.r_[True, (np.diff(parent[order]) != 0) | (np.diff(line[order]) != 0)] if len(order) else np.zeros(0, bool)
    place = np.arange(len(order))
    rank = np.empty(len(order), np.int64)
    rank[order] = place - np.maximum.accumulate(np.where(new_family, place, 0)) if len(order) else place
    accepted, width = matches.copy(), rank + 1
    for level in range(2, int(depth.max(initial=0)) + 1):
        here = (depth == level).nonzero()[0]
        accepted[here] &= accepted[parent[here]]
        width[here] = np.maximum(width[here], width[parent[here]])
    return accepted, width
