"""The part of a live page that shows the rollouts as they are generated: a fragment of HTML, made from a snapshot of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from paceline.report.formatting import format_duration
from paceline.report.html import Card, render
from paceline.report.plotting import Bar, Chart
from paceline.report.snapshot import AnswerProgress, RolloutSnapshot

_MAX_BARS = 160
"""Number of answers that are drawn; of more, as many quantiles of their lengths."""
_HEIGHT, _MARGIN = 170, 44
"""Height of a drawing and the width of its axis, in pixels."""
_COLOURS = {"off": "grey", "suffix": "blue", "eagle": "green", "": "pale"}
"""Drafter of a strategy → colour."""
_PHASES = {"generate": "generating", "generate_off": "comparison: the same answers without speculation", "reward": "grading",
           "infer": "training the policy", "train": "training the policy", "drafter": "training the drafter",
           "evaluate": "evaluating"}
_STATES = {"busy": "generating", "training": "training the drafter", "updating": "training the policy"}


def now_fragment(snapshot: RolloutSnapshot) -> str:
    """What the run is doing now."""
    charts = [answers_chart(snapshot.answers), course_chart(snapshot.course)]
    workers = [(f"worker {worker.worker}", f"{_STATES.get(worker.state, worker.state)}, {worker.num_requests} requests")
               for worker in snapshot.workers]
    return render("now.html", status=_status(snapshot), cards=_cards(snapshot), workers=workers, texts=snapshot.texts,
                  charts=[chart for chart in charts if chart is not None])


def _status(snapshot: RolloutSnapshot) -> str:
    phase = _PHASES.get(snapshot.phase, snapshot.phase)
    if not snapshot.step:
        return phase or "starting"
    left = "" if snapshot.eta_s is None else f" · about {format_duration(snapshot.eta_s)} left"
    return f"Step {snapshot.step:,} of {snapshot.num_steps:,}{f': {phase}' if phase else ''}{left}"


def _cards(snapshot: RolloutSnapshot) -> list[Card]:
    if not snapshot.num_total:
        return []
    share = f"{100 * snapshot.accepted / snapshot.drafted:.0f} % of {snapshot.drafted:,} verified" if snapshot.drafted else (
        "none verified so far")
    return [Card("answers finished", f"{snapshot.num_finished:,} of {snapshot.num_total:,}", "of this batch"),
            Card("tokens per second", f"{snapshot.tokens_per_second:,.0f}", f"accept length {snapshot.accept_length:.2f}"),
            Card("who drafts", _drafter(snapshot.strategy), snapshot.strategy or "no decoding step"),
            Card("draft tokens accepted", f"{snapshot.accepted:,}", share)]


def _drafter(strategy: str) -> str:
    return {"off": "nobody", "suffix": "suffix", "eagle": "learned"}.get(strategy.partition(":")[0], "–")


def answers_chart(answers: Sequence[AnswerProgress]) -> Chart | None:
    """One bar per answer: its tokens so far, by who proposed them."""
    if not answers:
        return None
    drawn = list(answers)
    if len(drawn) > _MAX_BARS:
        drawn.sort(key=lambda answer: answer.num_tokens)
        drawn = [drawn[i] for i in np.linspace(0, len(drawn) - 1, _MAX_BARS).round().astype(int)]
    bars = []
    for place, answer in enumerate(drawn):
        colours = ("blue", "green") if answer.is_running else ("pale", "teal")
        counts = answer.num_tokens - answer.num_accepted, answer.num_accepted
        tooltip = (f"answer {answer.request}: {answer.num_tokens} tokens, {answer.num_accepted} of them drafted, "
                   f"{'running' if answer.is_running else 'finished'}")
        bars.append(Bar(place + 0.1, place + 0.9, tuple(zip(colours, map(float, counts), strict=True)), tooltip))
    running = sum(answer.is_running for answer in answers)
    legend = {"blue": "running: the policy's own tokens", "green": "running: accepted draft tokens",
              "pale": "finished: the policy's own", "teal": "finished: drafted"}
    return _chart(f"Tokens of each answer: {running} running, {len(answers) - running} finished", bars, float(len(drawn)), legend)


def course_chart(course: Mapping[str, Any]) -> Chart | None:
    """Live answers over the time of the batch so far, by who drafts."""
    on = course.get("on") or {}
    if "strategy" not in on:
        return None
    width, bars, at = on["seconds"] / len(on["live"]), [], 0
    for (num, strategy), run in groupby(zip(on["live"], on["strategy"], strict=True)):
        end, name = at + len(list(run)), on["strategies"][strategy]
        colour = _COLOURS[name.partition(":")[0]]
        bars.append(Bar(at * width, end * width, ((colour, num),), f"{at * width:.2f} s: {num} live, {name or 'prefill'}"))
        at = end
    legend = {"grey": "off", "blue": "suffix drafter", "green": "learned drafter", "pale": "prefill only"}
    title = f"Answers that are not finished, and who drafts: {on['seconds']:.1f} seconds so far"
    return _chart(title, bars, on["seconds"], legend)


def _chart(title: str, bars: Sequence[Bar], right: float, legend: Mapping[str, str]) -> Chart:
    used = {colour for bar in bars for colour, height in bar.parts if height}
    pairs = tuple((colour, name) for colour, name in legend.items() if colour in used)
    return Chart(title, _drawing(bars, right, title, 1100), _drawing(bars, right, title, 400), pairs)


def _drawing(bars: Sequence[Bar], right: float, title: str, width: int) -> Markup:
    """Bars as plain SVG: matplotlib takes a second for what has to be drawn every second."""
    top = max(1.0, *(bar.height for bar in bars))
    scale_x, scale_y = (width - _MARGIN) / right, (_HEIGHT - 12) / top
    parts = []
    for value in (0.0, top / 2, top):
        y = _HEIGHT - value * scale_y
        parts.append(f'<path d="M{_MARGIN} {y:.1f}H{width}" stroke="var(--rule)"/><text x="{_MARGIN - 6}" y="{y + 4:.1f}" '
                     f'text-anchor="end" font-size="12" fill="var(--soft)">{value:.0f}</text>')
    for bar in bars:
        y, x, wide = float(_HEIGHT), _MARGIN + bar.x0 * scale_x, (bar.x1 - bar.x0) * scale_x
        parts.append(f"<g><title>{escape(bar.tooltip)}</title>")
        for colour, height in bar.parts:
            y -= height * scale_y
            parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.2f}" height="{height * scale_y:.1f}" '
                         f'fill="var(--{colour})"/>')
        parts.append("</g>")
    return Markup(f'<svg viewBox="0 0 {width} {_HEIGHT + 4}" role="img"><title>{escape(title)}</title>{"".join(parts)}</svg>')
