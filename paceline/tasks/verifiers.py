"""`task = "verifiers:NAME"`: installed environments of verifiers (its v1 API: tasksets, and environments that play them).

An environment of verifiers drives the conversation: it hands an agent messages and awaits what the model says. Here the agent is
the policy that is trained, in this process: no harness, no server, no tokens that are encoded twice. The environment runs in a
thread, waits for each of the policy's turns, and scores the trace in the end.
"""

from __future__ import annotations

import asyncio
import importlib.util
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import islice
from queue import SimpleQueue
from typing import Any

from pydantic import Field

from paceline.config import Config
from paceline.extras import install_command
from paceline.tasks.base import Problem, Reward
from paceline.tasks.environment import Concurrent, Message
from paceline.tasks.sessions import Session, SessionEnvironment

_CLOSE_S = 5.0
"""Seconds that an environment may take to end when its episode is given up."""


class VerifiersConfig(Config):
    environment: str = ""
    """Id of the installed taskset, or of a package with a taskset and an environment of its own."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Fields of the environment's configuration, such as `taskset = {…}` or `id`, an environment that plays the taskset."""
    size: int = Field(1000, ge=1)
    """Number of tasks that are used; fewer if the taskset has fewer."""


class Verifiers(SessionEnvironment, Concurrent):
    """An environment of verifiers with one agent, which is the policy."""

    def __init__(self, config: VerifiersConfig) -> None:
        super().__init__()
        if not config.environment:
            raise ValueError("task: verifiers needs the environment's name, as in verifiers:my-environment")
        if importlib.util.find_spec("verifiers") is None:
            raise ValueError(f"task: verifiers is not installed: {install_command('verifiers')}")
        self.config, self.name = config, f"verifiers:{config.environment}"
        self._load()

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config, "name": self.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        SessionEnvironment.__init__(self)
        self.config, self.name = state["config"], state["name"]
        self._load()

    def _load(self) -> None:
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        arguments = self.config.arguments
        taskset = {**arguments.get("taskset", {}), "id": self.config.environment}
        try:
            self.environment = load_environment(resolve_env_config({**arguments, "taskset": taskset}))
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"task: {self.name}: {' '.join(str(error).split())}") from None
        agents = list(agent_config_fields(self.environment.config))
        if len(agents) != 1:
            raise ValueError(f"task: {self.name} has the agents {', '.join(agents)}; one of them can be the policy, but there is "
                             "nobody to play the others")
        self._tasks = list(islice(self.environment.taskset, self.config.size))
        tools = [*self.environment.taskset.toolsets(self.environment.taskset.config),
                 *(tool for task in self._tasks[:1] for tool in task.toolsets(task.config))]
        if tools or any(task.NEEDS_CONTAINER for task in self._tasks[:1]):
            raise ValueError(f"task: {self.name} needs tool servers or a container, which are not run in reward workers")

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> Problem:
        if not 0 <= index < len(self):
            raise IndexError(index)
        task = self._tasks[index]
        return Problem(f"{self.name}-{index}", [{"role": "user", "content": task.data.prompt_text}], index)

    def open(self, problem: Problem) -> Session:
        return _Episode(self.environment, self._tasks[problem.truth])


class _Episode:
    """Implements `Session`: the environment runs in a thread and waits for turns."""

    def __init__(self, environment: Any, task: Any) -> None:
        self._environment, self._task = environment, task
        self._asked: SimpleQueue[list[Message] | None] = SimpleQueue()  # what the policy is told; None: the environment has ended
        self._turns: SimpleQueue[Message | None] = SimpleQueue()  # None: the policy says no more
        self._error: BaseException | None = None
        self._has_ended = False
        self._reward: dict[str, float] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> list[Message]:
        self._thread.start()
        found = self._next()
        if found is None:
            raise ValueError("the environment ended before the policy's first turn")
        return found

    def advance(self, turn: Message) -> list[Message] | None:
        self._turns.put(turn)
        return self._next()

    def finish(self) -> Reward:
        while not self._has_ended:
            self._turns.put(None)
            self._next()
        return self._reward or 0.0

    def close(self) -> None:
        if self._thread.is_alive():
            self._turns.put(None)
            self._thread.join(_CLOSE_S)

    def _next(self) -> list[Message] | None:
        found = self._asked.get()
        if found is None:
            self._has_ended = True
            if self._error is not None:
                raise self._error
        return found

    # -- in the thread

    def _run(self) -> None:
        try:
            asyncio.run(self._play())
        except BaseException as error:  # whatever it is, the policy's side raises it
            self._error = error
        self._asked.put(None)

    async def _play(self) -> None:
        from verifiers.v1.agent import Agents
        from verifiers.v1.episode import EnvInfo, Episode
        from verifiers.v1.trace import TraceTask

        environment, task = self._environment, self._task
        episode = Episode(env=EnvInfo(id=environment.config.env_id), task=TraceTask(
            type=type(task).__name__, data=task.data, key=task.key, hash=task.hash))
        agents = Agents(environment.config, lambda name, config: _Policy(name, config, self._ask, episode.traces))
        await environment.setup(agents)
        await environment.run(task, agents)
        if not episode.traces:
            raise ValueError(f"{type(environment).__name__}.run() ran no agent")
        await environment.finalize(task, episode)
        self._reward = {name: reward.value for trace in episode.traces for name, reward in trace.rewards.items()
                        if reward is not None}

    async def _ask(self, messages: list[Message]) -> Message | None:
        self._asked.put(messages)
        return await asyncio.to_thread(self._turns.get)


