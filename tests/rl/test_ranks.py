"""Sharded training: any number of ranks gives the weights of one."""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cache
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import torch._dynamo  # which optimizers import: once, in the process that the ranks are forked from
import torch.distributed as dist
from samples import random_samples
from test_learner import make_learner
from torch.distributed.device_mesh import init_device_mesh

from paceline.config import LearnerConfig, OptimizerConfig
from paceline.models.weights import load_model
from paceline.rl.adapters import merged_parameters
from paceline.rl.algorithms import make_algorithm
from paceline.rl.checkpoint import load_shard, policy_folder, restore, save_learner, shard_state
from paceline.rl.learner import Learner
from paceline.rl.models import Scorer
from paceline.rl.ranks import Ranks, gathered, local
from paceline.rl.reward_model import RewardModel

CASES: dict[str, dict[str, Any]] = {
    "grpo": {"options": {"kl": 0.1}},
    "ppo": {"name": "ppo", "epochs": 2, "minibatches": 2, "kind": "qwen3"},
    "rloo, tied, checkpointed": {"name": "rloo", "options": {"kl": 0.1}, "gradient_checkpointing": True},
    "exact": {"exact_logprobs": True, "options": {"kl": 0.1}, "kind": "qwen2", "minibatches": 2},
    "exact, checkpointed": {"exact_logprobs": True, "gradient_checkpointing": True},
    "lora": {"lora_rank": 2, "kind": "qwen2"},
    "exact, lora": {"exact_logprobs": True, "lora_rank": 2, "options": {"kl": 0.1}},
}

NO_KL = {"kl": 0.0}  # the reference is not part of a checkpoint


def train(learner: Learner, steps: int = 2) -> list[dict[str, float]]:
    found = []
    for step in range(steps):
        samples = random_samples(3, 4, seed=step)
        learner.infer(samples)
        learner.algorithm.compute_advantages(samples)
        found.append(learner.update(samples, step))
    return found


@contextmanager
def with_ranks(rank: int, size: int, folder: str, one_unit_bytes: int = 0) -> Iterator[Ranks]:
    """`one_unit_bytes`: as `Ranks` takes it; these models are small, and 0 has them gathered layer by layer all the same."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    try:
        yield Ranks(init_device_mesh("cpu", (size,)), one_unit_bytes)
    finally:
        dist.destroy_process_group()


def make_reward_model() -> RewardModel:
    model = Scorer(tiny.Decoder.random(tiny.CONFIGS["llama"], 4, 0.3, torch.float64), torch.float64)
    torch.nn.init.constant_(model.score.weight, 0.1)
    return RewardModel(model.requires_grad_(False), None, None)


def run_cases(rank: int, size: int, folder: str, names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with with_ranks(rank, size, folder) as ranks:
        for name in names:
            learner = make_learner(micro_batch_tokens=40, **CASES[name])
            learner.shard(ranks)
            metrics = train(learner)
            parts = sum(local(p).numel() for p in learner.policy.parameters())
            weights = {n: t.numpy() for n, t in learner.weights()}
            in_groups = dict(gathered(merged_parameters(learner.policy.model), group_bytes=512))
            assert in_groups.keys() == weights.keys() and all((in_groups[n].numpy() == w).all() for n, w in weights.items())
            found[name] = weights, metrics, parts
        samples = random_samples(2, 3)
        learner = make_learner(options={"kl": 0.1})
        learner.reward_model = make_reward_model()
        learner.shard(ranks)
        found["scores"] = learner.scores(samples)
        found["failure"] = failure_of(ranks)
    return found


def run_in(rank: int, size: int, folder: str, dtypes: list[torch.dtype], names: list[str]) -> dict[Any, Any]:
    with with_ranks(rank, size, folder, 1 << 20) as ranks:  # as one unit
        found = {}
        for dtype in dtypes:
            for name in names:
                learner = make_learner_in(dtype, **CASES[name])
                learner.shard(ranks)
                metrics = train(learner)
                found[dtype, name] = arrays(learner), metrics
    return found


def arrays(learner: Learner) -> dict[str, np.ndarray]:
    return {name: tensor.double().numpy() for name, tensor in learner.weights()}


def make_learner_in(dtype: torch.dtype, kind: str = "llama", **case: Any) -> Learner:
    """As a run has it: weights in float32 or better, frozen ones in the run's data type, and products in that."""
    kept = dtype if case.get("lora_rank") else torch.promote_types(dtype, torch.float32)
    return make_learner(micro_batch_tokens=40, model=deepcopy(tiny.model(kind)).to(kept), compute=dtype, **case)


