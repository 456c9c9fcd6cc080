"""The loss of one micro-batch: the drafter unrolled over packed records, held to the policy's features and distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.drafters.eagle import Eagle
from paceline.kernels import Ops
from paceline.kernels.upload import upload
from paceline.models.decoder import Decoder, Rope
from paceline.spot.attend import PathAttend
from paceline.spot.config import SpotConfig
from paceline.spot.losses import Heads, TargetLoss, hidden_distance, step_weights, target_loss
from paceline.spot.packing import Packed, align, answer_rows, unroll
from paceline.spot.scales import Scales


class Loss(NamedTuple):
    total: Tensor  # []
    hidden: Tensor  # [J] these and the following: weighted sums by unroll step, without gradient
    target: Tensor
    overlap: Tensor
    top1: Tensor
    weight: Tensor  # [J] of the rows that they are sums over

    def plus(self, other: Loss | None) -> Loss:
        """Of both, without gradient."""
        total = self.total.detach()
        return self._replace(total=total) if other is None else Loss(total + other.total, *map(torch.add, self[1:], other[1:]))


class Objective:
    """What does not change from one micro-batch to the next. Only reads the policy: its embedding and its head."""

    def __init__(self, policy: Decoder, config: SpotConfig, scales: Scales, ops: Ops, rope: Rope) -> None:
        self.config, self.recipe, self.scales = config, config.recipe, scales
        self._policy, self._ops, self._rope = policy, ops, rope
        self._head: Tensor | None = None

    def policy_changed(self) -> None:
        """A reduced vocabulary's rows of the head are gathered anew."""
        self._head = None

    def shares(self, sizes: Sequence[tuple[int, int]]) -> list[float]:
        """What one row weighs at each unroll step when these records, (tokens, prompt length), make up one optimizer step: every
        row alike, whatever it is packed with."""
        weights = step_weights(self.recipe.unroll, self.recipe.decay)
        counts = [sum(answer_rows(tokens, prompt, k) for tokens, prompt in sizes) for k in range(self.recipe.unroll)]
        return [w / max(1, count) for w, count in zip(weights, counts, strict=True)]

    def __call__(self, module: Eagle, packed: Packed, shares: Sequence[float], generator: torch.Generator | None = None) -> Loss:
        """generator: for noise on the features."""
        aligned = align(self._paths(module, packed, generator), packed)
        own = aligned.own.to(torch.promote_types(torch.float32, aligned.own.dtype))  # [J, T, H]
        wanted = packed.wanted[aligned.rows]  # [T, H]
        weight = aligned.valid * upload(np.array(shares), own.device).to(own.dtype)[:, None]
        hidden = self._hidden(own, wanted, weight)
        target = self._target(module, own, wanted, weight)
        total = self.recipe.hidden_weight * hidden.sum() + self.recipe.target_weight * target.loss.sum()
        return Loss(total, hidden.detach(), target.loss.detach(), target.overlap, target.top1, weight.sum(1))

    def _paths(self, module: Eagle, packed: Packed, generator: torch.Generator | None) -> list[Tensor]:
        narrow, scales = self._policy.norm.dtype, self.scales
        features = packed.features / scales.features.to(packed.features.dtype)  # powers of two: exact
        if generator is not None:
            noise = torch.rand(features.shape, generator=generator, device=features.device, dtype=torch.float32)
            features = features + ((2 * noise - 1) * self.config.feature_noise).to(features.dtype)
        with torch.autocast(features.device.type, dtype=narrow, enabled=narrow in (torch.bfloat16, torch.float16)):
            embedded = self._policy.embed(packed.follow) / scales.embedding
            attend = PathAttend(self._ops, self._rope, packed.positions, packed.lengths)
            return unroll(module, embedded, module.encode(features, self._ops), attend, self.recipe.unroll)

    def _hidden(self, own: Tensor, wanted: Tensor, weight: Tensor) -> Tensor:
        """[J]"""
        if self.recipe.hidden_weight == 0:
            return weight.new_zeros(len(own))
        return (hidden_distance(own, (wanted / self.scales.stream).to(own.dtype)) * weight).sum(1)

    def _target(self, module: Eagle, own: Tensor, wanted: Tensor, weight: Tensor) -> TargetLoss:
        own = own * self.scales.stream
        if module.norm is not None:
            own = self._ops.rms_norm(own, module.norm, module.config.model.rms_eps)
        policy_head = self._policy_head(module)
        heads = Heads(policy_head if module.head is None else module.head.weight, policy_head, self.config.temperature)
        return target_loss(own, wanted, weight, heads, self.config.objective)

    def _policy_head(self, module: Eagle) -> Tensor:
        if self._head is None:
            weight = self._policy.head.weight.detach()
            self._head = weight if module.draft_ids is None else weight[module.draft_ids].contiguous()
        return self._head


def means(summed: Loss) -> dict[str, float]:
    """Per row, of summed micro-batches; overlap and top-1 by depth."""
    weight = summed.weight.clamp_min(1e-30)
    found = {"hidden": float(summed.hidden.sum() / weight.sum()), "target": float(summed.target.sum() / weight.sum())}
    for name, values in (("overlap", summed.overlap), ("top1", summed.top1)):
        found |= {f"{name}/{depth}": value for depth, value in enumerate((values / weight).tolist(), start=1)}
    return found
