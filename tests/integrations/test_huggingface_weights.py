"""Weights of transformers and peft models, as an engine gets them."""

from __future__ import annotations

import peft
import pytest
import torch
from small_policy import write_policy

from paceline.integrations.huggingface import merged_weights, policy_config
from paceline.models.state_dict import load_state
from paceline.models.weights import empty_model, load_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def policy(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def with_lora(policy, **options):
    return peft.get_peft_model(policy, peft.LoraConfig(r=2, lora_alpha=8, init_lora_weights=False, **options))


def test_the_decoder_is_that_of_the_folder(folder, policy):
    loaded, _ = load_model(folder, dtype="float32")
    assert policy_config(policy, (13,)) == loaded.config
    model = empty_model(loaded.config, torch.float32, "cpu")
    load_state(model, merged_weights(policy))
    for mine, theirs in zip(model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("targets", [["q_proj", "v_proj", "down_proj"], ["embed_tokens", "lm_head", "k_proj"]])
def test_adapters_are_merged_and_the_model_is_left_as_it_is(policy, targets):
    adapted = with_lora(policy, target_modules=targets)
    before = {name: parameter.clone() for name, parameter in adapted.named_parameters()}
    merged = {name: value.clone() for name, value in merged_weights(adapted)}
    assert all(torch.equal(parameter, before[name]) for name, parameter in adapted.named_parameters())
    assert policy_config(adapted, (13,)).architecture == "llama"
    expected = dict(adapted.merge_and_unload().named_parameters())
    assert merged.keys() == expected.keys()
    for name, value in merged.items():
        assert torch.allclose(value, expected[name], atol=1e-6)
        untouched = before.get(f"base_model.model.{name}")
        assert (untouched is None) == any(target in name for target in targets)
        assert untouched is None or torch.equal(value, untouched)


def test_modules_that_are_trained_as_a_whole(policy):
    adapted = with_lora(policy, target_modules=["q_proj"], modules_to_save=["lm_head"])
    with torch.no_grad():
        adapted.base_model.model.lm_head.modules_to_save["default"].weight.add_(1)
    before = policy.lm_head.original_module.weight
    assert torch.equal(dict(merged_weights(adapted))["lm_head.weight"], before + 1)


def test_adapters_of_a_reference_policy_are_left_out(policy):
    adapted = with_lora(policy, target_modules=["q_proj"])
    own = {name: value.clone() for name, value in merged_weights(adapted)}
    adapted.add_adapter("ref", peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj", "o_proj"]))
    adapted.set_adapter("default")
    for name, value in merged_weights(adapted):
        assert torch.equal(value, own[name]), name


def test_what_cannot_be_merged_is_refused(policy):
    with pytest.raises(ValueError, match="DoRA"):
        dict(merged_weights(with_lora(policy, target_modules=["q_proj"], use_dora=True)))


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")  # peft's, about what is refused here
def test_an_adapter_on_tied_embeddings_is_refused(policy):
    policy.config.tie_word_embeddings = True
    policy.tie_weights()
    with pytest.raises(ValueError, match="tied"):
        dict(merged_weights(with_lora(policy, target_modules=["lm_head"])))
