"""Rollouts for TRL's `GRPOTrainer`: `GRPOTrainer(..., rollout_func=PacelineRollout())`.

The engine lives in the trainer's process and has its own copy of the policy. Before every generation it is compared with the
trainer's weights, and gets them if they differ. Nothing goes through files. A learned drafter is trained after each generation,
before the policy's update."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback
from trl.distributed import DistributedBackend

from paceline.config import ConfigError, ConfigProblem, TrainConfig
from paceline.engine import Engine
from paceline.engine.pool import RequestPool
from paceline.engine.prompts import derive_seed
from paceline.integrations.huggingface import merged_weights, policy_config
from paceline.models.state_dict import export_state, load_state
from paceline.models.weights import empty_model, parse_dtype
from paceline.spot.alarms import AlarmConfig
from paceline.trainer.config_files import check_drafter_settings
from paceline.trainer.drafter import OnlineDrafterTrainer, make_drafter_trainer
from paceline.trainer.monitor import DrafterMonitor
from paceline.trainer.parts import engine_for
from paceline.trainer.rollouts import RolloutFailed
from paceline.types import Rollout, RolloutGroup, SamplingParams, StepResult

logger = logging.getLogger(__name__)

SETTINGS = ("strategy", "drafter", "train_drafter", "drafter_budget", "drafter_alarms", "spot", "engine")
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
        self._calls = Counter[str]()  # of this step for training, of this evaluation

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Generate one completion for each prompt, as `GRPOTrainer` asks for it."""
        if self._trainer is None:
            self._start(trainer)
        elif self._trainer is not trainer:
            raise ValueError("PacelineRollout: it belongs to another trainer; make one for each")
        else:
            self.sync_weights()
        params = sampling_params(trainer)
        encoded, images, _ = trainer._tokenize_prompts(list(prompts))  # with the tools of each prompt
        if images is not None:
            raise ValueError("PacelineRollout: images are not supported")
        prompt_ids = [list(ids) for ids in encoded]
        mode = self._mode
        self.engine.wake()
        rollouts = self._generate(prompt_ids, params, self._next_seeds(mode, params.seed, len(prompts)), mode)
        self._rest()
        return {"prompt_ids": prompt_ids, "completion_ids": [rollout.token_ids for rollout in rollouts],
                "logprobs": [rollout.logprobs for rollout in rollouts]}

    def continue_answers(self, texts: list[list[int]]) -> list[Rollout]:
        """Generate what follows the results of tools. `texts`: prompts, answers so far, and results. The KV cache of what was
        generated before is used again, unless the engine has slept."""
        params = sampling_params(self._trainer)
        self.engine.wake()
        rollouts = generate(self.engine, texts, params, self._next_seeds(self._mode, params.seed, len(texts)))
        self._rest()
        return rollouts

    @property
    def _mode(self) -> str:
        return "train" if self._trainer.model.training else "eval"

    def _rest(self) -> None:
        """Free the KV cache while the trainer trains, if it is to be freed."""
        if self._sleep or (self._sleep is None and self.engine.device.type == "cuda"):
            self.engine.sleep()

    def sync_weights(self) -> bool:
        """Give the engine the trainer's weights if any of them differs from the engine's. Returns whether one did.

        The values are compared, because nothing else says reliably that weights have changed: checkpoints are loaded without a
        step, and optimizers may write past autograd's version counters. The first difference ends the comparison, so weights
        that are the same cost most: about half as much as an update."""
        own = export_state(self.engine.model)
        with closing(trained_weights(self._trainer)) as weights:
            differ = any(name in own and not torch.equal(own[name], value.to(own[name])) for name, value in weights)
        if differ:
            version = max(self.engine.version + 1, self._trainer.state.global_step)
            self.engine.update_weights(trained_weights(self._trainer), version)
        return differ

    def _next_seeds(self, mode: str, seed: int, count: int) -> list[int]:
        """The seeds of this call's answers. Those of training depend on the trainer's step, those of evaluations do not: every
        evaluation samples with the same seeds, and does not change what is trained on."""
        place = f"train/{self._trainer.state.global_step}" if mode == "train" else "eval"
        key = f"{place}/{self._calls[mode]}/{self._trainer.accelerator.process_index}"
        self._calls[mode] += 1
        return [derive_seed(seed, key, index) for index in range(count)]

    # -- the first call

    def _start(self, trainer: Any) -> None:
        """Make the engine and what belongs to it, and let the trainer use the log-probabilities."""
        if DistributedBackend(trainer.accelerator).fsdp_version == 1:
            raise ValueError("PacelineRollout: FSDP1 is not supported; set fsdp_version: 2 in accelerate's configuration")
        params, state = sampling_params(trainer), trainer.state
        config = TrainConfig(**self._settings, seed=params.seed, steps=max(1, state.max_steps), out=trainer.args.output_dir,
                             rollout={"max_new_tokens": params.max_new_tokens, "temperature": params.temperature})
        if config.engine.num_shares > 1:
            raise ValueError("PacelineRollout: engine.tensor_parallel: TRL's processes generate with a whole policy each")
        self._config, self.engine = config, self._make_engine(trainer, config)
        self.engine.version = state.global_step
        self._trainer = trainer
        self._monitor_drafter()
        trainer.add_callback(_TrainerEvents(self))
        self.engine.warm_up(trainer.args.generation_batch_size)
        # TRL computes its correction and metrics for log-probabilities of the sampler only if the sampler is vLLM's.
        trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = True, _Generation(self), state.global_step
        trainer.vllm_mode = "server"  # it has no vLLM to ask for its context

    def _make_engine(self, trainer: Any, config: TrainConfig) -> Engine:
        policy = trainer.accelerator.unwrap_model(trainer.model)
        own = torch.bfloat16 if trainer.args.bf16 else next(policy.parameters()).dtype
        model = empty_model(policy_config(policy, tuple(trainer.eos_token_ids)), parse_dtype(self._dtype or own) or own,
                            trainer.accelerator.device)
        load_state(model, trained_weights(trainer))
        trained = (parameter for parameter in policy.parameters() if parameter.requires_grad)  # adapters only?
        num_trained = sum(vars(each).get("ds_numel", each.numel()) for each in trained)  # ZeRO-3 leaves parameters empty
        return engine_for(config, model, trainer.processing_class, speculate=True, num_trained=num_trained)

    def _monitor_drafter(self) -> None:
        """Watch over the learned drafter, if there is one."""
        config, learned = self._config, self.engine.eagle
        if learned is None:
            return
        if not config.train_drafter and learned.module.policy_fingerprint is not None:
            self.engine.drafter_version = min(learned.module.policy_fingerprint.version, self.engine.version)
        self._monitor = DrafterMonitor(self.engine, AlarmConfig(**config.drafter_alarms))

    def restart_calls(self, *modes: str) -> None:
        """Count the calls of these modes from 0 again: a step or an evaluation begins."""
        for mode in modes:
            del self._calls[mode]

    # -- drafter training

    def begin_drafter_training(self) -> OnlineDrafterTrainer | None:
        """Return the learned drafter's trainer, which continues from its last checkpoint; None if there is nothing to train."""
        config = self._config
        if self.drafter_trainer is None and self.engine.eagle is not None and config.train_drafter:
            rank = self._trainer.accelerator.process_index
            folder = Path(config.out) / (f"{DRAFTER_FOLDER}-{rank}" if rank else DRAFTER_FOLDER)
            self.drafter_trainer = make_drafter_trainer(config, self.engine, folder)
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
            self.drafter_trainer.on_alarm()
        return metrics


