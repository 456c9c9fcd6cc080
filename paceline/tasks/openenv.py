"""`task = "openenv:NAME"`: environments of OpenEnv, which have `reset` and `step`."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pydantic import Field

from paceline.config import Config
from paceline.extras import install_command
from paceline.tasks.base import Problem
from paceline.tasks.environment import Concurrent, Message
from paceline.tasks.sessions import Session, SessionEnvironment


class OpenEnvConfig(Config):
    environment: str = ""
    """The environment: the address of a server (`http://…`), a class to run in the reward workers (`package.module:Class`), or a
    name that OpenEnv starts a server for."""
    size: int = Field(1000, ge=1)
    """Number of problems. Problem i is what `reset(seed=i)` begins, unless there are `resets`."""
    resets: list[dict[str, Any]] = Field(default_factory=list)
    """Arguments of `reset`, one problem each."""
    instructions: str = ""
    """Text before the first observation."""
    action: str | None = None
    """Field of the action that a turn's text fills. None: the action's only required field; a turn that is a JSON object is the
    whole action."""
    observation: str | None = None
    """Field of the observation that the policy is shown. None: all fields, as JSON."""
    start: dict[str, Any] = Field(default_factory=dict)
    """Further arguments for starting a named environment, such as `use_docker = true`."""


class OpenEnv(SessionEnvironment, Concurrent):
    """An environment of OpenEnv. Each turn is an action, and its reward is that of the step. Many episodes wait for a server at
    the same time; a class runs one call after another."""

    def __init__(self, config: OpenEnvConfig) -> None:
        super().__init__()
        if not config.environment:
            raise ValueError("task: openenv needs the environment's name, as in openenv:my-environment")
        if importlib.util.find_spec("openenv") is None:
            raise ValueError(f"task: openenv is not installed: {install_command('openenv')}")
        self.config, self.name = config, f"openenv:{config.environment}"
        if _is_class(config.environment):
            self.concurrency = 1

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In a worker: read the package, which takes seconds, when the worker starts, and not within the first call's time."""
        super().__setstate__(state)
        _class_of(self.config.environment if _is_class(self.config.environment) else "openenv:GenericEnvClient")

    def __len__(self) -> int:
        return len(self.config.resets) or self.config.size

    def __getitem__(self, index: int) -> Problem:
        if not 0 <= index < len(self):
            raise IndexError(index)
        arguments = self.config.resets[index] if self.config.resets else {"seed": index}
        return Problem(f"{self.name}-{index}", [{"role": "user", "content": self.config.instructions}], arguments)

    def open(self, problem: Problem) -> Session:
        return _Episode(self.config, problem.truth)


class _Stepped(Protocol):
    """What a step has led to."""

    observation: Mapping[str, Any]
    reward: float | None
    done: bool


class _Client(Protocol):
    """What is needed of an environment, wherever it runs."""

    def reset(self, **arguments: Any) -> _Stepped: ...

    def step(self, action: dict[str, Any]) -> _Stepped: ...

    def close(self) -> None: ...


class _Episode:
    """Implements `Session` with one environment."""

    def __init__(self, config: OpenEnvConfig, arguments: dict[str, Any]) -> None:
        self._config, self._arguments, self._rewards = config, arguments, list[float]()
        name = config.environment
        if "://" in name:
            self._client, self._field = _connect(name), config.action
        elif _is_class(name):
            local = _Local(name)
            self._client, self._field = local, config.action or local.only_field
        else:
            self._client, self._field = _start(name, config.start), config.action

    def start(self) -> list[Message]:
        shown = self._shown(self._client.reset(**self._arguments))
        return [{"role": "user", "content": "\n\n".join(filter(None, (self._config.instructions, shown)))}]

    def advance(self, turn: Message) -> list[Message] | None:
        result = self._client.step(self._action(turn["content"]))
        self._rewards.append(float(result.reward or 0.0))
        return None if result.done else [{"role": "user", "content": self._shown(result)}]

    def finish(self) -> Sequence[float]:
        return self._rewards

    def close(self) -> None:
        self._client.close()

    def _action(self, text: str) -> dict[str, Any]:
        """A turn as an action."""
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if isinstance(found, dict):
            return found
        if self._field is None:
            raise ValueError("the turn is no JSON object; name the field of the action that it fills (task_options.action)")
        return {self._field: text.strip()}

    def _shown(self, result: _Stepped) -> str:
        seen, name = result.observation, self._config.observation
        return str(seen[name]) if name is not None else json.dumps(dict(seen), ensure_ascii=False, default=str)


def _is_class(name: str) -> bool:
    return ":" in name and "://" not in name


def _class_of(where: str) -> Any:
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)


class _Local:
    """An environment's class in this process, with a client's methods."""

    def __init__(self, where: str) -> None:
        from openenv.core.env_server.types import Action

        made = _class_of(where)()
        hints = [argument for base in type(made).__orig_bases__ for argument in getattr(base, "__args__", ())]
        kinds: list[Any] = [hint for hint in hints if isinstance(hint, type) and issubclass(hint, Action)]
        self._environment, self._kind = made, kinds[0] if kinds else Action
        required = [name for name, each in self._kind.model_fields.items() if each.is_required()]
        self.only_field = required[0] if len(required) == 1 else None

    def reset(self, **arguments: Any) -> _Stepped:
        return self._result(self._environment.reset(**arguments))

    def step(self, action: dict[str, Any]) -> _Stepped:
        return self._result(self._environment.step(self._kind(**action)))

    def _result(self, observation: Any) -> _Stepped:
        from openenv.core.client_types import StepResult

        fields = observation.model_dump(exclude={"done", "reward", "metadata"})
        reward = None if observation.reward is None else float(observation.reward)
        return StepResult(fields, reward, observation.done)

    def close(self) -> None:
        self._environment.close()


def _connect(address: str) -> _Client:
    return _class_of("openenv:GenericEnvClient")(base_url=address).sync().connect()


def _start(name: str, arguments: dict[str, Any]) -> _Client:
    return _class_of("openenv:GenericEnvClient").from_env(name, **arguments).sync().connect()
