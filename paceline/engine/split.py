"""Splitting a policy over ranks, as rank 0 does it when an engine starts."""

from __future__ import annotations

from functools import partial

import torch

from paceline.config import EngineConfig
from paceline.engine.collectives import device_of
from paceline.engine.ranks import Ranks
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.parallel import split_decoder
from paceline.models.partition import Partition
from paceline.models.state_dict import load_state
from paceline.models.weights import MakeDecoder, empty_model


def check_split(model: ModelConfig, config: EngineConfig) -> None:
    """Raise a ValueError unless this policy can be split as the configuration says. Nothing is started."""
    Partition(0, config.tensor_parallel, config.num_shares).check(model)


def start_ranks(config: EngineConfig, device: torch.device) -> Ranks | None:
    """Start the other ranks, if there are any."""
    if config.tensor_parallel == 1:
        return None
    if device.index:
        raise ValueError(f"tensor_parallel: the ranks have GPUs 0, 1, ..., so that the device is cuda, not {device}")
    return Ranks(config.tensor_parallel, device, config.rank_timeout_s)


def decoder_maker(config: EngineConfig, ranks: Ranks | None, has_learned: bool) -> MakeDecoder:
    """Return what makes rank 0's part of a policy, or the whole policy if it is not split. `has_learned`: a learned drafter
    works there."""
    if config.num_shares == 1:
        return Decoder
    partition = Partition(0, config.tensor_parallel, config.num_shares)
    return partial(split_decoder, partition=partition, group=None if ranks is None else ranks.group, drafts=has_learned)


def split_policy(whole: Decoder, config: EngineConfig, ranks: Ranks | None, has_learned: bool) -> Decoder:
    """Return rank 0's part of a policy that is here as a whole."""
    device = device_of(whole.norm.device, 0) if ranks is not None else whole.norm.device
    model = empty_model(whole.config, whole.norm.dtype, device, decoder_maker(config, ranks, has_learned))
    load_state(model, dict(whole.named_parameters()))
    return model
