"""Results of the selection benchmark as sentences and as plain JSON."""

from __future__ import annotations

from typing import Any

from paceline.bench.selection import SELECTORS, BatchResult, Cell, Expected

_EVEN = 0.02
"""Relative differences below this count as none."""


def expectation(expected: Expected, auto: Cell) -> str:
    """Sentences that compare what auto predicted with what was measured."""
    ms = "not measured" if expected.measured_ms is None else f"{expected.measured_ms:.2f} ms"
    tokens = "" if expected.measured_tokens is None else f" for {expected.measured_tokens:.1f} tokens"
    return (f"auto used {auto.used} most and now holds {expected.strategy}: predicted {expected.predicted_ms:.2f} ms for "
            f"{expected.predicted_tokens:.1f} tokens a step, measured {ms}{tokens}. Lately its times were off by "
            f"{expected.cost_error:.0%}, its tokens by {expected.progress_error:.0%}; choosing took "
            f"{auto.choosing_share:.1%} of the time.")


def why(result: BatchResult) -> str:
    """One sentence that says why speculation pays at this batch size or does not."""
    batch, off = result.batch, result.cell("off")
    best = best_speculating(result)
    rows = "1 row" if batch == 1 else f"{batch} rows"
    if best is None or off.step is None:
        return "There is no drafter here: nothing to speculate with."
    if best.step is None:
        return f"{best.used} never ran with all {batch} requests at once; all in all it is {best.ratio:.2f}x off."
    nodes, tokens = best.step.rows / batch - 1, best.step.tokens / batch
    dearer = best.step.ms / off.step.ms
    found = (f"A step of {rows} costs {off.step.ms:.2f} ms, one with {best.used} ({nodes:.1f} nodes for each) "
             f"{best.step.ms:.2f} ms ({dearer:.2f}x) and brings {tokens:.2f} tokens for each")
    if best.ratio > 1 + _EVEN:
        return f"{found}: it pays; {best.ratio:.2f}x off."
    if best.ratio >= 1 - _EVEN:
        return f"{found}: it neither pays nor costs; {best.ratio:.2f}x off."
    return f"{found}: it does not pay; off is best."


def against_best(result: BatchResult) -> str:
    """Which fixed strategy would have been best, and why auto differs from it: the time that choosing takes, steps without
    speculation, and other strategies, in the order of what they cost at most."""
    auto, off = result.cell("auto"), result.cell("off")
    best = max((cell for cell in result.cells if cell.name not in SELECTORS), key=lambda cell: cell.tokens_per_s)
    found = f"The best fixed strategy would have been {best.name} ({best.ratio:.2f}x off); auto is {auto.ratio:.2f}x off"
    if auto.ratio >= (1 - _EVEN) * best.ratio:
        return found + (": as fast." if auto.ratio <= (1 + _EVEN) * best.ratio else ": faster, as it changes with the text.")
    steps = max(1, sum(auto.strategies.values()))
    shares = {name: count / steps for name, count in auto.strategies.items() if name != best.name}
    causes = [(auto.choosing_share, f"choosing took {auto.choosing_share:.1%} of its time")]
    if "off" in shares:
        causes.append((shares["off"] * (1 - off.ratio / best.ratio),
                       f"{shares.pop('off'):.0%} of its steps were off, to measure it or until a drafter was sure to pay"))
    if shares:
        most = max(shares, key=lambda name: shares[name])
        causes.append((sum(shares.values()) * (1 - auto.ratio / best.ratio),
                       f"{sum(shares.values()):.0%} were other strategies, mostly {most}, while it learned"))
    return f"{found}: " + "; ".join(text for _, text in sorted(causes, reverse=True)) + "."


def best_speculating(result: BatchResult) -> Cell | None:
    """The fastest strategy that speculates in most of its steps; None if there is none."""
    return max((cell for cell in result.cells if cell.used != "off"), key=lambda cell: cell.tokens_per_s, default=None)


def as_json(result: BatchResult) -> dict[str, Any]:
    """Figures of one batch size as plain JSON."""
    best = best_speculating(result)
    return {
        "batch": result.batch, "why": why(result), "against_best_fixed": against_best(result),
        "differing_answers": result.num_differing,
        "pays": best is not None and best.ratio > 1 + _EVEN,
        "strategies": {cell.name: cell._asdict() | {"step": None if cell.step is None else cell.step._asdict()}
                       for cell in result.cells},
        "auto_expected": None if result.expected is None else result.expected._asdict()}
