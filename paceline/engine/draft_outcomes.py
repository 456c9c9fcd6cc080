"""Outcomes of draft tokens, one by one: which were accepted. Selectors and the drafter's monitor learn from them."""

from __future__ import annotations

import numpy as np

from paceline.engine.command import StepCommand, StepOutputs
from paceline.types import DraftOutcomes, Strategy


def draft_outcomes(strategy: Strategy, command: StepCommand, outputs: StepOutputs) -> DraftOutcomes:
    """Return the outcomes of a step's draft tokens."""
    lines = np.zeros(0, int) if command.draft is None else command.draft.requests  # requests that were drafted for
    if outputs.drafts is None or outputs.counts is None:
        none = np.zeros(0, int)
        return DraftOutcomes(strategy, len(lines), none, none, none, np.zeros(0), np.zeros(0, bool))
    first = (np.cumsum(command.num_nodes + 1) - command.num_nodes - 1)[lines]  # row of each one's root
    num_nodes = command.num_nodes[lines]
    tokens, parents, depths, survival = outputs.drafts
    generated, num_generated = outputs.tokens[lines], outputs.counts[lines]
    line = np.repeat(np.arange(len(lines)), num_nodes)
    node = np.arange(len(line)) - np.repeat(np.cumsum(num_nodes) - num_nodes, num_nodes)
    row = first[line] + 1 + node
    depth = depths[row]
    parent = np.where(depth == 1, -1, parents[row] - row + np.arange(len(row)))
    matches = tokens[row] == generated[line, np.minimum(depth, generated.shape[1]) - 1]
    accepted, width = _walk(line, parent, depth, matches & (num_generated[line] > depth))
    return DraftOutcomes(strategy, len(lines), line, depth, width, survival[line, node].astype(float), accepted)


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
