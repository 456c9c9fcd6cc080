"""Starts an engine with empty caches and prints how many kernels were compiled when. Run by test_gpu_cold_start."""

from __future__ import annotations

import json
import sys
import time

import torch
from tiny import eagle, model
from triton import knobs

from paceline import Engine, SamplingParams
from paceline.config import EngineConfig
from paceline.models.decoder import Decoder


def main() -> None:
    compiled: list[str] = []
    knobs.runtime.jit_post_compile_hook = lambda **info: compiled.append(info["repr"])
    decoder = Decoder(model("qwen3").config).to("cuda", torch.bfloat16)
    decoder.load_state_dict(model("qwen3").state_dict())
    config = EngineConfig(max_batch=32, kv_memory_gb=0.25, deterministic=True)
    engine = Engine(decoder.requires_grad_(False), None, eagle("qwen3", "eagle3"), "auto", config)
    compile_ahead, num_ahead = engine.dummy_steps.compile_ahead, 0

    def counted() -> None:
        nonlocal num_ahead
        if sys.argv[1] == "ahead":
            compile_ahead()
        num_ahead = len(compiled)

    engine.dummy_steps.compile_ahead = counted
    began = time.perf_counter()
    engine.warm_up()
    groups = engine.generate([[1, 2, 3], [4, 5]], SamplingParams(max_new_tokens=32, seed=3, ignore_eos=True))
    print(json.dumps({"num_ahead": num_ahead, "num_later": len(compiled) - num_ahead, "seconds": time.perf_counter() - began,
                      "tokens": [rollout.token_ids for group in groups for rollout in group.rollouts]}))


if __name__ == "__main__":
    main()
