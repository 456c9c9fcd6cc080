"""Input lines to jobs. One JSON object a line; what is wrong with a line is said with its place and the rest goes on.

A job's identity never depends on its place: it is the line's `id`, or else a hash of what the line asks.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

_KINDS = ("prompt", "messages", "token_ids")


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt of the input. Keys of a line that are not named here are passed over."""

    place: str
    """file:line, for messages."""
    id: str | int | float
    """As given, or else the hash."""
    key: str | None
    """What seeds derive from: the given id as text; None: the prompt itself."""
    prompt: Any
    """Text, chat messages or token ids."""
    seed: int | None
    """The line's own, in place of the command's."""
    prompt_hash: str
    """16 hexadecimal digits of the prompt's kind and content and the line's own seed, if it has one."""


class JobReader:
    """Jobs of one input, one at a time. `complain` hears of every line that is none; the same job twice is a complaint."""

    def __init__(self, name: str, lines: BinaryIO, complain: Callable[[str], None]) -> None:
        self.name, self._lines, self._complain = name, lines, complain
        self._seen: dict[str, int] = {}

    def __iter__(self) -> Iterator[Job]:
        for number, line in enumerate(self._lines, start=1):
            if not line.strip():
                continue
            place = f"{self.name}:{number}"
            try:
                job = parse_job(place, line)
                self._require_new(job, number)
            except ValueError as error:
                self._complain(f"{place}: {error}")
                continue
            yield job

    def _require_new(self, job: Job, number: int) -> None:
        first = self._seen.setdefault(str(job.id), number)
        if first != number:
            what = "the same prompt, without an id," if job.key is None else f"id {job.id!r}"
            raise ValueError(f"{what} is already in line {first}")


def open_prompts(path: str) -> tuple[str, BinaryIO, int | None]:
    """Name, lines and, where that can be told, the number of lines; `-` is standard input."""
    if path == "-":
        return "<stdin>", sys.stdin.buffer, None
    file = Path(path)
    if file.is_dir():
        raise ValueError(f"{path}: is a folder, not a file of prompts")
    try:
        lines = file.open("rb")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file of prompts") from None
    if not file.is_file():
        return path, lines, None
    count = sum(bool(line.strip()) for line in lines)
    lines.seek(0)
    return path, lines, count


def parse_job(place: str, line: bytes) -> Job:
    """ValueError says what the line lacks."""
    raw = _object(line)
    kind, prompt = _prompt(raw)
    given, seed = raw.get("id"), raw.get("seed")
    if given is not None and (isinstance(given, bool) or not isinstance(given, str | int | float)):
        raise ValueError("id: neither a string nor a number")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**64):
        raise ValueError("seed: not a 64-bit integer")
    digest = prompt_hash(kind, prompt, seed)
    return Job(place, digest if given is None else given, None if given is None else str(given), prompt, seed, digest)


def prompt_hash(kind: str, prompt: Any, seed: int | None) -> str:
    asked = {kind: prompt} if seed is None else {kind: prompt, "seed": seed}
    text = json.dumps(asked, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _object(line: bytes) -> dict[str, Any]:
    try:
        raw = json.loads(line, parse_constant=_refuse_constant)
        json.dumps(raw, ensure_ascii=False).encode()  # half a surrogate pair is JSON, but no text
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(raw, dict):
        raise ValueError("not a JSON object")
    return raw


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _prompt(raw: dict[str, Any]) -> tuple[str, Any]:
    """Kind and content. A key whose value is null is as good as absent."""
    given = [kind for kind in _KINDS if raw.get(kind) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise ValueError(f"exactly one of {', '.join(_KINDS)} is wanted, found {found}")
    kind = given[0]
    value = raw[kind]
    if kind == "prompt":
        if not isinstance(value, str):
            raise ValueError("prompt: not a string")
    elif not isinstance(value, list):
        raise ValueError(f"{kind}: not a list")
    elif kind == "messages" and not all(map(_is_message, value)):
        raise ValueError('messages: not all are objects with strings "role" and "content"')
    elif kind == "token_ids" and not all(isinstance(token, int) and not isinstance(token, bool) for token in value):
        raise ValueError("token_ids: not all are integers")
    if not value:
        raise ValueError(f"{kind}: it is empty")
    return kind, value


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)
