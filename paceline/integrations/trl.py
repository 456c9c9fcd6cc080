"""Rollouts for TRL's `GRPOTrainer`: `GRPOTrainer(..., rollout_func=PacelineRollout())`.

The engine lives in the trainer's process and has its own copy of the policy, which gets the trainer's weights whenever they have
changed. Nothing goes through files. A learned drafter is trained after each generation, before the policy's update."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from paceline.config import ConfigError, ConfigProblem, TrainConfig
from paceline.engine import Engine
from paceline.engine.pool import RequestPool
from paceline.engine.prompts import derive_seed
from paceline.integrations.huggingface import merged_weights, policy_config
from paceline.models.state_dict import load_state
from paceline.models.weights import empty_model, parse_dtype
from paceline.spot.alarms import AlarmConfig
from paceline.spot.background import generation_stream, idle_cores, running_on
from paceline.trainer.config_files import check_drafter_settings
from paceline.trainer.drafter import OnlineDrafterTrainer, make_drafter_trainer
from paceline.trainer.monitor import DrafterMonitor
from paceline.trainer.parts import engine_for
from paceline.trainer.rollouts import RolloutFailed
from paceline.types import Rollout, RolloutGroup, SamplingParams, StepResult

logger = logging.getLogger(__name__)

SETTINGS = ("strategy", "drafter", "train_drafter", "drafter_mode", "drafter_budget", "drafter_alarms", "spot", "engine")
"""Fields of `TrainConfig` that `PacelineRollout` takes. Everything else is TRL's."""
DRAFTER_FOLDER = "paceline-drafter"
"""Folder of the drafter's checkpoints, within the trainer's output folder. Those of further processes have their number at the
end."""


