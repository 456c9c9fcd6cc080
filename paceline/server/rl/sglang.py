"""SGLang's own API, as far as trainers use it: slime and AReaL."""

from __future__ import annotations

import binascii
import json
from base64 import b64decode
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline.server.control import PauseMode
from paceline.server.generation import Choice
from paceline.server.rl.backend import Backend, Body, Routes
from paceline.server.rl.group import GroupRequest
from paceline.server.rl.tokens import TokenGeneration, TokenSampling
from paceline.server.rl.weights import Weights
from paceline.types import Rollout

_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
"""SGLang's names of sampling parameters that vLLM calls otherwise."""
_PAUSES: dict[str, PauseMode] = {"abort": "abort", "in_place": "keep", "retract": "keep"}


class LenientBody(Body):
    """A body of which fields that ask for nothing (false, empty) are accepted, too, whatever they are called."""

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        return {name: value for name, value in raw.items() if name in cls.model_fields or value}


class Sampling(TokenSampling):
    """Sampling parameters by SGLang's names."""

    max_tokens: int | None = Field(128, ge=1)
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    """Whether the text keeps the stop string or token that ended it."""

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        return {_NAMES.get(name, name): value for name, value in raw.items() if value not in (None, [], {})}


class GenerateRequest(LenientBody):
    """Body of `POST /generate`: one prompt or several, as text or token ids."""

    input_ids: list[int] | list[list[int]] | None = None
    text: str | list[str] | None = None
    sampling_params: Sampling = Field(default_factory=Sampling)
    rid: str | None = Field(None, min_length=1)
    return_logprob: bool = False
    logprob_start_len: Literal[-1] = -1
    """Log-probabilities of the prompt are not known."""
    return_text_in_logprobs: bool = False
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] | None = None
    lora_path: str | None = None
    session_id: str | None = None
    log_metrics: bool = True
    stream: bool = False

    @property
    def is_batch(self) -> bool:
        """Whether there are several prompts, and so a list of answers."""
        given = self.text if self.input_ids is None else self.input_ids
        return isinstance(given, list) and not (given and isinstance(given[0], int))

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as text or token ids."""
        if (self.input_ids is None) == (self.text is None):
            raise ValueError("input_ids, text: exactly one of them is needed")
        if self.input_ids is not None:
            return self.input_ids if self.is_batch else [self.input_ids]  # type: ignore[list-item, return-value]
        return [self.text] if isinstance(self.text, str) else list(self.text or [])


class WeightOptions(LenientBody):
    """What SGLang's weight updates have in common. Cached prefixes are always dropped."""

    weight_version: str | None = None
    abort_all_requests: bool = False
    flush_cache: bool = True
    selector: Literal["target", "all"] = "all"
    load_format: Literal["auto", "safetensors"] = "auto"
    torch_empty_cache: bool = False


class DiskRequest(WeightOptions):
    """Body of `POST /update_weights_from_disk`."""

    model_path: str
    token_step: int = 0


class DistributedRequest(WeightOptions):
    """Body of `POST /update_weights_from_distributed`."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"


class TensorRequest(WeightOptions):
    """Body of `POST /update_weights_from_tensor`: safetensors files in base64. SGLang's pickles are refused."""

    serialized_named_tensors: list[str]


class AbortRequest(LenientBody):
    """Body of `POST /abort_request`."""

    rid: str | None = None
    abort_all: bool = False
    abort_message: str | None = None


class PauseRequest(LenientBody):
    """Body of `POST /pause_generation`."""

    mode: Literal["abort", "in_place", "retract"] = "abort"


class MemoryRequest(LenientBody):
    """Body of `POST /release_memory_occupation` and `/resume_memory_occupation`."""

    tags: list[Literal["weights", "kv_cache", "cuda_graph"]] | None = None


class ContinueRequest(LenientBody):
    """Body of `POST /continue_generation`."""

    torch_empty_cache: bool = True


class GroupName(LenientBody):
    """Body of `POST /destroy_weights_update_group`."""

    group_name: str = "weight_update_group"


