"""Workers as plain processes, without Ray, so that migration between processes is tested also where Ray is not installed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from cluster.local import GROUP, PARAMS, PROMPTS, restless, run, submit, weights
from tiny import eagle, model

from benchmarks.lib.process_runtime import ProcessRuntime
from paceline import Engine, Rollout, Strategy
from paceline.cluster.coordinator import Coordinator
from paceline.cluster.worker import Send, Worker, gpu_of
from paceline.config import EngineConfig
from paceline.models.decoder import Decoder


@dataclass(frozen=True)
class DeviceSpec:
    """A worker whose engine has other weights than those that are published. `shared`: requests move between workers as handles
    of tensors (CUDA IPC, or shared memory on a CPU); otherwise as bytes."""

    device: str
    strategy: str
    shared: bool = True

    def build(self, worker_id: int, send: Send) -> Worker:
        torch.set_num_threads(1)
        engine = make_device_engine(self.device, self.strategy, seed=7)
        gpu = gpu_of(engine.model.norm.device) or "memory of this machine"
        return Worker(worker_id, engine, send, tokens_interval_s=0.1, gpu=gpu if self.shared else "")


def make_device_engine(device: str, strategy: str, seed: int) -> Engine:
    source = model("llama", seed)
    policy = Decoder.random(source.config, 0, dtype=torch.float64, device=device)
    policy.load_state_dict(source.state_dict())
    config = EngineConfig(page_size=16, kv_tokens=16384, max_batch=16)
    return Engine(policy, None, eagle("llama").to(device), Strategy.parse(strategy), config)


def check_processes(device: str, workers: int, strategy: str, shared: bool = True, batches: int = 3, max_new_tokens: int = 160,
                    kills: bool = False) -> list[dict[str, Any]]:
    """Generate some batches on worker processes while requests are moved about for no reason, and compare their tokens with those
    of one engine. `kills`: end a process during the last batch. Returns the moves."""
    params = replace(PARAMS, max_new_tokens=max_new_tokens)
    alone = make_device_engine(device, "off", seed=0)
    expected: dict[int, Rollout] = {r.seed: r for group in alone.generate(PROMPTS, params, GROUP) for r in group.rollouts}
    runtime = ProcessRuntime(workers, DeviceSpec(device, strategy, shared))
    coordinator = Coordinator(runtime, interval_s=0.02, decide=restless(workers))
    try:
        coordinator.publish_policy(weights(), 0)
        coordinator.wait_for_all()
        for batch in range(batches):
            ids, found = submit(coordinator, params), {}
            if kills and batch == batches - 1:
                while coordinator.book.num_generated == 0 and len(found) < len(ids):  # all may end between two rounds
                    found |= dict(coordinator.step())
                runtime.processes[workers - 1].kill()
            found |= run(coordinator, [request for request in ids if request not in found], rounds=20_000)
            assert {r.seed: r.token_ids for r in found.values()} == {seed: r.token_ids for seed, r in expected.items()}
        while kills and not coordinator.num_lost:
            coordinator.step()
        lost = [event["worker"] for event in coordinator.timeline.events if event["event"] == "lost"]
        assert (workers - 1 in lost) == kills
        if shared:
            assert len(set(coordinator.placement.gpus.values())) == 1 and coordinator.placement.gpus[0]
        return [event for event in coordinator.timeline.events if event["event"] == "migrated"]
    finally:
        coordinator.close()
