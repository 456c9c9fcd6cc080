"""vLLM's paths for trainers (its development mode), with what SkyRL, prime-rl, ART and AReaL add to them."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline.server.control import PauseMode
from paceline.server.rl.backend import Backend, Body, Routes
from paceline.server.rl.group import GroupRequest
from paceline.server.rl.tokens import TokenGeneration, TokensRequest
from paceline.server.rl.weights import Weights

_NO_TRANSFER = ("vLLM's own NCCL and IPC transfer is not spoken; /update_weights takes a folder or safetensors, and "
                "/init_weights_update_group makes a process group of torch.distributed")
_SAFETENSORS = ("application/octet-stream", "application/safetensors", "application/vnd.safetensors")


class UpdateInfo(Body):
    """How the weights come: from a folder, or broadcast in a process group."""

    weight_dir: str | None = None
    weight_version: str | None = None
    group_name: str | None = None
    names: list[str] = Field(default_factory=list)
    dtype_names: list[str] = Field(default_factory=list)
    shapes: list[list[int]] = Field(default_factory=list)


class UpdateRequest(Body):
    """Body of `POST /update_weights`: a folder, by any of the names that clients have for it."""

    weight_dir: str | None = None
    model_path: str | None = None
    update_info: UpdateInfo | None = None
    """vLLM's form of the request."""
    weight_version: str | None = None
    load_format: str | None = None
    abort_all_requests: bool = False
    skip_prefix_cache_reset: bool = False
    """Prefixes of older weights are dropped with every update."""


class AdapterRequest(Body):
    """Body of `POST /v1/load_lora_adapter`."""

    lora_name: str = Field(min_length=1)
    lora_path: str = ""
    lora_int_id: int | None = None
    load_inplace: bool = False
    """Adapters are always loaded in place."""


class VersionRequest(Body):
    """Body of `POST /update_weight_version`, which SGLang has, too."""

    new_version: str
    abort_all_requests: bool = False


class AbortRequest(Body):
    """Body of `POST /abort_requests`. Without ids, all are meant."""

    request_ids: list[str] = Field(default_factory=list)


class BroadcastRequest(Body):
    """Which tensors the trainer broadcasts, in this order."""

    group_name: str = "weight_update_group"
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