class _Generation:
    """Takes the place of TRL's `VLLMGeneration`. The trainer calls tools and environments itself, and has this generate each turn
    after the first."""

    def __init__(self, rollout: PacelineRollout) -> None:
        self._rollout = rollout

    def sync_weights(self) -> None:
        """TRL calls this when its step has changed. `PacelineRollout` compares the weights before every generation."""

    def generate(self, prompts: list[list[int]], images: Any, num_generations: int,
                 profiler: Any) -> tuple[None, list[list[int]], list[list[list[float]]], None]:
        """Return token ids and, for each of them, a list with its log-probability."""
        assert images is None and num_generations == 1, "turns of text, each of its own conversation"
        rollouts = self._rollout.continue_answers(prompts)
        return None, [r.token_ids for r in rollouts], [[[value] for value in r.logprobs] for r in rollouts], None


class _TrainerEvents(TrainerCallback):
    """Tells `PacelineRollout` where steps and evaluations begin, and writes the drafter's checkpoints with the trainer's."""

    def __init__(self, rollout: PacelineRollout) -> None:
        self._rollout = rollout

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._rollout.restart_calls("train", "eval")

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._rollout.restart_calls("eval")

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        self._rollout.restart_calls("eval")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._rollout.drafter_trainer is not None:
            self._rollout.drafter_trainer.save()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._rollout.end_drafter_training()


def trained_weights(trainer: Any) -> Generator[tuple[str, Tensor], None, None]:
    """The weights that the trainer trains, as `merged_weights` yields them. If they are sharded over processes, all of them have
    to iterate."""
    return merged_weights(trainer.accelerator.unwrap_model(trainer.model), DistributedBackend(trainer.accelerator).gather_params)


def sampling_params(trainer: Any) -> SamplingParams:
    """The sampling parameters of a `GRPOTrainer`. `generation_kwargs` are fields of `SamplingParams`; others are a ValueError."""
    own = {"temperature": trainer.temperature, "top_p": trainer.top_p, "top_k": trainer.top_k or 0, "min_p": trainer.min_p or 0.0,
           "repetition_penalty": trainer.repetition_penalty or 1.0, "max_new_tokens": trainer.max_completion_length,
           "seed": trainer.args.seed}
    return SamplingParams(**{**own, **(trainer.args.generation_kwargs or {})})


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
        for result, finished, _ in requests.steps():
            for place, rollout in finished:
                if rollout.finish_reason == "error":
                    raise RolloutFailed(f"prompt {place}: its answer ended with an error: {rollout.error}")
                rollouts[place] = rollout
            on_step(result, len(rollouts))
    return [rollouts[place] for place in range(len(prompts))]
