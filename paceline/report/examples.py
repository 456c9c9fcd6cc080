"""A few rollouts worth reading: the best and the worst among the last ones in `rollouts-*.jsonl`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.report.figures import number

_MAX_BYTES = 32 << 20  # of the newest rollouts: a long run leaves gigabytes
_MAX_CHARS = 4000


@dataclass(frozen=True, slots=True)
class Example:
    id: str
    sample: str
    step: int | None
    reward: float
    prompt: str
    text: str
    left_out: int
    """Characters of the text that are not shown."""


@dataclass(frozen=True, slots=True)
class Examples:
    best: list[Example]
    worst: list[Example]
    num_read: int


def pick_examples(folder: Path, each: int = 3) -> Examples:
    """Of different prompts where possible; of equal rewards the newest."""
    found = list(_newest(folder))
    best = _pick(sorted(found, key=lambda example: -example.reward), each)
    worst = _pick(sorted(found, key=lambda example: example.reward), each)
    return Examples(best, [example for example in worst if example not in best], len(found))


def _pick(ranked: list[Example], count: int) -> list[Example]:
    chosen: dict[str, Example] = {}
    for example in ranked:
        chosen.setdefault(example.id, example)
        if len(chosen) == count:
            return list(chosen.values())
    others = [example for example in ranked if example is not chosen[example.id]]
    return sorted([*chosen.values(), *others[: count - len(chosen)]], key=ranked.index)


def _newest(folder: Path) -> Iterator[Example]:
    """Newest first: by step where lines say it, and by the number in the file's name."""
    left = _MAX_BYTES
    for path in sorted(folder.glob("rollouts-*.jsonl"), key=_natural, reverse=True):
        lines = _tail(path, left)
        left -= sum(map(len, lines))
        yield from (example for line in reversed(lines) if (example := _parse(line)) is not None)
        if left <= 0:
            return


def _natural(path: Path) -> list[tuple[int, str]]:
    """rollouts-10 after rollouts-9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name)]


def _tail(path: Path, num_bytes: int) -> list[bytes]:
    """The last whole lines of a file, about so many bytes."""
    with path.open("rb") as file:
        start = max(0, path.stat().st_size - num_bytes)
        file.seek(start)
        lines = file.read().splitlines()
    return lines[1:] if start else lines


def _parse(line: bytes) -> Example | None:
    """None for a torn line, and for a rollout without a reward."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or isinstance(record.get("reward"), list | dict):
        return None
    reward = number(record, "reward")
    if reward is None:
        return None
    text, step = _text(record.get("text")), record.get("step")
    return Example(_text(record.get("id")), _text(record.get("sample")), step if isinstance(step, int) else None, reward,
                   _first(_text(record.get("prompt")), 600), text[:_MAX_CHARS], max(0, len(text) - _MAX_CHARS))


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _first(text: str, length: int) -> str:
    return text if len(text) <= length else text[:length] + " …"


