"""Prompts for drafter training, drafter evaluation and benchmarks: JSON lines, or the problems of a task."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

from paceline.engine import Engine
from paceline.generation.jobs import JobReader, open_prompts
from paceline.tasks import make_task

_TASK = "task:"


class NamedPrompt(NamedTuple):
    """A prompt and the name that its answers' seeds derive from."""

    key: str
    """Id of the prompt. The seeds of its answers derive from it."""
    prompt: Any
    """Text, chat messages or token ids."""


def read_prompts(source: str, on_refused: Callable[[str], None]) -> list[NamedPrompt]:
    """Prompts from `task:NAME` or from a file in the format of `paceline generate`, whose lines may also contain a `question`.
    `on_refused` is called with a message for every line that cannot be used."""
    if source.startswith(_TASK):
        task = make_task(source.removeprefix(_TASK))
        found = [NamedPrompt(problem.id, problem.prompt) for problem in (task[i] for i in range(len(task)))]
    else:
        name, lines, _ = open_prompts(source)
        with lines:
            reader = JobReader(name, _with_messages(lines), on_refused)
            found = [NamedPrompt(str(job.id), job.prompt) for job in reader]
    if not found:
        raise ValueError(f"prompts {source}: there is no prompt in it")
    return found


def digest(prompts: list[NamedPrompt]) -> str:
    """A hash of all prompts and their keys, to detect that they have changed."""
    return hashlib.blake2b(json.dumps(prompts).encode(), digest_size=8).hexdigest()


def plain_prompt(engine: Engine, prompt: Any) -> Any:
    """`prompt`, but chat messages are joined to plain text if the engine's tokenizer has no chat template."""
    is_chat = not isinstance(prompt, str) and isinstance(prompt[0], dict)
    if not is_chat or engine.tokenizer is None or engine.tokenizer.chat_template:
        return prompt
    return "\n\n".join(message["content"] for message in prompt) + "\n"


def encode_prompt(engine: Engine, named: NamedPrompt) -> list[int]:
    """Token ids of a prompt. Chat messages become plain text if the tokenizer has no chat template."""
    return engine.encode(plain_prompt(engine, named.prompt))


def _with_messages(lines: BinaryIO) -> BinaryIO:
    """Lines that contain only a `question` become lines with one user message."""
    return io.BytesIO(b"".join(_rewritten(lines)))


def _rewritten(lines: BinaryIO) -> Iterator[bytes]:
    for line in lines:
        try:
            raw = json.loads(line)
        except (ValueError, RecursionError):
            yield line  # JobReader reports what is wrong with it
            continue
        is_question = isinstance(raw, dict) and not raw.keys() & {"prompt", "messages", "token_ids"}
        if is_question and isinstance(raw.get("question"), str):
            kept = {name: raw[name] for name in ("id", "seed") if name in raw}
            line = json.dumps({**kept, "messages": [{"role": "user", "content": raw["question"]}]}).encode() + b"\n"
        yield line
