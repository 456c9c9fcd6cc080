"""Log-probabilities in the layouts of the OpenAI API and of vLLM."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from transformers.convert_slow_tokenizer import bytes_to_unicode

_LEAST = -9999.0
"""What is reported instead of minus infinity, which JSON does not have."""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "▁"
"""What SentencePiece writes for the space that a token begins with."""


class Entry(NamedTuple):
    """One token of a prompt or an answer."""

    token: int
    logprob: float | None
    """None for the first token of a prompt."""
    top: list[tuple[int, float]] | None = None
    """The most likely tokens and their log-probabilities; None if they are not known."""


class TokenTexts:
    """Texts and bytes of single tokens. A token of a byte-level vocabulary can be a part of a character: it has bytes then, but
    no text of its own."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}
        self._byte_of = {char: value for value, char in bytes_to_unicode().items()}

    def __call__(self, token: int) -> tuple[str, bytes]:
        """Text and bytes. The text of a part of a character names its bytes, as in the OpenAI API: `bytes:\\xe2\\x80`."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._find(token)
        return found

    def _find(self, token: int) -> tuple[str, bytes]:
        text, piece = self.tokenizer.decode([token]), self.tokenizer.convert_ids_to_tokens(token) or ""
        if "\ufffd" not in text and not _BYTE.fullmatch(piece):
            text = " " + text if piece.startswith(_SPACE) and not text.startswith(" ") else text
            return text, text.encode()
        if byte := _BYTE.fullmatch(piece):
            raw = bytes([int(byte[1], 16)])
        elif all(char in self._byte_of for char in piece):
            raw = bytes(self._byte_of[char] for char in piece)
        else:
            return text, text.encode()
        try:
            return raw.decode(), raw
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw


class TokenIds(TokenTexts):
    """Token ids in place of the tokens' texts, as vLLM writes them."""

    def __call__(self, token: int) -> tuple[str, bytes]:
        text = f"token_id:{token}"
        return text, text.encode()


class TextOffsets:
    """Where the tokens of a text begin, in characters, as the tokens come."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def add(self, piece: bytes) -> int:
        """Return the number of whole characters before a token."""
        before, self._length = self._length, self._length + len(self._decoder.decode(piece))
        return before


def completion_logprobs(texts: TokenTexts, entries: Sequence[Entry], offsets: TextOffsets) -> dict[str, Any]:
    """The layout of completions. `offsets` knows the tokens before these."""
    tops = [None if entry.logprob is None else _by_text(texts, entry) for entry in entries]
    return {"tokens": [texts(entry.token)[0] for entry in entries],
            "token_logprobs": [None if entry.logprob is None else _finite(entry.logprob) for entry in entries],
            "text_offset": [offsets.add(texts(entry.token)[1]) for entry in entries], "top_logprobs": tops}


def chat_logprobs(texts: TokenTexts, entries: Sequence[Entry]) -> dict[str, Any]:
    """The layout of chat completions."""
    def one(token: int, logprob: float) -> dict[str, Any]:
        text, raw = texts(token)
        return {"token": text.removeprefix("bytes:"), "logprob": _finite(logprob), "bytes": list(raw)}

    return {"content": [{**one(entry.token, entry.logprob or 0.0),
                         "top_logprobs": [one(*pair) for pair in entry.top or []]} for entry in entries], "refusal": None}


def prompt_logprobs(texts: TokenTexts, entries: Sequence[Entry], ranks: Sequence[int]) -> list[dict[str, Any] | None]:
    """vLLM's layout of a prompt's log-probabilities. `ranks`: ranks of the tokens but the first."""
    found: list[dict[str, Any] | None] = [None]
    for entry, rank in zip(entries[1:], ranks, strict=True):
        own = {entry.token: (rank, entry.logprob or 0.0)}
        top = {token: (place, value) for place, (token, value) in enumerate(entry.top or [], start=1)}
        found.append({str(token): {"logprob": _finite(value), "rank": place, "decoded_token": texts(token)[0]}
                      for token, (place, value) in {**own, **top}.items()})
    return found


def _by_text(texts: TokenTexts, entry: Entry) -> dict[str, float]:
    """Log-probabilities of the most likely tokens, and of the token itself. Of tokens with the same text the likeliest counts."""
    found: dict[str, float] = {}
    for token, value in [*(entry.top or []), (entry.token, entry.logprob or 0.0)]:
        found.setdefault(texts(token)[0], _finite(value))
    return found


def _finite(value: float) -> float:
    return max(value, _LEAST)
