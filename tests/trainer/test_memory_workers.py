"""The memory plan of several workers."""

from __future__ import annotations

import pytest
import torch
from trainer.test_memory import EIGHT, QWEN_7B, QWEN_32B, config, gigabytes

from paceline.config import LearnerConfig
from paceline.models.parameters import num_adapter_parameters, num_parameters
from paceline.trainer.memory import (
    free_bytes,
    kv_budget,
    plan_for,
)


def test_several_workers_hold_the_answers_that_the_drafter_is_trained_on():
    what = "answers that the drafter is trained on"
    workers = {"drafter": "learned", "cluster": {"workers": 2}, "drafter_buffer_gb": 3.0}
    assert gigabytes(plan_for(config(**workers), QWEN_7B))[what] == 3
    for other in ({"train_drafter": False}, {"cluster": {}}):
        assert what not in gigabytes(plan_for(config(**{**workers, **other}), QWEN_7B))


def test_every_worker_holds_its_shard_of_what_is_trained():
    """Parameters, gradients and moments are divided; activations and the engine's policy are whole on every worker. All but the
    engine is allocated after its KV cache."""
    critic = {"algorithm": "ppo", "algorithm_options": {"kl": 0.1}}
    one, eight = (plan_for(config(**critic, cluster={"workers": n}), QWEN_7B) for n in (1, 8))
    alone, shard = gigabytes(one), gigabytes(eight)
    for what in ("policy in training", "gradients", "AdamW", "reference policy", "critic", "critic's gradients",
                 "critic's AdamW"):
        assert shard[what] == pytest.approx(alone[what] / 8), what
    for what in ("activations of a micro-batch", "engine's policy"):
        assert shard[what] == alone[what]
    assert shard.keys() - alone.keys() == {"layers that are gathered from the shards"} and eight.kv_tokens == one.kv_tokens / 8
    assert {item.what for item in eight.items if not item.is_later} == {"engine's policy"}
    driver = plan_for(config(**critic, cluster={"workers": 8, "shard_training": False}), QWEN_7B)
    assert gigabytes(driver) == alone and "cluster.shard_training = true" in dict(driver.savings)


def test_the_engine_of_a_worker_shares_no_weights_with_its_learner():
    """A worker's learner holds a shard of the weights that LoRA does not train; its engine holds all of them."""
    one, two = (gigabytes(plan_for(config(learner={"lora_rank": 16}, cluster={"workers": n}), QWEN_7B)) for n in (1, 2))
    assert two["engine's policy"] == num_parameters(QWEN_7B) * 2 / 2**30 > one["engine's policy"]


def test_models_that_need_several_gpus_are_planned():
    """7B on 8 GPUs of 80 GB, and 32B on 8 of 140 GB: not refused, with room for many answers at a time."""
    eight, few = plan_for(config(**EIGHT), QWEN_7B, int(80e9)), config(cluster={"workers": 8})
    assert eight.fits(64 * 4096) and str(eight).startswith("on each of 8 workers:")
    refused = plan_for(few, QWEN_7B, int(80e9))
    assert not refused.fits(4096) and "learner.gradient_checkpointing = true" in dict(refused.savings)
    assert not plan_for(config(learner={"gradient_checkpointing": True}), QWEN_7B, int(80e9)).fits(4096)
    asleep = plan_for(config(**EIGHT, sleep_during_update=True), QWEN_32B, int(140e9))
    assert asleep.fits(16 * 4096)


def test_adapters_that_another_library_trains_leave_their_memory_to_the_kv_cache():
    """As in a run of our own whose settings say so. Gradients and moments of 7B parameters would leave nothing."""
    free, adapters = 60 * 2**30, num_adapter_parameters(QWEN_7B, 16, LearnerConfig().lora_targets)
    whole, found = (kv_budget(config(), QWEN_7B, free, num_trained=count) for count in (num_parameters(QWEN_7B), adapters))
    assert whole == kv_budget(config(), QWEN_7B, free) == pytest.approx(6)
    assert found == pytest.approx(kv_budget(config(learner={"lora_rank": 16}), QWEN_7B, free), rel=0.02) and found > 2 * whole


def test_the_kv_cache_of_a_worker_leaves_room_for_its_shard():
    free, plan = 60 * 2**30, plan_for(config(**EIGHT), QWEN_7B)
    later = gigabytes(plan_for(config(**EIGHT), QWEN_7B))
    del later["engine's policy"]
    assert kv_budget(config(**EIGHT), QWEN_7B, free) == pytest.approx(0.85 * (60 - sum(later.values())))
    assert plan.later_bytes / 2**30 == pytest.approx(sum(later.values()))


def test_workers_that_share_a_gpu_share_its_memory(monkeypatch):
    """Both start at the same time and find the GPU empty."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (120 << 30, 140 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 15 << 30)
    whole, half = (config(cluster={"workers": 2, "gpus_per_worker": gpus}) for gpus in (None, 0.5))
    assert [free_bytes(each, torch.device("cuda")) >> 30 for each in (whole, half)] == [120, 70 - 15]