def train_from(rank: int, size: int, folder: str, checkpoint: str) -> Any:
    """Go on from a checkpoint, save another one, and train once more."""
    learner = make_learner("ppo", options=NO_KL, model=load_model(policy_folder(Path(checkpoint)), "cpu", torch.float64)[0])
    with with_ranks(rank, size, folder) as ranks:
        learner.shard(ranks)
        restore(learner, Path(checkpoint))
        train(learner, 1)
        save_learner(learner, Path(folder) / "saved", None)
        train(learner, 1)
        return {name: tensor.numpy() for name, tensor in learner.weights()}


def failure_of(ranks: Ranks) -> str:
    """One rank has a weight that is not a number; all ranks say so, and none waits for another."""
    learner = make_learner()
    learner.shard(ranks)
    if ranks.rank == ranks.size - 1:
        local(learner.policy.model.norm.data).fill_(math.nan)
    try:
        learner.require_finite()
    except ValueError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def process_of() -> Iterator[Callable[[int], Pool]]:
    """The process of a rank, which is used again: it takes seconds to import torch. A process is one rank only, as DTensor
    remembers, for meshes of the same shape, which part is its own."""
    context = multiprocessing.get_context("spawn")  # a fork server would stay, with torch, for the pools of other tests
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        yield cache(lambda rank: stack.enter_context(context.Pool(1)))


def spread(process_of: Callable[[int], Pool], call: Any, size: int, folder: Path, *args: Any) -> list[Any]:
    folder.mkdir()
    calls = [process_of(rank).apply_async(call, (rank, size, str(folder), *args)) for rank in range(size)]
    return [one.get() for one in calls]


QUICK = [name for name in CASES if "lora" not in name]  # takes long to import


@pytest.mark.parametrize(("size", "names"), [(2, QUICK), pytest.param(4, list(CASES), marks=pytest.mark.slow)])
def test_any_number_of_ranks_gives_the_same_weights(process_of, tmp_path, size, names):
    ranks = spread(process_of, run_cases, size, tmp_path / "ranks", names)
    for name in names:
        alone = make_learner(micro_batch_tokens=40, **CASES[name])
        metrics = train(alone)
        expected = dict(alone.weights())
        total = sum(p.numel() for p in alone.policy.parameters())
        for weights, found, _ in (rank[name] for rank in ranks):
            assert weights.keys() == expected.keys()
            for key, value in weights.items():
                assert abs(expected[key].numpy() - value).max() < 1e-12, (name, key)
            assert found == [pytest.approx(line, rel=1e-9, abs=1e-12) for line in metrics], name
        assert all(abs(ranks[0][name][0][key] - other[name][0][key]).max() == 0 for other in ranks for key in expected)
        assert sum(rank[name][2] for rank in ranks) == total, "every weight is on one rank only"
    alone, samples = make_learner(options={"kl": 0.1}), random_samples(2, 3)
    alone.reward_model = make_reward_model()
    assert {rank["failure"] for rank in ranks} == {"policy: model.norm is not finite"}
    assert all(rank["scores"] == pytest.approx(alone.scores(samples)) for rank in ranks)


@pytest.mark.parametrize("names", [["grpo"], pytest.param(["ppo", "lora", "rloo, tied, checkpointed"], marks=pytest.mark.slow)])
def test_ranks_sum_their_gradients_in_every_dtype(process_of, tmp_path, names):
    """In each of them FSDP2 reduces by other operations, not all of which gloo has."""
    dtypes = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # and how far a step may be from that of one rank, by rounding
    ranks = spread(process_of, run_in, 2, tmp_path / "ranks", list(dtypes), names)
    for dtype, tolerance in dtypes.items():
        for name in names:
            alone = make_learner_in(dtype, **CASES[name])
            before, metrics, expected = arrays(alone), train(alone), arrays(alone)
            for weights, found in (rank[dtype, name] for rank in ranks):
                away = distance(weights, expected) / distance(before, expected)
                rounded = name == "lora" and dtype == torch.bfloat16  # by more than a step, when merged
                assert rounded or away < tolerance, (dtype, name, away)
                norms = [[line["grad_norm"] for line in lines] for lines in (found, metrics)]
                assert norms[0] == pytest.approx(norms[1], rel=tolerance), (dtype, name)


