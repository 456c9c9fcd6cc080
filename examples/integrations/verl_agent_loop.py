"""verl's agent loop with rollouts by Paceline, on a CPU: generate, update the weights, generate again. About two minutes, most of
them for starting Ray's processes.

    pip install '.[verl]'
    python examples/integrations/verl_agent_loop.py MODEL

MODEL is a Hugging Face folder or hub id of a chat model. With GPUs, verl's own trainer is started as usual, with
`actor_rollout_ref.rollout.name=paceline actor_rollout_ref.rollout.tensor_model_parallel_size=1`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import numpy as np
import ray
import verl
from hydra import compose, initialize_config_dir
from transformers import AutoModelForCausalLM
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopManager
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.llm_server import LLMServerManager

QUESTIONS = ["3:", "27:", "97:"]


def main(model: str, *overrides: str) -> list[int | None]:
    """Generate before and after a weight update, and return the global steps that verl was told with the answers."""
    with initialize_config_dir(config_dir=str(Path(verl.__file__).parent / "trainer/config"), version_base=None):
        config = compose("ppo_trainer", overrides=[
            f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.rollout.name=paceline",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=1", "actor_rollout_ref.rollout.nnodes=1",
            "actor_rollout_ref.rollout.n_gpus_per_node=1", "actor_rollout_ref.rollout.agent.num_workers=1",
            "actor_rollout_ref.rollout.calculate_log_probs=True", "actor_rollout_ref.rollout.response_length=64",
            "+actor_rollout_ref.rollout.engine_kwargs.paceline.strategy=auto", *overrides])
    ray.init(include_dashboard=False)
    servers = LLMServerManager.create(config=config)
    agent_loop = AgentLoopManager.create(config=config, llm_client=servers.get_client())
    steps = _generate(agent_loop)

    os.environ.setdefault("RANK", "0")  # verl's trainer sets it
    adapter = get_rollout_class("paceline")(config.actor_rollout_ref.rollout, config.actor_rollout_ref.model, None)
    weights = AutoModelForCausalLM.from_pretrained(model).named_parameters()  # in a run: those of the actor
    asyncio.run(adapter.update_weights(weights, global_steps=1))
    steps += _generate(agent_loop)
    ray.shutdown()
    return steps


def _generate(agent_loop: AgentLoopManager) -> list[int | None]:
    messages = [[{"role": "user", "content": question}] for question in QUESTIONS]
    output = agent_loop.generate_sequences(DataProto(non_tensor_batch={"raw_prompt": np.array(messages, dtype=object)}))
    extra = output.non_tensor_batch
    for question, tokens, mask, steps, accept_length in zip(
            QUESTIONS, output.batch["responses"], output.batch["response_mask"], extra["global_steps"], extra["accept_length"],
            strict=True):
        print(f"{question} {tokens[mask.bool()].tolist()} (global step {steps}, accept length {accept_length:.2f})")
    return list(extra["global_steps"])


if __name__ == "__main__":
    main(*sys.argv[1:])
