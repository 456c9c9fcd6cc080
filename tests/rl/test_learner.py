"""The learner: packing changes nothing, gradients flow where they should, bad numbers change no weight, checkpoints restore."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

import pytest
import tiny
import torch
from samples import random_samples

from paceline.config import LearnerConfig, OptimizerConfig
from paceline.models.save import save_model
from paceline.models.weights import load_model
from paceline.rl import Learner, NonFiniteError, make_algorithm, pack
from paceline.rl.checkpoint import Checkpoints, RunState, policy_folder, read_state, restore, save_learner
from paceline.rl.models import HEAD_ROWS, Policy, Scorer, load_reward_model


def make_learner(name="grpo", lr=1e-3, kind="llama", steps=10, temperature=1.0, compute=torch.float64, options=None, model=None,
                 **config) -> Learner:
    model = model or deepcopy(tiny.model(kind))
    return Learner(model, make_algorithm(name, 16, **(options or {})), LearnerConfig(**config), OptimizerConfig(lr=lr), steps,
                   temperature, compute)


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.weights()}


def assert_same(a, b, **kwargs):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], msg=lambda m, name=name: f"{name}: {m}", **kwargs)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_logprobs_equal_one_sequence_at_a_time(kind):
    policy, samples = Policy(tiny.model(kind), torch.float64), random_samples(3, 3)
    with torch.no_grad():
        for batch in pack(samples, 30):
            packed, entropy = policy.logprobs(batch, 0.7)
            alone = [policy.logprobs(pack([samples[i]], 30)[0], 0.7) for i in batch.members]
            torch.testing.assert_close(packed, torch.cat([p for p, _ in alone]))
            torch.testing.assert_close(entropy, torch.cat([e for _, e in alone]))


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_rows_of_the_head_in_chunks_equal_all_at_once(exact, entropy_gradient, monkeypatch):
    """Log-probabilities, entropy and gradients of more answer tokens than logits may exist for at the same time."""
    learner, temperature, rows = make_learner(exact_logprobs=exact), 0.7, []
    learner.warm_up()
    policy, parameters = learner.policy, list(learner.policy.parameters())
    (batch,) = pack(random_samples(8, 12, longest=60), 10_000)
    scaled = policy.model.logits(policy.hidden(batch)[batch.rows], policy.ops) / temperature
    distribution = scaled.log_softmax(dim=-1)
    expected = distribution.gather(1, batch.targets[:, None])[:, 0], -(distribution.exp() * distribution).sum(dim=-1)
    of_logits = policy._of_logits
    monkeypatch.setattr(policy, "_of_logits", lambda logits, *rest: (rows.append(len(logits)), of_logits(logits, *rest))[1])
    found = policy.logprobs(batch, temperature, entropy_gradient=entropy_gradient)
    assert set(rows) == {HEAD_ROWS, len(batch.rows) % HEAD_ROWS} and len(batch.rows) > 2 * HEAD_ROWS
    draw = torch.Generator().manual_seed(0)
    weights = torch.randn(2, len(batch.rows), generator=draw, dtype=torch.float64) * torch.tensor([[1], [entropy_gradient]])
    gradients = [torch.autograd.grad(sum((w * part).sum() for w, part in zip(weights, parts, strict=True)), parameters)
                 for parts in (expected, found)]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients[1], gradients[0])
    with torch.no_grad():
        torch.testing.assert_close(policy.logprobs(batch, temperature), tuple(part.detach() for part in expected))


def test_packing_is_tight_and_complete():
    samples = random_samples(4, 8)
    batches = pack(samples, 40)
    assert sorted(i for batch in batches for i in batch.members) == list(range(len(samples)))
    assert all(len(batch.tokens) <= 40 for batch in batches)
    total = sum(len(s.tokens) for s in samples)
    assert len(batches) <= -(-total // 40) + 1
    assert len(pack(samples, 1)) == len(samples)  # too long for the limit: alone


@pytest.mark.parametrize("old", ["trainer", "engine"])
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "rloo", "ppo"])
def test_update_does_not_depend_on_packing(name, old):
    options = {"kl": 0.1}
    results = []
    for limit, checkpointing in ((10_000, False), (25, False), (1, True)):
        learner = make_learner(name, options=options, micro_batch_tokens=limit, gradient_checkpointing=checkpointing,
                               old_logprobs=old)
        samples = random_samples(3, 4)
        learner.infer(samples)
        learner.algorithm.compute_advantages(samples)
        metrics = learner.update(samples, 0)
        results.append((weights_of(learner), metrics))
    before = dict(tiny.model("llama").named_parameters())
    assert any((results[0][0][name] != before[name]).any() for name in before)
    for weights, metrics in results[1:]:
        assert_same(results[0][0], weights, rtol=1e-7, atol=1e-9)
        assert metrics == pytest.approx(results[0][1], rel=1e-6, abs=1e-9)


def test_a_good_answer_becomes_likelier():
    learner, samples = make_learner(lr=1e-2), random_samples(1, 2)
    samples[0].reward, samples[1].reward = 1.0, 0.0
    batch = pack(samples, 100)[0]
    with torch.no_grad():
        before = learner.policy.logprobs(batch, 1.0)[0]
    for sample, part in zip(samples, before.split([s.num_answer for s in samples]), strict=True):
        sample.sampled = part
    learner.algorithm.compute_advantages(samples)
    metrics = learner.update(samples, 0)
    with torch.no_grad():
        change = (learner.policy.logprobs(batch, 1.0)[0] - before).split([s.num_answer for s in samples])
    assert change[0].mean() > 0 > change[1].mean()
    assert metrics["logprob_difference/max"] == 0.0


def test_lora_trains_adapters_only():
    model = deepcopy(tiny.model("qwen3"))
    before = {name: p.clone() for name, p in model.named_parameters()}
    learner = make_learner(model=model, lora_rank=2, lr=1e-2)
    assert_same(before, weights_of(learner))  # B starts at zero
    trained = [name for name, p in learner.policy.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    samples = random_samples(2, 3)
    learner.algorithm.compute_advantages(samples)
    learner.update(samples, 0)
    after = weights_of(learner)
    changed = {name.split(".")[-2] for name in after if not torch.equal(after[name], before[name])}
    assert changed == {"qkv", "o", "gate_up", "down"}
    assert torch.equal(after["embed.weight"], before["embed.weight"])


def test_bfloat16_keeps_float32_weights():
    learner = make_learner(model=deepcopy(tiny.model("llama", dtype=torch.float32)), compute=torch.bfloat16, lr=1e-6)
    before, samples = weights_of(learner), random_samples(2, 3)
    for sample in samples:
        sample.sampled = sample.sampled.float()
    learner.algorithm.compute_advantages(samples)
    learner.update(samples, 0)
    after = weights_of(learner)
    assert all(p.dtype == torch.float32 for p in after.values())
    moved = torch.cat([(after[n] - before[n]).abs().flatten() for n in after])
    assert 0 < moved.max() < 1e-5  # a change that bfloat16 weights would have lost


def test_not_a_number_changes_no_weight():
    learner, samples = make_learner(), random_samples(2, 3)
    learner.algorithm.compute_advantages(samples)
    samples[1].advantages = samples[1].advantages * float("nan")
    before = weights_of(learner)
    with pytest.raises(NonFiniteError, match="nan"):
        learner.update(samples, 0)
    assert_same(before, weights_of(learner), rtol=0, atol=0)
    samples = random_samples(2, 3)
    learner.algorithm.compute_advantages(samples)
    learner.update(samples, 0)  # and it can go on


@pytest.mark.parametrize(("name", "config"), [("grpo", {}), ("ppo", {"minibatches": 2, "epochs": 2}), ("rloo", {"lora_rank": 2})])
def test_checkpoint_restores_everything(name, config, tmp_path):
    def step(learner, seed):
        samples = random_samples(2, 4, seed)
        learner.infer(samples)
        learner.algorithm.compute_advantages(samples)
        learner.update(samples, seed)

    unbroken = make_learner(name, **config)
    step(unbroken, 0)
    checkpoints = Checkpoints(tmp_path, keep=2)
    saved = checkpoints.save(RunState(1, 4), partial(save_learner, unbroken, tokenizer=None))
    step(unbroken, 1)
    assert read_state(saved) == RunState(1, 4) and checkpoints.latest() == saved
    source = None if "lora_rank" in config else load_model(policy_folder(saved), dtype=torch.float64)[0]
    resumed = make_learner(name, model=source, **config)
    if resumed.reference is not None:
        resumed.reference.model.load_state_dict(unbroken.reference.model.state_dict())
    restore(resumed, saved)
    step(resumed, 1)
    assert_same(weights_of(unbroken), weights_of(resumed), rtol=0, atol=0)


def test_checkpoints_are_whole_or_absent(tmp_path, monkeypatch):
    learner, checkpoints = make_learner(), Checkpoints(tmp_path, keep=1)
    checkpoints.save(RunState(1, 1), partial(save_learner, learner, tokenizer=None))

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("paceline.rl.checkpoint.save_tensors", full)
    with pytest.raises(OSError, match=r"No space left.*step-000001"):
        checkpoints.save(RunState(2, 2), partial(save_learner, learner, tokenizer=None))
    assert [path.name for path in checkpoints.all()] == ["step-000001"]
    assert load_model(policy_folder(checkpoints.all()[0]))[0].config.vocab_size == tiny.VOCAB
    monkeypatch.undo()
    (tmp_path / ".new").mkdir()  # a run killed while it was writing
    checkpoints.save(RunState(3, 3), partial(save_learner, learner, tokenizer=None))
    assert [path.name for path in checkpoints.all()] == ["step-000003"]


def test_the_last_checkpoint_that_a_step_was_done_from_is_kept(tmp_path):
    """With keep=1 a new checkpoint replaces the old one only when a step has been done from it."""
    learner, checkpoints = make_learner(), Checkpoints(tmp_path, keep=1)
    for step in (1, 2, 3):
        checkpoints.confirm()
        checkpoints.save(RunState(step, step), partial(save_learner, learner, tokenizer=None))
    assert [path.name for path in checkpoints.all()] == ["step-000002", "step-000003"]
    checkpoints.confirm()
    assert [path.name for path in checkpoints.all()] == ["step-000003"]


def test_weights_that_are_no_numbers_are_not_saved(tmp_path):
    learner, checkpoints = make_learner(), Checkpoints(tmp_path, keep=1)
    checkpoints.save(RunState(1, 1), partial(save_learner, learner, tokenizer=None))
    with torch.no_grad():
        next(p for p in learner.policy.parameters() if p.requires_grad)[0] = float("inf")
    with pytest.raises(NonFiniteError, match=r"policy: .* is not finite"):
        checkpoints.save(RunState(2, 2), partial(save_learner, learner, tokenizer=None))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_reward_model_equals_transformers(tmp_path):
    from transformers import AutoModelForSequenceClassification, Qwen2Config

    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, num_labels=1, pad_token_id=0, max_position_embeddings=64)
    theirs = AutoModelForSequenceClassification.from_config(config).double()
    theirs.save_pretrained(tmp_path)
    ours, samples = load_reward_model(tmp_path, "cpu", torch.float64, torch.float64), random_samples(2, 3)
    (batch,) = pack(samples, 1000)
    with torch.no_grad():
        expected = [theirs(torch.tensor([s.tokens]).clamp_min(1)).logits[0, 0] for s in samples]
        tokens = batch.tokens.clamp_min(1)  # 0 is their padding
        torch.testing.assert_close(ours.scores(batch._replace(tokens=tokens)), torch.stack(expected))
    save_model(tiny.model("llama"), None, tmp_path / "plain")
    with pytest.raises(ValueError, match="sequence classifier"):
        load_reward_model(tmp_path / "plain", "cpu", torch.float64, torch.float64)


def test_critic_learns_the_returns():
    """A critic alone, on fixed returns: its loss falls."""
    learner, samples = make_learner("ppo", lr=3e-3, options={"kl": 0.0}), random_samples(4, 4)
    assert isinstance(learner.critic, Scorer)
    seen = []
    for _ in range(30):
        learner.infer(samples)
        learner.algorithm.compute_advantages(samples)
        seen.append(learner.update(samples, 0)["loss/value"])
    assert sum(seen[-5:]) < 0.5 * sum(seen[:5])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])  # DAPO's rewards also depend on the length
@pytest.mark.parametrize("none_differ", [False, True])
def test_samples_without_gradient_are_left_out_and_change_nothing(name, none_differ, monkeypatch):
    results, passes = [], []
    for leave_out in (True, False):
        learner = make_learner(name, lr=1e-3)
        packed = learner._packed
        monkeypatch.setattr(learner, "_packed", lambda samples, *rest, packed=packed: passes.append(len(samples)) or packed(
            samples, *rest))
        if not leave_out:
            monkeypatch.setattr(learner, "_with_gradient", lambda samples, weights: (samples, weights, 1.0))
        for step in range(2):  # in the second, the optimizer has momentum
            samples = random_samples(4, 4, seed=step)
            for number, sample in enumerate(samples):
                differs = sample.group == 1 and not (none_differ and step)
                sample.reward = float(number == 4) if differs else 1.0
            learner.infer(samples)
            learner.algorithm.compute_advantages(samples)
            metrics = learner.update(samples, step)
        results.append((weights_of(learner), metrics))
    assert passes[0] == 4 and passes[2] == 16, "only one of four groups has a gradient"
    assert_same(results[0][0], results[1][0], rtol=0, atol=1e-12)
    assert results[0][1]["grad_norm"] == pytest.approx(results[1][1]["grad_norm"], rel=1e-9)


@pytest.mark.parametrize("config", [{}, {"gradient_checkpointing": True}, {"lora_rank": 2}])
def test_a_warm_up_leaves_no_trace(config):
    warm, cold = make_learner(**config), make_learner(**config)
    warm.warm_up()
    assert all(parameter.grad is None for parameter in warm.policy.parameters())
    for learner in (warm, cold):
        samples = random_samples(2, 4)
        learner.algorithm.compute_advantages(samples)
        learner.update(samples, 0)
    assert_same(weights_of(warm), weights_of(cold), rtol=0, atol=0)


def test_deterministic_updates_use_deterministic_algorithms(monkeypatch):
    learner, samples, seen = make_learner(deterministic=True), random_samples(1, 2), []
    learner.algorithm.compute_advantages(samples)
    step = learner._optimizer_step
    monkeypatch.setattr(learner, "_optimizer_step",
                        lambda *args: (seen.append(torch.are_deterministic_algorithms_enabled()), step(*args))[1])
    learner.update(samples, 0)
    assert seen == [True]
    assert not torch.are_deterministic_algorithms_enabled()
