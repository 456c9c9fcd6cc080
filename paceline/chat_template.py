"""Chat templates: programs that come with a model and turn messages into text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_MAX_LINE = 300


def is_message(value: object) -> bool:
    """Whether the value is a chat message: a dictionary with the texts `role` and `content`."""
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def apply_chat_template(tokenizer: Any, messages: Sequence[Mapping[str, Any]], what: str, **options: Any) -> Any:
    """Return what the tokenizer's method of this name returns. A template raises whatever it likes: that becomes a ValueError of
    one line. `what`: the messages, as the line names them."""
    try:
        return tokenizer.apply_chat_template(list(messages), **options)
    except Exception as error:
        said = " ".join((str(error) or type(error).__name__).split())[:_MAX_LINE]
        raise ValueError(f"{what}: the chat template rejects them ({said})") from None
