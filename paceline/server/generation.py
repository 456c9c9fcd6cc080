"""One HTTP request: its prompts go to the engine, and its answers come back whole or piece by piece."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from paceline.engine.thread import EngineThread, Event, NewTokens, Submission
from paceline.server.errors import GenerationFailed
from paceline.server.schema import ChatRequest, GenerationRequest, chat_logprobs, completion_logprobs
from paceline.server.text import TextStream
from paceline.types import Rollout, SamplingParams


class Choice:
    """One answer of a request."""

    def __init__(self, prompt_ids: list[int], text: TextStream) -> None:
        self.prompt_ids, self.text = prompt_ids, text
        self.tokens: list[int] = []
        self.num_logprobs = self.text_offset = 0
        self.rollout: Rollout | None = None


class Generation:
    """The answers to one HTTP request, `n` to each of its prompts."""

    def __init__(self, thread: EngineThread, tokenizer: Any, body: GenerationRequest, prompts: Sequence[list[int]],
                 params: SamplingParams, timeout_s: float) -> None:
        """`timeout_s`: `result` and `stream` raise TimeoutError after so many seconds."""
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._thread, self._tokenizer, self._body, self._prompts, self._params = thread, tokenizer, body, prompts, params
        self._is_chat = isinstance(body, ChatRequest)
        self._events: asyncio.Queue[tuple[int, Event | Exception]] = asyncio.Queue()
        self._submissions: list[Submission] = []
        self._choices = [Choice(prompt, TextStream(tokenizer, params.stop)) for prompt in prompts for _ in range(body.n)]
        self._id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())

    async def start(self) -> None:
        """Queue all answers."""
        for number, prompt in enumerate(self._prompts):
            first = number * self._body.n

            def put(event: Event, first: int = first) -> None:
                self._events.put_nowait((first + event.sample, event))

            self._submissions.append(await self._thread.submit(prompt, self._params, put, self._body.n,
                                                               streamed=self._body.stream))

    def cancel(self) -> None:
        """Drop the answers that are not finished."""
        for submission in self._submissions:
            self._thread.cancel(submission)

    def fail(self, error: Exception) -> None:
        """Let `result` or `stream` raise an error, whatever the engine does."""
        self._events.put_nowait((0, error))

    async def result(self) -> bytes:
        """Wait for all answers. Returns the body of the HTTP answer."""
        async for index, event in self._all_events():
            if isinstance(event, Rollout):
                self._choices[index].rollout = event
        return await asyncio.to_thread(self._body_of_all)  # many long answers take a while

    def _body_of_all(self) -> bytes:
        choices = [self._whole(index, choice) for index, choice in enumerate(self._choices)]
        content = {**self._head(streamed=False), "choices": choices, "usage": self._usage()}
        return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()

    async def stream(self, on_first_token: Callable[[], None]) -> AsyncIterator[str]:
        """Yield the lines of an event stream."""
        if self._is_chat:
            for index in range(len(self._choices)):
                yield self._line([self._chunk(index, {"role": "assistant", "content": ""}, None)])
        started = False
        async for index, event in self._all_events():
            if not started:
                on_first_token()
                started = True
            chunk = self._piece(index, event)
            if chunk is not None:
                yield self._line([chunk])
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield self._line([], self._usage())
        yield "data: [DONE]\n\n"

    async def _all_events(self) -> AsyncIterator[tuple[int, Event]]:
        left = len(self._choices)
        while left:
            async with asyncio.timeout_at(self._deadline):
                index, event = await self._events.get()
            if isinstance(event, Exception):
                raise event
            if isinstance(event, Rollout):
                left -= 1
                if event.finish_reason == "error":
                    raise GenerationFailed(event.error or "the engine ended the answer with an error")
            yield index, event

    # Layout of answers

    def _head(self, streamed: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if streamed else "chat.completion") if self._is_chat else "text_completion"
        return {"id": self._id, "object": kind, "created": self._created, "model": self._body.model}

    def _line(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> str:
        content = {**self._head(streamed=True), "choices": choices}
        return f"data: {json.dumps(content if usage is None else {**content, 'usage': usage}, ensure_ascii=False)}\n\n"

    def _whole(self, index: int, choice: Choice) -> dict[str, Any]:
        """A finished answer."""
        rollout = choice.rollout
        assert rollout is not None
        found: dict[str, Any] = {"index": index, "finish_reason": rollout.finish_reason, "logprobs": None}
        if self._body.wants_logprobs:
            found["logprobs"] = self._logprobs(choice, rollout.token_ids, rollout.raw_logprobs or [])
        if self._body.return_token_ids:
            found |= {"token_ids": rollout.token_ids, "prompt_token_ids": choice.prompt_ids}
        text = {"message": {"role": "assistant", "content": rollout.text}} if self._is_chat else {"text": rollout.text}
        return {**found, **text}

    def _piece(self, index: int, event: Event) -> dict[str, Any] | None:
        """The chunk for an event; None if there is nothing to send yet."""
        choice = self._choices[index]
        if isinstance(event, NewTokens):
            choice.tokens += event.tokens
            text, reason, logprobs, tokens = choice.text.add(event.tokens), None, event.logprobs, event.tokens
        else:
            choice.rollout = event
            text, reason, tokens = choice.text.finish(event.text), event.finish_reason, []
            logprobs = (event.raw_logprobs or [])[choice.num_logprobs :]
        if not text and reason is None and not logprobs and not self._body.return_token_ids:
            return None
        content: dict[str, Any] = ({"content": text} if text else {}) if self._is_chat else {"text": text}
        chunk = self._chunk(index, content, reason)
        if logprobs:
            known = choice.tokens[choice.num_logprobs : choice.num_logprobs + len(logprobs)]
            chunk["logprobs"] = self._logprobs(choice, known, logprobs)
            choice.num_logprobs += len(logprobs)
        return {**chunk, "token_ids": tokens} if self._body.return_token_ids else chunk

    def _chunk(self, index: int, content: dict[str, Any], reason: str | None) -> dict[str, Any]:
        text = {"delta": content} if self._is_chat else content
        return {"index": index, **text, "logprobs": None, "finish_reason": reason}

    def _logprobs(self, choice: Choice, tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
        texts = [self._tokenizer.decode([token]) for token in tokens]
        start, choice.text_offset = choice.text_offset, choice.text_offset + sum(map(len, texts))
        return chat_logprobs(texts, logprobs) if self._is_chat else completion_logprobs(texts, logprobs, start)

    def _usage(self) -> dict[str, int]:
        prompt = sum(map(len, self._prompts))
        answers = sum(len(choice.rollout.token_ids) for choice in self._choices if choice.rollout is not None)
        return {"prompt_tokens": prompt, "completion_tokens": answers, "total_tokens": prompt + answers}
