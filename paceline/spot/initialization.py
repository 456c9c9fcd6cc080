"""Initialization of a new drafter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, islice

import torch
from torch import Tensor

from paceline.drafters.eagle import Eagle, EagleConfig, Form
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.spot.scaling import measure_scales, to_plain_scale
from paceline.types import FeatureRecord


def capture_layers(config: EagleConfig) -> tuple[int, ...]:
    """Returns the layers whose hidden states an engine must capture to train this drafter: those it reads, and the final one,
    which is its target."""
    return tuple(dict.fromkeys((*config.feature_layers, -1)))


def fresh_eagle(policy: Decoder, form: Form = "eagle", records: Sequence[FeatureRecord] = (), draft_vocab: int = 0,
                seed: int = 0, window: int | None = None, texts: Iterable[Sequence[int]] | None = None) -> Eagle:
    """Returns a new drafter for the policy, in its dtype and on its device.

    A new EAGLE drafter predicts that the next hidden state equals the current one: its layer adds nothing yet.

    Args:
        policy: The policy to draft for.
        form: Architecture of the drafter.
        records: Captured answers, from which an EAGLE-3 drafter measures the scale of its inputs.
        draft_vocab: Number of tokens that the drafter can predict; 0 means all of the policy's.
        seed: Seed of the random weights.
        window: Number of committed tokens that its draft tokens attend to; None means all of them.
        texts: Token ids of the texts from which a reduced vocabulary takes its tokens; None means the records.
    """
    config = replace(EagleConfig.for_policy(policy.config, form), window=window)
    device, hidden = policy.norm.device, policy.config.hidden_size
    texts = (record.token_ids for record in records) if texts is None else texts
    ids = draft_vocabulary(texts, draft_vocab, policy.config)
    dtype = torch.promote_types(torch.float32, policy.norm.dtype)
    module = Eagle.random(config, seed, hidden**-0.5, dtype, device, None if ids is None else ids.to(device))
    with torch.no_grad():
        if form == "eagle":
            module.fc.weight[:, :hidden] *= 0.5
            module.fc.weight[:, hidden:] = torch.eye(hidden, dtype=dtype, device=device)
        else:
            assert module.norm is not None
            module.fc.weight *= len(config.feature_layers) ** -0.5
            module.norm.fill_(policy.norm.double().square().mean().sqrt().item())  # logits of the same scale as the policy's
        module.attention.o.weight.zero_()
        module.mlp.down.weight.zero_()
    scales = measure_scales(policy, config, records)
    return to_plain_scale(module, dict(module.named_parameters()), scales, config, policy.norm.dtype)


def is_untrained(drafter: Eagle) -> bool:
    """Whether the drafter is as `fresh_eagle` made it: its layer adds nothing yet."""
    return not bool(drafter.attention.o.weight.any())


def draft_vocabulary(texts: Iterable[Sequence[int]], size: int, policy: ModelConfig) -> Tensor | None:
    """Returns the sorted ids [size] of a reduced vocabulary; None means all tokens. They are the tokens that end an answer, the
    most frequent ones of the texts, and then the lowest ids, because tokenizers usually number merges in the order of their
    frequency."""
    if size == 0 or size >= policy.vocab_size:
        return None
    counts = Counter(chain.from_iterable(texts))
    ranked = chain(policy.eos_token_ids, (token for token, _ in counts.most_common()), range(policy.vocab_size))
    return torch.tensor(sorted(islice(dict.fromkeys(ranked), size)))
