"""A replica: one rollout server and where it runs."""

from __future__ import annotations

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
    """One engine: a replica is never more than one process."""

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
        """Start the server, on the node and the GPU of its worker if it has one."""
        kind = "_reward" if self.is_reward_model else "_teacher" if self.is_teacher_model else ""
        name = server_name(self.replica_rank, f"{kind}{self.name_suffix}")
        options: dict[str, Any] = {"name": name, "max_concurrency": self.max_concurrency, "num_cpus": 0}
        device = "cpu"
        if self.workers:
            node, gpus = await self.workers[0].__ray_call__.remote(_placement)
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
            if gpus:
                device = "cuda"
                options["runtime_env"] = {"env_vars": {**dict.fromkeys(get_platform().ray_noset_envvars(), "1"),
                                                       get_platform().visible_devices_envvar(): gpus[0]}}
        actor: Any = ray.remote(PacelineServer).options(**options)
        server = actor.remote(self.config, self.model_config, self.rollout_mode, device, name)
        await server.ready.remote()
        self.servers, self._server_handle, self._server_address = [server], server, name


def _placement(worker: Any) -> tuple[str, list[str]]:
    """Node and GPUs of the process that this runs in."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_accelerator_ids().get(get_resource_name(), [])
