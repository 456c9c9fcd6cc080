"""What the compiled loop finds, against every cut of the sorted nodes priced by the cost curve itself."""

from __future__ import annotations

import numpy as np
import pytest
from world import gpu_costs

from paceline.strategy.gains import Gain
from paceline.strategy.options import MAX_ROWS, max_nodes, spread
from paceline.types import NUM_QUALITIES, StepView, Strategy

SHAPES = ((1, 1), (4, 1), (4, 2), (6, 4))


def random_gains(draw: np.random.Generator, size: int) -> Gain:
    known = np.array([max_nodes(*shape) for shape in SHAPES])[:, None, None]
    nodes = np.arange(size) < known
    survival = -np.sort(-draw.random((len(SHAPES), NUM_QUALITIES, size)), axis=2) * nodes
    return Gain(survival, draw.choice([0.4, 1.0], survival.shape) * nodes)


@pytest.mark.parametrize("size", [64, 10])  # 10: no look has shown more
@pytest.mark.parametrize("qualities", [(0, 0, 5, 0), (3, 0, 2, 9), (40, 30, 20, 10), (200, 0, 0, 300)])
@pytest.mark.parametrize(("drafter", "sizes"), [("eagle", ()), ("both", (8, 16, 64, 96)), ("eagle", (8, 32, 128, 512))])
def test_the_best_of_all_cuts_is_found(drafter, qualities, sizes, size):
    draw, costs, batch = np.random.default_rng(sum(qualities)), gpu_costs(), sum(qualities)
    costs.row_sizes, costs.row_context_ms, costs.request_context_ms = sizes, 0.01, 0.02
    gains = random_gains(draw, size)
    now = gains._replace(survival=gains.survival**0.8)
    view = StepView(0, batch, 0, (drafter,), 100, qualities=qualities, context=700.0)
    found = {option.shape: option for option in spread(costs, drafter, SHAPES, gains, now, view)}
    for place, shape in enumerate(SHAPES):
        survival, present = now.survival[place].ravel(), now.present[place].ravel()
        weight = present * np.repeat(qualities, size)
        order = [node for node in np.argsort(-survival, kind="stable") if weight[node] > 0]
        rows, tokens = (batch + values[order].cumsum() for values in (weight, survival * weight))
        ms = [float(costs.ms(Strategy(drafter, *shape, 1), batch, float(r), 700.0)) for r in rows]
        rates = (tokens / ms)[rows <= min(MAX_ROWS, batch * (1 + max_nodes(*shape)))]
        if not rates.size:
            assert shape not in found
            continue
        best, option = int(np.argmax(rates)), found[shape]
        assert (option.tokens_per_ms, option.rows) == pytest.approx((rates[best], rows[best]))
        taken = np.bincount(np.array(order[: best + 1]) // size, minlength=NUM_QUALITIES)
        assert all(share == count for share, count, running in zip(option.shares, taken, qualities, strict=True) if running)
