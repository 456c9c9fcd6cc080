"""A real model, SmolLM2-135M-Instruct as a GGUF: its logits and greedy text are those of transformers, and it survives saving.

In one file, because both loaders take ten seconds to read it. The default suite compares small models with transformers
(`test_gguf.py`, `test_parity.py`)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from models.small_models import assert_same, logits_of, their_logits
from transformers import AutoModelForCausalLM, PreTrainedModel

from paceline import Engine, SamplingParams
from paceline.models.save import save_model
from paceline.models.weights import load_model


@pytest.fixture(scope="module")
def engine(smollm2_path: Path) -> Engine:
    return Engine.load(smollm2_path, strategy="auto")


@pytest.fixture(scope="module")
def theirs(smollm2_path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32).eval()


@pytest.mark.slow
def test_smollm2_equals_transformers(engine: Engine, theirs: PreTrainedModel) -> None:
    model, tokenizer = engine.model, engine.tokenizer
    assert model.embed.weight.dtype == torch.float32 and model.config.eos_token_ids == (tokenizer.eos_token_id,)
    tokens = torch.tensor(tokenizer("The capital of France is Paris, and 17 + 25 makes 42.").input_ids)
    torch.testing.assert_close(logits_of(model, tokens), their_logits(theirs, tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_smollm2_greedy_equals_generate(engine: Engine, theirs: PreTrainedModel) -> None:
    messages = [[{"role": "user", "content": text}] for text in ("List the planets.", "What is 17 + 25?")]
    groups = engine.generate(messages, SamplingParams(temperature=0, max_new_tokens=32))
    for group in groups:
        ids = torch.tensor([group.prompt_ids])
        want = theirs.generate(ids, max_new_tokens=32, do_sample=False, attention_mask=torch.ones_like(ids))
        rollout = group.rollouts[0]
        want_ids = want[0, len(group.prompt_ids):].tolist()
        assert rollout.token_ids == want_ids
        assert rollout.text == engine.tokenizer.decode(want_ids, skip_special_tokens=True)
    prompt = torch.tensor(groups[0].prompt_ids)
    ours, reference = logits_of(engine.model, prompt), their_logits(theirs, prompt)
    assert (ours - reference).abs().max() / reference.abs().max() < 1e-4


def test_smollm2_speaks(engine: Engine) -> None:
    model, tokenizer = engine.model, engine.tokenizer
    question = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    start = len(tokens)
    while len(tokens) < start + 10 and tokens[-1] not in model.config.eos_token_ids:
        tokens.append(int(logits_of(model, torch.tensor(tokens), last=1).argmax()))
    assert "Paris" in tokenizer.decode(tokens[start:])


def test_smollm2_saved_as_a_folder(engine: Engine, tmp_path: Path) -> None:
    model, tokenizer = engine.model, engine.tokenizer
    save_model(model, tokenizer, tmp_path / "out", max_shard_bytes=200_000_000)
    again, tokenizer_again = load_model(tmp_path / "out")
    assert_same(again, model)
    text = "Hello, wörld!\n\tdef f(x): return x<|im_end|>"
    assert tokenizer_again(text).input_ids == tokenizer(text).input_ids
    assert tokenizer_again.chat_template == tokenizer.chat_template
    shutil.rmtree(tmp_path / "out")  # half a gigabyte