class PacelineRollout:
    """A `rollout_func` for `GRPOTrainer` that generates with a Paceline engine.

    >>> rollout = PacelineRollout(drafter="learned", engine={"kv_tokens": 65536})
    >>> GRPOTrainer(model, reward_funcs, GRPOConfig(...), train_dataset, rollout_func=rollout).train()

    Sampling parameters, seed and chat template are the trainer's. The log-probabilities that tokens were sampled with go back to
    the trainer, and its importance-sampling correction uses them: GRPOConfig's `vllm_importance_sampling_*` settings apply."""

    engine: Engine
    """The engine; it exists from the first generation on."""
    drafter_trainer: OnlineDrafterTrainer | None = None
    """Trains the learned drafter; None while the trainer does not train, and if there is nothing to train."""

    def __init__(self, dtype: str | None = None, sleep: bool | None = None, **settings: Any) -> None:
        """`dtype`: data type of generation; None: bfloat16 if the trainer uses bfloat16, otherwise that of its weights. `sleep`:
        free the KV cache while the trainer trains; None: only on a GPU. `settings`: fields of `TrainConfig`, those in
        `SETTINGS`."""
        foreign = sorted(set(settings) & set(TrainConfig.model_fields) - set(SETTINGS))
        if foreign:
            raise ConfigError([ConfigProblem(key, "it is set by GRPOTrainer and GRPOConfig") for key in foreign])
        check_drafter_settings(TrainConfig(**settings))
        if dtype is not None:
            parse_dtype(dtype)
        self._dtype, self._sleep, self._settings = dtype, sleep, settings
        self._trainer: Any = None
        self._config: TrainConfig
        self._monitor: DrafterMonitor | None = None
        self._stream: torch.cuda.Stream | None = None
        self._synced = -1  # the trainer's step whose weights the engine has
        self._calls = 0  # of this step

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Generate one completion for each prompt, as `GRPOTrainer` asks for it."""
        if self._trainer is None:
            self._start(trainer)
        elif self._trainer is not trainer:
            raise ValueError("PacelineRollout: it belongs to another trainer; make one for each")
        self.sync_weights()
        params = sampling_params(trainer)
        prompt_ids = encode_prompts(prompts, trainer)
        training = trainer.model.training
        key = f"{'train' if training else 'eval'}/{trainer.state.global_step}/{self._calls}/{trainer.accelerator.process_index}"
        seeds = [derive_seed(params.seed, key, index) for index in range(len(prompts))]
        self._calls += 1
        self.engine.wake()
        rollouts = self._generate(prompt_ids, params, seeds, "train" if training else "eval")
        if self._sleep or (self._sleep is None and self.engine.device.type == "cuda"):
            self.engine.sleep()
        return {"prompt_ids": prompt_ids, "completion_ids": [rollout.token_ids for rollout in rollouts],
                "logprobs": [rollout.logprobs for rollout in rollouts]}

    def sync_weights(self) -> None:
        """Give the engine the trainer's weights, if the trainer has done a step since it got them."""
        step = self._trainer.state.global_step
        if step != self._synced:
            if self._synced >= 0:
                self.engine.update_weights(merged_weights(self._trainer.accelerator.unwrap_model(self._trainer.model)))
            self._synced, self._calls = step, 0

    # -- the first call

    def _start(self, trainer: Any) -> None:
        """Make the engine and what belongs to it, and let the trainer use the log-probabilities."""
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise ValueError("PacelineRollout: a policy that is sharded over processes (FSDP, DeepSpeed) is not supported")
        if trainer.tools:
            raise ValueError("PacelineRollout: tools are not supported")
        params, state = sampling_params(trainer), trainer.state
        config = TrainConfig(**self._settings, seed=params.seed, steps=max(1, state.max_steps), out=trainer.args.output_dir,
                             rollout={"max_new_tokens": params.max_new_tokens, "temperature": params.temperature})
        self._config, self.engine = config, self._make_engine(trainer, config)
        self.engine.version = state.global_step
        self._trainer, self._synced = trainer, state.global_step
        self._monitor_drafter()
        self.engine.warm_up(trainer.args.generation_batch_size)
        # TRL computes its correction and metrics for log-probabilities of the sampler only if the sampler is vLLM's, and then
        # asks `vllm_generation` to follow the weights.
        trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = True, self, state.global_step

    def _make_engine(self, trainer: Any, config: TrainConfig) -> Engine:
        policy = trainer.accelerator.unwrap_model(trainer.model)
        own = torch.bfloat16 if trainer.args.bf16 else next(policy.parameters()).dtype
        model = empty_model(policy_config(policy, tuple(trainer.eos_token_ids)), parse_dtype(self._dtype or own) or own,
                            trainer.accelerator.device)
        load_state(model, merged_weights(policy))
        num_trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)  # adapters only?
        return engine_for(config, model, trainer.processing_class, speculate=True, num_trained=num_trained)

    def _monitor_drafter(self) -> None:
        """Watch over the learned drafter, if there is one."""
        config, learned = self._config, self.engine.eagle
        if learned is None:
            return
        if not config.train_drafter and learned.module.policy_fingerprint is not None:
            self.engine.drafter_version = min(learned.module.policy_fingerprint.version, self.engine.version)
        self._monitor = DrafterMonitor(self.engine, AlarmConfig(**config.drafter_alarms), config.train_drafter)
        if config.train_drafter:
            self._trainer.add_callback(_DrafterCheckpoints(self))

    # -- drafter training

    def begin_drafter_training(self) -> OnlineDrafterTrainer | None:
        """Return the learned drafter's trainer, which continues from its last checkpoint; None if there is nothing to train."""
        config, device = self._config, self.engine.device
        if self.drafter_trainer is None and self.engine.eagle is not None and config.train_drafter:
            rank = self._trainer.accelerator.process_index
            folder = Path(config.out) / (f"{DRAFTER_FOLDER}-{rank}" if rank else DRAFTER_FOLDER)
            self.drafter_trainer = make_drafter_trainer(config, self.engine, folder, max(1, idle_cores()))
            if config.drafter_mode == "cuda_stream" and device.type == "cuda":
                self._stream = generation_stream(device)
        return self.drafter_trainer

    def end_drafter_training(self) -> None:
        """Write the drafter's last checkpoint and end its training. If the trainer trains once more, it is continued."""
        if self.drafter_trainer is not None:
            self.drafter_trainer.save()
            self.drafter_trainer.close()
            self.drafter_trainer = None

    # -- every call

    def _generate(self, prompts: list[list[int]], params: SamplingParams, seeds: list[int], mode: str) -> list[Rollout]:
        """Generate one answer for each prompt, train the drafter in training mode, and report metrics to the trainer."""
        step, training = self._trainer.state.global_step + 1, mode == "train"
        drafter_trainer = self.begin_drafter_training() if training else None
        if drafter_trainer is not None:
            drafter_trainer.begin_step(step)

        def on_step(result: StepResult, num_finished: int) -> None:
            if self._monitor is not None and training:
                self._monitor.on_engine_step(result)
            if drafter_trainer is not None:
                drafter_trainer.on_engine_step(result, num_finished, len(prompts))

        self.engine.reset_stats()
        began = time.perf_counter()
        with running_on(self._stream):
            rollouts = generate(self.engine, prompts, params, seeds, on_step)
        seconds = time.perf_counter() - began
        stats = self.engine.stats()
        metrics = {"paceline/accept_length": stats.tokens_per_verification, "paceline/seconds": seconds,
                   "paceline/tokens_per_second": stats.generated_tokens / max(seconds, 1e-9)}
        if drafter_trainer is not None:
            metrics |= drafter_trainer.train([RolloutGroup([], rollouts)], step, seconds)
        if self._monitor is not None and training:
            metrics |= self._observe_drafter(self._monitor)
        for name, value in metrics.items():
            self._trainer._metrics[mode][name].append(value)
        return rollouts

    def _observe_drafter(self, monitor: DrafterMonitor) -> dict[str, float]:
        metrics, alarms = monitor.end_step()
        for alarm in alarms:
            logger.warning("drafter %s: %s", alarm.name, alarm.message)
        if self.drafter_trainer is not None and any(alarm.name != "calibration" for alarm in alarms):
            self.drafter_trainer.end_pause()
        return metrics


