"""Prompts as users give them: encoding, validation, and the seed of each answer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from paceline.chat_template import apply_chat_template
from paceline.types import SamplingParams, plain_int

_SHOWN = 60
"""Number of characters of a wrong value that an error message shows."""
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids (a list, a numpy array or a tensor), or chat messages."""


@runtime_checkable
class _Array(Protocol):
    """A numpy array or a tensor."""

    ndim: int

    def tolist(self) -> Any: ...


def encode(prompt: Prompt, tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
    """Return the token ids of a prompt. `tokenizer`: None if the model came without one. `chat_template_kwargs`: variables that
    the chat template of messages reads, such as `enable_thinking`."""
    if isinstance(prompt, str):
        return list(_needed(tokenizer, "text").encode(prompt))
    if isinstance(prompt, _Array):
        if prompt.ndim != 1:
            raise ValueError(f"prompt: an array with {prompt.ndim} dimensions; pass one row for each prompt")
        return _token_ids(prompt.tolist())
    if isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Sequence):
        raise ValueError(f"prompt: {_short(prompt)} is neither text nor a list of token ids or messages")
    if prompt and isinstance(prompt[0], Mapping):
        return _encode_messages(prompt, _needed(tokenizer, "messages"), chat_template_kwargs or {})
    return _token_ids(prompt)


def _encode_messages(messages: Sequence[Any], tokenizer: Any, variables: Mapping[str, Any]) -> list[int]:
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise ValueError(f"messages: {_short(message)} has no role and content")
    return list(apply_chat_template(tokenizer, messages, "messages", tokenize=True, return_dict=False,
                                    **{"add_generation_prompt": True, **variables}))


def _token_ids(values: Sequence[Any]) -> list[int]:
    ids = [plain_int(value) for value in values]
    if None in ids:
        raise ValueError(f"prompt: {_short(values[ids.index(None)])} is not a token id")
    return ids  # type: ignore[return-value]


def check(prompt_ids: list[int], params: SamplingParams, n: int, tokenizer: Any, vocabulary: int, max_length: int) -> None:
    """Raise ValueError if the prompt cannot be served. `max_length`: largest number of tokens of prompt and answer together."""
    check_arguments(params, n)
    if not prompt_ids:
        raise ValueError("prompt: it is empty")
    wrong = next((token for token in prompt_ids if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise ValueError(f"prompt: token id {wrong} is outside the vocabulary of {vocabulary} tokens")
    if len(prompt_ids) >= max_length:
        raise ValueError(f"prompt: {len(prompt_ids)} tokens leave no room for an answer in a context of {max_length}")
    if params.stop:
        _needed(tokenizer, "stop strings")
    if params.bad_words:
        bad_word_ids(params.bad_words, _needed(tokenizer, "bad_words"))
    outside = next((token for token, _ in params.logit_bias if token >= vocabulary), None)
    if outside is not None:
        raise ValueError(f"logit_bias: token id {outside} is outside the vocabulary of {vocabulary} tokens")
    outside = next((token for token in params.allowed_token_ids if token >= vocabulary), None)
    if outside is not None:
        raise ValueError(f"allowed_token_ids: {outside} is outside the vocabulary of {vocabulary} tokens")


def bad_word_ids(words: Sequence[str], tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of words, as vLLM does: at the beginning of a text, and behind a space where that begins with another
    token. ValueError if a word has no tokens."""
    found: list[tuple[int, ...]] = []
    for word in words:
        plain, spaced = (tuple(tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False)) for prefix in ("", " "))
        if not plain:
            raise ValueError(f"bad_words: {_short(word)} has no tokens")
        found.append(plain)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            found.append(spaced)
    return tuple(dict.fromkeys(found))


def check_reply(token_ids: Sequence[int], vocabulary: int) -> list[int]:
    """Return the token ids of a reply. ValueError if one is not in the vocabulary."""
    found = _token_ids(token_ids.tolist() if isinstance(token_ids, _Array) else token_ids)
    wrong = next((token for token in found if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise ValueError(f"reply: token id {wrong} is outside the vocabulary of {vocabulary} tokens")
    return found


def check_arguments(params: SamplingParams | None, n: int) -> None:
    """Raise ValueError if these are not sampling parameters, or `n` is not a number of answers."""
    if params is not None and not isinstance(params, SamplingParams):
        raise ValueError(f"params: {_short(params)} is not of type SamplingParams")
    count = plain_int(n)
    if count is None or count < 1:
        raise ValueError(f"n: {_short(n)} is not an integer >= 1")


def answer_seeds(params: SamplingParams, prompt_ids: Sequence[int], n: int, key: str | None,
                 seeds: Sequence[int] | None) -> list[int]:
    """Return the seeds of a prompt's n answers: those given, or derived ones."""
    if key is not None and not isinstance(key, str):
        raise ValueError(f"key: {_short(key)} is not a string")
    if seeds is None:
        return [derive_seed(params.seed, prompt_ids if key is None else key, sample) for sample in range(n)]
    if len(seeds) != n:
        raise ValueError(f"seeds: {len(seeds)} seeds for n = {n} answers")
    return list(seeds)


def derive_seed(seed: int, key: str | Sequence[int], sample: int) -> int:
    """Return an answer's own 64-bit seed, from the sampling parameters' seed, the prompt's key (or the prompt's token ids) and
    the number of the answer. It never depends on the prompt's place in a file, a batch or a cluster."""
    text = key if isinstance(key, str) else ",".join(map(str, key))
    kind = "id" if isinstance(key, str) else "prompt"
    digest = hashlib.blake2b(f"{seed}|{kind}|{sample}|{text}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN else text[:_SHOWN] + " …"


def _needed(tokenizer: Any, what: str) -> Any:
    if tokenizer is None:
        raise ValueError(f"{what}: the model came without a tokenizer; pass token ids")
    return tokenizer
