"""Prompts as users give them, and what is wrong with those that cannot be served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from paceline.types import SamplingParams

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or chat messages."""


def encode(prompt: Prompt, tokenizer: Any) -> list[int]:
    """Token ids. tokenizer: None if the model came without."""
    if isinstance(prompt, str):
        return list(_needed(tokenizer, "text").encode(prompt))
    if prompt and isinstance(prompt[0], Mapping):
        chat = _needed(tokenizer, "messages")
        try:
            return list(chat.apply_chat_template(list(prompt), add_generation_prompt=True, tokenize=True, return_dict=False))
        except TemplateError as error:
            raise ValueError(f"messages: the chat template refuses them ({error})") from None
    return [int(token) for token in prompt]  # type: ignore[arg-type]


def check(prompt_ids: list[int], params: SamplingParams, n: int, tokenizer: Any, vocabulary: int, limit: int) -> None:
    """limit: tokens of prompt and answer."""
    if n < 1:
        raise ValueError(f"n: {n} is not an integer >= 1")
    if not prompt_ids:
        raise ValueError("prompt: it is empty")
    wrong = next((token for token in prompt_ids if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise ValueError(f"prompt: token id {wrong} is outside the vocabulary of {vocabulary}")
    if len(prompt_ids) >= limit:
        raise ValueError(f"prompt: {len(prompt_ids)} tokens leave no room for an answer in a context of {limit}")
    if params.stop:
        _needed(tokenizer, "stop strings")


def _needed(tokenizer: Any, what: str) -> Any:
    if tokenizer is None:
        raise ValueError(f"{what}: the model came without a tokenizer; pass token ids")
    return tokenizer
