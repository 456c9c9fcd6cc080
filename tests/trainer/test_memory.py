"""The memory plan, and an engine that sleeps while the policy is updated."""

from __future__ import annotations

import tomllib
from copy import deepcopy
from dataclasses import replace

import pytest
import tiny
import torch
from e2e import toy
from trainer.test_trainer_library import make_config
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from paceline.config import LearnerConfig, TrainConfig
from paceline.drafters.checkpoint import save_eagle
from paceline.drafters.eagle import Eagle, EagleConfig
from paceline.models.config import ExpertsSpec, LayerSpec, ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.parameters import num_adapter_parameters, num_parameters
from paceline.models.weights import load_model
from paceline.rl import pack
from paceline.rl.adapters import add_lora
from paceline.rl.batch import Sample
from paceline.rl.learner import Learner
from paceline.rl.models import load_reward_model
from paceline.spot import SpotConfig
from paceline.trainer import Trainer
from paceline.trainer.config_files import apply_override
from paceline.trainer.memory import (
    MemoryItem,
    MemoryPlan,
    _activation_bytes,
    check_memory,
    kv_budget,
    memory_plan,
    plan_for,
)
from paceline.trainer.parts import engine_for, learner_for
from paceline.trainer.validation import setting_problems

QWEN_7B = ModelConfig("qwen2", 152064, 3584, 18944, 28, 28, 4, 128, max_context=32768, qkv_bias=True)
QWEN_30B_A3B = ModelConfig("qwen3_moe", 151936, 2048, 6144, 48, 32, 4, 128, max_context=40960, qk_norm=True,
                           layers=(LayerSpec(experts=ExpertsSpec(128, 8, 768)),) * 48)
QWEN_32B = ModelConfig("qwen2", 152064, 5120, 27648, 64, 40, 8, 128, max_context=32768, qkv_bias=True)
H200 = 140 * 2**30
LONG = {"prompts": 32, "group_size": 8, "max_new_tokens": 4096}
EIGHT = {"cluster": {"workers": 8}, "learner": {"gradient_checkpointing": True}}


def config(**changes) -> TrainConfig:
    return TrainConfig(**{"dtype": "bfloat16", "rollout": LONG, **changes})


def gigabytes(plan):
    return {item.what: item.num_bytes / 2**30 for item in plan.items}


def test_weights_gradients_and_optimizer_of_a_7b_model():
    found = gigabytes(plan_for(config(), QWEN_7B))
    billions = num_parameters(QWEN_7B) / 1e9
    assert billions == pytest.approx(7.62, abs=0.01)
    assert found["policy in training"] == found["gradients"] == pytest.approx(4e9 * billions / 2**30)
    assert found["AdamW"] == pytest.approx(2 * found["gradients"]) and found["engine's policy"] == pytest.approx(14.2, abs=0.1)
    assert "reference policy" not in found and "critic" not in found
    assert gigabytes(plan_for(config(algorithm="grpo", algorithm_options={"kl": 0.1}), QWEN_7B))["reference policy"] == \
        pytest.approx(14.2, abs=0.1)


def test_moments_in_8_bits_take_a_quarter():
    plain, small = (gigabytes(plan_for(config(optimizer={"kind": kind}), QWEN_7B))["AdamW"] for kind in ("adamw", "adamw_8bit"))
    assert small == pytest.approx((2 + 2 / 64) / 8 * plain)


def test_what_fits_and_what_would_help():
    """Full weights of a 7B model fit on one H200 with recomputed activations and an engine that sleeps; LoRA fits as well."""
    plain = plan_for(config(), QWEN_7B, H200)
    assert not plain.fits(4096) and {setting.split(" = ")[0] for setting, _ in plain.savings} == {
        "learner.gradient_checkpointing", "learner.lora_rank", "learner.micro_batch_tokens", "optimizer.kind",
        "sleep_during_update"}
    assert plan_for(config(learner={"gradient_checkpointing": True}, sleep_during_update=True), QWEN_7B, H200).fits(64 * 4096)
    assert plan_for(config(learner={"lora_rank": 16, "gradient_checkpointing": True}), QWEN_7B, H200).fits(256 * 4096)
    assert "left for the KV cache" in str(plain) and "saved by learner.lora_rank = 16" in str(plain)


