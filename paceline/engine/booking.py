"""A step between its launch and its end: what it drew, entered with its requests."""

from __future__ import annotations

from typing import NamedTuple

from paceline.engine.drafting import Drafted
from paceline.engine.finish import Tokenizer, append
from paceline.engine.graphs import Moment
from paceline.engine.request import Request, Status
from paceline.engine.scheduler import StepPlan
from paceline.engine.transfer import Download
from paceline.engine.watch import Look
from paceline.types import FinishReason


class InFlight(NamedTuple):
    """A step that has been launched and not yet read."""

    plan: StepPlan
    drafted: Drafted
    drawn: Download | None
    """None: it holds nothing but prompts."""
    version: int
    began: Moment
    look: Look | None
    """At what comes of its drafts."""
    context: float
    """Mean of its decode requests."""
    launch_seconds: float
    """That launching it took."""


class Booked(NamedTuple):
    tokens: dict[int, list[int]]
    """Request → what it got."""
    ended: list[tuple[Request, FinishReason]]
    accepted: int
    """Drafted nodes."""


def book(step: InFlight, max_length: int, tokenizer: Tokenizer | None) -> Booked:
    """Waits for the step if it must. Requests get their tokens up to the one that ends them."""
    if step.drawn is None:
        return Booked({}, [], 0)
    tokens, logprobs, raw, counts = step.drawn.lists()
    requests, drafted, over = step.plan.decode, step.drafted, Status.FINISHED
    if drafted.max_depth:
        tokens, logprobs, raw = ([row[:num] for row, num in zip(rows, counts, strict=False)] for rows in (tokens, logprobs, raw))
    appended: dict[int, list[int]] = {}
    ended: list[tuple[Request, FinishReason]] = []
    for request, drawn, chances in zip(requests, tokens, logprobs, strict=False):  # behind them comes padding
        if request.status is over:  # ended while this step was on its way
            continue
        taken, reason = append(request, drawn, max_length, tokenizer)
        if reason is not None:
            ended.append((request, reason))
            drawn, chances = drawn[:taken], chances[:taken]
        appended[request.id] = drawn
        request.num_computed = len(request.tokens) - 1
        request.logprobs += chances
        request.versions += [step.version] * taken
    for request, chances in zip(requests, raw, strict=False):
        if request.params.raw_logprobs and request.id in appended:
            request.raw_logprobs += chances[: len(appended[request.id])]
    accepted = 0
    for request, nodes, num in zip(requests, drafted.num_nodes, counts, strict=False):
        if nodes and request.id in appended:
            accepted += num - 1
            request.tried(num > 1)
    return Booked(appended, ended, accepted)
