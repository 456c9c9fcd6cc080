"""Which part of an answer is the answer. Everything here is linear in the text's length."""

from __future__ import annotations

from typing import Literal

Extract = Literal["auto", "boxed", "hash", "tags", "last"]
"""`boxed`: the last \\boxed{}; `hash`: what follows the last ####, to the end of its line; `tags`: the last <answer> … </answer>;
`last`: the last number, letter or line, as the task reads it; `auto`: the first of these that the answer has."""


def after_thinking(answer: str) -> str:
    """What follows the last `</think>`: what was tried while thinking is not the answer."""
    return answer.rpartition("</think>")[2]


def extract(answer: str, how: Extract) -> tuple[str | None, bool]:
    """The marked text, and whether a mark was found. `auto` falls back to (None, False): the caller reads the last thing."""
    text = after_thinking(answer)
    finders = {"boxed": last_boxed, "hash": after_hashes, "tags": last_tagged}
    for name, find in finders.items():
        if how in (name, "auto"):
            found = find(text)
            if found is not None:
                return found, True
    return None, False


def last_boxed(text: str) -> str | None:
    """Content of the last \\boxed{…}, braces balanced; of nested ones the innermost. Unclosed: none."""
    mark = text.rfind("\\boxed")
    if mark < 0:
        return None
    start = mark + len("\\boxed")
    while start < len(text) and text[start] == " ":
        start += 1
    if start >= len(text) or text[start] != "{":
        return None
    depth = 0
    for place in range(start, len(text)):
        char = text[place]
        if char == "{" and text[place - 1] != "\\":
            depth += 1
        elif char == "}" and text[place - 1] != "\\":
            depth -= 1
            if depth == 0:
                return text[start + 1:place].strip()
    return None


def after_hashes(text: str) -> str | None:
    _, mark, after = text.rpartition("####")
    return after.split("\n", 1)[0].strip() if mark else None


def last_tagged(text: str, tag: str = "answer") -> str | None:
    before, close, _ = text.rpartition(f"</{tag}>")
    _, opened, content = before.rpartition(f"<{tag}>")
    return content.strip() if close and opened else None


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(after_thinking(text).splitlines()) if line.strip()), "")
