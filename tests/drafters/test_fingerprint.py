"""A drafter names its policy: another's is refused, an older one's is flagged, and publishing it leaves the policy alone."""

from __future__ import annotations

import json
import warnings
from copy import deepcopy

import pytest
import torch
from tiny import eagle, model

from paceline import Engine, SamplingParams
from paceline.drafters.checkpoint import load_eagle, save_eagle
from paceline.drafters.eagle import Eagle
from paceline.drafters.fingerprint import PolicyFingerprint, fingerprint_of
from paceline.types import Strategy


def owned(kind: str = "llama", seed: int = 0, version: int = 3, form: str = "eagle") -> Eagle:
    drafter = deepcopy(eagle(kind, form))
    drafter.policy_fingerprint = fingerprint_of(model(kind, seed), version)
    return drafter


def test_the_fingerprint_tells_weights_apart_but_not_dtypes():
    policy = deepcopy(model("llama"))
    first = fingerprint_of(policy)
    assert fingerprint_of(deepcopy(policy).bfloat16()) == fingerprint_of(deepcopy(policy).float()) == first
    assert fingerprint_of(model("llama", 1)).weights != first.weights and fingerprint_of(model("llama", 1)).shape == first.shape
    assert fingerprint_of(model("qwen2")).shape != first.shape
    for parameter in policy.parameters():  # one layer's change is seen, as of adapters
        before = parameter.detach().clone()
        with torch.no_grad():
            parameter.mul_(1.02)
        assert fingerprint_of(policy).weights != first.weights
        with torch.no_grad():
            parameter.copy_(before)
    assert fingerprint_of(policy) == first


@pytest.mark.parametrize("form", ["eagle", "eagle3"])
def test_it_is_written_and_read_back(form, tmp_path):
    save_eagle(owned(form=form), tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = Engine(model("llama"), drafter=tmp_path)
    assert engine.drafter_mismatch is None
    assert load_eagle(tmp_path, model("llama")).policy_fingerprint == fingerprint_of(model("llama"), 3)
    save_eagle(eagle("llama", form), tmp_path)  # of unknown origin: nothing to say
    assert load_eagle(tmp_path, model("llama")).policy_fingerprint is None
    assert Engine(model("llama"), drafter=tmp_path).drafter_mismatch is None


def test_a_drafter_of_another_policy_is_refused(tmp_path):
    save_eagle(owned("llama"), tmp_path)
    with pytest.raises(ValueError, match=r"llama hidden 32.*qwen3 hidden 32"):
        load_eagle(tmp_path, model("qwen3"))
    save_eagle(eagle("llama", "eagle3"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="reads layer 9, this policy has 2"):
        load_eagle(tmp_path, model("llama"))


def test_one_for_other_weights_is_flagged_once(tmp_path):
    save_eagle(owned(), tmp_path)
    with pytest.warns(UserWarning, match="trained for other weights") as said:
        engine = Engine(model("llama", 1), drafter=tmp_path, strategy="eagle:d3w2v6")
    assert len(said) == 1 and "version 3" in engine.drafter_mismatch
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.update_drafter(owned(), 0)  # known already
    assert engine.drafter_mismatch is not None
    engine.update_drafter(owned(seed=1), 0)
    assert engine.drafter_mismatch is None


def test_publication_leaves_the_policy_and_the_tokens_alone():
    policy = model("llama")
    engine = Engine(policy, drafter=deepcopy(eagle("llama")), strategy="eagle:d3w2v6")
    params = SamplingParams(max_new_tokens=20, seed=1)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    tokens = engine.generate([[1, 2, 3]], params, 4)[0].rollouts
    engine.version = 5
    with pytest.raises(ValueError, match="version 6 is newer than the policy's, 5"):
        engine.update_drafter(eagle("llama", seed=7), 6)
    with pytest.raises(ValueError, match="another form"):
        engine.update_drafter(eagle("llama", "eagle3"), 5)
    with pytest.raises(ValueError, match="another form"):
        engine.update_drafter(eagle("llama", draft_vocab=20), 5)
    with pytest.warns(UserWarning, match="follows policy version 3, the policy is at 5"):
        engine.update_drafter(eagle("llama", seed=7), 3)
    assert engine.drafter_version == 3
    engine.update_drafter(eagle("llama", seed=7), 5)
    assert engine.drafter_mismatch is None
    assert all(torch.equal(policy.state_dict()[name], value) for name, value in before.items())
    again = engine.generate([[1, 2, 3]], params, 4)[0].rollouts
    assert [r.token_ids for r in again] == [r.token_ids for r in tokens]


def test_a_distrusted_drafter_is_not_offered_until_a_new_one_comes():
    seen = []

    def select(view):
        seen.append(view.available)
        return Strategy.OFF

    engine = Engine(model("llama"), drafter=deepcopy(eagle("llama")), strategy=select)
    params = SamplingParams(max_new_tokens=3)
    engine.generate([[1, 2, 3]], params)
    assert "eagle" in seen[-1]
    engine.distrust("eagle")
    engine.generate([[1, 2, 3]], params)
    assert "eagle" not in seen[-1] and "suffix" in seen[-1]
    engine.update_drafter(eagle("llama", seed=7), 0)
    engine.generate([[1, 2, 3]], params)
    assert "eagle" in seen[-1]
    engine.distrust("eagle")
    engine.distrust(None)
    engine.generate([[1, 2, 3]], params)
    assert "eagle" in seen[-1]


def test_json_that_is_no_fingerprint_gives_none():
    assert PolicyFingerprint.from_json(None) is None and PolicyFingerprint.from_json({"shape": "x"}) is None


def test_a_new_drafter_may_have_another_reduced_vocabulary_of_the_same_size():
    first, second = (deepcopy(eagle("llama", seed=seed, draft_vocab=20)) for seed in (1, 2))
    assert set(first.draft_ids.tolist()) != set(second.draft_ids.tolist())
    params, runs = SamplingParams(max_new_tokens=30, seed=1), []
    for replaced in (False, True):
        engine = Engine(model("llama"), drafter=deepcopy(first if replaced else second), strategy="eagle:d3w2v6")
        if replaced:
            engine.update_drafter(second, 0)
        found = engine.generate([[1, 2, 3]], params, 4)[0].rollouts
        runs.append(([rollout.token_ids for rollout in found], engine.stats().tokens_per_verification))
    assert runs[0] == runs[1], "it drafts as if it had been there from the start"
