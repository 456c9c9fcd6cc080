"""Text of an answer that is still growing."""

from __future__ import annotations

from typing import Any

_INCOMPLETE = "�"
"""What a tokenizer decodes the first bytes of an unfinished character to."""
_CONTEXT = 6
"""Number of earlier tokens that new ones are decoded with: whether a token begins with a space depends on the one before."""


class TextStream:
    """Turns tokens into pieces of text as they come. The pieces together are the answer's final text: characters that are not
    complete, and text that may be the beginning of a stop string, are held back."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._tokens: list[int] = []
        self._start = 0  # first token that is decoded again
        self._done = 0  # number of tokens whose text has been taken over
        self._held = ""  # decoded, but not given out yet
        self._num_sent = 0

    def add(self, tokens: list[int]) -> str:
        """Return the text that can be given out now."""
        self._tokens += tokens
        known, whole = self._decode(self._start, self._done), self._decode(self._start, len(self._tokens))
        if len(whole) <= len(known) or whole.endswith(_INCOMPLETE):
            return ""
        self._held += whole[len(known) :]
        self._done = len(self._tokens)
        self._start = max(0, self._done - _CONTEXT)
        return self._send(len(self._held) - self._longest_stop_prefix())

    def finish(self, text: str) -> str:
        """Return the rest of the answer, whose final text is `text`."""
        return text[self._num_sent :]

    def _send(self, length: int) -> str:
        piece, self._held = self._held[:length], self._held[length:]
        self._num_sent += len(piece)
        return piece

    def _longest_stop_prefix(self) -> int:
        """Length of the longest end of the text that may belong to a stop string."""
        found = [self._held.find(stop) for stop in self._stop if stop in self._held]
        if found:
            return len(self._held) - min(found)
        lengths = [size for stop in self._stop for size in range(1, min(len(stop), len(self._held) + 1))
                   if self._held.endswith(stop[:size])]
        return max(lengths, default=0)

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._tokens[start:end], skip_special_tokens=True)
