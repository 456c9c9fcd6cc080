"""When an answer is over. A pure function of its tokens: where it stops does not depend on how many came in one step."""

from __future__ import annotations

from typing import Protocol

from paceline.engine.request import Request
from paceline.types import FinishReason

NOT_A_NUMBER = -1
"""Drawn where the policy's logits are none. One of every request's `stop_ids`."""


class Tokenizer(Protocol):
    def decode(self, token_ids: list[int], skip_special_tokens: bool = ...) -> str: ...


def append(request: Request, tokens: list[int], max_length: int, tokenizer: Tokenizer | None) -> tuple[int, FinishReason | None]:
    """Appends drawn tokens up to the one that ends the answer. Returns how many were taken and why it ended, if it did."""
    mine = request.tokens
    end = len(mine) + len(tokens)
    if end < request.max_tokens and end < max_length and request.stop_ids.isdisjoint(tokens) and not request.params.stop:
        mine += tokens
        return len(tokens), None
    for taken, token in enumerate(tokens, start=1):
        if token == NOT_A_NUMBER:
            request.error = f"request {request.id}: the policy's logits at position {len(mine)} are not numbers"
            return taken - 1, "error"
        mine.append(token)
        if token in request.stop_ids or (request.params.stop and stops_here(request, tokenizer)):
            return taken, "stop"
        if len(mine) >= request.max_tokens or len(mine) >= max_length:
            return taken, "length"
    return len(tokens), None


def stops_here(request: Request, tokenizer: Tokenizer | None) -> bool:
    """Whether the text ending with the newest token contains a stop string. Only the end is decoded: a character is
    made of at most four byte-level tokens."""
    assert tokenizer is not None, "stop strings need a tokenizer"
    window = 4 * max(len(stop) for stop in request.params.stop) + 4
    answer = request.tokens[max(len(request.prompt_ids), len(request.tokens) - window) :]
    text = tokenizer.decode(answer, skip_special_tokens=False)
    return any(stop in text for stop in request.params.stop)


def final_text(request: Request, tokenizer: Tokenizer | None) -> str:
    """The answer without special tokens, cut before the first stop string."""
    if tokenizer is None:
        return ""
    text = tokenizer.decode(request.output_ids, skip_special_tokens=True)
    cuts = [text.find(stop) for stop in request.params.stop if stop in text]
    return text[: min(cuts)] if cuts else text
