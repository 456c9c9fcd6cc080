"""Prompts of HTTP requests become token ids here. Whatever takes long happens in threads or in another process, and what cannot
be served is refused before it is encoded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import LifoQueue
from typing import Any, TypeVar

from paceline.server.templates import Conversation, TemplateRenderer

T = TypeVar("T")
_SHORT_CHARS = 1 << 15
"""Texts up to this length are encoded within milliseconds. Longer ones have a thread of their own."""
_LONGEST_CHARS = 1 << 20
"""Longest text that is encoded although it need not fit into the context: to count its tokens, or to keep the last of them. One
of 4 MB takes twelve seconds and a gigabyte."""
_NUM_THREADS = 2
_PROBED_CHARS_PER_TOKEN = 8
"""A text with more characters per token of the context than this is refused by its beginning if that is too long already."""


class PromptEncoder:
    """Encodes the prompts of one server, whose engine has a context of `max_length` tokens."""

    def __init__(self, tokenizer: Any, max_length: int, template_timeout_s: float) -> None:
        self._tokenizer, self._max_length = tokenizer, max_length
        self._max_chars = max_length * max(map(len, tokenizer.get_vocab()))  # no text that fits is longer
        self._short, self._long = ThreadPoolExecutor(_NUM_THREADS, "paceline-tokenizer"), ThreadPoolExecutor(1, "paceline-long")
        self._rendering = ThreadPoolExecutor(_NUM_THREADS, "paceline-template")
        self._renderers = [TemplateRenderer(tokenizer, template_timeout_s, self._max_chars) for _ in range(_NUM_THREADS)]
        self._free_renderers: LifoQueue[TemplateRenderer] = LifoQueue()
        for renderer in self._renderers:
            self._free_renderers.put(renderer)
        tokenizer.encode("a")  # sets the tokenizer up: afterwards threads can share it

    def start(self) -> None:
        """Get ready for the first conversation, without waiting for it."""
        self._rendering.submit(self._renderers[-1].start)

    def close(self) -> None:
        """End the threads. What they are at is not waited for."""
        for renderer in self._renderers:
            renderer.close()
        for pool in (self._short, self._long, self._rendering):
            pool.shutdown(wait=False, cancel_futures=True)

    async def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text, although they may be more than the context has."""
        self._check_chars(text)
        pool = self._short if len(text) <= _SHORT_CHARS else self._long
        return await _call(pool, lambda: list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens)))

    async def encode(self, prompt: str | list[int], add_special_tokens: bool = True, keep: int | None = None) -> list[int]:
        """Return the token ids of a prompt; of those the last `keep`. ValueError if they are more than the context has."""
        if not isinstance(prompt, str):
            ids = prompt if keep is None else prompt[-keep:]
            self._check_length(len(ids))
            return ids
        if keep is not None:
            self._check_chars(prompt)
        elif len(prompt) > self._max_chars:
            raise ValueError(f"prompt: {len(prompt)} characters leave no room for an answer in a context of "
                             f"{self._max_length} tokens")
        pool = self._short if len(prompt) <= _SHORT_CHARS else self._long
        return await _call(pool, self._encode, prompt, add_special_tokens, keep)

    async def encode_all(self, prompts: Sequence[str | list[int]], add_special_tokens: bool = True,
                         keep: int | None = None) -> list[list[int]]:
        """Return the token ids of several prompts. All of them are checked before the first is encoded."""
        for prompt in prompts:
            if not isinstance(prompt, str):
                self._check_length(len(prompt[-keep:] if keep else prompt))
        return [await self.encode(prompt, add_special_tokens, keep) for prompt in prompts]

    async def encode_chat(self, conversation: Conversation, add_special_tokens: bool = False,
                          keep: int | None = None) -> list[int]:
        """Return the token ids of a conversation, rendered with the model's chat template."""
        self._renderers[0].check_variables(conversation.variables)
        text = await _call(self._rendering, self._render, conversation)
        return await self.encode(text, add_special_tokens, keep)

    async def decode(self, tokens: list[int]) -> str:
        """Return the text of token ids."""
        self._check_length(len(tokens) - 1)
        size = len(self._tokenizer)
        outside = next((token for token in tokens if token >= size), None)
        if outside is not None:
            raise ValueError(f"tokens: {outside} is outside the vocabulary of {size} tokens")
        return await _call(self._short, self._tokenizer.decode, tokens)

    def _render(self, conversation: Conversation) -> str:
        renderer = self._free_renderers.get()
        try:
            return renderer.render(conversation)
        finally:
            self._free_renderers.put(renderer)

    def _encode(self, text: str, add_special_tokens: bool, keep: int | None = None) -> list[int]:
        probe = _PROBED_CHARS_PER_TOKEN * self._max_length
        if keep is None and len(text) > probe:
            num_tokens = len(self._tokenizer.encode(text[:probe], add_special_tokens=add_special_tokens))
            if num_tokens > 2 * self._max_length:  # the rest of the text cannot make half as many of them
                raise ValueError(f"prompt: its first {probe} characters are {num_tokens} tokens and leave no room for an answer "
                                 f"in a context of {self._max_length}")
        ids = list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        ids = ids if keep is None else ids[-keep:]
        self._check_length(len(ids))
        return ids

    def _check_chars(self, text: str) -> None:
        longest = max(_LONGEST_CHARS, _PROBED_CHARS_PER_TOKEN * self._max_length)
        if len(text) > longest:
            raise ValueError(f"prompt: {len(text)} characters are more than the {longest} that are encoded at once")

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens >= self._max_length:
            raise ValueError(f"prompt: {num_tokens} tokens leave no room for an answer in a context of {self._max_length}")


async def _call(pool: ThreadPoolExecutor, work: Callable[..., T], *arguments: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool, work, *arguments)
