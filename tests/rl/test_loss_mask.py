"""Answers of several turns in training: tokens of replies are read and not trained on. Losses and gradients equal a plain PyTorch
reference that runs one sequence at a time and knows of no packing, and TRL's loss with the same masks."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import CONFIGS, OPS, VOCAB, model

from paceline import Engine, Rollout, RolloutGroup, SamplingParams
from paceline.config import EngineConfig, LearnerConfig, OptimizerConfig
from paceline.models.attend import PackedAttend
from paceline.models.decoder import Rope
from paceline.rl import Learner, make_algorithm, pack, samples_of
from paceline.rl.batch import Sample

MOST = 60
ALGORITHMS = ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "ppo"]


def rollouts(groups: int = 2, size: int = 3, engine: Engine | None = None) -> list[RolloutGroup]:
    """Answers of two or three turns."""
    engine = engine or Engine(model(), drafter="none", strategy="off")
    params = SamplingParams(max_new_tokens=MOST, max_turn_tokens=6, pauses=True, seed=1)
    found = []
    for number in range(groups):
        ids = engine.add([5, 9, number + 1], params, size)
        while engine.has_work:
            engine.step()
        for turn in range(2):
            for i, request in enumerate(ids):
                if turn <= i:
                    assert engine.resume(request, [(7 * number + 3 * i + k) % VOCAB for k in range(2 + i)])
            while engine.has_work:
                engine.step()
        group = RolloutGroup([5, 9, number + 1], [engine.end(request) for request in ids])
        for i, rollout in enumerate(group.rollouts):
            rollout.reward = float((i + number) % 3)
        found.append(group)
    return found


def learner(name: str, policy=None, **options) -> Learner:
    algorithm = make_algorithm(name, MOST, **{"kl": 0.1, **options})
    return Learner(copy.deepcopy(policy or model()), algorithm, LearnerConfig(micro_batch_tokens=70, minibatches=1, epochs=1),
                   OptimizerConfig(lr=1e-3), 10, 1.0, torch.float64)


def plain_logprobs(policy, rollout: Rollout) -> torch.Tensor:
    """Log-probabilities of all tokens of an answer, by its own forward pass."""
    tokens = torch.tensor(rollout.prompt_ids + rollout.token_ids)
    rope = Rope(CONFIGS["llama"], 256, torch.float64, "cpu")
    hidden = policy(tokens, PackedAttend(OPS, *rope(torch.arange(len(tokens))), (len(tokens),))).final
    rows = hidden[len(rollout.prompt_ids) - 1 : -1]
    return policy.logits(rows, OPS).log_softmax(-1).gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]


def plain_advantages(name: str, groups: list[RolloutGroup], values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Advantages of the sampled tokens of each answer. `values`: the critic's, of the same tokens, for PPO."""
    found = []
    for group in groups:
        rewards = torch.tensor([rollout.reward for rollout in group.rollouts], dtype=torch.float64)
        others = (rewards.sum() - rewards) / (len(rewards) - 1)
        each = {"dr_grpo": rewards - rewards.mean(), "rloo": rewards - others}.get(
            name, (rewards - rewards.mean()) / (rewards.std() + 1e-4))
        found += [advantage.repeat(sum(rollout.loss_mask)) for advantage, rollout in zip(each, group.rollouts, strict=True)]
    if name != "ppo":
        return found
    answers = [rollout for group in groups for rollout in group.rollouts]
    for i, (rollout, value) in enumerate(zip(answers, values, strict=True)):
        advantage, after = torch.zeros_like(value), 0.0
        for t in reversed(range(len(value))):  # only sampled tokens are steps: the reward comes at the last of them
            delta = (rollout.reward if t == len(value) - 1 else float(value[t + 1])) - float(value[t])
            advantage[t] = after = delta + 0.95 * after
        found[i] = advantage
    every = torch.cat(found)
    return [(advantage - every.mean()) / (every.std() + 1e-8) for advantage in found]


