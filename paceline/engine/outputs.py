"""Outputs of steps: sampled tokens are appended to their requests, and turned into rollouts when a request ends.

Where an answer stops is a pure function of its tokens: it does not depend on how many of them one step brought.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np

from paceline.engine.command import StepOutputs
from paceline.engine.request import Request, Status
from paceline.types import FeatureRecord, FinishReason, Rollout, SamplingParams

NOT_A_NUMBER = -1
"""Token id that is sampled where the policy's logits are not numbers, or no token is allowed. It is one of every request's
`stop_ids`."""
_FEW = 256
"""Outputs of steps with no more places for tokens than this are converted to Python numbers as a whole, which takes less time
than finding out which of them were sampled."""


def stop_ids(params: SamplingParams, eos: frozenset[int]) -> frozenset[int]:
    """Return the token ids that end an answer, or a turn of it. `eos`: the policy's end-of-text ids."""
    return frozenset({NOT_A_NUMBER, *params.stop_token_ids}) | (frozenset() if params.ignore_eos else eos)


class Appended(NamedTuple):
    """The tokens that one step added to its requests."""

    tokens: dict[int, list[int]]
    """New tokens by request id."""
    ended: list[tuple[Request, FinishReason]]
    """Requests that ended with these tokens."""
    accepted: int
    """Number of accepted draft tokens."""


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer to find stop strings."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = ...) -> str: ...


def append_outputs(requests: list[Request], outputs: StepOutputs, version: int, max_length: int,
                   tokenizer: Tokenizer | None) -> Appended:
    """Append the sampled tokens of a step to its requests, up to the token that ends an answer. `version`: version of the
    policy."""
    finished = Status.FINISHED
    tokens, logprobs, raw = _sampled(outputs, len(requests))
    appended: dict[int, list[int]] = {}
    ended: list[tuple[Request, FinishReason]] = []
    accepted = 0
    of_version = [[version] * count for count in range(outputs.tokens.shape[1] + 1)]
    for request, new, chances in zip(requests, tokens, logprobs, strict=True):
        if request.status is finished or not new:  # it ended while this step was in flight, or is not yet sampled from
            continue
        if request.num_steps_dropped:  # its turn ended while this step was in flight
            request.num_steps_dropped -= 1
            continue
        own, count = request.tokens, len(new)
        accepted += count - 1
        end = len(own) + count
        if end < request.max_tokens and end < max_length and request.stop_ids.isdisjoint(new) and not request.params.stop:
            own += new
        else:
            taken, reason = append_tokens(request, new, max_length, tokenizer)
            if reason is not None:
                ended.append((request, reason))
                new, chances = new[:taken], chances[:taken]
        appended[request.id] = new
        request.num_computed = len(own) - 1
        request.logprobs += chances
        request.versions += of_version[len(new)]
    for request, chances in zip(requests, raw, strict=False):
        if request.params.raw_logprobs and request.id in appended:
            request.raw_logprobs += chances[: len(appended[request.id])]
    return Appended(appended, ended, accepted)


def _sampled(outputs: StepOutputs, num_requests: int) -> tuple[Iterable[list[int]], Iterable[list[float]], Iterable[list[float]]]:
    """Return tokens, log-probabilities and raw log-probabilities of each request; no raw ones if they were not computed. In large
    steps only what was generated is converted to Python numbers: unused tree levels can be many times as much."""
    tokens, logprobs, raw, counts, _ = outputs
    fields = [array[:num_requests] for array in (tokens, logprobs, raw) if array is not None]
    lists: list[Iterable[Any]]
    if counts is None:  # one token each
        lists = [field.tolist() for field in fields]
    elif num_requests * tokens.shape[1] <= _FEW:
        each = counts[:num_requests].tolist()
        lists = [[row[:count] for row, count in zip(field.tolist(), each, strict=True)] for field in fields]
    else:
        ends = np.cumsum(counts[:num_requests]).tolist()
        spans = list(map(slice, [0, *ends[:-1]], ends))
        filled = np.arange(tokens.shape[1]) < counts[:num_requests, None]
        lists = [map(field[filled].tolist().__getitem__, spans) for field in fields]
    return lists[0], lists[1], lists[2] if raw is not None else ()


def append_tokens(request: Request, tokens: list[int], max_length: int,
                  tokenizer: Tokenizer | None) -> tuple[int, FinishReason | None]:
    """Append tokens to a request up to the one that ends the answer. Return how many were appended, and why the answer ended,
    if it did."""
    own = request.tokens
    for taken, token in enumerate(tokens, start=1):
        if token == NOT_A_NUMBER:
            request.error = f"request {request.id}: the policy's logits at position {len(own)} are not numbers"
            return taken - 1, "error"
        own.append(token)
        if token in request.stop_ids or (request.params.stop and _ends_with_stop_string(request, tokenizer)):
            return taken, "stop"
        if len(own) >= request.max_tokens or len(own) >= max_length:
            return taken, "length"
    return len(tokens), None


def make_rollout(request: Request, reason: FinishReason, tokenizer: Tokenizer | None, features: FeatureRecord | None) -> Rollout:
    """Return a finished request's rollout."""
    return Rollout(
        request_id=request.id, sample=request.sample, prompt_ids=request.prompt_ids, token_ids=request.output_ids,
        logprobs=request.logprobs, text=_final_text(request, tokenizer), finish_reason=reason, versions=request.versions,
        seed=request.params.seed, error=request.error, no_token_allowed=request.no_token_allowed, features=features,
        loss_mask=request.loss_mask, raw_logprobs=request.raw_logprobs if request.params.raw_logprobs else None,
        num_preemptions=request.num_preemptions)


def failed_rollout(sample: int, error: str) -> Rollout:
    """Return the rollout of a prompt that could not be served."""
    return Rollout(request_id=-1, sample=sample, prompt_ids=[], token_ids=[], logprobs=[], text="", finish_reason="error",
                   versions=[], error=error)


def feature_record(request: Request, features: Any, layers: tuple[int, ...]) -> FeatureRecord:
    """Return the hidden states of these layers, as they were stored while generating, for every token that was fed."""
    return FeatureRecord(request.tokens[: request.num_computed + 1], features, layers, request.versions,
                         len(request.prompt_ids))


def _ends_with_stop_string(request: Request, tokenizer: Tokenizer | None) -> bool:
    """Whether the text that ends with the newest token contains a stop string, the first `min_tokens` tokens and earlier turns
    left out. Only the end of the answer is decoded: a character consists of at most four byte-level tokens."""
    assert tokenizer is not None, "stop strings need a tokenizer"
    window = 4 * max(len(stop) for stop in request.params.stop) + 4
    first = max(len(request.prompt_ids) + request.params.min_tokens, request.turn_start)
    answer = request.tokens[max(first, len(request.tokens) - window) :]
    text = tokenizer.decode(answer, skip_special_tokens=False)
    return any(stop in text for stop in request.params.stop)


def _final_text(request: Request, tokenizer: Tokenizer | None) -> str:
    """Return the answer without special tokens, cut before the first stop string that may end it. An answer of several turns is
    not cut: stop strings have ended its turns."""
    if tokenizer is None:
        return ""
    text = tokenizer.decode(request.output_ids, skip_special_tokens=True)
    if request.params.pauses:
        return text
    least = request.params.min_tokens
    end = tokenizer.decode(request.output_ids[least:], skip_special_tokens=True) if least else text
    cuts = [end.find(stop) for stop in request.params.stop if stop in end]
    return text[: len(text) - len(end) + min(cuts)] if cuts else text
