"""A learned reward model that scores answers as text, with the tokenizer that it was trained with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from paceline.chat_template import apply_chat_template
from paceline.models.weights import open_checkpoint
from paceline.rl.batch import MicroBatch, Sample, pack, sample_of
from paceline.rl.models import Scorer, load_reward_model
from paceline.types import MODEL_PART, TASK_PART, RolloutGroup


class ScoresAnswers(Protocol):
    """The part of a learner that the reward model's scores come from."""

    @property
    def sample_dtype(self) -> torch.dtype:
        """Data type of log-probabilities."""
        ...

    @property
    def has_reward_model(self) -> bool:
        """Whether a reward model's scores are part of the rewards."""
        ...

    def scores(self, samples: Sequence[Sample]) -> list[float]:
        """The reward model's score of every sample, times its weight."""
        ...


def add_scores(groups: Sequence[RolloutGroup], learner: ScoresAnswers) -> None:
    """Add the reward model's scores to the rewards of all rollouts that were graded. It is the last part of grading: whatever
    looks at a reward later (dynamic sampling, advantages, metrics, evaluations, warnings) sees the sum."""
    graded = [(group, rollout) for group in groups for rollout in group.rollouts if rollout.reward is not None]
    if not learner.has_reward_model or not graded:
        return
    samples = [sample_of(group, index, rollout, learner.sample_dtype) for index, (group, rollout) in enumerate(graded)]
    for (_, rollout), score in zip(graded, learner.scores(samples), strict=True):
        own = rollout.reward or 0.0
        rollout.reward, rollout.reward_parts = own + score, {**(rollout.reward_parts or {TASK_PART: own}), MODEL_PART: score}


class RewardModel:
    """A frozen sequence classifier. If its tokenizer is not the policy's, prompt and answer are given to it as text: through its
    own chat template where the prompt consists of messages, otherwise one after the other."""

    def __init__(self, scorer: Scorer, tokenizer: Any, policy_tokenizer: Any) -> None:
        """`tokenizer` is the reward model's own; None: it takes the policy's token ids."""
        self.scorer, self._policy_tokenizer = scorer, policy_tokenizer
        self._tokenizer = None if tokenizer is None or knows_all_tokens(tokenizer, policy_tokenizer) else tokenizer

    @classmethod
    def load(cls, source: str | Path, policy_tokenizer: Any, policy_vocab_size: int, device: torch.device | str,
             dtype: torch.dtype, compute: torch.dtype) -> RewardModel:
        """Loads a reward model from the folder or hub id of a `…ForSequenceClassification` model with one label."""
        checkpoint = open_checkpoint(source)
        tokenizer = checkpoint.tokenizer()
        if tokenizer is None and checkpoint.config.vocab_size < policy_vocab_size:
            raise ValueError(f"reward_model: {source} has no tokenizer, and a smaller vocabulary than the policy")
        if tokenizer is not None and policy_tokenizer is None:
            raise ValueError(f"reward_model: {source} reads text, but the policy has no tokenizer")
        return cls(load_reward_model(source, device, dtype, compute), tokenizer, policy_tokenizer)

    def packed(self, samples: Sequence[Sample], max_tokens: int, device: torch.device | str) -> list[MicroBatch]:
        """Micro-batches of at most so many tokens, for the scorer."""
        return pack([self._encoded(sample) for sample in samples], max_tokens, device=device)

    def token_ids(self, sample: Sample) -> list[int]:
        """What the reward model reads of a sample."""
        tokenizer, prompt = self._tokenizer, sample.prompt
        if tokenizer is None:
            return sample.tokens
        if isinstance(prompt, list) and tokenizer.chat_template:
            messages = [*prompt, {"role": "assistant", "content": sample.text}]
            return list(apply_chat_template(tokenizer, messages, "reward_model: messages", tokenize=True, return_dict=False))
        if isinstance(prompt, list):
            prompt = "\n\n".join(message["content"] for message in prompt) + "\n"
        elif prompt is None:
            prompt = self._policy_tokenizer.decode(sample.tokens[: sample.prompt_length], skip_special_tokens=True)
        return list(tokenizer.encode(prompt + sample.text))

    def _encoded(self, sample: Sample) -> Sample:
        ids = self.token_ids(sample)
        unused = torch.zeros(len(ids) - 1, dtype=sample.sampled.dtype)
        return replace(sample, tokens=ids, prompt_length=1, sampled=unused, old=None, reference=None, values=None, returns=None,
                       advantages=None, loss_mask=None)


def knows_all_tokens(tokenizer: Any, of: Any) -> bool:
    """Whether a tokenizer has all tokens of another one, with the same ids."""
    return of is not None and of.get_vocab().items() <= tokenizer.get_vocab().items()