def test_the_kv_cache_leaves_room_for_the_update():
    settings = {"learner": {"gradient_checkpointing": True}}
    free = 90 * 2**30
    awake, asleep = (kv_budget(config(sleep_during_update=sleeps, **settings), QWEN_7B, free) for sleeps in (False, True))
    plan = plan_for(config(**settings), QWEN_7B)
    assert awake == pytest.approx(0.1 * 90) and plan.later_bytes > free
    assert asleep == pytest.approx(0.85 * (90 - gigabytes(plan)["AdamW"]))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("rank", [0, 2])
def test_saved_activations_are_what_the_plan_says(checkpointing, rank):
    """Per layer: what the backward pass of a real model keeps, against the plan's difference between two depths."""
    rows, found = 128, []
    shapes = [ModelConfig("qwen2", 300, 64, 192, layers, 4, 2, 16, qkv_bias=True, max_context=512) for layers in (2, 3)]
    learner = {"gradient_checkpointing": checkpointing, "lora_rank": rank, "micro_batch_tokens": rows}
    for shape in shapes:
        model = Decoder.random(shape, dtype=torch.bfloat16 if rank else torch.float32)
        settings = config(learner=learner, rollout={**LONG, "max_new_tokens": 64})
        policy = learner_for(settings, model, None).policy
        found.append(saved_bytes(policy, [Sample([1] * rows, 2, 0, 1.0, False, torch.zeros(rows - 2))]))
    planned = [_activation_bytes(settings, shape, 2) for shape in shapes]
    assert 0.9 <= (planned[1] - planned[0]) / (found[1] - found[0]) <= 1.1


def saved_bytes(policy, samples) -> int:
    """Bytes of all tensors that autograd keeps for the backward pass, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.logprobs(pack(samples, 10_000)[0], 1.0)
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_recomputed_layers_do_not_keep_cast_weights(checkpointing):
    """autocast's cache would hold all weights in bfloat16 until the end of the forward pass."""
    model = Decoder.random(tiny.CONFIGS["llama"])
    policy = learner_for(config(learner={"gradient_checkpointing": checkpointing}), model, None).policy
    with policy.precision():
        assert torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled() != checkpointing


def test_parameters_are_counted_as_they_are():
    model = deepcopy(tiny.model("qwen3"))
    assert num_parameters(model.config) == sum(p.numel() for p in model.parameters())
    learner = LearnerConfig(lora_rank=3)
    add_lora(model, learner, 0)
    adapters = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
    assert num_adapter_parameters(model.config, 3, learner.lora_targets) == adapters


def test_an_engine_that_sleeps_during_updates_generates_the_same(tmp_path, monkeypatch):
    toy.make_folder(tmp_path)
    asleep = []
    update = Learner.update

    def recorded(self, samples, step):
        asleep.append([engine.executor.is_asleep for engine in trainer.backend.engines])
        return update(self, samples, step)

    monkeypatch.setattr(Learner, "update", recorded)
    for name, sleeps in (("awake", False), ("asleep", True)):
        trainer = Trainer(make_config(tmp_path, out=str(tmp_path / name), sleep_during_update=sleeps, compare_off=True))
        trainer.run()
    toy.assert_same_run(tmp_path / "awake", tmp_path / "asleep")
    assert asleep == [[False, False]] * 3 + [[True, True]] * 3