class SglangApi:
    """The handlers of these paths."""

    def __init__(self, backend: Backend, weights: Weights) -> None:
        self._backend, self._weights = backend, weights
        self._control, self._thread = backend.control, backend.thread

    def routes(self) -> Routes:
        """Methods, path and handler of each route."""
        both, post, get = ("GET", "POST"), ("POST",), ("GET",)
        return [
            (("POST", "PUT"), "/generate", self.generate), (post, "/abort_request", self.abort),
            (post, "/pause_generation", self.pause), (post, "/continue_generation", self.resume),
            (post, "/update_weights_from_disk", self.update_from_disk),
            (post, "/update_weights_from_tensor", self.update_from_tensor),
            (post, "/update_weights_from_distributed", self.update_from_distributed),
            (post, "/init_weights_update_group", self.join_group), (post, "/destroy_weights_update_group", self.leave_group),
            (both, "/release_memory_occupation", self.release_memory), (both, "/resume_memory_occupation", self.resume_memory),
            (both, "/flush_cache", self.flush_cache), (get, "/model_info", self.model_info),
            (get, "/get_model_info", self.model_info), (get, "/server_info", self.server_info),
            (get, "/get_server_info", self.server_info), (get, "/get_weight_version", self.weight_version),
            (get, "/health_generate", self.health), (get, "/v1/loads", self.loads)]

    # Generation

    async def generate(self, request: Request) -> Response:
        body = await self._backend.parse(request, GenerateRequest)
        sampling = body.sampling_params.model_copy(update={
            "model": body.lora_path, "stream": body.stream, "logprobs": 1 if body.return_logprob else None,
            "logprobs_mode": body.logprobs_mode})
        assert sampling.max_tokens is not None, "it has a default"
        prompts = await self._backend.prepare(request, sampling, body.prompts(), sampling.max_tokens)
        params = sampling.sampling_params(sampling.max_tokens)
        generation = SglangGeneration(self._thread, self._backend.texts, sampling, prompts, params,
                                      self._backend.config.timeout_s, sampling.max_tokens, body.rid, self._control.describe)
        generation.asked = body
        return await self._backend.answer(request, generation, body.stream)

    async def abort(self, request: Request) -> Response:
        body = await self._backend.parse(request, AbortRequest)
        if body.abort_all or body.rid is not None:
            await self._thread.abort(None if body.abort_all else body.rid)
        return Response()

    async def pause(self, request: Request) -> Response:
        mode = (await self._backend.parse(request, PauseRequest)).mode
        self._weights.forget_parts()
        await self._control.hold("pause", _PAUSES[mode])
        if mode == "retract":
            await self._thread.call(lambda engine: engine.drop_cache(running=True))
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: Request) -> Response:
        await self._backend.parse(request, ContinueRequest)
        self._weights.forget_parts()
        await self._control.release("pause")
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def flush_cache(self, request: Request) -> Response:
        await self._thread.call(lambda engine: engine.drop_cache())
        return Response("Cache flushed.\n")

    # Memory

    async def release_memory(self, request: Request) -> Response:
        tags = (await self._backend.parse(request, MemoryRequest)).tags
        await self._control.hold("sleep", "keep")
        await self._thread.sleep(weights=not tags or "weights" in tags)
        return JSONResponse(None)

    async def resume_memory(self, request: Request) -> Response:
        tags = (await self._backend.parse(request, MemoryRequest)).tags
        if not tags or "kv_cache" in tags:  # weights are updated where they are
            await self._thread.wake()
            await self._control.release("sleep")
        return JSONResponse(None)

    # Weights

    async def update_from_disk(self, request: Request) -> Response:
        body = await self._backend.parse(request, DiskRequest)
        await self._abort_if_asked(body)
        await self._weights.load_folder(body.model_path, body.weight_version)
        return self._updated()

    async def update_from_tensor(self, request: Request) -> Response:
        limit = self._weights.max_bytes * 3 // 2  # in base64
        body = TensorRequest.model_validate_json(await self._backend.read(request, limit))
        await self._abort_if_asked(body)
        for part in body.serialized_named_tensors:
            try:
                data = b64decode(part, validate=True)
            except binascii.Error:
                raise ValueError("serialized_named_tensors: not base64") from None
            await self._weights.receive_safetensors(data, body.weight_version)
        return self._updated()

    async def update_from_distributed(self, request: Request) -> Response:
        body = await self._backend.parse(request, DistributedRequest)
        await self._abort_if_asked(body)
        await self._weights.receive_broadcast(body.group_name, body.names, body.dtypes, body.shapes, body.weight_version)
        return self._updated()

    async def join_group(self, request: Request) -> Response:
        await self._weights.join_group(await self._backend.parse(request, GroupRequest))
        return JSONResponse({"success": True, "message": "Succeeded to initialize custom process group."})

    async def leave_group(self, request: Request) -> Response:
        name = (await self._backend.parse(request, GroupName)).group_name
        found = await self._weights.leave_group(name)
        return JSONResponse({"success": found, "message": "" if found else f"there is no group {name}"}, 200 if found else 400)

    async def _abort_if_asked(self, body: WeightOptions) -> None:
        if body.abort_all_requests:
            await self._thread.abort()

    def _updated(self) -> Response:
        missing = self._weights.num_missing
        message = f"{missing} tensors are still missing" if missing else "Succeeded to update model weights."
        return JSONResponse({"success": True, "message": message, "num_paused_requests": 0,
                             "weight_version": self._control.weight_version})

    # Information

    async def model_info(self, request: Request) -> Response:
        name = self._backend.config.model_name
        return JSONResponse({"model_path": name, "served_model_name": name, "tokenizer_path": name, "is_generation": True,
                             "preferred_sampling_params": None, "weight_version": self._control.weight_version})

    async def server_info(self, request: Request) -> Response:
        scheduler = self._backend.engine.scheduler
        return JSONResponse({
            "model_path": self._backend.config.model_name, "served_model_name": self._backend.config.model_name,
            "tp_size": self._backend.engine.config.tensor_parallel,
            "dp_size": 1, "pp_size": 1, "context_length": scheduler.max_length, "max_running_requests": scheduler.max_batch,
            "weight_version": self._control.weight_version, "internal_states": [{}]})

    async def weight_version(self, request: Request) -> Response:
        return JSONResponse({"weight_version": self._control.weight_version})

    async def health(self, request: Request) -> Response:
        problem = self._thread.problem
        return JSONResponse({"status": problem or "ok"}, 200 if problem is None else 503)

    async def loads(self, request: Request) -> Response:
        pending = self._thread.num_pending
        running = min(pending, self._thread.stats.num_running)
        return JSONResponse({"dp_rank_count": 1, "loads": [
            {"dp_rank": 0, "num_running_reqs": running, "num_waiting_reqs": pending - running, "num_total_reqs": pending}]})


