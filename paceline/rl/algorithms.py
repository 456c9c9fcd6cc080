"""The training algorithms: one small class each, registered in `ALGORITHMS`. A class decides which groups are kept, computes the
advantages of answers and the weights of tokens, and defines the loss of a micro-batch. The learner knows none of them by name."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from paceline.config import Config
from paceline.names import suggest
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
    """Loss of one micro-batch."""

    total: Tensor
    """The value to differentiate."""
    parts: dict[str, Tensor]
    """Terms of the loss and other metrics, as weighted sums that add up over the micro-batches of a batch."""


class GRPO(Config):
    """Group-relative policy optimisation: an answer's advantage is relative to the other answers to its prompt."""

    clip_low: float = Field(0.2, ge=0, lt=1)
    """Importance ratios below 1 minus this value are clipped."""
    clip_high: float = Field(0.2, ge=0)
    """Importance ratios above 1 plus this value are clipped."""
    kl: float = Field(0.0, ge=0)
    """Weight of the KL divergence from the frozen reference policy, added to the loss of every token."""
    aggregation: Aggregation = "sequence"
    """How token losses are averaged: per answer (`sequence`), over all tokens (`token`), or divided by a constant
    (`constant`)."""
    dynamic_sampling: bool = False
    """Replace groups whose answers all have the same reward by groups of further prompts."""
    max_refills: int = Field(4, ge=0)
    """Maximum number of times that dynamic sampling generates further groups in one step."""
    overlong_cache: int = Field(0, ge=0)
    """Answers longer than max_new_tokens minus this value are penalised by up to 1. 0: no penalty."""
    max_new_tokens: int = Field(0, ge=0)
    """Maximum number of tokens per answer; taken from the rollout configuration."""
    needs_critic: ClassVar[bool] = False
    """Whether the algorithm trains a critic."""
    kl_in_loss: ClassVar[bool] = True
    """Whether the KL divergence is added to the loss. Otherwise it is subtracted from the reward."""

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen copy of the first policy is needed."""
        return self.kl > 0

    def keep(self, rewards: list[float]) -> bool:
        """Whether the policy is trained on a group with these rewards."""
        return not self.dynamic_sampling or max(rewards) > min(rewards)

    def compute_advantages(self, samples: list[Sample]) -> None:
        """Fills `advantages` of every sample."""
        for members in _groups(samples):
            rewards = torch.tensor([self.shaped_reward(s) for s in members], dtype=members[0].sampled.dtype)
            for sample, advantage in zip(members, self.group_advantages(rewards), strict=True):
                sample.advantages = advantage.repeat(sample.num_answer)

    def shaped_reward(self, sample: Sample) -> float:
        """Reward of an answer including the reward model's score and the penalty for overlong answers."""
        return sample.reward + (sample.score or 0.0) + overlong_penalty(sample.num_answer, self.max_new_tokens,
                                                                        self.overlong_cache)

    def group_advantages(self, rewards: Tensor) -> Tensor:
        """Advantages of the answers of one group [G] from their rewards [G]."""
        return group_normalised(rewards)

    def weights(self, lengths: list[int]) -> list[float]:
        """Weight of one token of each answer in the batch's loss, from the answers' lengths."""
        return token_weights(lengths, self.aggregation, self.max_new_tokens)

    def loss(self, logprobs: Tensor, batch: MicroBatch) -> Loss:
        """Loss of a micro-batch, given the log-probabilities [A] of its answer tokens under the policy being trained."""
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
        """Logarithm of the importance ratio of every answer token [A]."""
        return logprobs - (logprobs.detach() if batch.old is None else batch.old)


class DrGRPO(GRPO):
    """GRPO without its two biases: advantages are not divided by the group's standard deviation, and losses not by the
    answer's own length."""

    aggregation: Aggregation = "constant"

    def group_advantages(self, rewards: Tensor) -> Tensor:
        return group_centred(rewards)


class DAPO(GRPO):
    """GRPO with an asymmetric clip range, dynamic sampling, a token-level loss and a soft penalty for overlong answers."""

    clip_high: float = Field(0.28, ge=0)
    aggregation: Aggregation = "token"
    dynamic_sampling: bool = True
    overlong_cache: int = Field(64, ge=0)


class RLOO(GRPO):
    """REINFORCE with the mean reward of the group's other answers as baseline. The importance ratio and its clipping are those
    of whole answers. `kl` times the sum of log pi - log ref over the answer is subtracted from the reward."""

    kl_in_loss: ClassVar[bool] = False

    def shaped_reward(self, sample: Sample) -> float:
        distance = 0.0 if sample.reference is None else float((_known(sample.old) - sample.reference).sum())
        return super().shaped_reward(sample) - self.kl * distance

    def group_advantages(self, rewards: Tensor) -> Tensor:
        return leave_one_out(rewards)

    def log_ratio(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        return summed_per_sample(super().log_ratio(logprobs, batch), batch.sample, len(batch.lengths))


class PPO(GRPO):
    """Proximal policy optimisation with a critic. The reward is assigned to the last token and the KL penalty to every token;
    generalised advantage estimation turns them into advantages."""

    kl: float = Field(0.05, ge=0)
    aggregation: Aggregation = "token"
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount factor per token."""
    lam: float = Field(0.95, ge=0, le=1)
    """Lambda of generalised advantage estimation."""
    value_clip: float = Field(0.2, gt=0)
    """The critic's values are clipped to this distance from the old ones."""
    value_weight: float = Field(0.5, gt=0)
    """Weight of the critic's loss."""
    whiten: bool = True
    """Normalise advantages to mean 0 and standard deviation 1 over the batch."""
    needs_critic: ClassVar[bool] = True
    kl_in_loss: ClassVar[bool] = False

    def compute_advantages(self, samples: list[Sample]) -> None:
        for sample in samples:
            assert sample.values is not None
            rewards = torch.zeros_like(sample.sampled)
            if sample.reference is not None:
                rewards -= self.kl * (_known(sample.old) - sample.reference)
            rewards[-1] += self.shaped_reward(sample)
            sample.advantages, sample.returns = gae(rewards, sample.values, self.gamma, self.lam)
        if self.whiten:
            for sample, advantages in zip(samples, whitened([_known(s.advantages) for s in samples]), strict=True):
                sample.advantages = advantages

    def value_loss(self, values: Tensor, batch: MicroBatch) -> Tensor:
        """The critic's loss of a micro-batch, given its values [A]."""
        old, returns = _known(batch.values), _known(batch.returns)
        return self.value_weight * (batch.weights * clipped_value_loss(values, old, returns, self.value_clip)).sum()


Algorithm = GRPO
"""Type of all algorithms: the others are subclasses of GRPO."""
Name = Literal["grpo", "dr_grpo", "dapo", "rloo", "ppo"]
ALGORITHMS: dict[str, type[GRPO]] = {"grpo": GRPO, "dr_grpo": DrGRPO, "dapo": DAPO, "rloo": RLOO, "ppo": PPO}


def make_algorithm(name: str, max_new_tokens: int, **options: Any) -> Algorithm:
    """The algorithm of this name. `options` are the fields of its class."""
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm: {name!r} is not one of {', '.join(ALGORITHMS)}{suggest(name, ALGORITHMS)}")
    return ALGORITHMS[name](**{"max_new_tokens": max_new_tokens, **options})


def _groups(samples: list[Sample]) -> list[list[Sample]]:
    found: dict[int, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.group, []).append(sample)
    return list(found.values())


def _known(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor
