"""The rollout server: an engine as a Ray actor, with the methods that verl's agent loops, load balancer and trainer call."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor
from verl.utils.fs import copy_to_local
from verl.workers.rollout.replica import RolloutMode, TokenOutput

from paceline.drafters.eagle import Eagle
from paceline.engine import Engine
from paceline.engine.build import has_learned_drafter
from paceline.engine.split import decoder_maker, start_ranks
from paceline.engine.thread import Answer, EngineThread
from paceline.integrations.verl.drafter import DrafterTraining
from paceline.integrations.verl.settings import ServerSettings, check_parallel, drafter_config, engine_config, sampling_params
from paceline.models.weights import check_model, load_model, resolve_device
from paceline.spot import capture_layers
from paceline.trainer.parts import make_drafter

logger = logging.getLogger(__name__)


class PacelineServer:
    """One engine. While `abort_all_requests` has closed it, new requests wait for `resume_generation`, or are sent back."""

    def __init__(self, config: Any, model_config: Any, mode: RolloutMode, device: str = "cpu", name: str = "server") -> None:
        """`config`, `model_config`: verl's `RolloutConfig` and model configuration. `device`: used unless the settings name
        one. `name`: the server's own, different for each replica."""
        check_parallel(config)
        settings = ServerSettings(**dict(config.engine_kwargs.get("paceline") or {}))
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        self._config, self._mode = config, mode
        source, device = copy_to_local(model_config.path), resolve_device(settings.device or device)
        own, training = engine_config(settings, config, check_model(source).max_context), drafter_config(settings, config)
        ranks = start_ranks(own, torch.device(device))
        make = decoder_maker(own, ranks, has_learned_drafter(settings.drafter))
        model, tokenizer = load_model(source, device, config.dtype, make=make)
        drafter = make_drafter(training, model)
        if isinstance(drafter, Eagle) and settings.train_drafter:
            own = own.model_copy(update={"capture": tuple(dict.fromkeys((*own.capture, *capture_layers(drafter.config))))})
        self._engine = engine = Engine(model, tokenizer, drafter, settings.strategy, own, ranks, source)
        self._drafter: DrafterTraining | None = None
        if isinstance(drafter, Eagle) and settings.train_drafter:
            folder = Path(settings.drafter_folder or self._temporary_folder()) / name
            self._drafter = DrafterTraining(engine, training, folder)
        self._thread = EngineThread(engine, on_step=self._drafter.on_step if self._drafter else lambda result: None)
        self._thread.start()
        self._received: dict[str, Tensor] = {}
        self._global_steps: int | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._rejecting = False

    async def ready(self) -> bool:
        """Return when the engine can generate without compiling or capturing anything first."""
        await self._thread.call(Engine.warm_up)
        return True

    def _temporary_folder(self) -> str:
        """A folder that is removed together with the server."""
        self._temporary = TemporaryDirectory(prefix="paceline-drafter-")
        return self._temporary.name

    async def drafter_metrics(self) -> dict[str, float]:
        """What the last training of the drafter reported; empty before the first one, and without a drafter to train."""
        return {} if self._drafter is None else self._drafter.metrics

    async def _train_drafter(self) -> None:
        """Train the learned drafter on the answers since the last time. The engine still has the weights that generated them."""
        if self._drafter is not None:
            await self._thread.call(self._drafter.train)

    async def close(self) -> None:
        """Write the drafter's last checkpoint and end the engine."""
        if self._drafter is not None:
            await self._thread.call(self._drafter.close)
        self._thread.close()
        self._engine.close()

    # -- generation

    async def generate(self, prompt_ids: Any, sampling_params: dict[str, Any], request_id: str,
                       image_data: Any = None, video_data: Any = None, audio_data: Any = None,
                       mm_processor_kwargs: Any = None, priority: int = 0) -> TokenOutput:
        """Generate one answer. Its extra fields say with which global steps' weights it was generated, and its accept length."""
        if image_data or video_data or audio_data:
            raise ValueError("generate: images, videos and audio are not supported by rollout.name=paceline")
        while not self._open.is_set():
            if self._rejecting:
                return TokenOutput(token_ids=[], stop_reason="aborted", extra_fields={"global_steps": self._global_steps})
            await self._open.wait()
        key = f"{self._global_steps}/{request_id}"
        params = _sampling_params(sampling_params, self._config, len(prompt_ids), key)
        answer = await self._thread.generate(list(prompt_ids), params, request_id)
        return self._output(answer, bool(sampling_params.get("logprobs")))

    def _output(self, answer: Answer, logprobs: bool) -> TokenOutput:
        rollout = answer.rollout
        extra: dict[str, Any] = {  # names that start with spec_ are verl's own, for its metrics
            "global_steps": self._global_steps, "accept_length": answer.accept_length,
            "spec_num_draft_tokens": answer.num_drafted, "spec_num_accepted_tokens": answer.num_accepted,
            "spec_num_verify_steps": answer.num_verifications}
        if self._global_steps is not None and rollout.versions:
            extra |= {"min_global_steps": min(rollout.versions), "max_global_steps": max(rollout.versions)}
        return TokenOutput(token_ids=rollout.token_ids, log_probs=rollout.logprobs if logprobs else None,
                           stop_reason="aborted" if rollout.finish_reason == "abort" else "completed",
                           num_preempted=rollout.num_preemptions, extra_fields=extra)

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict[str, Any]:
        """End all requests with what they have and let no new one in. New ones wait, or with `reject_request` are sent back as
        aborted."""
        self._rejecting = reject_request
        self._open.clear()
        ended = await self._thread.abort()
        if reset_prefix_cache:
            await self.clear_kv_cache()
        return {"aborted_count": len(ended), "request_ids": ended}

    async def abort_request(self, request_id: str, reset_prefix_cache: bool = True) -> dict[str, Any]:
        """End one request with what it has."""
        return {"aborted": bool(await self._thread.abort(request_id)), "request_id": request_id}

    async def resume_generation(self) -> None:
        """Let requests in again after `abort_all_requests`."""
        self._rejecting = False
        self._open.set()

    # -- weights

    async def receive_weights(self, part: bytes) -> None:
        """Keep a part of the next weights, a safetensors file, until `update_weights`."""
        self._received |= load(part)

    async def update_weights(self, global_steps: int | None = None) -> None:
        """Replace the policy's weights with those received. They are checked completely first: if one is missing or of another
        shape, ValueError, and the engine keeps its weights."""
        await self._train_drafter()
        received, self._received = self._received, {}
        await self._thread.call(lambda engine: engine.update_weights(received, global_steps))
        if global_steps is not None:
            await self.set_global_steps(global_steps)

    async def set_global_steps(self, global_steps: int) -> None:
        """Say which step of the trainer the weights are of."""
        self._global_steps = global_steps

    # -- memory

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Bring the engine back after `sleep`. Tag `weights` alone changes nothing: weights are updated where they are."""
        if tags is None or "kv_cache" in tags:
            await self._thread.wake()

    async def sleep(self) -> None:
        """Free KV cache and weights while a trainer on the same device needs the memory. Requests wait until `wake_up`. Does
        nothing for a server with a device of its own."""
        if self._config.free_cache_engine and self._mode is not RolloutMode.STANDALONE:
            await self._train_drafter()
            await self._thread.sleep(weights=True)

    async def release_kv_cache(self) -> None:
        """Free the KV cache during a weight update."""
        if self._config.free_cache_engine:
            await self._train_drafter()
            await self._thread.sleep(weights=False)

    async def resume_kv_cache(self) -> None:
        """Allocate the KV cache again after `release_kv_cache`."""
        await self._thread.wake()

    async def clear_kv_cache(self) -> None:
        """Forget cached prefixes."""
        await self._thread.call(lambda engine: engine.scheduler.drop_prefixes())

    # -- profiling

    async def start_profile(self, **kwargs: Any) -> None:
        """Profiling is not supported; says so in the log."""
        logger.warning("rollout.name=paceline cannot be profiled by verl")

    async def stop_profile(self) -> None:
        """Nothing to stop."""


_sampling_params = sampling_params  # the method's argument of this name is verl's
