"""A policy that is split over two processes on one GPU: tokens and log-probabilities in bfloat16 are those of one process that
sums by the same tree, bit for bit. The processes exchange through the host, so steps are not captured."""

from __future__ import annotations

import pytest
import torch

from paceline import Engine, SamplingParams
from paceline.config import EngineConfig
from paceline.drafters.eagle import Eagle, EagleConfig
from paceline.models.config import ExpertsSpec, LayerSpec, ModelConfig
from paceline.models.decoder import Decoder

SHAPES = {
    "qwen2": ModelConfig("qwen2", 1021, 512, 1024, 3, 8, 2, 64, max_context=1024, qkv_bias=True),
    "llama": ModelConfig("llama", 776, 320, 640, 2, 8, 8, 128, max_context=1024, tie_embeddings=True),
    "one kv head": ModelConfig("qwen3", 512, 256, 768, 3, 4, 1, 64, max_context=1024, qk_norm=True),
    "experts": ModelConfig("qwen3_moe", 512, 256, 320, 3, 4, 2, 64, max_context=1024, qk_norm=True,
                           layers=(LayerSpec(experts=ExpertsSpec(16, 4, 256)),) * 3),
}
PROMPTS = [[(7 * i + j) % 500 for j in range(length)] for i, length in enumerate((5, 90, 1, 33, 200, 12))]
PARAMS = SamplingParams(max_new_tokens=40, seed=3)


def answers(shape: str, ranks: int, strategy: str = "off", **options) -> list[tuple[list[int], list[float]]]:
    policy = Decoder.random(SHAPES[shape], seed=1, std=0.12, dtype=torch.bfloat16, device="cuda")
    drafter = (Eagle.random(EagleConfig.for_policy(SHAPES[shape], "eagle"), 3, 0.1, torch.bfloat16, "cuda")
               if strategy.startswith("eagle") else "suffix")
    config = EngineConfig(**{"kv_tokens": 8192, "profile": False, "reduction_shares": 8, "tensor_parallel": ranks, **options})
    engine = Engine(policy, None, drafter, strategy, config)
    try:
        return [(r.token_ids, r.logprobs) for group in engine.generate(PROMPTS, PARAMS, n=3) for r in group.rollouts]
    finally:
        engine.close()


@pytest.mark.parametrize("shape", SHAPES)
def test_two_processes_on_one_gpu_have_the_bits_of_one(shape):
    want = answers(shape, 1)
    assert answers(shape, 2) == want


@pytest.mark.parametrize("strategy", ["suffix:d4w2v8", "eagle:d3w2v6"])
def test_speculation_and_preemption_keep_the_bits(strategy):
    want = answers("qwen2", 1)
    assert answers("qwen2", 2, strategy) == want
    assert answers("qwen2", 2, strategy, kv_tokens=640) == want


def test_one_process_with_shares_captures_its_steps_and_keeps_the_bits():
    assert answers("llama", 1) == answers("llama", 1, cuda_graphs=False)
