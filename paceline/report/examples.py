"""Example rollouts for the report: the best and the worst answers among the newest lines of `rollouts-*.jsonl`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.report.metrics import finite_value

_MAX_BYTES = 32 << 20
"""Number of bytes of the newest rollouts that are read; a long run writes gigabytes."""
_MAX_CHARS = 4000
_MAX_PROMPT_CHARS = 600


@dataclass(frozen=True, slots=True)
class Example:
    """An answer with its reward."""

    id: str
    """Id of the prompt."""
    sample: str
    """Number of the answer among those of the same prompt."""
    step: int | None
    """Training step in which the answer was generated, if the file says so."""
    reward: float
    prompt: str
    text: str
    num_omitted: int
    """Number of characters of the answer beyond those in `text`."""


@dataclass(frozen=True, slots=True)
class Examples:
    """Answers for a reader to look at."""

    best: list[Example]
    worst: list[Example]
    num_read: int
    """Number of rollouts with a reward from which the examples were picked."""


def pick_examples(folder: Path, each: int = 3) -> Examples:
    """Picks the best and the worst answers, of different prompts where possible; of equal rewards, the newest answer is taken."""
    found = list(_newest_first(folder))
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


def _newest_first(folder: Path) -> Iterator[Example]:
    """Examples in reverse order of the files' numbers and of the lines in each file."""
    left = _MAX_BYTES
    for path in sorted(folder.glob("rollouts-*.jsonl"), key=_natural_order, reverse=True):
        lines = _last_lines(path, left)
        left -= sum(map(len, lines))
        found = [example for line in reversed(lines) if (example := _parse(line)) is not None]
        prompts = {example.id: example.prompt for example in found if example.prompt}  # on one line of each group
        yield from (example if example.prompt else replace(example, prompt=prompts.get(example.id, "")) for example in found)
        if left <= 0:
            return


def _natural_order(path: Path) -> list[tuple[int, str]]:
    """Sort key that places rollouts-10 after rollouts-9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name)]


def _last_lines(path: Path, num_bytes: int) -> list[bytes]:
    """The whole lines in the last `num_bytes` bytes of a file."""
    with path.open("rb") as file:
        start = max(0, path.stat().st_size - num_bytes)
        file.seek(start)
        lines = file.read().splitlines()
    return lines[1:] if start else lines


def _parse(line: bytes) -> Example | None:
    """Parses a rollout. Returns None for an incomplete line and for a rollout without a reward."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or isinstance(record.get("reward"), list | dict):
        return None
    reward = finite_value(record, "reward")
    if reward is None:
        return None
    prompt, text, step = _to_text(record.get("prompt")), _to_text(record.get("text")), record.get("step")
    prompt = prompt if len(prompt) <= _MAX_PROMPT_CHARS else prompt[:_MAX_PROMPT_CHARS] + " …"
    return Example(_to_text(record.get("id")), _to_text(record.get("sample")), step if isinstance(step, int) else None, reward,
                   prompt, text[:_MAX_CHARS], max(0, len(text) - _MAX_CHARS))


def _to_text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
