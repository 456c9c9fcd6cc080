"""Training on workers that have a GPU, without Ray: two that share one (`cluster.gpus_per_worker = 0.5`, gloo), and one rank of
NCCL. The rollouts are those of a run without workers."""

from __future__ import annotations

import pytest
import torch
from cluster.process_trainer import OneRankTrainer, ProcessTrainer, check_same_run

SHARED = {"workers": 2, "gpus_per_worker": 0.5}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_two_workers_share_a_gpu(tmp_path, monkeypatch, dtype):
    check_same_run(ProcessTrainer, tmp_path, monkeypatch, device="cuda", dtype=dtype, cluster=SHARED)


@pytest.mark.parametrize("changes", [
    {"sleep_during_update": True, "compare_off": True}, {"algorithm": "ppo"}, {"learner": {"lora_rank": 4}},
    {"learner": {"exact_logprobs": True}}, {"drafter": "learned", "strategy": "eagle:d2w2v3", "spot": {"form": "eagle"}},
], ids=lambda changes: "+".join(changes))
def test_what_works_on_one_worker_works_on_two_that_share_a_gpu(tmp_path, monkeypatch, changes):
    check_same_run(ProcessTrainer, tmp_path, monkeypatch, device="cuda", cluster=SHARED, **changes)


def test_moments_in_8_bits_on_two_workers_that_share_a_gpu(tmp_path, monkeypatch):
    pytest.importorskip("torchao.optim")
    check_same_run(ProcessTrainer, tmp_path, monkeypatch, device="cuda", cluster=SHARED,
                   optimizer={"kind": "adamw_8bit", "lr": 1e-4})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_rank_of_nccl(tmp_path, monkeypatch, dtype):
    try:
        check_same_run(OneRankTrainer, tmp_path, monkeypatch, device="cuda", dtype=dtype, sleep_during_update=True,
                       cluster={"workers": 1, "address": "here"})
        assert torch.distributed.get_backend() == "nccl"
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
