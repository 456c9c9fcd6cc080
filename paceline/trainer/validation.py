"""Checks of a run's configuration against what is there (models, files, devices, packages), before anything is written or
loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from paceline.bundled import resolve_model
from paceline.config import ConfigError, ConfigProblem, TrainConfig
from paceline.drafters.checkpoint import check_drafter_folder
from paceline.engine.build import require_drafter
from paceline.engine.split import check_split
from paceline.extras import install_command
from paceline.kernels import choose_backend
from paceline.models.config import ModelConfig
from paceline.models.weights import check_model, parse_dtype
from paceline.rl.algorithms import ALGORITHMS, make_algorithm
from paceline.strategy import make_selector
from paceline.tasks import make_task
from paceline.tasks.environment import AnyTask
from paceline.tasks.weighted import weighted
from paceline.trainer.config_files import check_drafter_settings
from paceline.trainer.device import check_run_device, check_worker_gpus, cluster_address, run_device
from paceline.trainer.evaluation import split_task
from paceline.trainer.hub import check_push_to_hub
from paceline.trainer.run_folder import check_run_folder
from paceline.trainer.run_settings import check_resumable
from paceline.types import SamplingParams


def check_config(config: TrainConfig, resume: bool = False, task: AnyTask | None = None) -> AnyTask:
    """Raises a ConfigError that names every setting with which the run cannot start, and returns its task.

    `resume`: the run continues from its run folder, so the model that it started with need not be there. `task` is used instead
    of the one that the configuration names.
    """
    problems = setting_problems(config)
    for key, check in _file_checks(config, resume):
        problems += _problems(key, check)
    if task is None:
        found: list[AnyTask] = []
        problems += _problems("task", lambda: found.append(make_task(config.task, **config.task_options)))
        task = found[0] if found else None
    if task is not None:
        problems += _task_problems(config, task)
    if problems:
        raise ConfigError(problems)
    assert task is not None
    return task


def setting_problems(config: TrainConfig) -> list[ConfigProblem]:
    """What is wrong with the settings themselves, apart from the task's and from what models and folders there are."""
    return [problem for key, check in _checks(config) for problem in _problems(key, check)]


def _task_problems(config: TrainConfig, task: AnyTask) -> list[ConfigProblem]:
    if not len(task):
        return [ConfigProblem("task", f"{task.name} has no problems")]
    rewards = config.reward
    return [*_problems("reward.functions", lambda: weighted(task, rewards.functions, rewards.task_weight)),
            *_problems("evaluation", lambda: split_task(config, task))]