class _Policy:
    """The policy, with the methods of verifiers' `Agent` that environments use."""

    def __init__(self, name: str, config: Any, ask: Any, traces: list[Any]) -> None:
        self.name, self.config, self.trainable, self._ask, self._traces = name, config, True, ask, traces

    async def run(self, task: Any, **_: Any) -> Any:
        """Have the policy answer a task's prompt."""
        async with self.interaction(task) as exchange:
            await exchange.turn()
        return exchange.trace

    @asynccontextmanager
    async def interaction(self, task: Any, **_: Any) -> AsyncIterator[_Exchange]:
        """A conversation, whose trace is scored in the end."""
        exchange = _Exchange(task, self)
        yield exchange
        trace = exchange.trace
        trace.stop("user_closed")
        await task.score(trace)
        missing = [name for name, reward in trace.rewards.items() if reward is None]
        if missing:
            raise ValueError(f"rewards that need a container are not run in reward workers: {', '.join(missing)}")
        trace.ok = True
        self._traces.append(trace)

    async def answer(self, messages: list[Message]) -> Message | None:
        return await self._ask(messages)


class _Exchange:
    """A conversation with the policy, with the methods of verifiers' `Interaction` that environments use."""

    def __init__(self, task: Any, policy: _Policy) -> None:
        from verifiers.v1.state import state_cls
        from verifiers.v1.trace import AgentInfo, Trace, TraceTask

        self._task, self._policy, self._is_over = task, policy, False
        self._messages: list[Any] = []
        self.trace = Trace(task=TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
                           state=state_cls(type(task))(), agent=AgentInfo(config=policy.config, name=policy.name))

    async def turn(self, message: Any = None) -> Any:
        """Tell the policy these messages, and return its turn."""
        from verifiers.v1.agent import Segment
        from verifiers.v1.graph import prepare_turn
        from verifiers.v1.types import AssistantMessage, Response

        new = list(self._told(message))
        said = None if self._is_over else await self._policy.answer([_plain(each) for each in new])
        if said is None:
            self._is_over = True
            return Segment(messages=[], terminated=True)
        turn = AssistantMessage(content=said["content"])
        prepare_turn(self.trace, [*self._messages, *new]).commit(
            Response(id="", created=0, model="policy", message=turn, finish_reason="stop"))
        self._messages += [*new, turn]
        await self._look_for_stops()
        return Segment(messages=[turn])

    def _told(self, message: Any) -> Iterator[Any]:
        from verifiers.v1.dialects import parse_message
        from verifiers.v1.types import SystemMessage, UserMessage

        data = self._task.data
        if not self._messages and data.system_prompt is not None:
            yield SystemMessage(content=data.system_prompt)
        if message is None and not self._messages:
            message = data.prompt
        if message is None:
            raise ValueError("a turn needs a message")
        if isinstance(message, str):
            yield UserMessage(content=message)
        else:
            yield from (parse_message(each) if isinstance(each, dict) else each for each in message)

    async def _look_for_stops(self) -> None:
        from verifiers.v1.session import call_hook
        from verifiers.v1.trace import Trace

        most = self._policy.config.max_turns
        self._is_over = most is not None and self.trace.num_turns >= most
        for stop in self._task.hooks("stop"):
            self._is_over = self._is_over or await call_hook(stop, {Trace: self.trace})


def _plain(message: Any) -> Message:
    if not isinstance(message.content, str):
        raise TypeError("messages have to be text")
    return {"role": message.role, "content": message.content}
