"""`deterministic` on a CPU, in any dtype and with any kernels: not only the tokens, every bit of the log-probabilities is
the same
whatever the batch, the chunks and the strategy. Without it they differ in the last digits, and a near-tie may fall otherwise."""

from __future__ import annotations

import random

import pytest
import torch
from tiny import VOCAB, eagle, model

from paceline import Engine, SamplingParams
from paceline.config import EngineConfig


@pytest.mark.parametrize(("kind", "dtype", "kernels"), [
    ("llama", torch.float32, "auto"), ("qwen3_moe", torch.float32, "auto"), ("gpt_oss", torch.float32, "auto"),
    ("qwen2", torch.float32, "portable"), ("qwen3", torch.bfloat16, "portable"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("llama", torch.bfloat16, "auto"), ("qwen3_moe", torch.bfloat16, "auto"), ("gemma2", torch.float64, "auto"),
        ("qwen3", torch.float64, "portable")))])
def test_bits_do_not_depend_on_the_batch_or_the_strategy(kind, dtype, kernels):
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.choice([1, 7, 30, 110]))] for _ in range(6)]
    params = SamplingParams(max_new_tokens=60, seed=5)

    def run(strategy: str, max_batch: int, max_rows: int) -> list[tuple[list[int], list[float]]]:
        config = EngineConfig(deterministic=True, kernels=kernels, max_batch=max_batch, max_rows=max_rows, kv_tokens=6000)
        policy = model(kind, dtype=dtype)
        engine = Engine(policy, drafter=eagle(kind, dtype=dtype), strategy=strategy, config=config)
        groups = engine.generate(prompts, params, n=3)
        return [(r.token_ids, r.logprobs) for group in groups for r in group.rollouts]

    alone = run("off", 1, 512)
    others = (("off", 18, 512), ("suffix:d6w3v20", 7, 100), ("eagle:d4w3v12", 18, 40), ("auto", 5, 33))
    for strategy, max_batch, max_rows in others:
        assert run(strategy, max_batch, max_rows) == alone, strategy