def distance(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    return math.sqrt(sum(np.square(one[key] - other[key]).sum() for key in other))


def test_ranks_and_one_process_continue_each_others_checkpoints(process_of, tmp_path):
    alone = make_learner("ppo", options=NO_KL)
    train(alone, 1)
    save_learner(alone, tmp_path / "first", None)
    train(alone, 1)
    ranks = spread(process_of, train_from, 2, tmp_path / "ranks", str(tmp_path / "first"))
    saved = tmp_path / "ranks" / "saved"
    again = make_learner("ppo", options=NO_KL, model=load_model(policy_folder(saved), "cpu", torch.float64)[0])
    restore(again, saved)
    for learner in (alone, again):
        train(learner, 1)
        for name, tensor in learner.weights():
            assert all(abs(tensor.numpy() - rank[name]).max() < 1e-12 for rank in ranks), name


def make_8bit_learner(folder: Path | None = None) -> Learner:
    """Some of its matrices are large enough for moments in 8 bits, and some of these have parts that are not."""
    model = tiny.Decoder.random(replace(tiny.CONFIGS["llama"], intermediate_size=512), 0, std=0.2)
    if folder is not None:
        model = load_model(policy_folder(folder), "cpu", torch.float32)[0]
    return Learner(model, make_algorithm("grpo", 16), LearnerConfig(micro_batch_tokens=40), OptimizerConfig(
        lr=1e-2, kind="adamw_8bit"), 10, 1.0, torch.float32)


def train_8bit_from(rank: int, size: int, folder: str, checkpoint: str) -> Any:
    """Go on from a checkpoint, save another one, and train once more; also as a rank that was started anew from its shard."""
    torch.compile = lambda function, **options: function  # it would take a minute; this process is a rank and nothing else
    with with_ranks(rank, size, folder) as ranks:
        learner, again = make_8bit_learner(Path(checkpoint)), make_8bit_learner(Path(checkpoint))
        for one in (learner, again):
            one.shard(ranks)
        restore(learner, Path(checkpoint))
        train(learner, 1)
        save_learner(learner, Path(folder) / "saved", None)
        load_shard(again, shard_state(learner))
        for one in (learner, again):
            train(one, 1)
        is_small = [local(m).numel() % 256 > 0 or local(m).numel() < 4096 for s in learner.optimizers[0].state.values()
                    for name, m in s.items() if name != "step"]
        is_8bit = [hasattr(local(m), "codes") for s in learner.optimizers[0].state.values()
                   for name, m in s.items() if name != "step"]
        return arrays(learner), arrays(again), is_8bit, is_small


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_moments_in_8_bits_are_sharded(process_of, tmp_path, monkeypatch, size):
    """Ranks and one process continue each other's checkpoints, and a rank continues from its shard bit for bit."""
    pytest.importorskip("torchao.optim")
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    alone = make_8bit_learner()
    train(alone, 1)
    save_learner(alone, tmp_path / "first", None)
    before = arrays(alone)
    for _ in range(2):
        train(alone, 1)
    ranks = spread(process_of, train_8bit_from, size, tmp_path / "ranks", str(tmp_path / "first"))
    again = make_8bit_learner(tmp_path / "ranks" / "saved")
    restore(again, tmp_path / "ranks" / "saved")
    train(again, 1)
    for weights, restarted, is_8bit, is_small in ranks:
        assert all((weights[name] == restarted[name]).all() for name in weights)
        assert any(is_8bit) and is_8bit == [not small for small in is_small]
        for one in (alone, again):
            assert distance(weights, arrays(one)) < 0.05 * distance(before, arrays(one))


def test_micro_batches_are_shared_evenly():
    class Some(Ranks):
        def __init__(self, rank: int, size: int) -> None:
            self.rank, self.size = rank, size

    learner, samples = make_learner(micro_batch_tokens=10), random_samples(2, 5)
    for size in (1, 2, 3, 4):
        shares = []
        for rank in range(size):
            learner.ranks = Some(rank, size)
            shares.append(learner._packed(samples, [1.0] * len(samples)))
        assert len({len(share) for share in shares}) == 1
        assert sorted(i for share in shares for batch in share for i in batch.members) == list(range(len(samples)))
        idle = [batch for share in shares for batch in share if not batch.members]
        assert len(idle) < size and all(not batch.weights.any() for batch in idle)