class _DrafterCheckpoints(TrainerCallback):
    """Writes the drafter's checkpoint together with the trainer's."""

    def __init__(self, rollout: PacelineRollout) -> None:
        self._rollout = rollout

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._rollout.drafter_trainer is not None:
            self._rollout.drafter_trainer.save()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._rollout.end_drafter_training()


def sampling_params(trainer: Any) -> SamplingParams:
    """The sampling parameters of a `GRPOTrainer`. `generation_kwargs` are fields of `SamplingParams`; others are a ValueError."""
    own = {"temperature": trainer.temperature, "top_p": trainer.top_p, "top_k": trainer.top_k or 0, "min_p": trainer.min_p or 0.0,
           "repetition_penalty": trainer.repetition_penalty or 1.0, "max_new_tokens": trainer.max_completion_length,
           "seed": trainer.args.seed}
    return SamplingParams(**{**own, **(trainer.args.generation_kwargs or {})})


def encode_prompts(prompts: Sequence[Any], trainer: Any) -> list[list[int]]:
    """The token ids of prompts (texts or conversations), encoded as `GRPOTrainer` does it for its own generation."""
    tokenizer = trainer.processing_class
    if isinstance(prompts[0], str):
        return [list(ids) for ids in tokenizer(text=list(prompts))["input_ids"]]
    encoded = tokenizer.apply_chat_template(
        conversation=list(prompts), chat_template=trainer.chat_template, add_generation_prompt=True, tokenize=True,
        return_dict=True, **trainer.chat_template_kwargs)
    return [list(ids) for ids in encoded["input_ids"]]


def generate(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int],
             on_step: Any = lambda result, num_finished: None) -> list[Rollout]:
    """Generate one answer for each prompt, with its own seed. Equal prompts share their KV cache. `on_step` gets the result of
    every engine step and the number of finished answers. RolloutFailed if an answer ends with an error."""
    places: dict[tuple[int, ...], list[int]] = {}
    for place, prompt in enumerate(prompts):
        places.setdefault(tuple(prompt), []).append(place)
    rollouts: dict[int, Rollout] = {}
    with RequestPool[int](engine) as requests:
        for prompt, own in places.items():
            requests.add(list(prompt), params, own, seeds=[seeds[place] for place in own])
        for result, finished in requests.steps():
            for place, rollout in finished:
                if rollout.finish_reason == "error":
                    raise RolloutFailed(f"prompt {place}: its answer ended with an error: {rollout.error}")
                rollouts[place] = rollout
            on_step(result, len(rollouts))
    return [rollouts[place] for place in range(len(prompts))]