def test_a_dry_run_prints_the_plan_beside_the_configuration(tmp_path, capsys):
    toy.make_folder(tmp_path)
    assert toy.run([*toy.settings(tmp_path, "run"), "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert tomllib.loads(printed.out)["steps"] == 5 and "policy in training" in printed.err and "KV cache" in printed.err


# What a learned drafter and a reward model add


@pytest.mark.parametrize("changes", [
    {"drafter": "suffix"}, {"drafter": "suffix", "engine": {"capture": (0, 1)}}, {"drafter": "learned"},
    {"drafter": "learned", "spot": {"form": "eagle3"}}, {"drafter": "learned", "engine": {"capture": (0, -1)}},
    {"drafter": "folder"}, {"drafter": "folder", "train_drafter": False}], ids=str)
def test_the_kv_cache_stores_per_token_what_the_plan_says(tmp_path, changes):
    """The plan counts the policy's keys and values, the features that a learned drafter reads or is trained on, and the drafter's
    own keys and values, for which a loaded drafter may have another number of heads."""
    toy.make_folder(tmp_path)
    model, tokenizer = load_model(tmp_path / "model", dtype="float64")
    if changes["drafter"] == "folder":
        eagle = EagleConfig.for_policy(model.config, "eagle3", (0, 1))
        eagle = replace(eagle, model=replace(eagle.model, num_kv_heads=eagle.model.num_heads))
        save_eagle(Eagle.random(eagle, dtype=torch.float64), tmp_path / "drafter", model)
        changes = {**changes, "drafter": str(tmp_path / "drafter")}
    engine = {"kv_tokens": 64, **changes.get("engine", {})}
    settings = make_config(tmp_path, **{**changes, "strategy": "off", "engine": engine})
    tokens, *stored = engine_for(settings, model, tokenizer, speculate=True).executor.store.tensors()
    assert plan_for(settings, model.config).kv_bytes_per_token == sum(tensor.nbytes for tensor in stored) / len(tokens)


def test_features_that_wait_to_be_copied_are_planned_up_to_a_bound():
    """Features that wait to be copied to the host are at most those of one step's answers, and their memory is free again when
    the policy is updated."""
    what = "features that wait to be copied"
    hidden_bytes = 2 * QWEN_7B.hidden_size
    short = {"prompts": 2, "group_size": 4, "max_new_tokens": 256}
    assert gigabytes(plan_for(config(drafter="learned", rollout=short), QWEN_7B))[what] == 2048 * hidden_bytes / 2**30
    assert gigabytes(plan_for(config(drafter="learned"), QWEN_7B))[what] == 4
    eagle3 = config(drafter="learned", rollout=short, spot={"form": "eagle3"})
    assert gigabytes(plan_for(eagle3, QWEN_7B))[what] == 4 * 2048 * hidden_bytes / 2**30
    for other in ({}, {"drafter": "learned", "train_drafter": False}, {"drafter": "learned", "cluster": {"workers": 2}}):
        assert what not in gigabytes(plan_for(config(**other), QWEN_7B))
    asleep, awake = (plan_for(config(drafter="learned", sleep_during_update=sleeps), QWEN_7B) for sleeps in (True, False))
    drafter = sum(gigabytes(asleep)[item] for item in ("learned drafter", "training of the drafter"))
    assert asleep.later_bytes == pytest.approx((gigabytes(asleep)["AdamW"] + 4 + drafter) * 2**30)
    assert awake.later_bytes == sum(item.num_bytes for item in awake.items if item.is_later and item.phase != "generation")


@pytest.mark.parametrize("form", ["hass", "eagle3"])
def test_a_learned_drafter_is_planned_as_it_is_made(form):
    plan = plan_for(config(drafter="learned", train_drafter=False, spot={"form": form, "draft_vocab": 0}), QWEN_7B)
    with torch.device("meta"):
        drafter = Eagle(EagleConfig.for_policy(QWEN_7B, SpotConfig(form=form).module_form))
    assert gigabytes(plan)["learned drafter"] == 2 * sum(p.numel() for p in drafter.parameters()) / 2**30


def test_training_of_a_drafter_takes_memory_for_every_unroll_step():
    once, thrice = (gigabytes(plan_for(config(drafter="learned", spot={"unroll": n}), QWEN_7B))["training of the drafter"]
                    for n in (1, 3))
    assert 2 < thrice / once < 3
    assert "training of the drafter" not in gigabytes(plan_for(config(drafter="learned", train_drafter=False), QWEN_7B))


def test_a_loaded_eagle3_drafter_is_planned_with_its_own_unroll_steps(tmp_path):
    toy.make_folder(tmp_path)
    model, _ = load_model(tmp_path / "model", dtype="float64")
    drafter = Eagle.random(EagleConfig.for_policy(model.config, "eagle3", (0, 1)), dtype=torch.float64)
    save_eagle(drafter, tmp_path / "drafter", model)
    settings = {"drafter": str(tmp_path / "drafter"), "strategy": "off"}
    own, seven, three = (
        gigabytes(plan_for(make_config(tmp_path, **settings, spot=spot), model.config))["training of the drafter"]
        for spot in ({}, {"unroll": 7}, {"unroll": 3}))
    assert own == seven > three


@pytest.mark.parametrize("drafter", ["suffix", "learned"])
def test_two_engines_share_the_memory_for_their_kv_caches(drafter):
    """With `compare_off` there are two. The first one leaves the second as many tokens of KV cache, and its weights."""
    alone, both = (config(drafter=drafter, compare_off=two, learner={"lora_rank": 16}) for two in (False, True))
    free = 120 << 30
    one, first = (kv_budget(c, QWEN_7B, free) for c in (alone, both))
    weights = gigabytes(plan_for(alone, QWEN_7B))["engine's policy"]
    second = kv_budget(both, QWEN_7B, free - int((first + weights) * 2**30), speculate=False)
    plans = plan_for(alone, QWEN_7B), plan_for(both, QWEN_7B)
    of_first, of_both = (plan.kv_bytes_per_token for plan in plans)
    assert first == pytest.approx((one - 0.85 * weights) * of_first / of_both)
    assert second / (of_both - of_first) >= first / of_first and first + second < one - 0.85 * weights + 0.15 * one


@pytest.mark.parametrize(("sleeps", "waiting", "update", "generation", "later"), [
    (False, 8, 7, 13, 9), (False, 1, 7, 7, 3), (True, 8, 3, 13, 9), (True, 1, 3, 6, 2)])
def test_what_is_held_in_one_phase_alone_shares_its_memory(sleeps, waiting, update, generation, later):
    items = (MemoryItem("moments", 1, "always", is_later=True), MemoryItem("gradients", 2, "update", is_later=True),
             MemoryItem("engine", 4, "engine"), MemoryItem("waiting", waiting, "generation", is_later=True))
    plan = MemoryPlan(items, 1, 1, None, sleeps)
    assert (plan.update_bytes, plan.generation_bytes, plan.later_bytes) == (update, generation, later)


def test_only_settings_that_the_configuration_accepts_are_recommended():
    """What check_config would refuse is not advice."""
    two, driver = {"cluster": {"workers": 2}, "drafter": "learned"}, {"cluster": {"workers": 8, "shard_training": False}}
    for change in (EIGHT, driver, {}, two):
        plan = plan_for(config(**change), QWEN_7B, H200)
        for setting, saved in plan.savings:
            key, _, value = setting.partition(" = ")
            changed = change_config(config(**change), key, value)
            assert set(setting_problems(changed)) <= set(setting_problems(config(**change))), setting
            assert saved > 0 and changed != config(**change)


def change_config(given: TrainConfig, key: str, value: str) -> TrainConfig:
    """As `--set key=value` does it, checked."""
    raw = given.model_dump()
    apply_override(raw, f"{key}={value}")
    return TrainConfig(**raw)


def test_a_reward_model_is_planned_as_it_is_loaded(tmp_path):
    Qwen2ForSequenceClassification(Qwen2Config(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_labels=1, pad_token_id=60)).save_pretrained(tmp_path / "rewards")
    loaded = load_reward_model(tmp_path / "rewards", "cpu", torch.bfloat16, torch.bfloat16)
    plan = plan_for(config(reward_model=str(tmp_path / "rewards")), QWEN_7B)
    assert {item.what: item.num_bytes for item in plan.items}["reward model"] == sum(p.nbytes for p in loaded.parameters())
    assert not any(item.what.startswith("reward model") for item in plan_for(config(), QWEN_7B).items)
    unknown = plan_for(config(reward_model="someone/not-downloaded"), QWEN_7B)
    assert gigabytes(unknown)["reward model (not on this machine yet)"] == 0


# Runs that cannot fit


@pytest.fixture
def small_gpu(monkeypatch):
    """A GPU of 1 MiB, which is free."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (2**20, 2**20))


def said(message: str, folder) -> bool:
    """Whether a message says in one line what the run needs, what there is, and which settings would help."""
    plan = memory_plan(make_config(folder), 2**20)
    wanted = ["does not fit on cuda", "KV cache of a whole step at full length", "left for the KV cache 0.00 GiB of 0.0",
              *(item.what for item in plan.items), *(f"saved by {setting}" for setting, _ in plan.savings)]
    assert len(plan.items) >= 5 and len(plan.savings) >= 2
    return all(words in message for words in wanted) and "\n" not in message.strip()


def test_a_run_that_cannot_fit_is_refused_with_its_plan(tmp_path, small_gpu):
    toy.make_folder(tmp_path)
    with pytest.raises(ValueError, match=r"^device: ") as raised:
        Trainer(make_config(tmp_path)).run()
    assert said(str(raised.value), tmp_path) and not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match=r"^device: "):
        check_memory(make_config(tmp_path, device="cuda:0"))


def test_memory_that_cannot_hold_an_answer_is_refused(tmp_path):
    """The KV cache of every worker has this much."""
    toy.make_folder(tmp_path)
    check_memory(make_config(tmp_path, engine={"kv_memory_gb": 1e-4}))
    with pytest.raises(ValueError, match=r"^engine.kv_tokens: the KV cache holds 16 tokens, but an answer may have .* = 24"):
        check_memory(make_config(tmp_path, engine={"kv_memory_gb": 1e-6}, rollout={"max_new_tokens": 24}))


def test_a_dry_run_that_cannot_fit_says_so(tmp_path, small_gpu, capsys):
    toy.make_folder(tmp_path)
    assert toy.run([*toy.settings(tmp_path, "run"), "--dry-run"]) == 2
    printed = capsys.readouterr()
    assert said(printed.err, tmp_path) and not printed.out


def test_a_run_that_fits_is_not_refused(tmp_path, small_gpu, monkeypatch):
    toy.make_folder(tmp_path)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (0, 2**30))  # what others hold now may be free later
    check_memory(make_config(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (0, 0))
    check_memory(make_config(tmp_path))


def test_a_mixture_of_experts_counts_all_parameters_and_those_of_a_token():
    """Qwen3-30B-A3B: 30.5 billion parameters, 3.3 active. What is stored counts all of them, activations only the active ones."""
    plan = plan_for(TrainConfig(dtype="bfloat16"), QWEN_30B_A3B)
    assert plan.parameters is not None
    total, active = plan.parameters
    assert total == pytest.approx(30.53e9, rel=0.001) and active == pytest.approx(3.35e9, rel=0.01)
    assert "30.53 billion, 3.3" in str(plan) and "parameters" not in str(plan_for(TrainConfig(), QWEN_7B))
    engine = next(item for item in plan.items if item.what == "engine's policy")
    assert engine.num_bytes == 2 * total * (2 if TrainConfig().compare_off else 1)
    wide = replace(QWEN_30B_A3B, layers=(LayerSpec(experts=ExpertsSpec(128, 64, 768)),) * 48)
    (few,), (many,) = ([item.num_bytes for item in plan_for(TrainConfig(dtype="bfloat16"), shape).items
                        if item.what.startswith("activations")] for shape in (QWEN_30B_A3B, wide))
    assert few < many
