"""A small environment of verifiers: a taskset, and an environment that plays it in several turns."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    target: str


class GuessTask(vf.Task[GuessData]):
    @vf.reward(weight=2.0)
    async def found(self, trace) -> float:
        return float(any(self.data.target in (message.content or "") for message in trace.assistant_messages))

    @vf.metric
    async def turns(self, trace) -> float:
        return float(trace.num_turns)


class GuessConfig(vf.TasksetConfig):
    digits: str = "01234567"


class GuessTaskset(vf.Taskset[GuessTask, GuessConfig]):
    def load(self) -> Iterator[GuessTask]:
        for digit in self.config.digits:
            yield GuessTask(GuessData(prompt=f"{digit}: ", target=digit), self.config.task)


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    most: int = 3


class GuessEnv(vf.Env[GuessEnvConfig]):
    """Says how often it was told something until it is told the digit, at most so many times."""

    async def run(self, task, agents) -> None:
        async with agents.player.interaction(task) as game:
            segment = await game.turn()
            for number in range(1, self.config.most):
                if segment.terminated or task.data.target in segment.last_reply:
                    return
                segment = await game.turn(f" {number}:")


__all__ = ["GuessEnv", "GuessTaskset"]
