"""A close look at what came of a step's drafts, node by node: what selectors calibrate themselves with. The nodes are where the
drafter left them; a look costs a small download, taken now and then."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paceline.engine.drafting import Drafted
from paceline.engine.scheduler import StepPlan
from paceline.engine.transfer import Download
from paceline.types import Strategy, Watched

EVERY, FEW = 32, 16
"""Speculating steps between looks that nobody asked for; half as many where fewer requests than that run."""


class Look(NamedTuple):
    """Begun between drafting and verifying: captured graphs share memory, and what one leaves there the next may overwrite."""

    strategy: Strategy
    lines: np.ndarray  # [L] decode requests that were drafted for
    first_rows: np.ndarray  # [L] row of each one's root
    num_nodes: np.ndarray  # [L]
    quality: np.ndarray  # [L]
    nodes: Download | None  # tokens, parents, depths [R] of the rows, survival [lines of the drafts, N]; None: no node was found
    drafts: np.ndarray  # [L] line of the drafts

    @classmethod
    def start(cls, plan: StepPlan, drafted: Drafted) -> Look:
        counts = np.array(drafted.num_nodes, int)
        wanted = np.array(plan.num_nodes, int) > 0
        first = np.cumsum(counts + 1) - counts - 1
        quality = np.array([request.quality for request in plan.decode], int)
        tree, nodes = drafted.inputs.tree, None
        if drafted.survival is not None:
            nodes = Download.start(tree.tokens, tree.parents, tree.depths, drafted.survival)
        lines = wanted.nonzero()[0]
        return cls(plan.strategy, lines, first[lines], counts[lines], quality[lines], nodes, np.array(drafted.lines, int)[lines])

    def result(self, drawn: Download) -> tuple[Watched, float]:
        """drawn: what the step drew. Also the number of nodes that should be accepted by the drafter's own estimates."""
        if self.nodes is None:
            none = np.zeros(0, int)
            return Watched(self.strategy, len(self.lines), self.quality, none, none, none, none, none.astype(float),
                           none.astype(bool), none.astype(bool)), 0.0
        tokens, parents, depths, survival = self.nodes.arrays()
        found = drawn.arrays()
        taken, count = found[0][self.lines], found[-1][self.lines]
        line = np.repeat(np.arange(len(self.lines)), self.num_nodes)
        node = np.arange(len(line)) - np.repeat(np.cumsum(self.num_nodes) - self.num_nodes, self.num_nodes)
        row = self.first_rows[line] + 1 + node
        base = row - np.arange(len(row))  # of the same line: row - place among the nodes
        depth, token = depths[row], tokens[row]
        parent = np.where(depth == 1, -1, parents[row] - base)
        estimate = survival[self.drafts[line], node]
        return watched_of(self.strategy, self.quality, line, parent, depth, estimate, token, taken, count), float(estimate.sum())


def watched_of(strategy: Strategy, quality: np.ndarray, line: np.ndarray, parent: np.ndarray, depth: np.ndarray,
               estimate: np.ndarray, token: np.ndarray, taken: np.ndarray, count: np.ndarray) -> Watched:
    """Nodes [M] beside what came: taken [L, D] tokens, of which the first `count` [L] less one may be nodes; estimate [M]: of
    their survival, the drafter's own."""
    estimate = np.maximum(estimate.astype(float), 1e-12)
    above = np.where(parent < 0, 1.0, estimate[parent])
    fits = token == taken[line, np.minimum(depth, taken.shape[1]) - 1]
    hit, tested = np.zeros(len(line), bool), parent < 0
    for level in range(1, int(depth.max(initial=0)) + 1):
        here = depth == level
        if level > 1:
            tested[here] = hit[parent[here]]
        hit[here] = tested[here] & fits[here] & (count[line[here]] > level)
    return Watched(strategy, len(quality), quality, line, parent, depth, _ranks(line, parent), np.minimum(estimate / above, 1.0),
                   tested, hit)


def _ranks(line: np.ndarray, parent: np.ndarray) -> np.ndarray:
    """Place among siblings: they lie in the drafter's order."""
    family = line * (len(line) + 1) + parent + 1
    order = np.argsort(family, kind="stable")
    first = np.r_[True, family[order][1:] != family[order][:-1]] if len(order) else np.zeros(0, bool)
    place = np.arange(len(order))
    rank = np.empty(len(order), np.int64)
    rank[order] = place - np.maximum.accumulate(np.where(first, place, 0)) if len(order) else place
    return rank
