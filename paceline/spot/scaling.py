"""Input scaling for training. An embedding's values are far smaller than those of a final hidden state, and single channels of
inner layers are far larger than the others; a drafter trained on them directly spends many steps on their magnitudes alone.

Training therefore divides each input by its root mean square, and the plain drafter that engines run is recovered by folding the
scales into its weights. All scales are powers of two, so converting to training scale and back does not change a bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.drafters.eagle import Eagle, EagleConfig, feature_columns
from paceline.models.decoder import Decoder
from paceline.types import FeatureRecord


class Scales(NamedTuple):
    """Scales that the drafter's inputs and outputs are divided by during training."""

    embedding: float  # of token embeddings
    residual: float  # of the drafter's own outputs, and in EAGLE form of the features it reads
    features: Tensor  # [F] of the features it reads, by channel


def measure_scales(policy: Decoder, config: EagleConfig, records: Sequence[FeatureRecord]) -> Scales:
    """Measures the scales of a drafter's inputs.

    EAGLE reads final hidden states, whose scale follows from the weight of the policy's last norm. EAGLE-3 reads inner layers,
    whose scale is measured on `records`; without records it is taken to be 1.
    """
    device, hidden = policy.norm.device, policy.config.hidden_size
    if config.form == "eagle":
        residual = _power_of_two(_rms(policy.norm)).item()
        return Scales(_power_of_two(_rms(policy.embed.weight)).item(), residual, torch.full((hidden,), residual, device=device))
    if not records:
        return Scales(1.0, 1.0, torch.ones(len(config.feature_layers) * hidden, device=device))
    parts = [torch.cat([r.features[:, c] for c in feature_columns(r.layers, config.feature_layers, hidden)], dim=-1)
             for r in records]
    found = torch.cat(parts).to(device).double().square().mean(0).sqrt()  # [F]
    return Scales(1.0, 1.0, _power_of_two(found.clamp_min(found.median() / 16)).float())


def to_training_scale(plain: Eagle, scales: Scales) -> Eagle:
    """Returns a trainable copy of a drafter at training scale, in float32 at least."""
    dtype = torch.promote_types(torch.float32, plain.fc.weight.dtype)
    module = _empty_like(plain, training_config(plain.config, scales), dtype)
    _copy_scaled(module, dict(plain.named_parameters()), scales, inverse=True)
    return module.requires_grad_(True)


def to_plain_scale(module: Eagle, weights: Mapping[str, Tensor], scales: Scales, config: EagleConfig,
                   dtype: torch.dtype) -> Eagle:
    """Returns the drafter that engines run. weights: Weights at training scale, the module's own or a moving average of them."""
    plain = _empty_like(module, config, dtype)
    _copy_scaled(plain, weights, scales, inverse=False)
    return plain.requires_grad_(False)


def training_config(plain: EagleConfig, scales: Scales) -> EagleConfig:
    """Returns the config at training scale, where the epsilon of the norms is scaled like their inputs."""
    return replace(plain, model=replace(plain.model, rms_eps=plain.model.rms_eps / scales.residual**2))


def _empty_like(module: Eagle, config: EagleConfig, dtype: torch.dtype) -> Eagle:
    return Eagle(config, module.draft_ids, own_head=module.head is not None).to(module.fc.weight.device, dtype)


def _copy_scaled(module: Eagle, weights: Mapping[str, Tensor], scales: Scales, inverse: bool) -> None:
    factors = _weight_factors(module.config, scales)
    with torch.no_grad():
        for name, target in module.named_parameters():
            source, factor = weights[name], factors.get(name)
            if factor is None:
                target.copy_(source)
            else:
                factor = factor.to(source.device, torch.promote_types(torch.float32, source.dtype))
                target.copy_(source / factor if inverse else source * factor)


def _weight_factors(config: EagleConfig, scales: Scales) -> dict[str, Tensor]:
    """Returns the factors that convert parameters from training scale to plain scale, by parameter name. In EAGLE form no norm
    precedes the attention, so its input weights are scaled as well."""
    if config.form == "eagle3":
        return {"fc.weight": 1 / scales.features}
    residual = torch.tensor(scales.residual)
    embedding = torch.full_like(scales.features, scales.residual / scales.embedding)
    return {"fc.weight": torch.cat([embedding, torch.ones_like(embedding)]), "attention.qkv.weight": 1 / residual,
            **dict.fromkeys(("attention.o.weight", "mlp.down.weight", "fc.bias", "attention.o.bias", "mlp.down.bias"), residual)}


def _rms(x: Tensor) -> Tensor:
    return x.double().square().mean().sqrt()


def _power_of_two(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 1.0).log2().round().exp2()
