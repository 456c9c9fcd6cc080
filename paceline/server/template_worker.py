"""Renders chat templates in a process of its own, whose time and memory its parent limits. It is run as a script, so that it
imports neither torch nor the rest of Paceline; see `paceline.server.templates`, which starts it.

Input and output are lines of JSON. The first line in has the limits, every further one a template and a conversation."""

from __future__ import annotations

import json
import os
import resource
import sys
from contextlib import suppress
from typing import Any, TextIO


def main() -> None:
    """Answer the lines of standard input until it is closed."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever is printed by others does not mix with the answers
    options = json.loads(sys.stdin.readline())
    from transformers.utils.chat_template_utils import render_jinja_template  # takes a second

    _limit_memory(options["memory_bytes"])
    _answer(answers, {"ready": True})
    for line in sys.stdin:
        _answer(answers, _rendered(render_jinja_template, json.loads(line), options["max_chars"]))


def _rendered(render: Any, conversation: dict[str, Any], max_chars: int) -> dict[str, str]:
    """The rendered text, or what is wrong with it."""
    try:
        (text,), _ = render(conversations=[conversation["messages"]], chat_template=conversation["template"],
                            tools=conversation["tools"], add_generation_prompt=conversation["add_generation_prompt"],
                            continue_final_message=conversation["continue_final_message"], **conversation["variables"])
    except MemoryError:
        return {"error": "the chat template needs too much memory"}
    except Exception as error:  # whatever the expressions of a template raise
        kind = "" if type(error).__name__ in ("TemplateError", "ValueError") else f"{type(error).__name__}: "
        return {"error": f"the chat template rejects them ({kind}{' '.join(str(error).split())[:200]})"}
    if len(text) > max_chars:
        return {"error": f"they are {len(text)} characters, more than any prompt of the longest context has"}
    return {"text": text}


def _answer(answers: TextIO, content: dict[str, Any]) -> None:
    answers.write(json.dumps(content) + "\n")
    answers.flush()


def _limit_memory(num_bytes: int) -> None:
    """Limit the process to so much more memory than it has now, where the system can."""
    with suppress(OSError, ValueError):
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, used + num_bytes))


if __name__ == "__main__":
    main()
