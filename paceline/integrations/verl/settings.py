"""What verl's rollout configuration means for an engine: the engine's own settings, and the sampling parameters of a request."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from paceline.config import Config, EngineConfig, TrainConfig
from paceline.engine.prompts import derive_seed
from paceline.trainer.config_files import check_drafter_settings
from paceline.types import SamplingParams

_PARALLEL = ("data_parallel_size", "pipeline_model_parallel_size")
_SAME = ("temperature", "top_p", "min_p", "stop", "stop_token_ids", "presence_penalty", "frequency_penalty", "repetition_penalty",
         "logit_bias", "allowed_token_ids", "bad_words", "structured_outputs", "min_tokens")
"""Sampling parameters that vLLM and Paceline name alike."""
_WITHOUT_EFFECT = {"logprobs", "skip_special_tokens", "spaces_between_special_tokens", "detokenize", "include_stop_str_in_output"}
"""Sampling parameters of other engines that change no token here."""


class ServerSettings(Config):
    """Settings of one rollout server: `actor_rollout_ref.rollout.engine_kwargs.paceline`."""

    drafter: str = "suffix"
    """Drafter: `suffix`, `none`, the folder or hub id of a learned drafter, or `learned` for a new one."""
    strategy: str = "auto"
    """Speculation strategy: off, auto, or a fixed one such as suffix:d8w2v16. It changes no token."""
    train_drafter: bool = True
    """Whether a learned drafter is trained between two steps of verl's trainer."""
    drafter_folder: str | None = None
    """Folder for the checkpoints of the trained drafters, one subfolder per replica; a later run continues them. None: they are
    not kept."""
    spot: dict[str, Any] = Field(default_factory=dict)
    """Fields of `SpotConfig`: how the drafter is trained."""
    drafter_budget: dict[str, Any] = Field(default_factory=dict)
    """Fields of `TrainingBudgetConfig`: how long it is trained per step."""
    device: str | None = None
    """Device of the engine. None: the GPU that verl assigns to the rollout, or the CPU if it assigns none."""
    threads: int | None = Field(None, ge=1)
    """Number of CPU threads. None: PyTorch's default."""
    engine: dict[str, Any] = Field(default_factory=dict)
    """Fields of `EngineConfig`. `max_context` and `max_batch` follow from verl's configuration if they are not given."""


_LONG_RUN = 1000
"""Number of steps that a run is assumed to have: a rollout server is not told."""


def drafter_config(settings: ServerSettings, config: Any) -> TrainConfig:
    """What the drafter and its training are made from. ConfigError if `spot` or `drafter_budget` have fields that are not
    settings."""
    made = TrainConfig(drafter=settings.drafter, strategy=settings.strategy, train_drafter=settings.train_drafter,
                       spot=settings.spot, drafter_budget=settings.drafter_budget, steps=_LONG_RUN,
                       rollout={"temperature": config.temperature})
    check_drafter_settings(made)
    return made


def check_parallel(config: Any) -> None:
    """ValueError if a rollout replica would be more than one engine."""
    for name in _PARALLEL:
        if getattr(config, name) != 1:
            raise ValueError(f"rollout.{name}: {getattr(config, name)} is not supported by rollout.name=paceline, set it to 1")


def engine_config(settings: ServerSettings, config: Any, model_context: int) -> EngineConfig:
    """The engine's configuration. `config`: verl's rollout configuration; `model_context`: the model's own limit."""
    length = config.max_model_len or config.prompt_length + config.response_length
    if "tensor_parallel" in settings.engine:
        raise ValueError("engine_kwargs.paceline.engine.tensor_parallel: it is called rollout.tensor_model_parallel_size in verl")
    return EngineConfig(**{"max_context": min(length, model_context), "max_batch": _max_batch(config),
                           "tensor_parallel": config.tensor_model_parallel_size, **settings.engine})


def _max_batch(config: Any) -> int | None:
    """verl's limit of concurrent requests if it is below the engine's own default."""
    return config.max_num_seqs if config.max_num_seqs <= 64 else None


def sampling_params(given: dict[str, Any], config: Any, prompt_length: int, key: str) -> SamplingParams:
    """The sampling parameters of a request from verl's, which are named as in vLLM. `key` distinguishes requests that are to get
    different noise. ValueError if a parameter is not supported."""
    left = {name: value for name, value in given.items() if value is not None and name not in _WITHOUT_EFFECT}
    limit = left.pop("max_tokens", left.pop("max_new_tokens", None))
    if limit is None:
        limit = min(config.response_length, config.prompt_length + config.response_length - prompt_length)
    params = SamplingParams(
        **{name: left.pop(name) for name in _SAME if name in left}, top_k=max(0, left.pop("top_k", 0)),
        max_new_tokens=max(1, limit), ignore_eos=left.pop("ignore_eos", config.ignore_eos),
        seed=left.pop("seed", derive_seed(config.seed, key, 0)))
    if left.pop("n", 1) != 1 or left:
        wrong = ", ".join(left) or "n"
        raise ValueError(f"sampling_params: {wrong}: not supported by rollout.name=paceline")
    return params
