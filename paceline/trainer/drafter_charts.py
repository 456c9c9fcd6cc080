"""Charts of a drafter's quality: along the answer, by depth and by tau. Written as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from paceline.files import atomic_write
from paceline.report.html import charts_page
from paceline.report.plotting import Chart, Series, line_chart
from paceline.spot.coverage import Coverage

_COLOURS = ("blue", "purple", "green", "yellow", "teal", "grey")


def write_charts(path: Path, found: Sequence[Coverage], best: Coverage, title: str) -> None:
    """Writes the charts of the best tau, and with several taus a comparison of them, to an HTML file."""
    charts = [position_chart(best), depth_chart(best), expected_tokens_chart(best)]
    if len(found) > 1:
        charts.append(tau_chart(found))
    atomic_write(path, charts_page(title, charts))


def position_chart(found: Coverage) -> Chart:
    """Share of correct first guesses along the answer, which shows how a drafter trained on short answers decays on long ones."""
    x = np.array([float(start) for start, _ in found.by_position])
    y = np.array([share.covered for _, share in found.by_position])
    least = min(share.rows for _, share in found.by_position)
    return line_chart("Along the answer", [Series("first guess right", "blue", x, y)], "token of the answer, from",
                      "share of first guesses right", note=f"Each point: the tokens up to the next one, {least:,} at least.",
                      wide=True)


def depth_chart(found: Coverage) -> Chart:
    """Share of tokens that are among the drafter's first k guesses, by depth."""
    series = _by_depth(found.by_depth)
    return line_chart("Coverage by depth", series, "depth", "share covered", from_zero=True,
                      note="How often the policy's token is among the first guesses.")


def expected_tokens_chart(found: Coverage) -> Chart:
    """Expected number of tokens per verification with a full draft tree, by depth."""
    series = _by_depth(found.accept_length)
    return line_chart("Expected tokens per verification", series, "depth", "tokens per verification", from_zero=True,
                      note="With a full tree; an engine's budget prunes it.")


def tau_chart(found: Sequence[Coverage]) -> Chart:
    """Expected number of tokens per verification at the largest depth, by tau."""
    ordered = sorted(found, key=lambda coverage: coverage.tau)
    x = np.array([coverage.tau for coverage in ordered])
    series = [Series(f"top {k}", colour, x, np.array([coverage.accept_length[k][-1] for coverage in ordered]))
              for k, colour in zip(ordered[0].accept_length, _COLOURS, strict=False)]
    return line_chart("By tau", series, "tau", "tokens per verification",
                      note="How much of the shared noise the ranking uses.")


def _by_depth(values: dict[int, list[float]]) -> list[Series]:
    return [Series(f"top {k}", colour, np.arange(1.0, len(shares) + 1), np.array(shares))
            for (k, shares), colour in zip(values.items(), _COLOURS, strict=False)]
