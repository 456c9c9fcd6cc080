"""Replies to a model's turn as token ids: what the chat template puts between the turn and the next one.

The tokens of the conversation so far are never encoded again. The template formats a short conversation of its own with the
reply, and what it writes behind the turn is encoded and appended. So a template that changes earlier turns, as
those that drop thinking do, changes nothing here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from paceline.chat_template import apply_chat_template

_TURN = "⟦turn⟧"


def encode_reply(messages: Sequence[Mapping[str, Any]], turn_ids: Sequence[int], tokenizer: Any, stop_ids: Collection[int],
                 chat_template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
    """Return the token ids that follow a turn: the end of the turn unless it has one, the messages of the reply, and the
    beginning of the next turn. `stop_ids`: token ids that end a turn. ValueError if the chat template rejects the messages."""
    tail = _tail([dict(message) for message in messages], tokenizer, chat_template_kwargs or {})
    ids = list(tokenizer.encode(tail, add_special_tokens=False))
    has_end = bool(turn_ids) and turn_ids[-1] in stop_ids
    if has_end and ids and (ids[0] == turn_ids[-1] or ids[0] in stop_ids):
        del ids[0]  # the turn has its end already, be it another one than the template's
    return ids


def _tail(messages: list[dict[str, Any]], tokenizer: Any, variables: Mapping[str, Any]) -> str:
    """The text behind a turn."""
    if not tokenizer.chat_template:
        return "\n" + "\n\n".join(message["content"] for message in messages) + "\n"
    asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _TURN}]
    text = apply_chat_template(tokenizer, [*asked, *messages], "messages of the reply", tokenize=False,
                               **{"add_generation_prompt": True, **variables})
    _, mark, tail = text.rpartition(_TURN)
    if not mark:
        raise ValueError("reply: the chat template leaves out the turn before it")
    return tail