class VllmApi:
    """The handlers of these paths."""

    def __init__(self, backend: Backend, weights: Weights) -> None:
        self._backend, self._weights = backend, weights
        self._control, self._thread = backend.control, backend.thread
        self._announced: BroadcastRequest | None = None

    def routes(self) -> Routes:
        """Methods, path and handler of each route."""
        posts = {"/inference/v1/generate": self.generate, "/pause": self.pause, "/resume": self.resume, "/sleep": self.sleep,
                 "/wake_up": self.wake_up, "/abort_requests": self.abort, "/inference/v1/abort_requests": self.abort,
                 "/update_weights": self.update, "/start_weight_update": self.start_update,
                 "/finish_weight_update": self.finish_update, "/update_weight_version": self.rename,
                 "/reset_prefix_cache": self.drop_cache, "/v1/load_lora_adapter": self.load_adapter,
                 "/load_lora_adapter": self.load_adapter, "/skyrl/v1/load_lora_adapter": self.load_adapter,
                 "/v1/unload_lora_adapter": self.unload_adapter, "/unload_lora_adapter": self.unload_adapter,
                 "/areal_pause_generation": self.areal_pause, "/areal_continue_generation": self.areal_continue,
                 "/areal_update_weights": self.areal_update, "/areal_init_weights_update_group": self.areal_join,
                 "/areal_set_update_weight_meta": self.areal_announce, "/areal_update_weights_xccl": self.areal_receive,
                 "/init_weight_transfer_engine": self.refuse_transfer}
        gets = {"/is_paused": self.is_paused, "/is_sleeping": self.is_sleeping, "/get_world_size": self.world_size,
                "/weight_info": self.weight_info}
        return [*((("POST",), path, handle) for path, handle in posts.items()),
                *((("GET",), path, handle) for path, handle in gets.items())]

    # Generation

    async def generate(self, request: Request) -> Response:
        body = await self._backend.parse(request, TokensRequest)
        sampling = body.generation_request()
        room = self._backend.engine.scheduler.max_length - len(body.token_ids)
        max_tokens = sampling.max_tokens or max(1, room)
        prompts = await self._backend.prepare(request, sampling, [body.token_ids], max_tokens)
        generation = TokenGeneration(
            self._thread, self._backend.texts, sampling, prompts, sampling.sampling_params(max_tokens),
            self._backend.config.timeout_s, max_tokens, body.request_id or request.headers.get("x-request-id"),
            self._control.describe)
        return await self._backend.answer(request, generation, body.stream)

    async def abort(self, request: Request) -> Response:
        ids = (await self._backend.parse(request, AbortRequest)).request_ids
        ended = [name for one in ids for name in await self._thread.abort(one)] if ids else await self._thread.abort()
        return JSONResponse({"status": "aborted", "aborted": len(ended)})

    async def pause(self, request: Request) -> Response:
        self._weights.forget_parts()
        await self._control.hold("pause", _mode(request))
        if request.query_params.get("clear_cache", "true").lower() == "true" and _mode(request) != "keep":
            await self._thread.call(lambda engine: engine.drop_cache())
        return self._done("paused")

    async def resume(self, request: Request) -> Response:
        self._weights.forget_parts()
        await self._control.release("pause")
        return self._done("resumed")

    async def is_paused(self, request: Request) -> Response:
        return JSONResponse({"is_paused": self._control.is_held("pause")})

    async def drop_cache(self, request: Request) -> Response:
        running = request.query_params.get("reset_running_requests", "false").lower() == "true"
        if request.headers.get("content-type", "").startswith("application/json"):
            running |= (await self._backend.parse(request, _CacheRequest)).reset_running_requests
        await self._thread.call(lambda engine: engine.drop_cache(running))
        return JSONResponse({"success": True, "status": "ok"})

    # Memory

    async def sleep(self, request: Request) -> Response:
        """Level 1 and 2 are the same: a copy of the weights stays on the host, where they may be updated."""
        level = request.query_params.get("level", "1")
        if level not in ("0", "1", "2"):
            raise ValueError(f"level: {level} is not 0, 1 or 2")
        tags = request.query_params.getlist("tags")
        await self._control.hold("sleep", _mode(request))
        if level != "0":
            await self._thread.sleep(weights=not tags or "weights" in tags)
        return JSONResponse({"status": "sleeping", "level": int(level), "weight_version": self._control.weight_version})

    async def wake_up(self, request: Request) -> Response:
        """With the tag `weights` alone nothing happens yet: they are updated where they are."""
        tags = request.query_params.getlist("tags")
        awake = not tags or "kv_cache" in tags or "scheduling" in tags
        if awake:
            await self._thread.wake()
            await self._control.release("sleep")
        return JSONResponse({"status": "awake" if awake else "sleeping", "tags": tags or None})

    async def is_sleeping(self, request: Request) -> Response:
        return JSONResponse({"is_sleeping": self._control.is_held("sleep")})

    # Weights

    async def update(self, request: Request) -> Response:
        """From a folder, or from the body itself if that is a safetensors file."""
        if request.headers.get("content-type", "").partition(";")[0] in _SAFETENSORS:
            data = await self._backend.read(request, self._weights.max_bytes)
            await self._weights.receive_safetensors(data, request.query_params.get("weight_version"))
        else:
            await self._update_as_told(await self._backend.parse(request, UpdateRequest))
        missing = self._weights.num_missing
        return JSONResponse({"status": "incomplete" if missing else "ok", "message": "Weights updated", "missing": missing,
                             "weight_version": self._control.weight_version})

    async def _update_as_told(self, body: UpdateRequest) -> None:
        info = body.update_info
        if info is None or info.weight_dir is not None:
            return await self._update_from(body, body.model_path or body.weight_dir if info is None else info.weight_dir)
        if info.group_name is None:
            raise ValueError(_NO_TRANSFER)
        await self._weights.receive_broadcast(info.group_name, info.names, info.dtype_names, info.shapes, info.weight_version)

    async def _update_from(self, body: UpdateRequest, path: str | None) -> None:
        if path is None:
            raise ValueError("weight_dir: is missing; the folder of the new weights")
        if body.load_format not in (None, "auto", "safetensors"):
            raise ValueError(f"load_format: {body.load_format} is not supported; there is safetensors")
        if body.abort_all_requests:
            await self._thread.abort()
        await self._weights.load_folder(path, body.weight_version)

    async def start_update(self, request: Request) -> Response:
        self._weights.forget_parts()
        return JSONResponse({"message": "Weight update started"})

    async def finish_update(self, request: Request) -> Response:
        if self._weights.num_missing:
            missing = self._weights.num_missing
            self._weights.forget_parts()
            raise ValueError(f"{missing} tensors are missing; the weights are what they were")
        return JSONResponse({"message": "Weight update finished", "weight_version": self._control.weight_version})

    async def refuse_transfer(self, request: Request) -> Response:
        raise HTTPException(501, _NO_TRANSFER)

    async def rename(self, request: Request) -> Response:
        body = await self._backend.parse(request, VersionRequest)
        if body.abort_all_requests:
            await self._thread.abort()
        self._control.name_weights(self._backend.engine.version, body.new_version)
        return JSONResponse({"success": True, "new_version": body.new_version,
                             "message": f"Weight version updated to {body.new_version}"})

    async def weight_info(self, request: Request) -> Response:
        return JSONResponse({"weight_version": self._control.weight_version})

    async def world_size(self, request: Request) -> Response:
        return JSONResponse({"world_size": 1})  # whatever the number of ranks: only rank 0 joins a trainer's group

    async def load_adapter(self, request: Request) -> Response:
        body = await self._backend.parse(request, AdapterRequest)
        await self._weights.load_adapter(body.lora_path, body.lora_name)
        return JSONResponse({"status": "ok", "success": True, "lora_name": body.lora_name,
                             "weight_version": self._control.weight_version})

    async def unload_adapter(self, request: Request) -> Response:
        body = await self._backend.parse(request, AdapterRequest)
        if not await self._weights.unload_adapter(body.lora_name):
            raise HTTPException(404, f"the adapter {body.lora_name} is not loaded")
        return JSONResponse({"status": "ok", "success": True, "weight_version": self._control.weight_version})

    # AReaL's own paths

    async def areal_pause(self, request: Request) -> Response:
        await self._control.hold("pause", "abort")
        return _success("Generation paused and all requests aborted")

    async def areal_continue(self, request: Request) -> Response:
        await self._control.release("pause")
        return _success("Generation continued")

    async def areal_update(self, request: Request) -> Response:
        body = await self._backend.parse(request, UpdateRequest)
        await self._update_from(body, body.model_path)
        return _success("success")

    async def areal_join(self, request: Request) -> Response:
        body = await self._backend.parse(request, GroupRequest)
        await self._weights.join_group(body)
        return _success("success")

    async def areal_announce(self, request: Request) -> Response:
        self._announced = await self._backend.parse(request, BroadcastRequest)
        return _success("success")

    async def areal_receive(self, request: Request) -> Response:
        announced, self._announced = self._announced, None
        if announced is None:
            raise ValueError("areal_set_update_weight_meta has to say first which tensors come")
        await self._weights.receive_broadcast(announced.group_name, announced.names, announced.dtypes, announced.shapes)
        return _success("success")

    def _done(self, status: str) -> Response:
        return JSONResponse({"status": status, "weight_version": self._control.weight_version})


class _CacheRequest(Body):
    reset_running_requests: bool = False


def _mode(request: Request) -> PauseMode:
    mode = request.query_params.get("mode", "abort")
    for known in get_args(PauseMode):
        if mode == known:
            return known
    raise ValueError(f"mode: {mode} is not {', '.join(get_args(PauseMode))}")


def _success(message: str) -> JSONResponse:
    content: dict[str, Any] = {"success": True, "message": message}
    return JSONResponse(content)
