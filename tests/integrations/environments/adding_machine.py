"""A small environment of OpenEnv."""

from __future__ import annotations

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Say(Action):
    text: str


class Heard(Observation):
    length: int = 0
    step: int = 0


class AddingMachine(Environment[Say, Heard, State]):
    """Adds up the lengths of what it is told, and stops at three steps. Each step earns a tenth of its length."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state, self._sum = State(), 0

    def reset(self, seed=None, episode_id=None, **kwargs) -> Heard:
        self._state, self._sum = State(step_count=0), seed or 0
        return Heard(length=self._sum)

    def step(self, action: Say, timeout_s=None, **kwargs) -> Heard:
        self._sum += len(action.text)
        self._state = State(step_count=self._state.step_count + 1)
        return Heard(length=self._sum, step=self._state.step_count, reward=len(action.text) / 10,
                     done=self._state.step_count == 3)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    import sys

    import uvicorn
    from openenv.core.env_server import create_app

    uvicorn.run(create_app(AddingMachine, Say, Heard, max_concurrent_envs=16), port=int(sys.argv[1]), log_level="warning")