class SglangGeneration(TokenGeneration):
    """The answers to one request of `/generate`."""

    asked: GenerateRequest

    def _content(self) -> Any:
        found = [self._answer(choice, rollout.token_ids, self._known_logprobs(rollout), rollout)
                 for choice in self._choices if (rollout := choice.rollout) is not None]
        return found if self.asked.is_batch or self._body.n > 1 else found[0]

    async def stream(self, on_first_token: Callable[[], None]) -> AsyncIterator[str]:
        """Yield the lines of an event stream. Every event has the whole answer so far."""
        known: list[list[float]] = [[] for _ in self._choices]
        async for index, event in self._all_events():
            choice = self._choices[index]
            if not choice.tokens:
                on_first_token()
            if isinstance(event, Rollout):
                choice.tokens, known[index], choice.rollout = event.token_ids, self._known_logprobs(event), event
            else:
                choice.tokens = [*choice.tokens, *event.tokens]
                known[index] += event.logprobs
            content = self._answer(choice, choice.tokens, known[index], choice.rollout)
            several = self.asked.is_batch or self._body.n > 1
            yield f"data: {json.dumps({**content, 'index': index} if several else content, ensure_ascii=False)}\n\n"
        yield "data: [DONE]\n\n"

    def _answer(self, choice: Choice, tokens: list[int], logprobs: list[float], rollout: Rollout | None) -> dict[str, Any]:
        """An answer, as far as it is known."""
        info: dict[str, Any] = {"id": self._name, "finish_reason": self._finish_reason(rollout),
                                "prompt_tokens": len(choice.prompt_ids), "completion_tokens": len(tokens),
                                "num_retractions": 0 if rollout is None else rollout.num_preemptions}
        if self._body.wants_logprobs:
            info["input_token_logprobs"] = []
            info["output_token_logprobs"] = [
                [logprob, token, self._tokenizer.decode([token]) if self.asked.return_text_in_logprobs else None]
                for token, logprob in zip(tokens, logprobs, strict=False)]
        if rollout is not None:
            info |= self._describe(rollout)
        return {"text": self._text(tokens, rollout), "output_ids": tokens, "meta_info": info}

    def _text(self, tokens: list[int], rollout: Rollout | None) -> str:
        sampling = self.asked.sampling_params
        if rollout is not None and sampling.skip_special_tokens and not sampling.no_stop_trim:
            return rollout.text
        matched = None if rollout is None or sampling.no_stop_trim else self._matched(rollout)
        kept = tokens[:-1] if isinstance(matched, int) else tokens
        text: str = self._tokenizer.decode(kept, skip_special_tokens=sampling.skip_special_tokens)
        return text.partition(matched)[0] if isinstance(matched, str) else text

    def _finish_reason(self, rollout: Rollout | None) -> dict[str, Any] | None:
        if rollout is None:
            return None
        if rollout.finish_reason == "stop":
            return {"type": "stop", "matched": self._matched(rollout)}
        if rollout.finish_reason == "length":
            return {"type": "length", "length": len(rollout.token_ids)}
        return {"type": rollout.finish_reason, "message": "Aborted"}

    def _matched(self, rollout: Rollout) -> int | str | None:
        """The stop string that ended an answer, or else the token."""
        if rollout.finish_reason != "stop":
            return None
        text = self._tokenizer.decode(rollout.token_ids, skip_special_tokens=False)
        return next((stop for stop in self.params.stop if stop in text), rollout.token_ids[-1])
