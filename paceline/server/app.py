"""The HTTP application: routes, limits and errors."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from paceline.engine import Engine
from paceline.engine.prompts import Prompt
from paceline.engine.thread import EngineThread, Overloaded, Unavailable
from paceline.server.config import ServerConfig
from paceline.server.generation import Generation, GenerationFailed
from paceline.server.metrics import ServerMetrics
from paceline.server.schema import ChatRequest, CompletionRequest, GenerationRequest, error_body

_CLIENT_GONE = 499
"""Status, seen in metrics only, of a request whose client did not wait for the answer."""
_RETRY_AFTER_S = 1


def create_app(engine: Engine, config: ServerConfig | None = None) -> Starlette:
    """Make the application. It runs the engine in a thread of its own from start-up to shutdown; nobody else may use the engine
    meanwhile. ValueError if the model came without a tokenizer."""
    if engine.tokenizer is None:
        raise ValueError("the model came without a tokenizer, which a server needs")
    return _Server(engine, config or ServerConfig()).app


class _Server:
    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self.engine, self.config = engine, config
        self.thread = EngineThread(engine, config.max_pending, config.warm_up)
        self.metrics = ServerMetrics(engine, self.thread)
        self._tokenizing = ThreadPoolExecutor(1, "paceline-tokenizer")  # a long prompt must not hold up the others' answers
        routes = [Route("/health", self.health), Route("/metrics", self.show_metrics),
                  Route("/v1/models", self._guarded(self.models)),
                  Route("/v1/completions", self._guarded(self.completions), methods=["POST"]),
                  Route("/v1/chat/completions", self._guarded(self.chat), methods=["POST"])]
        self.app = Starlette(routes=routes, lifespan=self._lifespan, exception_handlers={HTTPException: _http_error})
        self.app.state.thread = self.thread

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.thread.start()
        yield
        await asyncio.to_thread(self.thread.close)
        self._tokenizing.shutdown()

    # Routes

    async def health(self, request: Request) -> Response:
        problem = self.thread.problem
        return JSONResponse({"status": problem or "ok", "warm": self.thread.is_warm}, 200 if problem is None else 503)

    async def show_metrics(self, request: Request) -> Response:
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def models(self, request: Request) -> Response:
        model = {"id": self.config.model_name, "object": "model", "created": 0, "owned_by": "paceline",
                 "max_model_len": self.engine.scheduler.max_length}
        return JSONResponse({"object": "list", "data": [model]})

    async def completions(self, request: Request) -> Response:
        body = CompletionRequest.model_validate_json(await self._read(request))
        prompts = [await self._encode(prompt) for prompt in body.prompts()]
        return await self._generate(request, body, prompts, body.max_tokens)

    async def chat(self, request: Request) -> Response:
        body = ChatRequest.model_validate_json(await self._read(request))
        prompt = await self._encode([message.plain() for message in body.messages], body.chat_template_kwargs)
        room = max(1, self.engine.scheduler.max_length - len(prompt))
        return await self._generate(request, body, [prompt], body.max_completion_tokens or body.max_tokens or room)

    # What they are made of

    def _guarded(self, handle: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """The handler with the check of the key, errors as the OpenAI API reports them, and metrics."""

        async def handler(request: Request) -> Response:
            began = time.perf_counter()
            response = await _answered(self._checked(handle, request))
            self.metrics.requests.labels(request.url.path, response.status_code).inc()
            if not isinstance(response, _EventStream):  # its own end is counted when it comes
                self.metrics.duration.observe(time.perf_counter() - began)
            return response

        return handler

    async def _checked(self, handle: Callable[[Request], Awaitable[Response]], request: Request) -> Response:
        key = self.config.api_key
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if key is not None and not hmac.compare_digest(given.encode(), key.encode()):
            raise HTTPException(401, "the API key is missing or wrong")
        return await handle(request)

    async def _read(self, request: Request) -> bytes:
        """The body of a request, if it is not too large."""
        limit, body = self.config.max_body_bytes, bytearray()
        async for part in request.stream():
            body += part
            if len(body) > limit:
                raise HTTPException(413, f"the request is larger than {limit} bytes")
        return bytes(body)

    async def _encode(self, prompt: Prompt, variables: dict[str, Any] | None = None) -> list[int]:
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, self.engine.encode, prompt, variables)

    async def _generate(self, request: Request, body: GenerationRequest, prompts: list[list[int]], max_tokens: int) -> Response:
        if body.model != self.config.model_name:
            raise HTTPException(404, f"the model {body.model} does not exist; there is {self.config.model_name}")
        limit = min(self.config.max_answers, self.config.max_pending)
        if len(prompts) * body.n > limit:
            raise HTTPException(400, f"n: more than {limit} answers to one request")
        generation = Generation(self.thread, self.engine.tokenizer, body, prompts, body.sampling_params(max_tokens),
                                self.config.timeout_s)
        try:
            await generation.start()
            if body.stream:
                return self._event_stream(generation)
            return JSONResponse(await _while_connected(request, generation.result()))
        except BaseException:
            generation.cancel()
            raise

    def _event_stream(self, generation: Generation) -> Response:
        began = time.perf_counter()

        def on_first_token() -> None:
            self.metrics.first_token.observe(time.perf_counter() - began)

        def on_end() -> None:
            generation.cancel()
            self.metrics.duration.observe(time.perf_counter() - began)

        return _EventStream(_with_error_line(generation.stream(on_first_token)), on_end)


class _EventStream(StreamingResponse):
    """A stream of events; `on_end` is called when it is complete, or the client is gone."""

    def __init__(self, content: AsyncIterator[str], on_end: Callable[[], None]) -> None:
        super().__init__(content, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


async def _with_error_line(lines: AsyncIterator[str]) -> AsyncIterator[str]:
    """The lines of an event stream, with an error as the last one if something fails after the stream has begun."""
    try:
        async for line in lines:
            yield line
    except (TimeoutError, GenerationFailed) as error:
        yield f"data: {bytes(_error(*_describe(error)).body).decode()}\n\n"


async def _while_connected(request: Request, work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """Wait for `work`, but no longer than the client does."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HTTPException(_CLIENT_GONE, "the client is gone")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _answered(work: Awaitable[Response]) -> Response:
    """The response of a handler, or of the error that it raises."""
    try:
        return await work
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        return _error(400, f"{where}: {message}" if where else message)
    except (ValueError, HTTPException, Overloaded, Unavailable, TimeoutError, GenerationFailed) as error:
        return _error(*_describe(error))


def _describe(error: Exception) -> tuple[int, str]:
    """Status and message of an error."""
    if isinstance(error, HTTPException):
        return error.status_code, error.detail
    if isinstance(error, TimeoutError):
        return 504, "the answer took longer than the server's time limit"
    status = {Overloaded: 429, Unavailable: 503, GenerationFailed: 500}.get(type(error), 400)
    return status, " ".join(str(error).split())


def _error(status: int, message: str) -> JSONResponse:
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    headers = {"Retry-After": str(_RETRY_AFTER_S)} if status in (429, 503) else None
    return JSONResponse(error_body(message, kind), status, headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """Errors of the router: an unknown path, a wrong method."""
    assert isinstance(error, HTTPException)
    return _error(error.status_code, error.detail)
