"""What an environment is: numbered problems, an opening, replies to the policy's turns, and a reward for the whole conversation.

A task (`base.Task`) is an environment that never replies. Environments run in worker processes (`RewardPool`), where every call
is a pure function of its arguments: the transcript says all that has happened. So a call whose process was killed is made again,
and a run that was interrupted repeats its episodes token for token.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, getdoc, signature
from typing import Any, Literal, Protocol, runtime_checkable

from paceline.tasks.base import Problem, Problems, Reward, Task

Message = dict[str, Any]
"""A chat message: `role`, `content`, and in an assistant's message with calls of tools `tool_calls`."""
EpisodeEnd = Literal["environment", "turns", "tokens", "time"]
"""Why an episode ended: the environment ended it, or a limit was reached."""
MOST_RESULT_CHARS = 4000
"""Number of characters of a tool's result that the policy is shown."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """A conversation of the policy with an environment."""

    problem: Problem
    messages: list[Message] = field(default_factory=list)
    """All messages so far: the opening, the policy's turns (`role` is `assistant`), and the replies."""
    end: EpisodeEnd | None = None
    """Why the episode ended; None while it goes on."""

    @property
    def turns(self) -> list[str]:
        """The text of each of the policy's turns, calls of tools left out."""
        return [message["content"] for message in self.messages if message["role"] == "assistant"]

    @property
    def answer(self) -> str:
        """The text of the policy's last turn; empty before the first one."""
        return next(reversed(self.turns), "")

    @property
    def calls(self) -> list[tuple[str, dict[str, Any]]]:
        """Name and arguments of the tools that the last message calls."""
        functions = [call["function"] for call in self.messages[-1].get("tool_calls", ())]
        return [(function["name"], function["arguments"]) for function in functions]


@runtime_checkable
class Environment(Problems, Protocol):
    """Numbered problems that the policy solves in several turns. It is sent to worker processes, so it has to pickle."""

    def reset(self, problem: Problem) -> list[Message]:
        """The messages that a conversation about the problem begins with."""
        ...

    def reply(self, transcript: Transcript) -> list[Message] | None:
        """The messages that answer the policy's last turn; None ends the episode."""
        ...

    def reward(self, transcript: Transcript) -> Reward | Sequence[float]:
        """The reward for a conversation that has ended; a list has the reward of each of the policy's turns."""
        ...


class Concurrent:
    """An environment whose calls wait most of the time, for a server, a tool or another model. Each worker process runs up to
    `concurrency` of its calls at the same time, in threads, so they have to be thread-safe."""

    concurrency: int = 64


AnyTask = Task | Environment
"""What a policy is trained on."""


def is_environment(task: AnyTask) -> bool:
    """Whether a task has several turns."""
    return isinstance(task, Environment)


def opening(problem: Problem) -> list[Message]:
    """The messages of a problem's prompt, which is text or chat messages."""
    prompt = problem.prompt
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(message) for message in prompt]


# -- tools


_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


@dataclass(frozen=True, slots=True)
class Tool:
    """A Python function that a policy may call."""

    function: Callable[..., Any]
    schema: dict[str, Any]
    """Its description as chat templates take it."""

    @property
    def name(self) -> str:
        return self.schema["function"]["name"]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
        """The tool that a function is: its name, the first paragraph of its docstring, and its parameters with their type hints
        and the lines `name: text` that the docstring has for them. ValueError says what is missing."""
        name, text = function.__name__, getdoc(function) or ""
        hints, lines = typing.get_type_hints(function), [line.strip() for line in text.splitlines()]
        if not text:
            raise ValueError(f"tool {name}: it has no docstring, which tells the policy what it is for")
        properties, required = {}, []
        for parameter in signature(function).parameters.values():
            if parameter.name not in hints or parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
                raise ValueError(f"tool {name}: parameter {parameter.name} needs a type hint")
            said = next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{parameter.name}:")), None)
            properties[parameter.name] = _json_schema(name, hints[parameter.name]) | ({"description": said} if said else {})
            if parameter.default is Parameter.empty:
                required.append(parameter.name)
        described = {"name": name, "description": " ".join(text.split("\n\n")[0].split()),
                     "parameters": {"type": "object", "properties": properties, "required": required}}
        return cls(function, {"type": "function", "function": described})

    def call(self, arguments: dict[str, Any]) -> Message:
        """The result of a call as a message. Whatever the function raises is its result, too, with `error` set: the arguments
        are the policy's."""
        try:
            signature(self.function).bind(**arguments)
            found = self.function(**arguments)
        except Exception as error:
            return tool_message(self.name, f"Error: {type(error).__name__}: {error}", error=True)
        return tool_message(self.name, found if isinstance(found, str) else json.dumps(found, default=str, ensure_ascii=False))


def tool_message(name: str, text: str, error: bool = False) -> Message:
    """The result of a call as a message."""
    cut = text if len(text) <= MOST_RESULT_CHARS else text[:MOST_RESULT_CHARS] + " …"
    return {"role": "tool", "name": name, "content": cut} | ({"error": True} if error else {})


def _json_schema(tool: str, hint: Any) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        kinds = [kind for kind in arguments if kind is not type(None)]
        if len(kinds) == 1:
            return _json_schema(tool, kinds[0])
    if origin is Literal:
        return {"type": _JSON_TYPES[type(arguments[0])], "enum": list(arguments)}
    if origin in (list, dict):
        items = {"items": _json_schema(tool, arguments[0])} if origin is list else {}
        return {"type": _JSON_TYPES[origin], **items}
    if hint in _JSON_TYPES:
        return {"type": _JSON_TYPES[hint]}
    raise ValueError(f"tool {tool}: {hint} is not a type that a chat template knows (str, int, float, bool, list, dict, Literal)")


class UsesTools:
    """An environment whose policy may call tools. The chat template is told of them, calls are parsed in the template's format,
    and `reply` makes them; a turn without a call ends the episode."""

    tools: Sequence[Tool] = ()

    def reply(self, transcript: Transcript) -> list[Message] | None:
        """The results of the calls in the policy's last turn; None if there are none."""
        by_name = {tool.name: tool for tool in self.tools}
        missing = f"Error: there is no such tool; there are {', '.join(by_name)}"
        replies = [by_name[name].call(arguments) if name in by_name else tool_message(name, missing, error=True)
                   for name, arguments in transcript.calls]
        return replies or None


def tools_of(task: AnyTask) -> Sequence[Tool]:
    """The tools that a task's policy may call."""
    return task.tools if isinstance(task, UsesTools) else ()


def concurrency_of(task: AnyTask) -> int:
    """The number of a task's calls that one worker process runs at the same time."""
    return task.concurrency if isinstance(task, Concurrent) else 1
