"""AReaL's remote engines, for SGLang and vLLM: weights from a folder, then broadcast in a process group. See with_skyrl.py."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from datetime import datetime

import torch.distributed as dist
from areal.api import ModelAllocation, ModelRequest, ParamSpec, WeightUpdateMeta
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig, NameResolveConfig
from areal.engine.core.distributed import init_custom_process_group
from areal.engine.sglang_remote import RemoteSGLangEngine
from areal.engine.vllm_remote import RemotevLLMEngine
from areal.utils import name_resolve, names
from areal.utils.network import find_free_ports
from safetensors.torch import load_file

ENGINES = {"sglang": RemoteSGLangEngine, "vllm": RemotevLLMEngine}


def main(backend: str, address: str, prompts: list[list[int]], sampling: dict, weights: list[str]) -> list:
    name_resolve.reconfigure(NameResolveConfig(type="nfs", nfs_record_root=tempfile.mkdtemp()))
    config = InferenceEngineConfig(backend=f"{backend}:d1", experiment_name="e", trial_name="t", request_timeout=120,
                                   max_concurrent_rollouts=4)
    client = ENGINES[backend](config)
    client.initialize(addr=address.removeprefix("http://"), train_data_parallel_size=1)

    def generate() -> dict:
        async def all_of_them():
            return await asyncio.gather(*(client.agenerate(ModelRequest(
                input_ids=prompt, gconfig=GenerationHyperparameters(**sampling))) for prompt in prompts))

        found = asyncio.run(all_of_them())
        return {"tokens": [one.output_tokens for one in found], "logprobs": [one.output_logprobs for one in found]}

    answers = [generate()]
    first, second = weights
    client.pause_generation()
    name_resolve.add(names.update_weights_from_disk("e", "t", client.get_version()), str(datetime.now().timestamp()))
    client.update_weights_from_disk(WeightUpdateMeta(type="disk", path=first, clear_checkpoint_after_load=False)).result()
    client.continue_generation()
    client.set_version(1)
    answers.append(generate())
    broadcast(client, backend, f"{second}/model.safetensors")
    answers.append(generate())
    client.destroy()
    return answers


def broadcast(client, backend: str, file: str) -> None:
    """What AReaL's trainers do to send weights, with gloo instead of NCCL."""
    port = find_free_ports(1)[0]
    meta = WeightUpdateMeta(type="xccl", gen_allocation=ModelAllocation.from_str(f"{backend}:d1", name="rollout"),
                            nccl_master_address="127.0.0.1", nccl_master_port=port, nccl_group_name="update_weight_group")
    joined = client.init_weights_update_group(meta)
    group = init_custom_process_group(backend="gloo", world_size=2, init_method=f"tcp://127.0.0.1:{port}", rank=0,
                                      group_name=meta.nccl_group_name)
    joined.result()
    tensors = sorted(load_file(file).items())
    client.pause_generation()
    half = len(tensors) // 2
    for part in (tensors[:half], tensors[half:]):
        specs = [ParamSpec(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
                 for name, tensor in part]
        received = client.update_weights_from_distributed(meta, specs)
        for _, tensor in part:
            dist.broadcast(tensor, 0, group=group)
        received.result()
    client.continue_generation()
    client.set_version(2)


if __name__ == "__main__":
    print("ANSWERS " + json.dumps(main(**json.loads(sys.argv[1]))))
