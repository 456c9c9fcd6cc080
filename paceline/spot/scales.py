"""Units a drafter is trained in. An embedding's numbers are far smaller than a final state's, and single channels of inner layers
far larger than the rest: plain weights would spend long on that alone. So training divides inputs by their root mean square, and
the plain drafter is recovered by multiplying its weights. All scales are powers of two: going there and back changes no bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.drafters.eagle import Eagle, EagleConfig
from paceline.models.decoder import Decoder
from paceline.spot.packing import columns_of
from paceline.types import FeatureRecord


class Scales(NamedTuple):
    embedding: float
    stream: float
    """Of the drafter's own outputs, and in EAGLE form of what it reads."""
    features: Tensor  # [F] of what it reads


def measure(policy: Decoder, config: EagleConfig, records: Sequence[FeatureRecord]) -> Scales:
    """EAGLE reads final states, whose size the policy's last norm tells. EAGLE-3 reads inner layers, known by what was captured;
    without any record they are taken as they are."""
    device, hidden = policy.norm.device, policy.config.hidden_size
    if config.form == "eagle":
        stream = _power_of_two(_rms(policy.norm)).item()
        return Scales(_power_of_two(_rms(policy.embed.weight)).item(), stream, torch.full((hidden,), stream, device=device))
    if not records:
        return Scales(1.0, 1.0, torch.ones(len(config.feature_layers) * hidden, device=device))
    parts = [torch.cat([r.features[:, c] for c in columns_of(r, config.feature_layers, hidden)], dim=-1) for r in records]
    found = torch.cat(parts).to(device).double().square().mean(0).sqrt()  # [F]
    return Scales(1.0, 1.0, _power_of_two(found.clamp_min(found.median() / 16)).float())


def to_training(plain: Eagle, scales: Scales) -> Eagle:
    """A trainable copy in the units of training, float32 at least."""
    fresh = _alike(plain, training_config(plain.config, scales), torch.promote_types(torch.float32, plain.fc.weight.dtype))
    _fill(fresh, dict(plain.named_parameters()), scales, inverse=True)
    return fresh.requires_grad_(True)


def training_config(plain: EagleConfig, scales: Scales) -> EagleConfig:
    return replace(plain, model=replace(plain.model, rms_eps=plain.model.rms_eps / scales.stream**2))


def to_plain(module: Eagle, weights: Mapping[str, Tensor], scales: Scales, config: EagleConfig, dtype: torch.dtype) -> Eagle:
    """What an engine drafts with. weights: the module's or an average of them, in the units of training."""
    fresh = _alike(module, config, dtype)
    _fill(fresh, weights, scales, inverse=False)
    return fresh.requires_grad_(False)


def _alike(module: Eagle, config: EagleConfig, dtype: torch.dtype) -> Eagle:
    return Eagle(config, module.draft_ids, own_head=module.head is not None).to(module.fc.weight.device, dtype)


def _fill(module: Eagle, weights: Mapping[str, Tensor], scales: Scales, inverse: bool) -> None:
    factors = _factors(module.config, scales)
    with torch.no_grad():
        for name, target in module.named_parameters():
            source, factor = weights[name], factors.get(name)
            if factor is None:
                target.copy_(source)
            else:
                factor = factor.to(source.device, torch.promote_types(torch.float32, source.dtype))
                target.copy_(source / factor if inverse else source * factor)


def _factors(config: EagleConfig, scales: Scales) -> dict[str, Tensor]:
    """Parameter → what turns it from the units of training into plain ones. Nothing normalises what EAGLE's attention reads."""
    if config.form == "eagle3":
        return {"fc.weight": 1 / scales.features}
    stream = torch.tensor(scales.stream)
    embedding = torch.full_like(scales.features, scales.stream / scales.embedding)
    return {"fc.weight": torch.cat([embedding, torch.ones_like(embedding)]), "attention.qkv.weight": 1 / stream,
            "attention.o.weight": stream, "mlp.down.weight": stream}


def _rms(x: Tensor) -> Tensor:
    return x.double().square().mean().sqrt()


def _power_of_two(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 1.0).log2().round().exp2()
