"""The learner, the engines and the drafter of a run, made from its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.config import TrainConfig
from paceline.drafters.checkpoint import load_eagle
from paceline.drafters.eagle import Eagle
from paceline.engine import Engine
from paceline.files import DamagedFile
from paceline.models.decoder import Decoder
from paceline.models.state_dict import export_state
from paceline.models.weights import load_model, parse_dtype
from paceline.rl.adapters import plain_copy, unadapted_parameters
from paceline.rl.algorithms import make_algorithm
from paceline.rl.checkpoint import policy_folder, restore
from paceline.rl.learner import Learner
from paceline.rl.models import SamplingFilters
from paceline.rl.ranks import Ranks
from paceline.rl.reward_model import RewardModel
from paceline.spot import capture_layers
from paceline.trainer.drafter import new_drafter
from paceline.trainer.memory import free_bytes, kv_budget
from paceline.trainer.validation import check_kv_room


def master_dtype(config: TrainConfig) -> torch.dtype:
    """Data type of the weights in training: float32 or better."""
    return torch.float64 if parse_dtype(config.dtype) == torch.float64 else torch.float32


def make_learner(config: TrainConfig, checkpoint: Path | None, ranks: Ranks | None = None) -> tuple[Learner, Any]:
    """The learner and the tokenizer, from a checkpoint or from the model that the run starts with. Trained weights are held in
    float32 or better, frozen ones in the run's data type. With `ranks` it is one rank of a sharded learner. DamagedFile or
    NonFiniteError if the checkpoint is not usable; its manifest was looked at before (`load_latest`)."""
    compute, master = parse_dtype(config.dtype), master_dtype(config)
    device = config.device if ranks is None else "cpu"  # `shard` moves it to the device layer by layer
    lora = config.learner.lora_rank > 0
    source = config.model if checkpoint is None or lora else policy_folder(checkpoint)
    try:
        model, tokenizer = load_model(source, device, (compute or master) if lora else master,
                                      check_manifest=checkpoint is None and ranks is None)
    except ValueError as error:
        if checkpoint is None or source != policy_folder(checkpoint):
            raise
        raise DamagedFile(str(error)) from None  # the run itself has written it
    learner = learner_for(config, model, tokenizer)
    if learner.reference is not None and checkpoint is not None and not lora:
        first, _ = load_model(config.model, device, master)
        learner.load_reference(export_state(first))  # the reference is the policy that the run started with
    if ranks is not None:
        learner.shard(ranks)
    if checkpoint is not None:
        restore(learner, checkpoint)
    return learner, tokenizer


def learner_for(config: TrainConfig, model: Decoder, tokenizer: Any) -> Learner:
    """The run's learner for this policy, which it owns from now on. Its weights are in float32 or better, or in the run's data
    type if only adapters are trained."""
    compute = parse_dtype(config.dtype) or master_dtype(config)
    algorithm = make_algorithm(config.algorithm, config.rollout.max_new_tokens, **config.algorithm_options)
    reward_model = None
    if config.reward_model is not None:
        reward_model = RewardModel.load(config.reward_model, tokenizer, model.config.vocab_size, model.norm.device, compute,
                                        compute)
    rollout = config.rollout
    return Learner(model, algorithm, config.learner, config.optimizer, config.steps, rollout.temperature, compute, config.seed,
                   reward_model, config.reward_model_weight, SamplingFilters(rollout.top_k, rollout.top_p, rollout.min_p),
                   config.engine.num_shares)


def make_engine(config: TrainConfig, learner: Learner, tokenizer: Any, speculate: bool) -> Engine:
    """An engine with the learner's policy in the run's data type. All weights are a copy; with adapters only the matrices that
    they are merged into, and the rest is the learner's (`shared_weights`)."""
    policy = learner.policy.model
    dtype = parse_dtype(config.dtype) or policy.norm.dtype
    model = plain_copy(policy, learner.weights(), dtype, shared_weights(learner))
    return engine_for(config, model, tokenizer, speculate)


def shared_weights(learner: Learner) -> dict[str, Tensor]:
    """Weights of the plain policy that an engine need not copy, by name: those that training never changes, because only adapters
    are trained. Empty without adapters."""
    return unadapted_parameters(learner.policy.model) if learner.config.lora_rank else {}


def engine_for(config: TrainConfig, model: Decoder, tokenizer: Any, speculate: bool, num_trained: int | None = None) -> Engine:
    """An engine of the run for this policy, which it owns from now on. On a GPU its KV cache leaves room for what the policy's
    update needs, unless the configuration says how large it is. `num_trained`: see `kv_budget`."""
    device = model.norm.device
    if device.type == "cuda" and config.engine.kv_memory_gb is None and config.engine.kv_tokens is None:
        room = kv_budget(config, model.config, free_bytes(config, device), speculate, num_trained)
        config = config.model_copy(update={"engine": config.engine.model_copy(update={"kv_memory_gb": room})})
    if not speculate:
        return _with_room(Engine(model, tokenizer, "none", "off", config.engine), config)
    drafter = make_drafter(config, model)
    capture = config.engine.capture
    if isinstance(drafter, Eagle) and config.train_drafter:
        capture = tuple(dict.fromkeys((*capture, *capture_layers(drafter.config))))
    own = config.engine.model_copy(update={"capture": capture})
    return _with_room(Engine(model, tokenizer, drafter, config.strategy, own), config)


def _with_room(engine: Engine, config: TrainConfig) -> Engine:
    """The engine, if an answer of full length fits into its KV cache."""
    check_kv_room(config, engine.model.config, engine.scheduler.pages.num_pages * config.engine.page_size)
    return engine


def make_drafter(config: TrainConfig, policy: Decoder) -> Eagle | str:
    """The run's drafter as an engine accepts it: a name, or a learned drafter."""
    if not config.has_learned_drafter:
        return config.drafter
    if config.drafter != "learned":
        return load_eagle(config.drafter, policy)
    if not config.train_drafter:
        raise ValueError("train_drafter: false, but an untrained drafter must be trained; set `drafter` to a folder")
    return new_drafter(config, policy)
