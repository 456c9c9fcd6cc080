"""Greedy text equals transformers' `generate`; logits agree with it. Tiny models of three architectures and a real one."""

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


def test_smollm2_greedy_equals_generate(smollm2_path):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32).eval()
    engine = Engine.load(smollm2_path, dtype="float32", strategy="auto")
    messages = [[{"role": "user", "content": text}] for text in ("List the planets.", "What is 17 + 25?")]
    groups = engine.generate(messages, SamplingParams(temperature=0, max_new_tokens=32))
    for group in groups:
        ids = torch.tensor([group.prompt_ids])
        want = theirs.generate(ids, max_new_tokens=32, do_sample=False, attention_mask=torch.ones_like(ids))
        rollout = group.rollouts[0]
        want_ids = want[0, len(group.prompt_ids):].tolist()
        assert rollout.token_ids == want_ids
        assert rollout.text == engine.tokenizer.decode(want_ids, skip_special_tokens=True)
    # Prompt logits, row by row.
    from paceline.kernels import TorchOps
    from paceline.models.attend import PackedAttend
    from paceline.models.decoder import Rope

    prompt = torch.tensor(groups[0].prompt_ids)
    cos, sin = Rope(engine.model.config, 256, torch.float32, "cpu")(torch.arange(len(prompt)))
    ops = TorchOps()
    with torch.inference_mode():
        ours = engine.model.logits(engine.model(prompt, PackedAttend(ops, cos, sin, (len(prompt),))).final, ops)
        reference = theirs(prompt[None]).logits[0]
    assert (ours - reference).abs().max() / reference.abs().max() < 1e-4
