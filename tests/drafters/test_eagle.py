"""The learned drafter: its tree against a slow reference, and its checkpoints."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from drafters.long_context import drafts_behind_long_prompts
from safetensors.torch import load_file, save_file
from tiny import VOCAB, eagle, greedy_chain, model

from paceline import Engine, SamplingParams, Strategy
from paceline.config import EngineConfig
from paceline.drafters.checkpoint import load_eagle, save_eagle
from paceline.drafters.eagle import MIN_WINDOW, Eagle
from paceline.kernels import TorchOps
from paceline.types import Decision

OPS = TorchOps()


@pytest.mark.parametrize("form", ["eagle", "eagle3"])
@pytest.mark.parametrize("draft_vocab", [0, 20])
def test_drafts_equal_a_slow_reference(form, draft_vocab):
    """Chains, through prefill in chunks, accepted and rejected drafts, and steps in which the drafter did not run."""
    policy, drafter = model("qwen3"), eagle("qwen3", form, draft_vocab=draft_vocab)
    strategies = iter(["eagle:d4w1v4", "eagle:d4w1v4", "off", "off", "eagle:d4w1v4", "suffix:d4w2v8", "eagle:d4w1v4"] * 4)
    engine = Engine(policy, drafter=drafter, strategy="off", config=EngineConfig(page_size=3, max_rows=8, max_batch=2))
    made = []
    real = engine.executor.learned._draft

    def spy(slots, strategy, max_missing):
        drafts = real(slots, strategy, max_missing)
        (request,) = [r for r in engine.scheduler.running if r.slot == int(slots[0])]
        made.append((list(request.tokens), drafts.tokens[0].tolist()))
        return drafts

    engine.executor.learned._draft = spy
    engine.add([5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], SamplingParams(temperature=0, max_new_tokens=25))
    while engine.has_work:
        engine.step(Strategy.parse(next(strategies)))
    assert len(made) > 5
    for tokens, guesses in made:
        assert guesses == greedy_chain(policy, drafter, tokens, 4)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_the_deepest_draft_fits_into_the_smallest_window(kernels):
    drafter = deepcopy(eagle("qwen3"))
    drafter.config = replace(drafter.config, window=MIN_WINDOW)
    engine = Engine(model("qwen3"), drafter=drafter, strategy="eagle:d64w1v64", config=EngineConfig(kernels=kernels))
    off = Engine(model("qwen3"), drafter=None, strategy="off", config=EngineConfig(kernels=kernels))
    params = SamplingParams(max_new_tokens=12, seed=2)
    found, expected = (each.generate([[1, 2, 3] * 40], params)[0].rollouts[0].token_ids for each in (engine, off))
    assert found == expected and engine.stats().drafted > 0


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("form", ["eagle", "eagle3"])
def test_a_drafter_with_a_window_attends_to_the_last_tokens(form, kernels):
    """Behind contexts shorter and longer than the window, with shared prompts, and after pauses."""
    policy, plain = model("qwen3"), eagle("qwen3", form)
    drafter = Eagle(replace(plain.config, window=MIN_WINDOW), None).to(torch.float64).requires_grad_(False)
    drafter.load_state_dict(plain.state_dict())
    strategies = iter(["eagle:d4w1v4", "eagle:d3w1v3", "off", "off", "eagle:d4w1v4"] * 20)
    config = EngineConfig(page_size=1, max_rows=160, max_batch=4, kernels=kernels)
    engine = Engine(policy, drafter=drafter, strategy="off", config=config)
    made, real = [], engine.executor.learned._draft

    def spy(slots, strategy, max_missing):
        drafts = real(slots, strategy, max_missing)
        for line, slot in enumerate(slots.tolist()):
            (request,) = [r for r in engine.scheduler.running if r.slot == slot]
            made.append((list(request.tokens), drafts.tokens[line].tolist()))
        return drafts

    engine.executor.learned._draft = spy
    rng, params = random.Random(0), SamplingParams(temperature=0, max_new_tokens=25)
    for length in (10, 120):
        engine.add([rng.randrange(VOCAB) for _ in range(length)], params, 2)
    while engine.has_work:
        engine.step(Strategy.parse(next(strategies)))
    assert any(len(tokens) < MIN_WINDOW for tokens, _ in made) and any(len(tokens) > 120 for tokens, _ in made)
    different = 0
    for tokens, guesses in made:
        assert guesses == greedy_chain(policy, drafter, tokens, len(guesses))
        different += guesses != greedy_chain(policy, plain, tokens, len(guesses))
    assert different > 3, "without the window it would have guessed otherwise"


class Always(NamedTuple):
    """A selector that makes the same decision again and again."""

    decision: Decision

    def select(self, view):
        return self.decision

    def observe(self, outcome):
        pass


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("num_bytes", [5_000, 1 << 30])
def test_drafts_equal_a_slow_reference_whatever_was_accepted_before(pipelined, seed, num_bytes, monkeypatch):
    """Trees of changing depth for all or some requests, all, some or none of their nodes accepted, pauses of the drafter,
    requests that share a prompt; the host knows bounds only. Guesses are recorded, then replaced by what the policy will say, so
    that they are accepted."""
    monkeypatch.setattr("paceline.drafters.eagle_drafter.MAX_CATCH_UP_BYTES", num_bytes)  # a pause is caught up in pieces
    rng, policy, drafter = random.Random(seed), model("qwen3"), eagle("qwen3", "eagle3")
    prompts, params = [[5, 6, 7, 8, 9, 10, 11], [1], [30, 31]], SamplingParams(temperature=0, max_new_tokens=40)
    texts = {}  # slot -> text
    truth = [r for g in Engine(policy, drafter=None, strategy="off").generate(prompts, params, n=2) for r in g.rollouts]
    engine = Engine(policy, drafter=drafter, strategy="off", config=EngineConfig(page_size=3, max_rows=60, max_batch=6))
    engine.planner.pipelined = pipelined
    made = []
    real = engine.executor.learned._draft

    def spy(slots, strategy, max_missing):
        drafts = real(slots, strategy, max_missing)
        contexts = engine.executor.state.tensors.context[slots]
        for line, (slot, context) in enumerate(zip(slots.tolist(), contexts.tolist(), strict=True)):
            text = texts[slot]
            made.append((text[: context + 1], drafts.tokens[line].tolist()))
            if rng.random() < 0.7:
                told = (text[context + 1 :] + [0] * 64)[: drafts.tokens.shape[1] - rng.randrange(2)]
                drafts.tokens[line, : len(told)] = torch.tensor(told)
        return drafts

    engine.executor.learned._draft = spy
    ids = [request for prompt in prompts for request in engine.add(prompt, params, n=2)]
    while engine.has_work:
        choice = rng.choice(["eagle:d4w1v4", "eagle:d4w1v4", "eagle:d7w1v7", "eagle:d1w1v1", "suffix:d4w2v8", "off"])
        for _ in range(rng.choice([1, 1, 1, 9])):
            texts |= {r.slot: t.prompt_ids + t.token_ids for r in engine.planner.requests.values()
                      for t in [truth[ids.index(r.id)]]}
            if not texts.keys() >= set(range(6)):
                engine.step(Strategy.OFF)  # until everybody has a slot
                continue
            engine.selector = Always(Decision(Strategy.parse(choice), rng.choice([None, 1, 2])))
            engine.step()
    assert engine.stats().accepted > 30 and len(made) > 20
    for tokens, guesses in rng.sample(made, min(30, len(made))):
        if len(tokens) < 40:  # those who were finished before it was known drafted beyond their end
            assert guesses == greedy_chain(policy, drafter, tokens, len(guesses))


@pytest.mark.parametrize("form", ["eagle", "eagle3"])
@pytest.mark.parametrize("draft_vocab", [0, 20])
def test_a_checkpoint_comes_back_as_it_was(form, draft_vocab, tmp_path):
    original = deepcopy(eagle("llama", form, draft_vocab=draft_vocab))
    original.config = replace(original.config, window=80 if draft_vocab else None)
    save_eagle(original, tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "embed_tokens.weight" not in names, "the policy's tensors are not the drafter's"
    assert {"fc.weight", "layers.0.self_attn.q_proj.weight", "layers.0.mlp.up_proj.weight"} <= names
    loaded = load_eagle(tmp_path, model("llama"))
    assert loaded.config.window == original.config.window
    for name, tensor in original.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    engine = Engine(model("llama"), drafter=tmp_path, strategy="eagle:d3w2v6")
    assert engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=10))[0].rollouts[0].finish_reason == "length"
    assert engine.stats().drafted > 0


def test_a_drafter_shares_the_policys_tensors():
    policy, drafter = model("llama"), eagle("llama", "eagle")
    assert not any("embed" in name or "head" in name for name, _ in drafter.named_parameters())
    hidden = torch.randn(2, 32, dtype=torch.float64)
    assert torch.equal(drafter.logits(hidden, policy, OPS), policy.logits(hidden, OPS))


def test_damaged_drafters_are_one_clear_line(tmp_path):
    policy = model("llama")
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        load_eagle(tmp_path, policy)
    save_eagle(eagle("llama", "eagle3", draft_vocab=20), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for change, message in (({"fc.weight": torch.zeros(3, 3)}, r"fc\.weight has shape"),
                            ({"surprise": torch.zeros(1)}, "surprise"),
                            ({"d2t": torch.full((20,), VOCAB)}, "outside the policy's vocabulary")):
        save_file(tensors | change, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            load_eagle(tmp_path, policy)
    save_file({k: v for k, v in tensors.items() if k != "norm.weight"}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"norm\.weight is missing"):
        load_eagle(tmp_path, policy)
    (tmp_path / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(ValueError, match="damaged"):
        load_eagle(tmp_path, policy)
    (tmp_path / "config.json").write_text(json.dumps({})[:-1])
    with pytest.raises(ValueError, match="damaged"):
        load_eagle(tmp_path, policy)


@pytest.mark.parametrize("form", ["eagle", "eagle3"])
def test_drafts_behind_long_prompts_equal_those_of_the_reference_kernels(form):
    reference, other = (drafts_behind_long_prompts([2000, 700, 50], "cpu", torch.float64, "torch", form, seed) for seed in (1, 2))
    found = drafts_behind_long_prompts([2000, 700, 50], "cpu", torch.float32, "auto", form)
    assert float((found - reference).abs().max()) < 1e-4 and float((other - reference).abs().mean()) > 0.02
