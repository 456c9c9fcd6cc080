"""Chat templates, rendered in a process of its own.

A chat template is a program that comes with the model and reads what a client sends. Rendered in the server's process, one that
loops or multiplies strings would stop everybody: a thread cannot be ended. A process can."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from paceline.engine.thread import Unavailable
from paceline.server.tools import ordered_results

_MEMORY_BYTES = 512 << 20
"""Memory that rendering may take, beyond what the process has when it is ready."""
_START_S = 120.0
"""Seconds within which the process has to be ready."""
_RENDERED_WITH = {"messages", "conversations", "raise_exception"}
"""Names that transformers passes to the template, besides the arguments of `apply_chat_template`."""


class Conversation(NamedTuple):
    """What a chat template is rendered with."""

    messages: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]
    """Variables that the template reads, such as `enable_thinking`."""
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class TemplateRenderer:
    """Renders the chat template of a tokenizer. Its methods may be called by any thread; conversations are rendered one at a
    time."""

    def __init__(self, tokenizer: Any, timeout_s: float, max_chars: int) -> None:
        """`timeout_s`: largest number of seconds for one conversation. `max_chars`: longest text that is accepted."""
        self._tokenizer, self._timeout_s, self._max_chars = tokenizer, timeout_s, max_chars
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def check_variables(self, variables: Mapping[str, Any]) -> None:
        """ValueError if a client names what is not a variable of the template but an argument of the function that renders it,
        such as `chat_template`."""
        parameters = inspect.signature(self._tokenizer.apply_chat_template).parameters.values()
        reserved = _RENDERED_WITH | {each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD}
        for name in variables:
            if name in reserved:
                raise ValueError(f"chat_template_kwargs: {name} is not a variable of the chat template")

    def render(self, conversation: Conversation) -> str:
        """Return the text of a conversation. ValueError of one line if the template rejects it, or takes too long; Unavailable
        if there is no process to render it."""
        self.check_variables(conversation.variables)
        if not self._tokenizer.chat_template:
            raise ValueError("messages: the model came without a chat template; use /v1/completions")
        template = self._tokenizer.get_chat_template(tools=conversation.tools)  # models can have one of their own for tools
        if conversation.tools and "tools" not in template:
            raise ValueError("tools: the model's chat template does not read them")
        conversation = conversation._replace(messages=ordered_results(conversation.messages, template))
        for field in set().union(*conversation.messages) - {"role", "content"}:
            if field not in template:
                raise ValueError(f"messages: the model's chat template does not read {field}")
        variables = {**self._tokenizer.special_tokens_map, **conversation.variables}
        asked = {**conversation._asdict(), "variables": variables, "template": template}
        with self._lock:
            answer = self._ask(self._started(), asked, self._timeout_s)
            if answer is None:
                self._stop()
                raise ValueError(f"messages: the chat template took more than {self._timeout_s:g} s or its process ended")
        if "error" in answer:
            raise ValueError(f"messages: {answer['error']}")
        return answer["text"]

    def start(self) -> None:
        """Start the process, if the tokenizer has a template, so that the first conversation does not wait for it."""
        if self._tokenizer.chat_template:
            with self._lock, suppress(Unavailable):
                self._started()

    def close(self) -> None:
        """End the process."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()  # whoever renders gets an error
        with self._lock:
            self._stop()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        if self._closed:
            raise Unavailable("the server is shutting down")
        script = Path(__file__).with_name("template_worker.py")
        self._process = subprocess.Popen([sys.executable, "-P", str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         stderr=subprocess.DEVNULL, start_new_session=True)
        options = {"memory_bytes": _MEMORY_BYTES, "max_chars": self._max_chars}
        if self._ask(self._process, options, _START_S) is None:
            self._stop()
            raise Unavailable("the process that renders chat templates does not start")
        return self._process

    def _ask(self, process: subprocess.Popen[bytes], content: object, timeout_s: float) -> dict[str, Any] | None:
        """Send a line and return the answer; None if the process ended, which it does after `timeout_s`."""
        assert process.stdin is not None and process.stdout is not None
        killer = threading.Timer(timeout_s, process.kill)
        killer.daemon = True
        killer.start()
        try:
            process.stdin.write(json.dumps(content).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            return None
        finally:
            killer.cancel()
        return json.loads(line) if line.endswith(b"\n") else None

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()
