"""Token ids in, token ids out: vLLM's `/inference/v1/generate`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from paceline.engine.thread import NewTokens
from paceline.server.generation import Choice, Generation
from paceline.server.logprobs import prompt_logprobs
from paceline.server.rl.backend import Body
from paceline.server.schema import GenerationRequest, StreamOptions
from paceline.types import Rollout

_WITHOUT_EFFECT = ("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output", "detokenize",
                   "output_kind", "routed_experts_prompt_start")
"""Sampling parameters of vLLM that concern text, of which there is none here, or what an engine without experts does not have."""


class TokenSampling(GenerationRequest):
    """Sampling parameters by vLLM's names."""

    max_tokens: int | None = Field(None, ge=1)
    logprobs: int | None = Field(None, ge=0, le=1)

    @model_validator(mode="before")
    @classmethod
    def _drop_without_effect(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        if raw.get("truncate_prompt_tokens") is not None:
            raise ValueError("truncate_prompt_tokens: token ids are taken as they are")
        return {name: value for name, value in raw.items() if name in cls.model_fields or name not in _WITHOUT_EFFECT}

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def num_top(self) -> int:
        return 0


class TokensRequest(Body):
    """Body of `POST /inference/v1/generate`."""

    token_ids: list[int] = Field(min_length=1)
    sampling_params: TokenSampling = Field(default_factory=TokenSampling)
    model: str | None = None
    request_id: str | None = Field(None, min_length=1)
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    """Prefixes are shared only with requests of the same salt. Trainers use it to tell weights apart; those of older weights
    are dropped with every update anyway."""
    priority: Literal[0] = 0
    output_mode: Literal["tokens"] = "tokens"
    return_token_ids: bool = False
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    def generation_request(self) -> TokenSampling:
        """The sampling parameters with what the request says beside them."""
        if self.stream and self.sampling_params.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs: not supported in a stream")
        return self.sampling_params.model_copy(update={
            "model": self.model, "return_token_ids": self.return_token_ids, "stream": self.stream,
            "stream_options": self.stream_options, "cache_salt": self.cache_salt or self.sampling_params.cache_salt,
            "logprobs_mode": self.sampling_params.logprobs_mode or self.logprobs_mode})


class TokenGeneration(Generation):
    """The answers to one such request."""

    _describe: Callable[[Rollout], dict[str, Any]]

    def _content(self) -> Any:
        choices = [self._token_choice(index, choice, rollout.token_ids, self._known_logprobs(rollout), rollout)
                   for index, choice in enumerate(self._choices) if (rollout := choice.rollout) is not None]
        return {**self._token_head(), "model": self._body.model, "created": self._created, "choices": choices,
                "weight_version": choices[-1]["weight_version"], "usage": self._usage(), "prompt_logprobs": self._of_prompt(),
                **self._given_prompt()}

    async def stream(self, on_first_token: Callable[[], None]) -> AsyncIterator[str]:
        first: dict[str, Any] = self._given_prompt()
        started = False
        async for index, event in self._all_events():
            if not started:
                on_first_token()
                started = True
            yield _line({**self._token_head(), "choices": [self._token_piece(index, event)], **first})
            first = {}
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield _line({**self._token_head(), "choices": [], "usage": self._usage()})
        yield "data: [DONE]\n\n"

    def _of_prompt(self) -> list[dict[str, Any] | None] | None:
        """Log-probabilities of the prompt's tokens, if they were asked for."""
        if self._body.prompt_logprobs is None:
            return None
        choice = self._choices[0]
        entries = self._prompt_entries(choice, self._body.prompt_logprobs)
        return prompt_logprobs(self._texts, entries, [scored.rank for scored in choice.scores[: len(entries) - 1]])

    def _token_head(self) -> dict[str, Any]:
        return {"request_id": self._name, "output_mode": "tokens"}

    def _given_prompt(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._prompts[0]} if self._body.return_token_ids else {}

    def _token_piece(self, index: int, event: NewTokens | Rollout) -> dict[str, Any]:
        choice = self._choices[index]
        if isinstance(event, NewTokens):
            choice.tokens += event.tokens
            found = self._token_choice(index, choice, event.tokens, event.logprobs, None)
            choice.num_logprobs += len(event.logprobs)
        else:
            choice.rollout = event
            found = self._token_choice(index, choice, [], self._known_logprobs(event)[choice.num_logprobs :], event)
        return found

    def _token_choice(self, index: int, choice: Choice, tokens: list[int], logprobs: list[float],
                      rollout: Rollout | None) -> dict[str, Any]:
        """Tokens of an answer. `rollout`: the answer, if it is finished."""
        entries = None
        if self._body.wants_logprobs:
            known = tokens if rollout is not None and tokens else choice.tokens[choice.num_logprobs :]
            entries = {"content": [_entry(token, logprob) for token, logprob in zip(known, logprobs, strict=False)]}
        reason = None if rollout is None else rollout.finish_reason
        found = {"index": index, "token_ids": tokens, "logprobs": entries, "finish_reason": reason,
                 "stop_reason": None if rollout is None else self._final(rollout)[1]}
        return found if rollout is None else {**found, **self._describe(rollout)}


def _entry(token: int, logprob: float) -> dict[str, Any]:
    """A log-probability: by the token's id as vLLM writes it since 0.33, and as before."""
    return {"token": f"token_id:{token}", "token_id": token, "logprob": logprob, "rank": None, "bytes": None,
            "top_logprobs": [{"token": f"token_id:{token}", "token_id": token, "logprob": logprob, "rank": None, "bytes": None}]}


def _line(content: dict[str, Any] | Sequence[Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
