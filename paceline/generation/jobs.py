"""Parsing a file of prompts: one JSON object per line, or plain text if its name ends in .txt. A line
that cannot be used is reported with its place and skipped.

The identity of a job does not depend on its place in the file: it is the line's `id`, or else a hash of the line's prompt and
seed.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from paceline.chat_template import is_message
from paceline.files import require_shallow

_PLAIN = ".txt"
"""How the name of a file ends whose lines are prompts as plain text."""
_KINDS = ("prompt", "messages", "token_ids")


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt of the input. Other keys of its line are ignored."""

    place: str
    """Place in the input as file:line, for messages."""
    id: str | int | float
    """The line's `id`, or else `prompt_hash`."""
    key: str | None
    """What the answers' seeds derive from: the line's `id` as text. None: the prompt itself."""
    prompt: Any
    """Text, chat messages or token ids."""
    seed: int | None
    """The line's own seed, which replaces the one given for the whole file."""
    prompt_hash: str
    """Hash of the prompt's kind and content, and of the line's own seed if it has one (16 hexadecimal digits)."""


class JobReader:
    """Iterates over the jobs of one input. Lines that are no job, or the same job a second time, are skipped and reported to
    `on_refused`."""

    def __init__(self, name: str, lines: BinaryIO, on_refused: Callable[[str], None]) -> None:
        self.name, self._lines, self._on_refused = name, lines, on_refused
        self._seen: dict[str, int] = {}

    def __iter__(self) -> Iterator[Job]:
        for number, line in enumerate(self._lines, start=1):
            if not line.strip():
                continue
            place = f"{self.name}:{number}"
            try:
                job = parse_job(place, _plain_text(line) if self.name.endswith(_PLAIN) else line)
                self._require_new(job, number)
            except ValueError as error:
                self._on_refused(f"{place}: {error}")
                continue
            yield job

    def _require_new(self, job: Job, number: int) -> None:
        first = self._seen.setdefault(str(job.id), number)
        if first != number:
            what = "the same prompt, without an id," if job.key is None else f"id {job.id!r}"
            raise ValueError(f"{what} is already in line {first}")


def open_prompts(path: str) -> tuple[str, BinaryIO, int | None]:
    """Name, lines and number of non-empty lines (None: unknown) of a file of prompts; `-` is standard input. A file without a
    single prompt is a ValueError."""
    if path == "-":
        return "<stdin>", sys.stdin.buffer, None
    file = Path(path)
    if file.is_dir():
        raise ValueError(f"{path}: is a folder, not a file of prompts")
    try:
        lines = file.open("rb")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file of prompts") from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    if not file.is_file():
        return path, lines, None
    count = sum(bool(line.strip()) for line in lines)
    if not count:
        lines.close()
        raise ValueError(f"{path}: there is no prompt in it")
    lines.seek(0)
    return path, lines, count


def _plain_text(line: bytes) -> bytes:
    """A line of plain text as a line of JSON."""
    return json.dumps({"prompt": line.decode("utf-8", "replace").rstrip("\r\n")}).encode()


def parse_job(place: str, line: bytes) -> Job:
    """The job in one line of input. A ValueError says what is wrong with the line."""
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
    """Hash of a prompt's kind and content, and of its own seed if it has one, as 16 hexadecimal digits."""
    asked = {kind: prompt} if seed is None else {kind: prompt, "seed": seed}
    text = json.dumps(asked, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _object(line: bytes) -> dict[str, Any]:
    try:
        raw = json.loads(line, parse_constant=_refuse_constant)
        json.dumps(raw, ensure_ascii=False).encode()  # half a surrogate pair is valid JSON but cannot be encoded
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error}); plain text, one prompt per line, has to be in a file {_PLAIN}") from None
    if not isinstance(raw, dict):
        raise ValueError("not a JSON object")
    require_shallow(raw, "JSON")
    return raw


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _prompt(raw: dict[str, Any]) -> tuple[str, Any]:
    """Kind and content of a line's prompt. A key whose value is null counts as absent."""
    given = [kind for kind in _KINDS if raw.get(kind) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise ValueError(f"exactly one of {', '.join(_KINDS)} is required, found {found}")
    kind = given[0]
    value = raw[kind]
    if kind == "prompt":
        if not isinstance(value, str):
            raise ValueError("prompt: not a string")
    elif not isinstance(value, list):
        raise ValueError(f"{kind}: not a list")
    elif kind == "messages" and not all(map(is_message, value)):
        raise ValueError('messages: not all are objects with strings "role" and "content"')
    elif kind == "token_ids" and not all(isinstance(token, int) and not isinstance(token, bool) for token in value):
        raise ValueError("token_ids: not all are integers")
    if not value:
        raise ValueError(f"{kind}: it is empty")
    return kind, value
