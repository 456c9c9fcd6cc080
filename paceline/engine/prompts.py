"""Prompts as users give them: encoding, validation, and the seed of each answer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from paceline.types import SamplingParams

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or chat messages."""


def encode(prompt: Prompt, tokenizer: Any) -> list[int]:
    """Return the token ids of a prompt. `tokenizer`: None if the model came without one."""
    if isinstance(prompt, str):
        return list(_needed(tokenizer, "text").encode(prompt))
    if prompt and isinstance(prompt[0], Mapping):
        chat = _needed(tokenizer, "messages")
        try:
            return list(chat.apply_chat_template(list(prompt), add_generation_prompt=True, tokenize=True, return_dict=False))
        except TemplateError as error:
            raise ValueError(f"messages: the chat template rejects them ({error})") from None
    return [int(token) for token in prompt]  # type: ignore[arg-type]


def check(prompt_ids: list[int], params: SamplingParams, n: int, tokenizer: Any, vocabulary: int, max_length: int) -> None:
    """Raise ValueError if the prompt cannot be served. `max_length`: largest number of tokens of prompt and answer together."""
    if n < 1:
        raise ValueError(f"n: {n} is not an integer >= 1")
    if not prompt_ids:
        raise ValueError("prompt: it is empty")
    wrong = next((token for token in prompt_ids if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise ValueError(f"prompt: token id {wrong} is outside the vocabulary of {vocabulary} tokens")
    if len(prompt_ids) >= max_length:
        raise ValueError(f"prompt: {len(prompt_ids)} tokens leave no room for an answer in a context of {max_length}")
    if params.stop:
        _needed(tokenizer, "stop strings")


def derive_seed(seed: int, key: str | Sequence[int], sample: int) -> int:
    """Return an answer's own 64-bit seed, from the sampling parameters' seed, the prompt's key (or the prompt's token ids) and
    the number of the answer. It never depends on the prompt's place in a file, a batch or a cluster."""
    text = key if isinstance(key, str) else ",".join(map(str, key))
    kind = "id" if isinstance(key, str) else "prompt"
    digest = hashlib.blake2b(f"{seed}|{kind}|{sample}|{text}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _needed(tokenizer: Any, what: str) -> Any:
    if tokenizer is None:
        raise ValueError(f"{what}: the model came without a tokenizer; pass token ids")
    return tokenizer
