"""Our losses and advantages beside TRL's own, on the same tensors. TRL's methods are called on a stand-in for its trainer that
holds only the settings the mathematics reads."""

from __future__ import annotations

from collections import defaultdict
from unittest.mock import MagicMock

import pytest
import torch
from samples import random_samples

from paceline.rl.algorithms import make_algorithm
from paceline.rl.batch import Sample, pack

pytest.importorskip("trl")
LONGEST = 16


def padded(samples: list[Sample], parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)


def stand_in(new: torch.Tensor, loss_type: str, kl: float, clip_high: float) -> MagicMock:
    trainer = MagicMock()
    trainer._get_per_token_logps_and_entropies.return_value = (new, torch.zeros_like(new), None)
    trainer._metrics = {"train": defaultdict(list)}
    trainer.model.training = True
    trainer.loss_type, trainer.beta, trainer.importance_sampling_level = loss_type, kl, "token"
    trainer.epsilon_low, trainer.epsilon_high, trainer.args.delta = 0.2, clip_high, None
    trainer.args.use_bias_correction_kl, trainer.args.steps_per_generation = False, 1
    trainer.top_entropy_quantile, trainer.off_policy_mask_threshold = 1.0, None
    trainer.use_vllm = trainer.aux_loss_enabled = trainer._entropy_bonus_enabled = False
    trainer.current_gradient_accumulation_steps, trainer.accelerator.num_processes = 1, 1
    trainer.max_completion_length = LONGEST
    trainer.accelerator.reduce.side_effect = lambda x, reduction: x
    trainer.accelerator.gather.side_effect = lambda x: x
    return trainer


@pytest.mark.parametrize(("name", "loss_type", "kl", "clip_high"), [
    ("grpo", "grpo", 0.0, 0.2), ("grpo", "grpo", 0.3, 0.2), ("dr_grpo", "dr_grpo", 0.0, 0.2), ("dapo", "dapo", 0.1, 0.28),
    ("gspo", "grpo", 0.0, 0.3), ("cispo", "cispo", 0.1, 5.0)])
def test_losses_equal_trl(name, loss_type, kl, clip_high):
    from trl.trainer.grpo_trainer import GRPOTrainer

    options = {"gspo": {"clip_low": 0.2, "clip_high": 0.3}, "cispo": {"clip_high": 4.0}}.get(name, {})
    algorithm = make_algorithm(name, LONGEST, kl=kl, overlong_cache=0, **options)
    samples = random_samples(3, 4, longest=LONGEST)
    draw = torch.Generator().manual_seed(1)
    for sample in samples:
        sample.old, sample.reference = sample.sampled, -torch.rand(sample.num_answer, generator=draw, dtype=torch.float64)
    algorithm.compute_advantages(samples)
    new = [s.sampled + 0.5 * torch.randn(s.num_answer, generator=draw, dtype=torch.float64) for s in samples]
    mask = padded(samples, [torch.ones(s.num_answer, dtype=torch.float64) for s in samples])
    ids = torch.zeros_like(mask).long()
    inputs = {"prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": mask,
              "advantages": torch.stack([s.advantages[0] for s in samples]), "num_items_in_batch": mask.sum(),
              "old_per_token_logps": padded(samples, [s.sampled for s in samples]),
              "ref_per_token_logps": padded(samples, [s.reference for s in samples])}
    trainer = stand_in(padded(samples, new), loss_type, kl, clip_high)
    trainer.importance_sampling_level = "sequence" if name == "gspo" else "token"
    theirs = GRPOTrainer._compute_loss(trainer, None, inputs)
    ours = 0.0
    for batch in pack(samples, 40, algorithm.weights([s.num_answer for s in samples])):
        ours = ours + algorithm.loss(torch.cat([new[i] for i in batch.members]), batch).total
    torch.testing.assert_close(ours, theirs)


def test_rloo_equals_trl():
    from trl.trainer.rloo_trainer import RLOOTrainer

    algorithm, samples = make_algorithm("rloo", LONGEST), random_samples(3, 4, longest=6)
    algorithm.compute_advantages(samples)
    for sample in samples:
        sample.old = sample.sampled
    draw = torch.Generator().manual_seed(1)
    new = [s.sampled + 0.1 * torch.randn(s.num_answer, generator=draw, dtype=torch.float64) for s in samples]
    rewards = torch.tensor([s.reward for s in samples], dtype=torch.float64).view(3, 4)
    baseline = (rewards.sum(1, keepdim=True) - rewards) / 3  # TRL's formula, inline there
    advantages = (rewards - baseline).flatten()
    torch.testing.assert_close(torch.stack([s.advantages[0] for s in samples]), advantages)
    mask = padded(samples, [torch.ones(s.num_answer, dtype=torch.float64) for s in samples])
    ids = torch.zeros_like(mask).long()
    inputs = {"prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": mask, "advantages": advantages,
              "old_logps": torch.stack([s.sampled.sum() for s in samples])}
    theirs = RLOOTrainer._compute_loss(stand_in(padded(samples, new), "rloo", 0.0, 0.2), None, inputs)
    ours = 0.0
    for batch in pack(samples, 30, algorithm.weights([s.num_answer for s in samples])):
        ours = ours + algorithm.loss(torch.cat([new[i] for i in batch.members]), batch).total
    torch.testing.assert_close(ours, theirs)
