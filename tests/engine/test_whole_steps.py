"""Steps in one compiled call: they give what the same kernels give operation by operation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import eagle, model

from paceline import Engine, SamplingParams, Strategy
from paceline.config import EngineConfig

STRATEGIES = ("off", "suffix:d4w2v6", "eagle:d3w2v6", "off", "eagle:d1w1v1")
KINDS = ("llama", "qwen2", "qwen3")


def generate(kind: str, dtype: torch.dtype, in_one_call: bool, params: SamplingParams, monkeypatch: Any) -> list[Any]:
    """Answers with their features, and how many steps ran in one call. The number of rows grows beyond what the first program is
    made for, and requests of several lengths leave one by one."""
    config = EngineConfig(page_size=4, max_batch=12, profile=False, capture=(0, -1), deterministic=True)
    engine = Engine(model(kind, dtype=dtype), None, eagle(kind, "eagle3", dtype=dtype), "off", config)
    ops, whole = engine.executor.ops, []
    run = ops.whole_step
    monkeypatch.setattr(ops, "whole_step", lambda *arguments: whole.append(arguments[1].num_rows) or run(*arguments))
    if not in_one_call:
        monkeypatch.setattr(ops, "serves_whole_steps", lambda *_: False)
    for number, prompt in enumerate(([5, 6, 7, 8, 5, 6], [3, 1], [30, 31, 32])):
        engine.add(prompt, params, n=2 + number)
    rollouts, step = [], 0
    while engine.has_work:
        rollouts += engine.step(Strategy.parse(STRATEGIES[step % len(STRATEGIES)])).finished
        step += 1
    assert bool(whole) is in_one_call and (not whole or max(whole) > 32)
    return sorted(rollouts, key=lambda rollout: rollout.request_id)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_step_in_one_call_is_what_its_operations_make(kind, dtype, monkeypatch):
    params = SamplingParams(max_new_tokens=40, seed=3, temperature=0.9, top_p=0.95, min_p=0.01)
    one, other = (generate(kind, dtype, in_one_call, params, monkeypatch) for in_one_call in (True, False))
    for ours, theirs in zip(one, other, strict=True):
        assert ours.token_ids == theirs.token_ids and ours.logprobs == theirs.logprobs
        assert torch.equal(ours.features.features, theirs.features.features)


def test_new_weights_are_used_by_the_next_step():
    """Weights and the cache's memory are bound once: both are bound anew when they change."""
    policy, other = model("qwen3", dtype=torch.float32), model("qwen3", 7, dtype=torch.float32)
    engine = Engine(policy, None, None, "off", EngineConfig(max_batch=4, profile=False))
    params = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
    expected = Engine(other, None, None, "off", EngineConfig(max_batch=4, profile=False)).generate([[1, 2, 3]], params)
    before = engine.generate([[1, 2, 3]], params)
    engine.sleep(weights=True)
    engine.wake()
    assert engine.generate([[1, 2, 3]], params)[0].rollouts[0].token_ids == before[0].rollouts[0].token_ids
    engine.update_weights(dict(other.named_parameters()))
    after = engine.generate([[1, 2, 3]], params)
    assert after[0].rollouts[0].token_ids == expected[0].rollouts[0].token_ids != before[0].rollouts[0].token_ids
