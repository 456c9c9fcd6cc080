"""The algorithms: one small class each, and one dict. A class says which groups are worth learning from, what each answer is
credited with, how tokens are weighed and what the loss of a micro-batch is. The learner knows none of them by name."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from paceline.config import Config
from paceline.rl.advantages import gae, group_centred, group_normalised, leave_one_out, overlong_penalty, whitened
from paceline.rl.batch import MicroBatch, Sample
from paceline.rl.losses import (
    Aggregation,
    clipped_surrogate,
    clipped_value_loss,
    is_clipped,
    kl_k3,
    summed_per_sample,
    token_weights,
)


class Loss(NamedTuple):
    total: Tensor
    """What is differentiated."""
    parts: dict[str, Tensor]
    """Weighted sums over the micro-batch: they add up over a batch's micro-batches."""


class GRPO(Config):
    """Group-relative policy optimisation: an answer is credited relative to the other answers to its prompt."""

    clip_low: float = Field(0.2, ge=0, lt=1)
    clip_high: float = Field(0.2, ge=0)
    kl: float = Field(0.0, ge=0)
    """Weight of the distance to the frozen reference, added to the loss token by token."""
    aggregation: Aggregation = "sequence"
    dynamic_sampling: bool = False
    """Groups whose answers all earned the same are replaced by other prompts' …"""
    max_refills: int = Field(4, ge=0)
    """… so many times at most."""
    overlong_cache: int = Field(0, ge=0)
    """Answers longer than max_new_tokens minus this are penalised, up to 1; 0: not at all."""
    max_new_tokens: int = Field(0, ge=0)
    """Set from the rollout's own."""
    needs_critic: ClassVar[bool] = False
    kl_in_loss: ClassVar[bool] = True
    """False: it is subtracted from the reward."""

    @property
    def needs_reference(self) -> bool:
        return self.kl > 0

    def keep(self, rewards: list[float]) -> bool:
        """Whether a group is worth training on."""
        return not self.dynamic_sampling or max(rewards) > min(rewards)

    def credit(self, samples: list[Sample]) -> None:
        """Fills `advantages`."""
        for members in _groups(samples):
            rewards = torch.tensor([self.shaped(s) for s in members], dtype=members[0].sampled.dtype)
            for sample, advantage in zip(members, self.advantage(rewards), strict=True):
                sample.advantages = advantage.repeat(sample.num_answer)

    def shaped(self, sample: Sample) -> float:
        return sample.reward + (sample.score or 0.0) + overlong_penalty(sample.num_answer, self.max_new_tokens,
                                                                        self.overlong_cache)

    def advantage(self, rewards: Tensor) -> Tensor:
        return group_normalised(rewards)

    def weights(self, lengths: list[int]) -> list[float]:
        return token_weights(lengths, self.aggregation, self.max_new_tokens)

    def loss(self, logprobs: Tensor, batch: MicroBatch) -> Loss:
        """logprobs [A] of the answers' tokens under the policy being trained."""
        assert batch.advantages is not None
        log_ratio = self.log_ratio(logprobs, batch)
        policy = (batch.weights * clipped_surrogate(log_ratio, batch.advantages, self.clip_low, self.clip_high)).sum()
        clipped = is_clipped(log_ratio, batch.advantages, self.clip_low, self.clip_high)
        parts = {"loss/policy": policy.detach(), "clip_fraction": (batch.weights * clipped).sum()}
        total = policy
        if batch.reference is not None:
            kl = (batch.weights * kl_k3(logprobs, batch.reference)).sum()
            parts["kl"] = kl.detach()
            total = total + self.kl * kl if self.kl_in_loss else total
        return Loss(total, parts)

    def log_ratio(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        return logprobs - (logprobs.detach() if batch.old is None else batch.old)


class DrGRPO(GRPO):
    """GRPO without its two biases: no division by the group's deviation, none by the answer's own length."""

    aggregation: Aggregation = "constant"

    def advantage(self, rewards: Tensor) -> Tensor:
        return group_centred(rewards)


class DAPO(GRPO):
    """Asymmetric clip, dynamic sampling, token-level loss, soft penalty for overlong answers."""

    clip_high: float = Field(0.28, ge=0)
    aggregation: Aggregation = "token"
    dynamic_sampling: bool = True
    overlong_cache: int = Field(64, ge=0)


class RLOO(GRPO):
    """REINFORCE with the group's others as baseline; the ratio, and its clip, are those of whole answers. `kl` is subtracted
    from the reward, as the sum of log pi - log ref over the answer."""

    kl_in_loss: ClassVar[bool] = False

    def shaped(self, sample: Sample) -> float:
        distance = 0.0 if sample.reference is None else float((_known(sample.old) - sample.reference).sum())
        return super().shaped(sample) - self.kl * distance

    def advantage(self, rewards: Tensor) -> Tensor:
        return leave_one_out(rewards)

    def log_ratio(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        return summed_per_sample(super().log_ratio(logprobs, batch), batch.sample, len(batch.lengths))


class PPO(GRPO):
    """Proximal policy optimisation with a critic: the reward comes with the last token, the distance to the reference with
    every token, and generalised advantage estimation spreads them."""

    kl: float = Field(0.05, ge=0)
    aggregation: Aggregation = "token"
    gamma: float = Field(1.0, ge=0, le=1)
    lam: float = Field(0.95, ge=0, le=1)
    value_clip: float = Field(0.2, gt=0)
    value_weight: float = Field(0.5, gt=0)
    whiten: bool = True
    needs_critic: ClassVar[bool] = True
    kl_in_loss: ClassVar[bool] = False

    def credit(self, samples: list[Sample]) -> None:
        for sample in samples:
            assert sample.values is not None
            rewards = torch.zeros_like(sample.sampled)
            if sample.reference is not None:
                rewards -= self.kl * (_known(sample.old) - sample.reference)
            rewards[-1] += self.shaped(sample)
            sample.advantages, sample.returns = gae(rewards, sample.values, self.gamma, self.lam)
        if self.whiten:
            for sample, advantages in zip(samples, whitened([_known(s.advantages) for s in samples]), strict=True):
                sample.advantages = advantages

    def value_loss(self, values: Tensor, batch: MicroBatch) -> Tensor:
        old, returns = _known(batch.values), _known(batch.returns)
        return self.value_weight * (batch.weights * clipped_value_loss(values, old, returns, self.value_clip)).sum()


Algorithm = GRPO
"""What the learner is handed; the others are its kin."""
Name = Literal["grpo", "dr_grpo", "dapo", "rloo", "ppo"]
ALGORITHMS: dict[str, type[GRPO]] = {"grpo": GRPO, "dr_grpo": DrGRPO, "dapo": DAPO, "rloo": RLOO, "ppo": PPO}


def make_algorithm(name: str, max_new_tokens: int, **options: Any) -> Algorithm:
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm: {name!r} is not one of {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name](**{"max_new_tokens": max_new_tokens, **options})


def _groups(samples: list[Sample]) -> list[list[Sample]]:
    found: dict[int, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.group, []).append(sample)
    return list(found.values())


def _known(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor
