"""Steps that raise: the requests that they worked on end with an error, and the engine begins again with the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from paceline.engine.drafting import Drafting
from paceline.engine.request import Request, Status
from paceline.engine.scheduler import Scheduler
from paceline.types import Rollout, StepResult


def end_broken_requests(requests: dict[int, Request], results: Iterable[StepResult], scheduler: Scheduler, drafting: Drafting,
                        error: BaseException, held_pages: Collection[int] = ()) -> list[Rollout]:
    """End all requests that run, because a step was broken off by `error` and may have left them in any state. Return their
    rollouts. Requests that wait or are paused stay in `requests`; no slot, page or cached prefix is in use afterwards.
    `results`: results of steps before, whose rollouts are not reported again. `held_pages`: pages that belong to no request and
    stay allocated."""
    reported = {rollout.request_id for result in results for rollout in result.finished}
    broken = [request for request in requests.values()
              if request.status not in (Status.WAITING, Status.PAUSED) or request.id in reported]
    for request in broken:
        del requests[request.id]
    scheduler.reset(requests.values(), held_pages)
    drafting.reset()
    message = f"a step failed: {describe_error(error)}"
    for request in broken:
        request.status, request.finish_reason, request.error = Status.FINISHED, "error", message
    return [_broken_rollout(request, message) for request in broken if request.id not in reported]


def describe_error(error: BaseException) -> str:
    """Return the kind and the message of an error on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def _broken_rollout(request: Request, error: str) -> Rollout:
    """Return the rollout of a request whose step was broken off: the tokens of the steps before, without text and features."""
    lengths = [len(request.output_ids), len(request.logprobs), len(request.versions)]
    raw = request.raw_logprobs if request.params.raw_logprobs else None
    num = min(lengths if raw is None else [*lengths, len(raw)])  # the step may have extended only some of them
    return Rollout(
        request_id=request.id, sample=request.sample, prompt_ids=request.prompt_ids, token_ids=request.output_ids[:num],
        logprobs=request.logprobs[:num], text="", finish_reason="error", versions=request.versions[:num],
        seed=request.params.seed, raw_logprobs=None if raw is None else raw[:num], error=error,
        loss_mask=None if request.loss_mask is None else request.loss_mask[:num], num_preemptions=request.num_preemptions)