def _file_checks(config: TrainConfig, resume: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Models and folders, which may have to be looked for elsewhere."""
    shapes: list[ModelConfig] = []
    if resume:
        yield "", lambda: check_resumable(config)
    if not resume or Path(resolve_model(config.model)).exists():
        yield "model", lambda: shapes.append(check_model(config.model))
        yield "engine.tensor_parallel", lambda: _check_split(shapes, config)
    for shape in shapes:  # none if the model is wrong
        yield "", partial(_check_lengths, config, shape)
    if config.reward_model is not None:
        yield "reward_model", lambda: check_model(config.reward_model or "")
    yield "out", lambda: check_run_folder(Path(config.out), resume)


def _checks(config: TrainConfig) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What must not raise a ValueError, and which setting is wrong otherwise."""
    yield "", lambda: check_drafter_settings(config)
    yield ("algorithm_options" if config.algorithm in ALGORITHMS else "algorithm"), lambda: make_algorithm(
        config.algorithm, config.rollout.max_new_tokens, **config.algorithm_options)
    yield "", lambda: _check_sampling(config)
    yield "", lambda: _check_signal(config)
    yield "device", lambda: check_run_device(config)
    yield "strategy", lambda: make_selector(config.strategy)
    yield "drafter", lambda: _check_drafter(config)
    if config.optimizer.kind == "adamw_8bit":
        yield "optimizer.kind", lambda: _check_package("torchao", "lowmem")
    if config.learner.exact_logprobs:
        yield "learner.exact_logprobs", lambda: _check_exact(config)
    if config.wandb is not None:
        yield "wandb", lambda: _check_package("wandb", "wandb") if config.wandb else _refuse("the project's name is empty")
    if config.push_to_hub is not None:
        yield "push_to_hub", lambda: check_push_to_hub(config.push_to_hub or "")
    if config.rollout.max_staleness:
        yield "rollout.max_staleness", lambda: _check_asynchronous(config)
    if config.cluster.needs_ray:
        yield from _worker_checks(config)


def _worker_checks(config: TrainConfig) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What several workers cannot do; the table of docs/cluster.md says the same."""
    cluster = config.cluster
    yield "cluster", lambda: _check_package("ray", "cluster")
    if cluster.address is not None and find_spec("ray") is not None:
        yield "cluster.address", lambda: cluster_address(cluster.address or "")
    yield "cluster.gpus_per_worker", lambda: check_worker_gpus(config)
    yield "cluster.cpus_per_worker", lambda: _check_worker_cpus(config)
    if config.drafter_disk_gb not in (0, TrainConfig.model_fields["drafter_disk_gb"].default):
        yield "drafter_disk_gb", lambda: _refuse("several workers keep captured answers in memory only (drafter_buffer_gb)")
    if config.sleep_during_update and not cluster.shard_training and not config.rollout.max_staleness:
        yield "sleep_during_update", lambda: _refuse("the process that trains has no engine (cluster.shard_training = false)")


def _check_asynchronous(config: TrainConfig) -> None:
    """Engines hold unfinished answers whenever the policy is updated."""
    others = {"compare_off": config.compare_off, "sleep_during_update": config.sleep_during_update}
    given = " and ".join(name for name, is_given in others.items() if is_given)
    if given:
        raise ValueError(f"answers are under way during updates, which {given} cannot have")


def _check_worker_cpus(config: TrainConfig) -> None:
    """Ray would wait for cores that this machine does not have."""
    cluster, available = config.cluster, os.cpu_count() or 1
    if cluster.address is None and cluster.workers * cluster.cpus_per_worker > available:
        raise ValueError(f"{cluster.workers} workers with {cluster.cpus_per_worker:g} cores each do not fit on {available} "
                         "core(s)")


def _problems(key: str, check: Callable[[], Any]) -> list[ConfigProblem]:
    try:
        check()
    except ConfigError as error:
        return [problem.within(key) if key else problem for problem in error.problems]
    except (ValueError, OSError) as error:
        said = " ".join(str(error).split())
        return [ConfigProblem(key, said.removeprefix(f"{key}: ").removeprefix(f"{key} "))]
    return []


def _check_sampling(config: TrainConfig) -> None:
    rollout = config.rollout
    try:
        SamplingParams(temperature=rollout.temperature, top_k=rollout.top_k, top_p=rollout.top_p, min_p=rollout.min_p,
                       max_new_tokens=rollout.max_new_tokens, stop=rollout.stop, seed=config.seed)
    except ValueError as error:
        name, _, said = str(error).partition(": ")
        raise ConfigError([ConfigProblem(name if name == "seed" else f"rollout.{name}", said)]) from None


def _check_signal(config: TrainConfig) -> None:
    """Refuses settings with which every advantage is 0, so that nothing can be learned."""
    rollout, rewards, problems = config.rollout, config.reward, []
    if config.algorithm in ALGORITHMS and not ALGORITHMS[config.algorithm].needs_critic:
        compared = f"{config.algorithm} compares the answers to one prompt with each other"
        if rollout.group_size == 1:
            problems.append(ConfigProblem("rollout.group_size", f"{compared}, so 1 answer teaches nothing; use 4 or more"))
        if rollout.top_k == 1:
            problems.append(ConfigProblem("rollout.top_k", f"{compared}, and with 1 all of them are equal; use 0 for all tokens"))
        if rollout.min_p == 1:
            problems.append(ConfigProblem("rollout.min_p", f"{compared}, and with 1 all of them are equal; use less"))
    if rewards.task_weight == 0 and not any(rewards.functions.values()) and (
            config.reward_model is None or config.reward_model_weight == 0):
        problems.append(ConfigProblem("reward.task_weight", "it is 0 and nothing else gives a reward (reward.functions, "
                                      "reward_model), so nothing can be learned"))
    if problems:
        raise ConfigError(problems)


def _check_drafter(config: TrainConfig) -> None:
    if config.has_learned_drafter and config.drafter != "learned":
        check_drafter_folder(config.drafter, ("suffix", "none", "default", "learned"))
    elif config.drafter == "learned" and not config.train_drafter:
        raise ValueError("train_drafter is false, but an untrained drafter must be trained; set drafter to a folder")
    try:
        selector = make_selector(config.strategy)
    except ValueError:
        return  # said already
    require_drafter(selector, config.has_learned_drafter, config.drafter != "none")


def _check_exact(config: TrainConfig) -> None:
    """The trainer and the engine have the same bits only where the engine's do not depend on the batch."""
    try:
        device, dtype = run_device(config), parse_dtype(config.dtype) or torch.float32
    except ValueError:
        return  # said already
    on_gpu = device.startswith("cuda")
    if on_gpu and dtype == torch.float64:
        raise ValueError("float64 does not have the same bits in every batch on a GPU; set dtype = bfloat16 or float32")
    if on_gpu and not torch.cuda.is_available():
        return  # the workers have it, and this process cannot tell
    backend = choose_backend(device, dtype, config.engine.kernels)
    if backend.name == "torch":
        raise ValueError(f"the torch kernels ({backend.reason}) do not have the same bits in every batch; set engine.kernels = "
                         "auto and dtype = bfloat16 or float32")
    if not (on_gpu or config.engine.deterministic):
        raise ValueError("it needs an engine whose bits do not depend on the batch; set engine.deterministic = true")


def _check_split(shapes: list[ModelConfig], config: TrainConfig) -> None:
    for shape in shapes:
        check_split(shape, config.engine)


def _check_lengths(config: TrainConfig, shape: ModelConfig) -> None:
    """Answers of full length must fit into the policy's context, and into the KV cache."""
    own, context = config.engine.max_context, min(config.engine.max_context or shape.max_context, shape.max_context)
    limit = "the policy's context" if own is None or own > context else "engine.max_context"
    given = {"rollout.max_new_tokens": config.rollout.max_new_tokens,
             "evaluation.max_new_tokens": (config.evaluation.every and config.evaluation.max_new_tokens) or 0}
    problems = [ConfigProblem(key, f"an answer of {tokens} tokens and its prompt do not fit into {limit}, {context} tokens")
                for key, tokens in given.items() if tokens >= context]
    if problems:
        raise ConfigError(problems)
    if config.engine.kv_tokens is not None:
        check_kv_room(config, shape, config.engine.kv_tokens)


def check_kv_room(config: TrainConfig, shape: ModelConfig, kv_tokens: int) -> None:
    """Raises a ConfigError unless an answer of full length fits into a KV cache of so many tokens. Otherwise answers would end
    where the cache does, and the policy would be trained on that."""
    context, page = min(config.engine.max_context or shape.max_context, shape.max_context), config.engine.page_size
    holds, wanted = min(context, max(1, kv_tokens // page) * page), config.rollout.max_new_tokens
    if holds < min(wanted + 1, context):
        raise ConfigError([ConfigProblem("engine.kv_tokens", (
            f"the KV cache holds {holds} tokens, but an answer may have rollout.max_new_tokens = {wanted}; give it more memory "
            "(engine.kv_tokens, engine.kv_memory_gb) or shorten the answers"))])


def _refuse(message: str) -> None:
    raise ValueError(message)


def _check_package(package: str, extra: str) -> None:
    if find_spec(package) is None:
        raise ValueError(f"the package {package} is not installed; {install_command(extra)}")
