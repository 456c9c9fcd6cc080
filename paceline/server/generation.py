"""One HTTP request: its prompts go to the engine, and its answers come back whole or piece by piece."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from paceline.engine.thread import EngineThread, Event, NewTokens, Submission
from paceline.server.errors import GenerationFailed, NoTokenAllowed, describe, error_json
from paceline.server.logprobs import Entry, TextOffsets, TokenIds, TokenTexts, chat_logprobs, completion_logprobs, prompt_logprobs
from paceline.server.schema import ChatRequest, GenerationRequest
from paceline.server.scoring import TokenScore, score
from paceline.server.text import TextStream
from paceline.server.tools import NamedTool, call_json
from paceline.tool_calls import ToolCallFormat, ToolCallStream, parse_tool_calls
from paceline.types import Rollout, SamplingParams

STREAM_END = "data: [DONE]\n\n"
"""The last line of an event stream of completions."""


class Choice:
    """One answer of a request."""

    def __init__(self, prompt_ids: list[int], text: TextStream) -> None:
        self.prompt_ids, self.text = prompt_ids, text
        self.tokens: list[int] = []
        self.num_logprobs = 0
        self.calls: ToolCallStream | None = None  # of chats with tools
        self.num_calls = 0
        self.offsets = TextOffsets()
        self.rollout: Rollout | None = None
        self.scores: list[TokenScore] = []
        """Scores of the answer's tokens, and before them of the prompt's, but its first, if these are returned, too."""

    @property
    def finished(self) -> Rollout:
        """The whole answer."""
        assert self.rollout is not None
        return self.rollout


class Generation:
    """The answers to one HTTP request, `n` to each of its prompts."""

    def __init__(self, thread: EngineThread, texts: TokenTexts, body: GenerationRequest, prompts: Sequence[list[int]],
                 params: SamplingParams, timeout_s: float, max_tokens: int, request_id: str | None = None,
                 describe: Callable[[Rollout], dict[str, Any]] | None = None,
                 tool_format: ToolCallFormat | None = None) -> None:
        """`timeout_s`: `result` and `stream` raise TimeoutError after so many seconds. `max_tokens`: 0 if only prompts are
        scored. `request_id`: what the request can be aborted by (default: the id of the answer). `describe` returns further
        fields of a finished answer. `tool_format`: how the model writes calls of tools."""
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._thread, self._body, self._prompts, self.params = thread, body, prompts, params
        self._texts = TokenIds(texts.tokenizer) if body.return_tokens_as_token_ids else texts
        self._num_top = 0 if body.logprobs_mode == "processed_logprobs" else body.num_top
        self._tokenizer, self._max_tokens = texts.tokenizer, max_tokens
        self._is_chat = isinstance(body, ChatRequest)
        self._events: asyncio.Queue[tuple[int, Event | Exception]] = asyncio.Queue()
        self._submissions: list[Submission] = []
        self._choices = [Choice(prompt, TextStream(texts.tokenizer, params.stop)) for prompt in prompts for _ in range(body.n)]
        self._tool_format = tool_format if isinstance(body, ChatRequest) and body.parses_calls else None
        if self._tool_format is not None:
            for choice in self._choices:
                choice.calls = ToolCallStream(self._tool_format)
        self._id = f"{self._id_prefix}{uuid.uuid4().hex}"
        self._name = request_id or self._id
        self._describe = describe or (lambda rollout: {})
        self._created = int(time.time())

    async def start(self) -> None:
        """Queue all answers."""
        if self._max_tokens == 0:
            return
        for number, prompt in enumerate(self._prompts):
            first = number * self._body.n

            def put(event: Event, first: int = first) -> None:
                self._events.put_nowait((first + event.sample, event))

            self._submissions.append(await self._thread.submit(prompt, self.params, put, self._body.n,
                                                               streamed=self._body.stream, name=self._name))

    def cancel(self) -> None:
        """Drop the answers that are not finished."""
        for submission in self._submissions:
            self._thread.cancel(submission)

    def fail(self, error: Exception) -> None:
        """Let `result` or `stream` raise an error, whatever the engine does."""
        self._events.put_nowait((0, error))

    async def result(self) -> bytes:
        """Wait for all answers. Returns the body of the HTTP answer."""
        if self._max_tokens == 0:
            for choice in self._choices:
                choice.rollout = Rollout(-1, 0, choice.prompt_ids, [], [], "", "length", [])
        else:
            async for index, event in self._all_events():
                if isinstance(event, Rollout):
                    self._choices[index].rollout = event
        for choice in self._choices:
            await self._score(choice)
        return await asyncio.to_thread(self._body_of_all)  # many long answers take a while

    def _body_of_all(self) -> bytes:
        return json.dumps(self._content(), ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()

    def _content(self) -> Any:
        """The body of the HTTP answer with all answers."""
        choices = [self._whole(index, choice) for index, choice in enumerate(self._choices)]
        return {**self._head(streamed=False), **self._prompt_ids(), "choices": choices, "usage": self._usage()}

    async def stream(self, on_first_token: Callable[[], None]) -> AsyncIterator[str]:
        """Yield the lines of an event stream."""
        if self._is_chat:
            for index in range(len(self._choices)):
                yield self._line([self._chunk(index, {"role": "assistant", "content": ""}, None)],
                                 **({} if index else self._prompt_ids()))
        started = False
        continuous = self._body.stream_options is not None and self._body.stream_options.continuous_usage_stats
        async for index, event in self._all_events():
            if not started:
                on_first_token()
                started = True
            if isinstance(event, Rollout):
                self._choices[index].rollout = event
                await self._score(self._choices[index])
            chunk = self._piece(index, event)
            if chunk is not None:
                yield self._line([chunk], **({"usage": self._usage()} if continuous else {}))
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield self._line([], usage=self._usage())
        yield STREAM_END

    def error_line(self, error: Exception) -> str:
        """The last line of a stream in which something failed after it had begun."""
        return f"data: {error_json(*describe(error)).decode()}\n\n"

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
                    failed = NoTokenAllowed if event.no_token_allowed else GenerationFailed
                    raise failed(event.error or "the engine ended the answer with an error")
            yield index, event

    @property
    def _scores_prompt(self) -> bool:
        return self._body.prompt_logprobs is not None or (self._body.has_echo and self._body.wants_logprobs)

    async def _score(self, choice: Choice) -> None:
        """Compute what the engine does not report: alternatives, and log-probabilities of the prompt."""
        if not self._num_top and not self._scores_prompt:
            return
        num_top = max(self._num_top, self._body.prompt_logprobs or 0)
        start = 1 if self._scores_prompt else len(choice.prompt_ids)
        tokens = choice.prompt_ids + choice.finished.token_ids
        async with asyncio.timeout_at(self._deadline):
            choice.scores = await score(self._thread, tokens, start, num_top)

    # Layout of answers

    @property
    def _id_prefix(self) -> str:
        return "chatcmpl-" if self._is_chat else "cmpl-"

    def _head(self, streamed: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if streamed else "chat.completion") if self._is_chat else "text_completion"
        return {"id": self._id, "object": kind, "created": self._created, "model": self._body.model}

    def _prompt_ids(self) -> dict[str, list[int]]:
        """The prompt's token ids, where vLLM puts them for a chat."""
        return {"prompt_token_ids": self._prompts[0]} if self._is_chat and self._body.return_token_ids else {}

    def _line(self, choices: list[dict[str, Any]], **more: Any) -> str:
        content = {**self._head(streamed=True), "choices": choices, **more}
        return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"

    def _whole(self, index: int, choice: Choice) -> dict[str, Any]:
        """A finished answer."""
        rollout, body = choice.finished, self._body
        text, stop_reason = self._final(rollout)
        found: dict[str, Any] = {"index": index, "finish_reason": rollout.finish_reason, "stop_reason": stop_reason,
                                 "logprobs": None}
        if body.wants_logprobs:
            entries = self._answer_entries(choice, 0, rollout.token_ids, self._known_logprobs(rollout))
            if body.has_echo:
                entries = self._prompt_entries(choice, self._num_top) + entries
            found["logprobs"] = self._logprobs(choice, entries)
        if body.prompt_logprobs is not None:
            entries = self._prompt_entries(choice, body.prompt_logprobs)
            ranks = [scored.rank for scored in choice.scores[: len(entries) - 1]]
            found["prompt_logprobs"] = prompt_logprobs(self._texts, entries, ranks)
        if body.return_token_ids:
            found |= {"token_ids": rollout.token_ids, **({} if self._is_chat else {"prompt_token_ids": choice.prompt_ids})}
        found |= self._describe(rollout)
        if body.has_echo:
            text = self._tokenizer.decode(choice.prompt_ids, skip_special_tokens=True) + text
        if not self._is_chat:
            return {**found, "text": text}
        message: dict[str, Any] = {"role": "assistant", "content": text}
        calls: list[dict[str, Any]] = []
        if self._tool_format is not None:
            content, parsed = parse_tool_calls(text, self._tool_format)
            calls = [call_json(call) for call in parsed[: self._most_calls]]
            message |= {"content": content or None, "tool_calls": calls} if calls else {"content": content}
        return {**found, "finish_reason": self._reason(rollout, len(calls)), "message": message}

    @property
    def _most_calls(self) -> int | None:
        """Largest number of calls in an answer; None: any."""
        return 1 if isinstance(self._body, ChatRequest) and not self._body.parallel_tool_calls else None

    def _reason(self, rollout: Rollout, num_calls: int) -> str:
        """Why an answer ended; a call that was asked for by its name is no reason of its own, as in the OpenAI API."""
        is_named = isinstance(self._body, ChatRequest) and isinstance(self._body.tool_choice, NamedTool)
        return "tool_calls" if num_calls and rollout.finish_reason == "stop" and not is_named else rollout.finish_reason

    def _delta(self, choice: Choice, text: str, last: bool) -> dict[str, Any]:
        """What a piece of text adds to the message of a chat."""
        if choice.calls is None:
            return {"content": text} if text else {}
        content, calls = choice.calls.add(text)
        if last:
            rest, more = choice.calls.finish()
            content, calls = content + rest, calls + more
        calls = calls[: None if self._most_calls is None else max(0, self._most_calls - choice.num_calls)]
        first, choice.num_calls = choice.num_calls, choice.num_calls + len(calls)
        found: dict[str, Any] = {"content": content} if content else {}
        return {**found, "tool_calls": [call_json(*pair[::-1]) for pair in enumerate(calls, first)]} if calls else found

    def _final(self, rollout: Rollout) -> tuple[str, str | int | None]:
        """The text of an answer, and the stop string or the stop token's id that ended it."""
        if rollout.finish_reason != "stop":
            return rollout.text, None
        if rollout.token_ids and rollout.token_ids[-1] in self.params.stop_token_ids:
            return rollout.text, rollout.token_ids[-1]
        end = len(rollout.text)
        whole = self._tokenizer.decode(rollout.token_ids, skip_special_tokens=True) if self.params.stop else ""
        stop = next((stop for stop in self.params.stop if whole.startswith(stop, end)), None)
        return (rollout.text + stop if stop and self._body.include_stop_str_in_output else rollout.text), stop

    def _piece(self, index: int, event: Event) -> dict[str, Any] | None:
        """The chunk for an event; None if there is nothing to send yet."""
        choice, stop_reason = self._choices[index], None
        logprobs: Sequence[float] = []
        if isinstance(event, NewTokens):
            choice.tokens += event.tokens
            text, reason, tokens = choice.text.add(event.tokens), None, event.tokens
            if not self._num_top:  # alternatives are known when the answer is complete
                logprobs = event.logprobs
        else:
            final, stop_reason = self._final(event)
            text, tokens = choice.text.finish(final), []
            reason = self._reason(event, 0)
            logprobs = self._known_logprobs(event)[choice.num_logprobs :]
        if not self._body.wants_logprobs:
            logprobs = []
        content = self._delta(choice, text, isinstance(event, Rollout)) if self._is_chat else {"text": text}
        if not any(content.values()) and reason is None and not logprobs and not self._body.return_token_ids:
            return None
        if isinstance(event, Rollout):
            reason = self._reason(event, choice.num_calls)
        chunk = self._chunk(index, content, reason)
        if reason is not None:
            chunk["stop_reason"] = stop_reason
        if logprobs:
            first = choice.num_logprobs
            choice.num_logprobs += len(logprobs)
            entries = self._answer_entries(choice, first, choice.tokens[first : choice.num_logprobs], logprobs)
            chunk["logprobs"] = self._logprobs(choice, entries)
        if isinstance(event, Rollout):
            chunk |= self._describe(event)
        return {**chunk, "token_ids": tokens} if self._body.return_token_ids else chunk

    def _known_logprobs(self, rollout: Rollout) -> list[float]:
        """The log-probabilities that were asked for."""
        return (rollout.raw_logprobs or []) if self.params.raw_logprobs else rollout.logprobs

    def _chunk(self, index: int, content: dict[str, Any], reason: str | None) -> dict[str, Any]:
        text = {"delta": content} if self._is_chat else content
        return {"index": index, **text, "logprobs": None, "finish_reason": reason}

    def _answer_entries(self, choice: Choice, first: int, tokens: Sequence[int], logprobs: Sequence[float]) -> list[Entry]:
        """Entries of tokens of the answer from number `first` on. Of the sampled tokens' log-probabilities those are reported
        that the engine gave, also among the alternatives."""
        num_top = self._num_top
        if not num_top:
            return [Entry(*pair) for pair in zip(tokens, logprobs, strict=True)]
        skipped = len(choice.scores) - len(choice.finished.token_ids) + first
        found = []
        for token, logprob, scored in zip(tokens, logprobs, choice.scores[skipped:], strict=False):
            found.append(Entry(token, logprob, [(i, logprob if i == token else p) for i, p in scored.top[:num_top]]))
        return found

    def _prompt_entries(self, choice: Choice, num_top: int) -> list[Entry]:
        """Entries of the prompt's tokens. Nothing is known about the first."""
        return [Entry(choice.prompt_ids[0], None)] + [
            Entry(token, scored.logprob, scored.top[:num_top])
            for token, scored in zip(choice.prompt_ids[1:], choice.scores, strict=False)]

    def _logprobs(self, choice: Choice, entries: Sequence[Entry]) -> dict[str, Any]:
        return (chat_logprobs(self._texts, entries) if self._is_chat
                else completion_logprobs(self._texts, entries, choice.offsets))

    def _usage(self) -> dict[str, int]:
        prompt = sum(map(len, self._prompts))
        answers = sum(len(choice.tokens if choice.rollout is None else choice.rollout.token_ids) for choice in self._choices)
        return {"prompt_tokens": prompt, "completion_tokens": answers, "total_tokens": prompt + answers}
