"""What the APIs for trainers are built on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, model_validator
from starlette.requests import Request
from starlette.responses import Response

from paceline.engine import Engine
from paceline.engine.thread import EngineThread
from paceline.server.config import ServerConfig
from paceline.server.control import Control
from paceline.server.generation import Generation
from paceline.server.logprobs import TokenTexts
from paceline.server.schema import GenerationRequest

Handler = Callable[[Request], Awaitable[Response]]
Routes = list[tuple[Sequence[str], str, Handler]]
"""Methods, path and handler of each route."""
Model = TypeVar("Model", bound=BaseModel)


class Backend(NamedTuple):
    """The parts of a server that its APIs share."""

    engine: Engine
    thread: EngineThread
    config: ServerConfig
    control: Control
    texts: TokenTexts
    read: Callable[..., Awaitable[bytes]]
    """Reads a request's body, `read(request, limit)`; the limit is in bytes."""
    prepare: Callable[[Request, GenerationRequest, Sequence[str | list[int]], int], Awaitable[list[list[int]]]]
    """Checks a request with these prompts and so many new tokens, fills in what it leaves to the server, and encodes the
    prompts."""
    answer: Callable[[Request, Generation, bool], Awaitable[Response]]
    """Generates answers and returns them, streamed or not."""

    async def parse(self, request: Request, model: type[Model]) -> Model:
        """The body of a request; an empty one is an empty object."""
        return model.model_validate_json(await self.read(request) or b"{}")


class Body(BaseModel):
    """The body of a request. Fields that are null are as good as absent; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, raw: Any) -> Any:
        return {name: value for name, value in raw.items() if value is not None} if isinstance(raw, dict) else raw
