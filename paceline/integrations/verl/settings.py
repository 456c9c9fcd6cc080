"""What verl's rollout configuration means for an engine: the engine's own settings, and the sampling parameters of a request."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from paceline.config import Config, EngineConfig
from paceline.engine.prompts import derive_seed
from paceline.types import SamplingParams

_PARALLEL = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
_IGNORED = {"n": (None, 1), "repetition_penalty": (None, 1.0), "presence_penalty": (None, 0.0), "frequency_penalty": (None, 0.0),
            "logprobs": None, "prompt_logprobs": (None,), "skip_special_tokens": None, "spaces_between_special_tokens": None,
            "detokenize": None, "include_stop_str_in_output": None}
"""Sampling parameters of other engines that change nothing here, with the values that they may have (None: any)."""


class ServerSettings(Config):
    """Settings of one rollout server: `actor_rollout_ref.rollout.engine_kwargs.paceline`."""

    drafter: str = "suffix"
    """Drafter: `suffix`, `none`, or the folder of a learned drafter."""
    strategy: str = "auto"
    """Speculation strategy: off, auto, or a fixed one such as suffix:d8w2v16. It changes no token."""
    device: str | None = None
    """Device of the engine. None: the GPU that verl assigns to the rollout, or the CPU if it assigns none."""
    threads: int | None = Field(None, ge=1)
    """Number of CPU threads. None: PyTorch's default."""
    engine: dict[str, Any] = Field(default_factory=dict)
    """Fields of `EngineConfig`. `max_context` and `max_batch` follow from verl's configuration if they are not given."""


def check_parallel(config: Any) -> None:
    """ValueError if a rollout replica would be more than one process."""
    for name in _PARALLEL:
        if getattr(config, name) != 1:
            raise ValueError(f"rollout.{name}: {getattr(config, name)} is not supported by rollout.name=paceline, set it to 1")


def engine_config(settings: ServerSettings, config: Any, model_context: int) -> EngineConfig:
    """The engine's configuration. `config`: verl's rollout configuration; `model_context`: the model's own limit."""
    length = config.max_model_len or config.prompt_length + config.response_length
    return EngineConfig(**{"max_context": min(length, model_context), "max_batch": _max_batch(config), **settings.engine})


def _max_batch(config: Any) -> int | None:
    """verl's limit of concurrent requests if it is below the engine's own default."""
    return config.max_num_seqs if config.max_num_seqs <= 64 else None


def sampling_params(given: dict[str, Any], config: Any, prompt_length: int, key: str) -> SamplingParams:
    """The sampling parameters of a request from verl's, which are named as in vLLM. `key` distinguishes requests that are to get
    different noise. ValueError if a parameter is not supported."""
    left = {name: value for name, value in given.items() if value is not None}
    limit = left.pop("max_tokens", left.pop("max_new_tokens", None))
    if limit is None:
        limit = min(config.response_length, config.prompt_length + config.response_length - prompt_length)
    stop = left.pop("stop", ())
    params = SamplingParams(
        temperature=left.pop("temperature", 1.0), top_p=left.pop("top_p", 1.0), top_k=max(0, left.pop("top_k", 0)),
        min_p=left.pop("min_p", 0.0), max_new_tokens=max(1, limit), stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(left.pop("stop_token_ids", ())), ignore_eos=left.pop("ignore_eos", config.ignore_eos),
        seed=left.pop("seed", derive_seed(config.seed, key, 0)))
    for name, value in left.items():
        allowed = _IGNORED.get(name, ())
        if allowed is not None and value not in allowed:
            raise ValueError(f"sampling_params: {name}={value!r} is not supported by rollout.name=paceline")
    return params
