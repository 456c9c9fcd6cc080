"""When drafters are looked at, and with what: one that is unknown or has rested gets a step with a larger tree, watched closely,
which tells what every smaller tree of its would give, so one probe stands for many arms. Who does not pay rests ever longer.
The suffix drafter, once it is known, is judged aside: it guesses, and the text that comes tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from paceline.strategy.cost import CostCurve
from paceline.strategy.gains import MAX_NODES
from paceline.strategy.options import LEARNED_SHAPES, MAX_ROWS, SUFFIX_SHAPE, max_nodes, suffix_nodes
from paceline.strategy.survival import Survival
from paceline.types import DrafterName, Strategy

_LEAST_PROBED = 3
_PROBE_SHAPES = ((32, (8, 4)), (12, (6, 4)), (6, (6, 2)), (4, (4, 1)))
"""Nodes from which on → shape."""
_FIRST_REST, _LONGEST_REST = 48, 192
_SUFFIX_REST, MATTERS = 12, 0.1
"""What the suffix drafter offers changes with the text, and a look aside costs next to nothing. So many tokens more or less for
each request are worth a decision."""


@dataclass(slots=True)
class _Rest:
    """When a drafter is looked at again."""

    interval: int = _FIRST_REST
    next_step: int = 0
    probed: bool = False
    """Since the last decision."""


@dataclass(slots=True)
class Looks:
    """Whose turn it is, by the selector's own count of steps."""

    _rests: dict[DrafterName, _Rest] = field(default_factory=dict)
    _next_probe: int = 0
    _next_aside: int = 0
    _suffix_brought: float = 0.0
    """Tokens for each request, when the last decision was taken."""

    def turn(self, step: int, drafters: Iterable[DrafterName], is_known: Callable[[DrafterName], bool]) -> DrafterName | None:
        """The one of these to be probed now."""
        if step < self._next_probe:
            return None
        self._next_probe = step + _FIRST_REST
        for drafter in drafters:
            rest = self._rests.setdefault(drafter, _Rest())
            if not is_known(drafter) or step >= rest.next_step:
                rest.next_step, rest.probed, self._next_probe = step + rest.interval, True, step + 1
                return drafter
            self._next_probe = min(self._next_probe, rest.next_step)
        return None

    def aside(self, step: int) -> bool:
        """The idle suffix drafter is to guess beside this step."""
        if step < self._next_aside:
            return False
        self._next_aside = step + _SUFFIX_REST
        return True

    def suffix_matters(self, brings: float) -> bool:
        """Another decision, now that it brings so many tokens for each request."""
        return abs(brings - self._suffix_brought) > MATTERS * (1 + self._suffix_brought)

    def decided(self, available: Iterable[DrafterName], used: DrafterName, suffix_brings: float) -> None:
        """Who was probed and is not used rests longer; who is used is looked at again soon, with a larger tree."""
        self._suffix_brought = suffix_brings
        for drafter in available:
            rest = self._rests.setdefault(drafter, _Rest())
            if not rest.probed:
                continue
            rest.probed = False
            if drafter == used:
                rest.interval = 2 * _FIRST_REST
            elif drafter == "suffix":
                rest.interval = 2 * _SUFFIX_REST
            else:
                rest.interval = min(2 * rest.interval, _LONGEST_REST)

    def all_at_once(self) -> list[DrafterName]:
        """Everybody's turn, whom it knows: what they were seen to do was done for others."""
        for rest in self._rests.values():
            rest.next_step = 0
        self._next_probe = self._next_aside = 0
        return list(self._rests)

    def forget(self, drafters: Iterable[DrafterName]) -> None:
        """They have been replaced."""
        for drafter in drafters:
            self._rests.pop(drafter, None)
        self._next_probe = 0


def suffix_probe(costs: CostCurve, survival: Survival, requests: int) -> Strategy:
    """It brings what it has, and says itself what that is worth."""
    threshold = survival.threshold(0.5 * _price(costs, requests))
    return Strategy("suffix", *SUFFIX_SHAPE, suffix_nodes(costs, requests), threshold, watch=True)


def probe(drafter: DrafterName, costs: CostCurve, requests: int, tau: float) -> Strategy:
    """As many nodes as a step may have that costs half as much again as without, but a few in any case."""
    rows = requests * np.arange(2, MAX_NODES + 2)
    fits = costs.with_trees.at(costs.padded(rows)) <= 1.5 * costs.policy.at(requests)
    fits |= rows <= (_LEAST_PROBED + 1) * requests
    nodes = max(1, int((fits & (rows <= MAX_ROWS)).sum()))
    depth, width = next((shape for least, shape in _PROBE_SHAPES if nodes >= least), (nodes, 1))
    return Strategy(drafter, depth, width, min(nodes, max_nodes(depth, width)), tau=tau, watch=True)


def _price(costs: CostCurve, requests: int) -> float:
    """What a row more costs in tokens, about: nodes below that chance do not pay."""
    more = max(8, requests)
    plain, larger = costs.policy.at(np.array([requests, requests + more]))
    return float(min(0.9, (larger - plain) / more * requests / plain))


def drafts_at(requests: int) -> list[Strategy]:
    """Of the learned drafter, whatever may be used or probed with so many requests."""
    most = max(1, MAX_ROWS // requests - 1)
    shapes = dict.fromkeys((*LEARNED_SHAPES, *(shape for _, shape in _PROBE_SHAPES), (min(most, _LEAST_PROBED), 1)))
    return [Strategy("eagle", depth, width, min(most, max_nodes(depth, width))) for depth, width in shapes
            if depth <= most or (depth, width) == (1, 1)]
