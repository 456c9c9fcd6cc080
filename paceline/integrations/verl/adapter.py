"""The trainer's side of a rollout server: it sends weights, and puts the server to sleep while the trainer needs the memory."""

from __future__ import annotations

import os
from typing import Any

import ray
import torch
from safetensors.torch import save
from torch import Tensor
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.utils import ensure_async_iterator

from paceline.integrations.verl.replica import server_name
from paceline.integrations.verl.settings import check_parallel


class ServerAdapter(BaseRollout):
    """Connects one rank of the trainer with its rollout server, a Ray actor in another process."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        check_parallel(self.config)
        rank, size = int(os.environ.get("RANK", "0")), self.config.tensor_model_parallel_size
        self.replica_rank = rank // size if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % size == 0
        """Whether this rank talks to the server: one of those whose GPUs it has."""
        self._handle: Any = None

    @property
    def _server(self) -> Any:
        if self._handle is None:  # the server is started after the adapter
            self._handle = ray.get_actor(server_name(self.replica_rank))
        return self._handle

    async def resume(self, tags: list[str]) -> None:
        """Bring back what `release` freed: `weights`, `kv_cache`."""
        if self.config.free_cache_engine and self.is_leader_rank:
            await self._server.wake_up.remote(tags=tags)

    async def release(self) -> None:
        """Free the server's memory."""
        if self.config.free_cache_engine and self.is_leader_rank:
            await self._server.sleep.remote()

    @torch.no_grad()
    async def update_weights(self, weights: Any, wire_format: str = "named_tensors", global_steps: int | None = None,
                             peft_config: Any = None, **kwargs: Any) -> None:
        """Send full weights to the server, in parts of `checkpoint_engine.update_weights_bucket_megabytes`. They replace the
        server's when all have arrived. Nothing is written to disk."""
        if wire_format != "named_tensors":
            raise ValueError(f"wire_format: {wire_format} is not supported by rollout.name=paceline, only named_tensors")
        if peft_config is not None:
            raise ValueError("lora: rollout.name=paceline takes merged weights; set actor_rollout_ref.model.lora.merge=True")
        limit = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        part: dict[str, Tensor] = {}
        size = 0
        async for name, tensor in ensure_async_iterator(weights):  # all ranks take part in gathering them
            if not self.is_leader_rank:
                continue
            if part and size + tensor.nbytes > limit:
                await self._server.receive_weights.remote(save(part))
                part, size = {}, 0
            part[name] = torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format).copy_(tensor)
            size += tensor.nbytes
        if not self.is_leader_rank:
            return
        await self._server.receive_weights.remote(save(part))
        await self._server.update_weights.remote(global_steps)
