"""How often an engine used each strategy, in words."""

from __future__ import annotations

from collections.abc import Mapping


def strategy_shares(steps: Mapping[str, int], most: int = 5) -> str:
    """Shares of engine steps per strategy, such as `suffix:d8w2v16 61 %, off 39 %`: the most frequent ones, then the others
    together."""
    total = sum(steps.values())
    if not total:
        return "none"
    ranked = sorted(steps.items(), key=lambda item: -item[1])
    shown = ranked if len(ranked) <= most else [*ranked[: most - 1], ("others", sum(n for _, n in ranked[most - 1 :]))]
    return ", ".join(f"{name} {100 * count / total:.0f} %" for name, count in shown)
