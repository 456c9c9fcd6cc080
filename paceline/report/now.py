"""The part of a live page that shows the rollouts as they are generated: a fragment of HTML, made from a snapshot of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.report.formatting import format_duration
from paceline.report.html import Card, render
from paceline.report.plotting import Bar, BarAxis, Chart, bar_chart
from paceline.report.rollout_charts import course_bars
from paceline.report.snapshot import AnswerProgress, RolloutSnapshot

_MAX_BARS = 160
"""Number of answers that are drawn; of more, as many quantiles of their lengths."""
_ANSWER_COLOURS = {"blue": "running: the policy's own tokens", "green": "running: accepted draft tokens",
                   "pale": "finished: the policy's own", "teal": "finished: drafted"}
_PHASES = {"generate": "generating", "generate_off": "comparison: the same answers without speculation", "reward": "grading",
           "infer": "training the policy", "train": "training the policy", "drafter": "training the drafter",
           "evaluate": "evaluating"}
_STATES = {"busy": "generating", "training": "training the drafter", "updating": "training the policy"}


def now_fragment(snapshot: RolloutSnapshot) -> str:
    """What the run is doing now."""
    charts = [answers_chart(snapshot.answers), live_course_chart(snapshot.course)]
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
        own, drafted = ("blue", "green") if answer.is_running else ("pale", "teal")
        bars.append(Bar(place + 0.1, place + 0.9, {own: answer.num_tokens - answer.num_accepted, drafted: answer.num_accepted},
                        f"answer {answer.request}: {answer.num_tokens} tokens"))
    running = sum(answer.is_running for answer in answers)
    return bar_chart(f"Tokens of each answer: {running} running, {len(answers) - running} finished", bars,
                     BarAxis((0.0, float(len(drawn))), "answers", whole=True), "tokens", _ANSWER_COLOURS)


def live_course_chart(course: Mapping[str, Any]) -> Chart | None:
    """Live answers over the time of the batch so far, by who drafts."""
    on = course.get("on") or {}
    if "strategy" not in on:
        return None
    bars, legend = course_bars(on, on["seconds"])
    return bar_chart(f"Answers that are not finished, and who drafts: {on['seconds']:.1f} seconds so far", bars,
                     BarAxis((0.0, on["seconds"]), "seconds of generation"), "live answers", legend)
