"""Prompts that a drafter is trained and evaluated on: JSON lines, or the problems of a task."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

from paceline.commands.jobs import JobReader, open_prompts
from paceline.commands.rollouts import as_prompt
from paceline.engine import Engine
from paceline.tasks import Problem, make_task

_TASK = "task:"


class Asked(NamedTuple):
    key: str
    """What its answers' seeds derive from."""
    prompt: Any
    """Text, chat messages or token ids."""


def read_prompts(spec: str, complain: Callable[[str], None]) -> list[Asked]:
    """`task:NAME`, or a file as `paceline generate` takes it, whose lines may also have a `question`. `complain` hears of lines
    that are none."""
    if spec.startswith(_TASK):
        task = make_task(spec.removeprefix(_TASK))
        found = [Asked(problem.id, problem.prompt) for problem in (task[i] for i in range(len(task)))]
    else:
        name, lines, _ = open_prompts(spec)
        with lines:
            reader = JobReader(name, _with_messages(lines), complain)
            found = [Asked(str(job.id), job.prompt) for job in reader]
    if not found:
        raise ValueError(f"--prompts {spec}: not one prompt in it")
    return found


def digest(prompts: list[Asked]) -> str:
    """Tells other prompts from the same."""
    return hashlib.blake2b(json.dumps(prompts).encode(), digest_size=8).hexdigest()


def encoded(engine: Engine, asked: Asked) -> list[int]:
    """Chat messages become plain text where the tokenizer has no template for them."""
    is_chat = not isinstance(asked.prompt, str) and isinstance(asked.prompt[0], dict)
    return engine.encode(as_prompt(engine, Problem(asked.key, asked.prompt, None)) if is_chat else asked.prompt)


def _with_messages(lines: BinaryIO) -> BinaryIO:
    """Lines with nothing but a `question` to ask become lines with one user's message."""
    return io.BytesIO(b"".join(_rewritten(lines)))


def _rewritten(lines: BinaryIO) -> Iterator[bytes]:
    for line in lines:
        try:
            raw = json.loads(line)
        except ValueError:
            yield line  # the reader says what is wrong with it
            continue
        asks = isinstance(raw, dict) and not raw.keys() & {"prompt", "messages", "token_ids"}
        if asks and isinstance(raw.get("question"), str):
            kept = {name: raw[name] for name in ("id", "seed") if name in raw}
            line = json.dumps({**kept, "messages": [{"role": "user", "content": raw["question"]}]}).encode() + b"\n"
        yield line
