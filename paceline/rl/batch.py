"""Samples (answers with what training needs) and their packing into micro-batches, in which sequences do not attend to each
other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.packing import first_fit_decreasing
from paceline.types import Rollout, RolloutGroup


@dataclass(slots=True)
class Sample:
    """One answer. Tensors have one element per answer token that the policy sampled, which leaves the tokens of replies out, and
    are on the CPU; they are None until they are computed."""

    tokens: list[int]
    """Token ids of prompt and answer."""
    prompt_length: int
    """Number of prompt tokens."""
    group: int
    """Index of the group that the answer belongs to."""
    reward: float
    """The reward of the answer, the reward model's score included, before any shaping."""
    truncated: bool
    """Whether the answer reached the maximum length."""
    sampled: Tensor
    """Log-probabilities that the engine sampled with."""
    old: Tensor | None = None
    """Log-probabilities in the denominator of the importance ratio. None: the current policy, which has not been updated yet."""
    reference: Tensor | None = None
    """Log-probabilities under the frozen reference policy."""
    values: Tensor | None = None
    """The critic's values of the states before each token."""
    returns: Tensor | None = None
    """Targets of the critic."""
    advantages: Tensor | None = None
    """Advantages of the tokens."""
    prompt: str | list[dict[str, str]] | None = None
    """The prompt as text or chat messages, if it is known."""
    text: str = ""
    """The answer as text."""
    loss_mask: Tensor | None = None
    """[answer tokens] bool: whether each was sampled; None: all were."""
    turn_rewards: tuple[float, ...] = ()
    """Rewards of the turns, which are parts of `reward`; empty if the answer is rewarded as a whole."""

    @property
    def num_answer(self) -> int:
        """Number of answer tokens that the policy sampled, and is trained on."""
        return len(self.sampled)

    @property
    def length(self) -> int:
        """Number of answer tokens, those of replies included."""
        return len(self.tokens) - self.prompt_length

    def target_rows(self, start: int) -> Tensor:
        """Rows of the tokens that the policy sampled, where the sample begins at row `start`."""
        rows = torch.arange(start + self.prompt_length, start + len(self.tokens))
        return rows if self.loss_mask is None else rows[self.loss_mask]

    def turns(self) -> Tensor:
        """Number of the turn of every token that the policy sampled."""
        if self.loss_mask is None or not self.turn_rewards:
            return torch.zeros(self.num_answer, dtype=torch.int64)
        begins = torch.cat([self.loss_mask[:1], self.loss_mask[1:] & ~self.loss_mask[:-1]])
        return (begins.cumsum(0) - 1)[self.loss_mask].clamp(max=len(self.turn_rewards) - 1)


def samples_of(groups: Sequence[RolloutGroup], dtype: torch.dtype) -> list[Sample]:
    """Samples of all rollouts that have at least one token, did not fail and were graded. An answer whose grader failed is not
    a wrong answer: its group's baseline is that of the others."""
    return [sample_of(group, index, rollout, dtype) for index, group in enumerate(groups) for rollout in group.rollouts
            if rollout.token_ids and rollout.finish_reason != "error" and rollout.reward is not None]


def sample_of(group: RolloutGroup, index: int, rollout: Rollout, dtype: torch.dtype) -> Sample:
    """The sample of a graded rollout of a group, which is number `index` of its batch."""
    assert rollout.reward is not None, "it was graded"
    sampled = torch.tensor(rollout.logprobs, dtype=dtype)
    mask = None if rollout.loss_mask is None else torch.tensor(rollout.loss_mask, dtype=torch.bool)
    return Sample(rollout.prompt_ids + rollout.token_ids, len(rollout.prompt_ids), index, rollout.reward,
                  rollout.finish_reason == "length", sampled if mask is None else sampled[mask], prompt=group.prompt,
                  text=rollout.text, loss_mask=mask, turn_rewards=tuple(rollout.turn_rewards))


class MicroBatch(NamedTuple):
    """Input of one forward pass: R rows of S whole sequences with A sampled tokens, each predicted by the row before it."""

    tokens: Tensor  # [R] int64
    positions: Tensor  # [R] int64
    lengths: tuple[int, ...]  # of the sequences, in rows
    last: Tensor  # [S] int64 last row of each sequence
    rows: Tensor  # [A] int64 row whose output predicts the answer token
    targets: Tensor  # [A] int64
    sample: Tensor  # [A] int64 index of the sequence
    weights: Tensor  # [A] weight in the batch's loss
    sampled: Tensor  # [A]
    old: Tensor | None  # [A]
    advantages: Tensor | None
    reference: Tensor | None
    values: Tensor | None
    returns: Tensor | None
    members: tuple[int, ...]  # indices of the sequences in the list that was packed
    correction: Tensor | None = None  # [A] importance weights between engine and trainer (`losses.importance_weights`)


def pack(samples: Sequence[Sample], max_tokens: int, weights: Sequence[float] | None = None,
         device: torch.device | str = "cpu") -> list[MicroBatch]:
    """First fit, longest first: few micro-batches, and always the same ones."""
    bins = first_fit_decreasing([len(sample.tokens) for sample in samples], max_tokens)
    return [_micro_batch(samples, indices, weights, device) for indices in bins]


def _micro_batch(samples: Sequence[Sample], indices: list[int], weights: Sequence[float] | None,
                 device: torch.device | str) -> MicroBatch:
    chosen = [samples[i] for i in indices]
    lengths = [len(s.tokens) for s in chosen]
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    answers = torch.tensor([s.num_answer for s in chosen])
    sampled = torch.cat([s.sampled for s in chosen])
    target_rows = torch.cat([s.target_rows(start) for s, start in zip(chosen, starts.tolist(), strict=True)])
    tokens = torch.tensor([t for s in chosen for t in s.tokens])
    each = [1.0] * len(samples) if weights is None else weights
    weight = torch.tensor([each[i] for i in indices], dtype=sampled.dtype).repeat_interleave(answers)
    return MicroBatch(
        tokens.to(device), torch.cat([torch.arange(n) for n in lengths]).to(device), tuple(lengths),
        (starts + torch.tensor(lengths) - 1).to(device), (target_rows - 1).to(device), tokens[target_rows].to(device),
        torch.arange(len(chosen)).repeat_interleave(answers).to(device), weight.to(device), sampled.to(device),
        _column([s.old for s in chosen], device), _column([s.advantages for s in chosen], device),
        _column([s.reference for s in chosen], device), _column([s.values for s in chosen], device),
        _column([s.returns for s in chosen], device), tuple(indices))


def _column(parts: list[Tensor | None], device: torch.device | str) -> Tensor | None:
    known = [part for part in parts if part is not None]
    assert not known or len(known) == len(parts), "a column is known for all answers or for none"
    return torch.cat(known).to(device) if known else None