def plain_loss(name: str, new: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    """The losses of one answer's sampled tokens."""
    log_ratio = new - old
    if name == "gspo":
        log_ratio = log_ratio.mean().expand(len(new))
    if name == "rloo":
        log_ratio = log_ratio.sum().expand(len(new))
    ratio = log_ratio.exp()
    if name == "cispo":
        return -ratio.detach().clamp(0, 5) * advantage * new
    low, high = {"gspo": (3e-4, 4e-4), "dapo": (0.2, 0.28)}.get(name, (0.2, 0.2))
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_loss_and_gradient_equal_a_plain_reference(name):
    """The formulas are written out for one answer at a time, whose masked tokens are left out; some ratios are clipped."""
    groups = rollouts()
    ours = learner(name, kl=0.0, overlong_cache=0, dynamic_sampling=False)
    samples = samples_of(groups, torch.float64)
    ours.infer(samples)
    draw = torch.Generator().manual_seed(0)
    for sample in samples:  # as if the policy had changed since
        sample.old = sample.sampled + 0.2 * torch.randn(sample.num_answer, generator=draw, dtype=torch.float64)
    ours.algorithm.compute_advantages(samples)
    expected_advantages = plain_advantages(name, groups, [sample.values for sample in samples])
    for sample, advantages in zip(samples, expected_advantages, strict=True):
        torch.testing.assert_close(sample.advantages, advantages, rtol=1e-6, atol=1e-9)
    weights = ours.algorithm.weights([sample.num_answer for sample in samples])
    total = torch.zeros((), dtype=torch.float64)
    for batch in pack(samples, 70, weights):
        loss = ours.algorithm.loss(ours.policy.logprobs(batch, 1.0)[0], batch).total
        loss.backward()
        total += loss.detach()

    theirs = copy.deepcopy(model()).requires_grad_(True)
    answers = [rollout for group in groups for rollout in group.rollouts]
    masks = [torch.tensor(rollout.loss_mask, dtype=torch.float64) for rollout in answers]
    assert all(0 < mask.sum() < len(mask) for mask in masks)
    expected = torch.zeros((), dtype=torch.float64)
    for rollout, sample, advantages, mask in zip(answers, samples, expected_advantages, masks, strict=True):
        losses = plain_loss(name, plain_logprobs(theirs, rollout)[mask.bool()], sample.old, advantages)
        num_tokens = {"dr_grpo": MOST * len(answers), "dapo": sum(map(sum, masks)), "cispo": sum(map(sum, masks)),
                      "ppo": sum(map(sum, masks))}.get(name, mask.sum() * len(answers))
        expected = expected + losses.sum() / num_tokens
    expected.backward()
    assert float(total) == pytest.approx(float(expected.detach()), abs=1e-9)
    for (key, ours_), (_, theirs_) in zip(ours.policy.model.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(ours_.grad, theirs_.grad, rtol=1e-4, atol=1e-7, msg=key)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_all_algorithms_train_on_sampled_tokens_only(name):
    """A reply's tokens have neither advantage nor weight, and the update is that of the same answers in other micro-batches."""
    found = []
    for limit in (70, 10_000):
        ours = learner(name)
        ours.config = ours.config.model_copy(update={"micro_batch_tokens": limit})
        samples = samples_of(rollouts(), torch.float64)
        ours.infer(samples)
        ours.algorithm.compute_advantages(samples)
        for sample, rollout in zip(samples, [r for g in rollouts() for r in g.rollouts], strict=True):
            assert sample.num_answer == sum(rollout.loss_mask) == len(sample.advantages) == len(sample.reference)
            assert sample.length == len(rollout.token_ids)
        metrics = ours.update(samples, 0)
        assert metrics["logprob_difference/max"] < 1e-6, "sampled and trained log-probabilities are of the same tokens"
        found.append(torch.cat([p.detach().flatten() for p in ours.policy.parameters()]))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-6)


def test_adapters_and_exact_logprobs():
    """With LoRA, and with log-probabilities of the engine's own kernels: equal bit for bit to those that were sampled with."""
    policy = copy.deepcopy(model(dtype=torch.float32))
    engine = Engine(policy, drafter="none", strategy="off", config=EngineConfig(deterministic=True))
    algorithm = make_algorithm("grpo", MOST)
    config = LearnerConfig(lora_rank=4, exact_logprobs=True)
    ours = Learner(copy.deepcopy(policy), algorithm, config, OptimizerConfig(lr=1e-3), 10, 1.0, torch.float32)
    samples = samples_of(rollouts(engine=engine), torch.float32)
    ours.infer(samples)
    ours.algorithm.compute_advantages(samples)
    assert ours.update(samples, 0)["logprob_difference/max"] == 0.0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_rewards_of_turns(name):
    """A turn's tokens get no credit for what was earned before it; rewards of 0 change nothing."""
    groups, found = rollouts(), []
    for earned in (None, [0.0, 0.0, 0.0], [1.0, 0.0, 0.5]):
        for group in groups:
            for rollout in group.rollouts:
                num_turns = 1 + sum(a < b for a, b in zip(rollout.loss_mask, rollout.loss_mask[1:], strict=False))
                rollout.turn_rewards = [] if earned is None else earned[:num_turns]
        ours = learner(name, kl=0.0, overlong_cache=0, **({"whiten": False} if name == "ppo" else {}))
        samples = samples_of(groups, torch.float64)
        ours.infer(samples)
        ours.algorithm.compute_advantages(samples)
        found.append((samples, [sample.advantages for sample in samples]))
    for plain, zero in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(plain, zero, rtol=0, atol=1e-12)
    samples, advantages = found[2]
    assert [sample.turns().unique().tolist() for sample in samples[:3]] == [[0, 1], [0, 1, 2], [0, 1, 2]]
    if name == "ppo":
        values, sample = samples[1].values, samples[1]
        turns, rewards = sample.turns().tolist(), [0.0] * sample.num_answer
        for turn, value in enumerate(sample.turn_rewards):
            rewards[len(turns) - 1 - turns[::-1].index(turn)] += value
        rewards[-1] += sample.reward - sum(sample.turn_rewards)
        after, expected = 0.0, []
        for t in reversed(range(len(rewards))):
            coming = float(values[t + 1]) if t + 1 < len(rewards) else 0.0
            expected.insert(0, after := rewards[t] + coming - float(values[t]) + 0.95 * after)
        torch.testing.assert_close(advantages[1], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9)
        return
    for first in (0, 3):
        members = samples[first : first + 3]
        for turn, before in enumerate(([0, 0, 0], [1, 1, 1], [1, 1, 1])):
            returns = torch.tensor([s.reward - b for s, b in zip(members, before, strict=True)], dtype=torch.float64)
            wanted = ours.algorithm.group_advantages(returns)
            for sample, found_, each in zip(members, advantages[first:], wanted, strict=False):
                assert all(torch.isclose(value, each) for value in found_[sample.turns() == turn])


@pytest.mark.parametrize(("name", "loss_type", "clip_high"), [
    ("grpo", "grpo", 0.2), ("dapo", "dapo", 0.28), ("dr_grpo", "dr_grpo", 0.2), ("gspo", "grpo", 0.3), ("cispo", "cispo", 5.0)])
def test_losses_and_gradients_equal_trl_with_its_tool_mask(name, loss_type, clip_high):
    pytest.importorskip("trl")
    from test_trl import LONGEST, stand_in
    from trl.trainer.grpo_trainer import GRPOTrainer

    options = {"gspo": {"clip_low": 0.2, "clip_high": 0.3}}.get(name, {})
    algorithm = make_algorithm(name, LONGEST, overlong_cache=0, dynamic_sampling=False, **options)
    draw, samples, news, masks = torch.Generator().manual_seed(1), [], [], []
    for number in range(6):
        mask = torch.rand(5 + number, generator=draw) < 0.6
        mask[0] = True
        sampled = -torch.rand(int(mask.sum()), generator=draw, dtype=torch.float64)
        samples.append(Sample([1, 2] + [3] * len(mask), 2, number // 3, float(number % 3), False, sampled, loss_mask=mask))
        news.append(sampled + 0.3 * torch.randn(len(sampled), generator=draw, dtype=torch.float64))
        masks.append(mask)
        samples[-1].old = sampled
    algorithm.compute_advantages(samples)
    pad = lambda parts: torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)  # noqa: E731
    spread = lambda values: pad([torch.zeros(len(m), dtype=torch.float64).masked_scatter(m, v)  # noqa: E731
                                 for m, v in zip(masks, values, strict=True)])
    ones, tool_mask = pad([torch.ones(len(mask)) for mask in masks]), pad([mask.double() for mask in masks])
    ids = torch.zeros_like(ones).long()
    inputs = {"prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": ones, "tool_mask": tool_mask,
              "advantages": torch.stack([s.advantages[0] for s in samples]), "num_items_in_batch": tool_mask.sum(),
              "old_per_token_logps": spread([s.old for s in samples])}
    news = [new.requires_grad_() for new in news]
    trainer = stand_in(spread(news), loss_type, 0.0, clip_high)
    trainer.importance_sampling_level = "sequence" if name == "gspo" else "token"
    theirs = GRPOTrainer._compute_loss(trainer, None, inputs)
    ours = torch.zeros((), dtype=torch.float64)
    for batch in pack(samples, 30, algorithm.weights([s.num_answer for s in samples])):
        ours = ours + algorithm.loss(torch.cat([news[i] for i in batch.members]), batch).total
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), abs=1e-6)
    mine, wanted = torch.autograd.grad(ours, news), torch.autograd.grad(theirs, news)
    assert any(gradient.abs().max() > 1e-3 for gradient in wanted)
    for gradient, other in zip(mine, wanted, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-5, atol=1e-7)
