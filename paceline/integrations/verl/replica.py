"""A replica: one rollout server and where it runs."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.utils.device import get_resource_name
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from paceline.integrations.verl.server import PacelineServer
from paceline.integrations.verl.settings import check_parallel


def server_name(replica_rank: int, suffix: str = "") -> str:
    """The name of the Ray actor that serves a replica."""
    return f"paceline_server_{replica_rank}{suffix}"


class PacelineReplica(RolloutReplica):
    """One engine. With tensor parallelism its ranks are processes of the server, on the GPUs of all workers of the replica."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_parallel(self.config)

    async def init_standalone(self) -> None:
        """Start a server of its own. If the cluster has no GPUs, it runs on a CPU and needs no resource pool."""
        if ray.cluster_resources().get(get_resource_name(), 0):
            await super().init_standalone()
            return
        self.rollout_mode = RolloutMode.STANDALONE
        await self.launch_servers()

    async def launch_servers(self) -> None:
        """Start the server, on the node and the GPUs of its workers if it has some."""
        kind = "_reward" if self.is_reward_model else "_teacher" if self.is_teacher_model else ""
        name = server_name(self.replica_rank, f"{kind}{self.name_suffix}")
        options: dict[str, Any] = {"name": name, "max_concurrency": self.max_concurrency, "num_cpus": 0}
        device = "cpu"
        if self.workers:
            places = await asyncio.gather(*(worker.__ray_call__.remote(_placement) for worker in self.workers))
            nodes, gpus = {node for node, _ in places}, [gpu for _, own in places for gpu in own]
            if len(nodes) > 1:
                raise ValueError(f"rollout.tensor_model_parallel_size: {self.world_size} workers are on {len(nodes)} nodes; "
                                 "the ranks of rollout.name=paceline are on one")
            (node,) = nodes
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
            if gpus:
                device = "cuda"
                options["runtime_env"] = {"env_vars": {**dict.fromkeys(get_platform().ray_noset_envvars(), "1"),
                                                       get_platform().visible_devices_envvar(): ",".join(gpus)}}
        actor: Any = ray.remote(PacelineServer).options(**options)
        server = actor.remote(self.config, self.model_config, self.rollout_mode, device, name)
        await server.ready.remote()
        self.servers, self._server_handle, self._server_address = [server], server, name


def _placement(worker: Any) -> tuple[str, list[str]]:
    """Node and GPUs of the process that this runs in."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_accelerator_ids().get(get_resource_name(), [])
