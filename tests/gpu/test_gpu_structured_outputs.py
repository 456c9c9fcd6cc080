"""Grammars on a CUDA device: what is masked, and that steps with and without them share the captured graphs' buffers."""

from __future__ import annotations

import re

import pytest
import torch
from json_policy import policy, tokenizer
from tiny import eagle

from paceline import Engine, SamplingParams
from paceline.config import EngineConfig
from paceline.models.decoder import Decoder

PROMPTS = [[1, 2, 3, 4, 5] * 5, [7, 8, 9], [3]]
FORM = SamplingParams(max_new_tokens=40, seed=3, structured_outputs={"regex": "(ab|c)+[0-9]{2,4}"})
WORDS = SamplingParams(max_new_tokens=40, seed=3, bad_words=("a", "b", "1"))
PLAIN = SamplingParams(max_new_tokens=40, seed=4)


def moved(dtype: torch.dtype) -> Decoder:
    decoder = Decoder(policy().config).to("cuda", dtype)
    decoder.load_state_dict(policy().state_dict())
    return decoder.requires_grad_(False)


def answers(engine: Engine) -> list[tuple[list[int], str, str]]:
    jobs = [(prompt, params) for params in (FORM, WORDS, PLAIN) for prompt in PROMPTS]
    groups = engine.generate([prompt for prompt, _ in jobs], [params for _, params in jobs], 2)
    return [(rollout.token_ids, rollout.text, rollout.finish_reason) for group in groups for rollout in group.rollouts]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("strategy", ["off", "suffix:d4w2v8", "eagle:d3w2v6"])
def test_answers_are_those_of_a_cpu(dtype, strategy):
    config = EngineConfig(max_batch=16, kv_memory_gb=0.5)
    drafter = eagle() if "eagle" in strategy else "suffix"
    got = answers(Engine(moved(dtype), tokenizer(), drafter, strategy, config))
    want = answers(Engine(policy(), tokenizer(), None, "off", EngineConfig(kernels="torch")))
    same = sum(one[0] == other[0] for one, other in zip(got, want, strict=True))
    assert same >= len(want) - (0 if dtype == torch.float64 else 1), f"{same} of {len(want)} answers are the same"
    for _, text, reason in got[: 2 * len(PROMPTS)]:
        assert reason == "length" or re.fullmatch("(ab|c)+[0-9]{2,4}", text), text
