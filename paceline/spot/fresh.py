"""A drafter to begin with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.drafters.eagle import Eagle, EagleConfig, Form
from paceline.models.decoder import Decoder
from paceline.spot.scales import measure, to_plain
from paceline.types import FeatureRecord


def capture_layers(config: EagleConfig) -> tuple[int, ...]:
    """What an engine must capture for this drafter to be trained: what it reads, and the final state (its targets)."""
    return tuple(dict.fromkeys((*config.feature_layers, -1)))


def fresh_eagle(policy: Decoder, form: Form = "eagle", records: Sequence[FeatureRecord] = (), draft_vocab: int = 0,
                seed: int = 0) -> Eagle:
    """At first an EAGLE drafter says: the next state is this one. `records` tell an EAGLE-3 drafter the size of what it reads,
    and which tokens a reduced vocabulary of `draft_vocab` (0: all) should hold. In the policy's dtype and on its device."""
    config = EagleConfig.for_policy(policy.config, form)
    device, hidden = policy.norm.device, policy.config.hidden_size
    ids = draft_vocabulary(records, draft_vocab, policy.config.vocab_size)
    dtype = torch.promote_types(torch.float32, policy.norm.dtype)
    module = Eagle.random(config, seed, hidden**-0.5, dtype, device, None if ids is None else ids.to(device))
    with torch.no_grad():
        if form == "eagle":
            module.fc.weight[:, :hidden] *= 0.5
            module.fc.weight[:, hidden:] = torch.eye(hidden, dtype=dtype, device=device)
        else:
            assert module.norm is not None
            module.fc.weight *= len(config.feature_layers) ** -0.5
            module.norm.fill_(policy.norm.double().square().mean().sqrt().item())  # logits of the policy's own size
        module.attention.o.weight.zero_()  # the layer adds nothing yet
        module.mlp.down.weight.zero_()
    return to_plain(module, dict(module.named_parameters()), measure(policy, config, records), config, policy.norm.dtype)


def draft_vocabulary(records: Sequence[FeatureRecord], size: int, vocabulary: int) -> Tensor | None:
    """[size] token ids in order: the most frequent in the records, then the lowest (merges were learnt in the order of their
    use). None: all of them."""
    if size == 0 or size >= vocabulary:
        return None
    counts = Counter(token for record in records for token in record.token_ids)
    best = [token for token, _ in counts.most_common(size)]
    rest = (token for token in range(vocabulary) if token not in counts)
    return torch.tensor(sorted([*best, *(next(rest) for _ in range(size - len(best)))]))
