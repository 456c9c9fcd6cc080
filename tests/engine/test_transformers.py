"""Greedy text equals transformers' `generate`; logits agree with it. Tiny models of three architectures."""

from __future__ import annotations

import pytest
import torch

from paceline import Engine, SamplingParams
from paceline.models.weights import load_model

transformers = pytest.importorskip("transformers")
SIZES = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
         "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3, "bos_token_id": None,
         "eos_token_id": None, "pad_token_id": 0}


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("strategy", ["off", "suffix:d6w2v12"])
def test_greedy_equals_generate(kind, strategy, tmp_path):
    torch.manual_seed(0)
    extra = {"head_dim": 16} if kind == "Qwen3" else {}
    theirs = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**SIZES, **extra)).eval()
    theirs.save_pretrained(tmp_path)
    engine = Engine(load_model(tmp_path, "cpu", "float32")[0], strategy=strategy)
    prompts = [[5, 6, 7, 8], [1] * 9, [90, 2, 33]]
    groups = engine.generate(prompts, SamplingParams(temperature=0, max_new_tokens=40, raw_logprobs=True))
    for prompt, group in zip(prompts, groups, strict=True):
        ids = torch.tensor([prompt])
        want = theirs.generate(ids, max_new_tokens=40, do_sample=False, attention_mask=torch.ones_like(ids))[0, len(prompt):]
        rollout = group.rollouts[0]
        assert rollout.token_ids == want.tolist()
        with torch.no_grad():
            logits = theirs(torch.tensor([prompt + rollout.token_ids])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(1, want[:, None])[:, 0]
        assert rollout.raw_logprobs == pytest.approx(logprobs.tolist(), abs=1e-4)
