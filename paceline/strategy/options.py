"""What trees of a shape can do at a place: nodes in the order of their chances, as many as pay (RLHFSpec). Free functions."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.strategy.cost import CostCurve
from paceline.strategy.survival import MAX_NODES, Gain
from paceline.types import MAX_TREE_ROWS, NUM_QUALITIES, DrafterName, StepView, Strategy

SUFFIX_NODES = 16
MAX_ROWS = 512
"""Of a step with trees."""


class Option(NamedTuple):
    """The best that a shape can do."""

    drafter: DrafterName
    shape: tuple[int, int]
    tokens_per_ms: float
    tokens: float
    ms: float
    rows: float
    order: NDArray[np.int64]
    """Places of its nodes in the gain's flattened arrays."""
    least: float
    """The chance of the last of them …"""
    price: float
    """… and of one that would pay."""
    gain: Gain
    """As looks have shown …"""
    now: Gain
    """… and as it came lately."""

    def is_of(self, strategy: Strategy) -> bool:
        return self.drafter == strategy.drafter and self.shape == (strategy.depth, strategy.width)


def spread(costs: CostCurve, drafter: DrafterName, shape: tuple[int, int], gain: Gain, now: Gain,
           view: StepView) -> Option | None:
    """None: nothing is known of any node."""
    (depth, width), batch = shape, view.num_running
    weight = (now.present * counts_of(view)[:, None]).ravel()[gain.order]
    order, weight = gain.order[weight > 0], weight[weight > 0]
    rows = batch + weight.cumsum()
    most = SUFFIX_NODES if drafter == "suffix" else max_nodes(depth, width)
    count = int(rows.searchsorted(min(MAX_ROWS, batch * (1 + most)), side="right"))
    if count == 0:
        return None
    order, rows, chances = order[:count], rows[:count], now.survival.ravel()[order[:count]]
    tokens = batch + (chances * weight[:count]).cumsum()
    ms = costs.ms(Strategy(drafter, depth, width, MAX_TREE_ROWS - 1), batch, rows, view.context)
    rates = tokens / ms
    best = int(rates.argmax())
    price = float(rates[best] * (ms[-1] - ms[0]) / max(rows[-1] - rows[0], 1.0))
    least = float(chances[best])
    return Option(drafter, shape, float(rates[best]), float(tokens[best]), float(ms[best]), float(rows[best]), order[: best + 1],
                  least, min(price, least), gain, now)


def max_nodes(depth: int, width: int) -> int:
    """Of a learned drafter's tree."""
    return min(MAX_NODES, width + (depth - 1) * width**2)


def shares_of(option: Option, view: StepView) -> tuple[int, ...]:
    """Nodes of a request by its quality: for those that nobody is of now, too, since requests change theirs before the next
    decision."""
    taken = np.bincount(option.order // option.gain.survival.shape[1], minlength=NUM_QUALITIES)
    pay = ((option.now.survival >= option.price) & (option.now.present > 1e-6)).sum(1)
    return tuple(np.where(counts_of(view) > 0, taken, pay).tolist())


def hoped_of(option: Option, view: StepView) -> float:
    """Nodes to be accepted, by what looks have shown."""
    return float((option.gain.survival * option.gain.present * counts_of(view)[:, None]).ravel()[option.order].sum())


def counts_of(view: StepView) -> NDArray[np.float64]:
    """[Q] requests of each quality."""
    usual = [view.num_running if quality == NUM_QUALITIES - 2 else 0 for quality in range(NUM_QUALITIES)]
    return np.array(view.qualities or usual, float)
