"""The HTTP application: routes, and what bounds a request in time and memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from paceline.engine import Engine
from paceline.engine.thread import EngineThread, Unavailable
from paceline.server.auth import check_access
from paceline.server.config import ServerConfig
from paceline.server.control import Control
from paceline.server.encoding import PromptEncoder
from paceline.server.errors import ANSWERED, GenerationFailed, error_response
from paceline.server.generation import Generation
from paceline.server.logprobs import TokenTexts
from paceline.server.metrics import ServerMetrics
from paceline.server.responses import ResponsesGeneration, ResponsesRequest, errors_of_chat
from paceline.server.rl import Backend, RlApi
from paceline.server.schema import ChatRequest, CompletionRequest, DetokenizeRequest, GenerationRequest, TokenizeRequest
from paceline.tool_calls import tool_call_format

_MAX_BODIES = 64
"""Number of bodies of the largest size that may be in memory, because they are still received or encoded."""
_MAX_PATH = 100
"""Number of characters of an unknown path that the answer repeats."""
_COMPILING_THREADS = 2
"""Number of grammars that are compiled at a time; each takes up to about a second of a core."""
_CLOSE_S = 2.0
"""Seconds that the engine gets at shutdown to finish the step that it is at."""
_SHUTTING_DOWN = "the server is shutting down"

T = TypeVar("T")


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
        self.control = Control(self.thread, engine, config)
        self.encoder = PromptEncoder(engine.tokenizer, engine.scheduler.max_length, config.template_timeout_s)
        self._compiling = ThreadPoolExecutor(_COMPILING_THREADS, "paceline-grammar")
        self._texts = TokenTexts(engine.tokenizer)
        has_template = bool(engine.tokenizer.chat_template)
        self._tool_format = tool_call_format(engine.tokenizer.get_chat_template(tools=[{}]) if has_template else None)
        self._ending = asyncio.Event()
        self._streams: set[Generation] = set()
        self._num_body_bytes = 0  # of bodies that are in memory
        routes = [Route("/health", self.health), Route("/metrics", self.show_metrics),
                  Route("/v1/models", self._guarded(self.models)), Route("/v1/models/{name:path}", self._guarded(self.model)),
                  Route("/tokenizer_info", self._guarded(self.tokenizer_info)),
                  Route("/tokenize", self._guarded(self.tokenize), methods=["POST"]),
                  Route("/detokenize", self._guarded(self.detokenize), methods=["POST"]),
                  Route("/v1/completions", self._guarded(self.completions), methods=["POST"]),
                  Route("/v1/chat/completions", self._guarded(self.chat), methods=["POST"]),
                  Route("/v1/responses", self._guarded(self.responses), methods=["POST"])]
        self._rl: RlApi | None = None
        if config.rl:
            self._rl = RlApi(Backend(engine, self.thread, config, self.control, self._texts, self._read, self._prepare,
                                     self._answer))
            routes += [Route(path, self._guarded(handle), methods=list(methods)) for methods, path, handle in self._rl.routes]
        self._paths = ", ".join(sorted({route.path for route in routes if "{" not in route.path}))
        self.app = Starlette(routes=routes, lifespan=self._lifespan,
                             exception_handlers={404: self._unknown_path, HTTPException: _http_error, Exception: _defect})
        self.app.state.thread, self.app.state.config, self.app.state.server = self.thread, config, self

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.thread.start()
        if self.config.warm_up:
            self.encoder.start()
        yield
        self.end_requests()
        if self._rl is not None:
            await self._rl.close()
        self.encoder.close()
        self._compiling.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self.thread.close, _CLOSE_S)

    def end_requests(self) -> None:
        """End all requests with an error, and refuse new ones. Streams that have begun get an error event."""
        self._ending.set()
        for generation in self._streams:
            generation.fail(Unavailable(_SHUTTING_DOWN))

    # Routes

    async def health(self, request: Request) -> Response:
        problem = self.thread.problem
        return JSONResponse({"status": problem or "ok", "warm": self.thread.is_warm}, 200 if problem is None else 503)

    async def show_metrics(self, request: Request) -> Response:
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        self.control.resolve(request.path_params["name"])
        return JSONResponse(self._card())

    async def tokenizer_info(self, request: Request) -> Response:
        tokenizer = self.engine.tokenizer
        return JSONResponse({"tokenizer_class": type(tokenizer).__name__, "bos_token": tokenizer.bos_token,
                             "eos_token": tokenizer.eos_token, "pad_token": tokenizer.pad_token,
                             "chat_template": tokenizer.chat_template})

    async def tokenize(self, request: Request) -> Response:
        body = TokenizeRequest.model_validate_json(await self._read(request))
        self.control.resolve(body.model)
        if body.prompt is None:
            work = self.encoder.encode_chat(body.conversation(), body.add_special_tokens or False)
        else:
            work = self.encoder.tokenize(body.prompt, body.add_special_tokens is not False)
        tokens = await self._encoded(request, work)
        strings = {"token_strs": [self._texts(token)[0] for token in tokens]} if body.return_token_strs else {}
        longest = self.engine.scheduler.max_length
        return JSONResponse({"count": len(tokens), "max_model_len": longest, "tokens": tokens, **strings})

    async def detokenize(self, request: Request) -> Response:
        body = DetokenizeRequest.model_validate_json(await self._read(request))
        self.control.resolve(body.model)
        return JSONResponse({"prompt": await self._encoded(request, self.encoder.decode(body.tokens))})

    async def completions(self, request: Request) -> Response:
        body = CompletionRequest.model_validate_json(await self._read(request))
        given = body.prompts()
        self._check(body, len(given), body.max_tokens)
        prompts = await self._encoded(request, self.encoder.encode_all(given, body.add_special_tokens,
                                                                            body.truncate_prompt_tokens))
        return await self._generate(request, body, prompts, body.max_tokens)

    async def chat(self, request: Request) -> Response:
        return await self._chat(request, ChatRequest.model_validate_json(await self._read(request)))

    async def responses(self, request: Request) -> Response:
        asked = ResponsesRequest.model_validate_json(await self._read(request))
        with errors_of_chat():
            return await self._chat(request, asked.chat(), partial(ResponsesGeneration, asked))

    async def _unknown_path(self, request: Request, error: Exception) -> Response:
        path = request.url.path if len(request.url.path) <= _MAX_PATH else request.url.path[:_MAX_PATH] + " …"
        return error_response(HTTPException(404, f"there is no {path!r}; this server has {self._paths}"))

    # What they are made of

    async def _chat(self, request: Request, body: ChatRequest, kind: Callable[..., Generation] = Generation) -> Response:
        max_tokens = body.max_completion_tokens or body.max_tokens
        body.use_tools(self._tool_format)
        self._check(body, 1, max_tokens or self.engine.scheduler.max_length)
        prompt = await self._encoded(request, self.encoder.encode_chat(body.conversation(), body.add_special_tokens,
                                                                             body.truncate_prompt_tokens))
        room = max(1, self.engine.scheduler.max_length - len(prompt))
        return await self._generate(request, body, [prompt], max_tokens or room, kind)

    def _guarded(self, handle: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """The handler with the check of the key, its time limit, errors as the OpenAI API reports them, and metrics."""

        async def handler(request: Request) -> Response:
            began = time.perf_counter()
            request.state.num_body_bytes = 0
            try:
                response = await self._in_time(self._checked(handle, request))
            except ANSWERED as error:
                response = error_response(error)
            finally:
                self._release(request)
            endpoint = request.url.path.removesuffix("/" + request.path_params.get("name", ""))  # a bounded number of them
            self.metrics.requests.labels(endpoint, response.status_code).inc()
            if not isinstance(response, _EventStream):  # its own end is counted when it comes
                self.metrics.duration.observe(time.perf_counter() - began)
            return response

        return handler

    async def _in_time(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for `work`, but no longer than the time limit allows, nor than the server runs."""
        task, ending = asyncio.create_task(work), asyncio.create_task(self._ending.wait())
        try:
            await asyncio.wait({task, ending}, timeout=self.config.timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise Unavailable(_SHUTTING_DOWN) if ending.done() else TimeoutError
        finally:
            task.cancel()
            ending.cancel()

    async def _checked(self, handle: Callable[[Request], Awaitable[Response]], request: Request) -> Response:
        check_access(request, self.config)
        return await handle(request)

    async def _read(self, request: Request, limit: int | None = None) -> bytes:
        """The body of a request, if it is not larger than `limit` bytes (None: as configured), and there is room for it."""
        limit, body = limit or self.config.max_body_bytes, bytearray()
        async for part in request.stream():
            body += part
            request.state.num_body_bytes += len(part)
            self._num_body_bytes += len(part)
            if len(body) > limit:
                raise HTTPException(413, f"the request is larger than {limit} bytes")
            if self._num_body_bytes > _MAX_BODIES * limit:
                raise Unavailable("too many large requests are being received")
        return bytes(body)

    def _release(self, request: Request) -> None:
        """The body of a request is no longer in memory."""
        self._num_body_bytes -= request.state.num_body_bytes
        request.state.num_body_bytes = 0

    def _card(self) -> dict[str, Any]:
        return {"id": self.control.model_name, "object": "model", "created": 0, "owned_by": "paceline",
                "root": self.config.model_name, "max_model_len": self.engine.scheduler.max_length}

    def _check(self, body: GenerationRequest, num_prompts: int, max_tokens: int) -> None:
        """Refuse what can be refused before prompts are encoded, and fill in what the request leaves to the server."""
        body.model = self.control.resolve(body.model)
        body.logprobs_mode = body.logprobs_mode or ("raw_logprobs" if body.has_echo else self.config.default_logprobs)
        if body.logprobs_mode == "processed_logprobs" and body.num_top > 1:
            raise ValueError("logprobs_mode: alternatives are known of raw_logprobs only")
        limit = min(self.config.max_answers, self.config.max_pending)
        if num_prompts * body.n > limit:
            raise HTTPException(400, f"n: more than {limit} answers to one request")
        body.sampling_params(max_tokens)

    async def _encoded(self, request: Request, work: Coroutine[Any, Any, T]) -> T:
        """Wait for the encoding of a request's prompts, but no longer than the client does."""
        try:
            return await _while_connected(request, work)
        finally:
            self._release(request)

    async def _prepare(self, request: Request, body: GenerationRequest, prompts: Sequence[str | list[int]],
                       max_tokens: int) -> list[list[int]]:
        """Check a request and encode its prompts."""
        self._check(body, len(prompts), max_tokens)
        return await self._encoded(request, self.encoder.encode_all(list(prompts)))

    async def _generate(self, request: Request, body: GenerationRequest, prompts: list[list[int]], max_tokens: int,
                        kind: Callable[..., Generation] = Generation) -> Response:
        described = self.control.describe if self.config.rl else None
        return await self._answer(request, kind(
            self.thread, self._texts, body, prompts, body.sampling_params(max_tokens), self.config.timeout_s, max_tokens,
            request.headers.get("x-request-id"), described, self._tool_format), body.stream)

    async def _answer(self, request: Request, generation: Generation, streamed: bool) -> Response:
        """Generate answers, once generation is not paused."""
        try:
            form = generation.params.structured_outputs
            if form is not None:
                check = self.engine.planner.grammars.check
                await asyncio.get_running_loop().run_in_executor(self._compiling, check, form.as_grammar())
            await self.control.admit()
            await generation.start()
            if streamed:
                return self._event_stream(generation)
            return Response(await _while_connected(request, generation.result()), media_type="application/json")
        except BaseException:
            generation.cancel()
            raise

    def _event_stream(self, generation: Generation) -> Response:
        began = time.perf_counter()
        self._streams.add(generation)

        def on_first_token() -> None:
            self.metrics.first_token.observe(time.perf_counter() - began)

        def on_end() -> None:
            generation.cancel()
            self._streams.discard(generation)
            self.metrics.duration.observe(time.perf_counter() - began)

        return _EventStream(_with_error_line(generation, on_first_token), on_end)


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


async def _with_error_line(generation: Generation, on_first_token: Callable[[], None]) -> AsyncIterator[str]:
    """The lines of an event stream, with an error as the last one if something fails after the stream has begun."""
    try:
        async for line in generation.stream(on_first_token):
            yield line
    except (TimeoutError, GenerationFailed, Unavailable) as error:
        yield generation.error_line(error)


async def _while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Wait for `work`, but no longer than the client does."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _http_error(request: Request, error: Exception) -> Response:
    """Errors of the router: a wrong method."""
    return error_response(error)


async def _defect(request: Request, error: Exception) -> Response:
    """Errors that nobody expected. Starlette raises them again, so that they are logged."""
    return error_response(GenerationFailed(f"the server failed: {type(error).__name__}"))
