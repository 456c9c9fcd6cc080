"""The training algorithms: one small class each, registered in `ALGORITHMS`. A class decides which groups are kept, computes the
advantages of answers and the weights of tokens, and defines the loss of a micro-batch. The learner knows none of them by name."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from paceline.config import Config
from paceline.names import suggest
from paceline.rl.advantages import gae, group_centred, group_normalised, leave_one_out, overlong_penalty, whitened
from paceline.rl.batch import MicroBatch, Sample
from paceline.rl.losses import (
    Aggregation,
    averaged_per_sample,
    clipped_importance,
    clipped_surrogate,
    clipped_value_loss,
    is_clipped,
    kl_k3,
    summed_per_sample,
    token_weights,
)

_OVERLONG_PART = 5
"""The penalty for overlong answers begins in the last fifth of the permitted length, as in the DAPO paper."""


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
    entropy_bonus: float = Field(0.0, ge=0)
    """Weight of the policy's entropy, which is subtracted from the loss of every token. 0: no bonus."""
    aggregation: Aggregation = "sequence"
    """How token losses are averaged: per answer (`sequence`), over all tokens (`token`), or divided by a constant
    (`constant`)."""
    dynamic_sampling: bool = False
    """Replace groups whose answers all have the same reward by groups of further prompts."""
    max_refills: int = Field(4, ge=0)
    """Maximum number of times that dynamic sampling generates further groups in one step."""
    overlong_cache: int | None = Field(0, ge=0)
    """Answers longer than max_new_tokens minus this number of tokens are penalised, by up to 1 at max_new_tokens. 0: no penalty.
    None: a fifth of max_new_tokens. It is never more than max_new_tokens."""
    mask_truncated: bool = False
    """Leave answers that reached max_new_tokens without an end out of the loss. Their rewards still count for their group's
    baseline."""
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

    def trains_on(self, sample: Sample) -> bool:
        """Whether a sample is part of the loss."""
        return not (self.mask_truncated and sample.truncated)

    def compute_advantages(self, samples: list[Sample]) -> None:
        """Fills `advantages` of every sample. A turn's tokens get no credit for what earlier turns have earned: their advantages
        are the group's with the rewards from this turn on."""
        for members in _groups(samples):
            rewards = torch.tensor([self.shaped_reward(s) for s in members], dtype=members[0].sampled.dtype)
            num_turns = max(1, *(len(s.turn_rewards) for s in members))
            earned = rewards.new_tensor([[sum(s.turn_rewards[:turn]) for s in members] for turn in range(num_turns)])
            by_turn = torch.stack([self.group_advantages(rewards - before) for before in earned])  # [turns, G]
            for sample, advantages in zip(members, by_turn.T, strict=True):
                sample.advantages = advantages[sample.turns()]

    def shaped_reward(self, sample: Sample) -> float:
        """Reward of an answer including the penalty for overlong answers."""
        longest = self.max_new_tokens
        cache = longest // _OVERLONG_PART if self.overlong_cache is None else min(self.overlong_cache, longest)
        return sample.reward + overlong_penalty(sample.length, longest, cache)

    def group_advantages(self, rewards: Tensor) -> Tensor:
        """Advantages of the answers of one group [G] from their rewards [G]."""
        return group_normalised(rewards)

    def weights(self, lengths: list[int]) -> list[float]:
        """Weight of one token of each answer in the batch's loss, from the answers' lengths."""
        return token_weights(lengths, self.aggregation, self.max_new_tokens)

    def loss(self, logprobs: Tensor, batch: MicroBatch, entropy: Tensor | None = None) -> Loss:
        """Loss of a micro-batch, given the log-probabilities [A] of its answer tokens under the policy being trained, and the
        policy's entropy [A] where there is a bonus for it."""
        assert batch.advantages is not None
        log_ratio = self.log_ratio(logprobs, batch)
        weights = batch.weights if batch.correction is None else batch.weights * batch.correction
        policy = (weights * self.token_loss(logprobs, log_ratio, batch.advantages)).sum()
        clipped = is_clipped(log_ratio, batch.advantages, self.clip_low, self.clip_high)
        parts = {"loss/policy": policy.detach(), "clip_fraction": (batch.weights * clipped).sum()}
        total = policy
        if self.entropy_bonus:
            assert entropy is not None
            total = total - self.entropy_bonus * (batch.weights * entropy).sum()
        if batch.reference is not None:
            kl = (batch.weights * kl_k3(logprobs, batch.reference)).sum()
            parts["kl"] = kl.detach()
            total = total + self.kl * kl if self.kl_in_loss else total
        return Loss(total, parts)

    def token_loss(self, logprobs: Tensor, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        """Policy loss of every answer token [A]."""
        return clipped_surrogate(log_ratio, advantages, self.clip_low, self.clip_high)

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
    overlong_cache: int | None = Field(None, ge=0)


class GSPO(GRPO):
    """GRPO whose importance ratio and clipping are those of whole answers: the geometric mean of the tokens' ratios, within a
    narrow clip range."""

    clip_low: float = Field(3e-4, ge=0, lt=1)
    clip_high: float = Field(4e-4, ge=0)

    def log_ratio(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        return averaged_per_sample(super().log_ratio(logprobs, batch), batch.sample, len(batch.lengths))


class CISPO(GRPO):
    """GRPO whose importance weights are clipped instead of the update: every token keeps its gradient. The loss is averaged over
    all tokens."""

    clip_low: float = Field(1.0, ge=0, le=1)
    clip_high: float = Field(4.0, ge=0)
    aggregation: Aggregation = "token"

    def token_loss(self, logprobs: Tensor, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        return clipped_importance(logprobs, log_ratio, advantages, self.clip_low, self.clip_high)


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
    """Proximal policy optimisation with a critic. The reward is assigned to the last token, or each turn's to the last token of
    the turn, and the KL penalty to every token; generalised advantage estimation turns them into advantages."""

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
            rewards[-1] += self.shaped_reward(sample) - sum(sample.turn_rewards)
            last_tokens = torch.searchsorted(sample.turns(), torch.arange(len(sample.turn_rewards)), right=True) - 1
            rewards.index_add_(0, last_tokens, rewards.new_tensor(sample.turn_rewards))
            sample.advantages, sample.returns = gae(rewards, sample.values, self.gamma, self.lam)
        trained = [sample for sample in samples if self.trains_on(sample)]
        if self.whiten:
            for sample, advantages in zip(trained, whitened([_known(s.advantages) for s in trained]), strict=True):
                sample.advantages = advantages

    def value_loss(self, values: Tensor, batch: MicroBatch) -> Tensor:
        """The critic's loss of a micro-batch, given its values [A]."""
        old, returns = _known(batch.values), _known(batch.returns)
        return self.value_weight * (batch.weights * clipped_value_loss(values, old, returns, self.value_clip)).sum()


Algorithm = GRPO
"""Type of all algorithms: the others are subclasses of GRPO."""
ALGORITHMS: dict[str, type[GRPO]] = {"grpo": GRPO, "dr_grpo": DrGRPO, "dapo": DAPO, "gspo": GSPO, "cispo": CISPO, "rloo": RLOO,
                                     "ppo": PPO}


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
