"""Asynchronous training: without staleness it is the synchronous loop, with it every token is as old as it may be and has the
log-probability of the policy that sampled it, and importance weights correct for the rest."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from e2e import toy

from paceline import Engine, SamplingParams
from paceline.bundled import resolve_model
from paceline.config import EngineConfig, LearnerConfig, OptimizerConfig, TrainConfig
from paceline.models.decoder import Decoder
from paceline.models.weights import load_model
from paceline.report import read_metrics
from paceline.rl import Learner, make_algorithm, pack
from paceline.rl.batch import Sample, samples_of
from paceline.rl.checkpoint import read_state
from paceline.rl.models import Policy
from paceline.tasks import make_task
from paceline.trainer import RunStatus, Trainer, TrainerCallback
from paceline.trainer.rollouts import PromptStream
from paceline.types import Rollout, RolloutGroup


def make_config(path: Path, **changes: Any) -> TrainConfig:
    if not (path / "model").exists():
        toy.make_folder(path, problems=12)
    rollout = {"prompts": 2, "group_size": 3, "max_new_tokens": 12, **changes.pop("rollout", {})}
    fields = {"model": str(path / "model"), "task": "python", "dtype": "float64", "steps": 4, "seed": 3, "threads": 1,
              "task_options": {"function": f"{path}/reward.py:score", "data": f"{path}/prompts.jsonl"},
              "strategy": "suffix:d4w2v8", "out": str(path / "run"), "optimizer": {"lr": 0.01}, "reward": {"workers": 0},
              "rollout": rollout, "engine": {"kv_tokens": 2048, "max_batch": 4, "on_update": "recompute"}}
    return TrainConfig(**{**fields, **changes})


@pytest.mark.parametrize("changes", [
    {"strategy": "off"}, {"strategy": "suffix:d4w2v8"}, {"strategy": "suffix:d4w2v8", "learner": {"lora_rank": 4}},
    {"strategy": "eagle:d2w2v3", "drafter": "learned", "spot": {"form": "eagle"}}], ids=["plain", "suffix", "lora", "learned"])
def test_without_staleness_a_run_is_a_plain_synchronous_loop(tmp_path, changes):
    """Rollouts and weights, bit for bit. A learned drafter, which is trained between the steps, changes the last bits of
    log-probabilities, as the engine beside it drafts otherwise."""
    config, recorder = make_config(tmp_path, checkpoint_every=4, **changes), Recorder()
    assert Trainer(config, callbacks=[recorder], progress=False).run().status is RunStatus.COMPLETED
    source, tokenizer = load_model(config.model, "cpu", "float64")
    tolerance, drafts = (1e-9, "off") if "drafter" in changes else (0.0, config.strategy)
    engine = Engine(deepcopy(source).requires_grad_(False), tokenizer, "none" if drafts == "off" else "suffix", drafts,
                    config.engine)
    learner = Learner(source, make_algorithm("grpo", 12), config.learner, OptimizerConfig(lr=0.01), 4, 1.0, torch.float64, 3)
    task, params = make_task(config.task, **config.task_options), SamplingParams(max_new_tokens=12, seed=3)
    prompts, expected = PromptStream(task, 3, None), []
    for step in range(4):
        problems = prompts.take(2 * step, 2)
        keys = [f"{2 * step + i}/{problem.id}" for i, problem in enumerate(problems)]
        groups = engine.generate([problem.prompt for problem in problems], params, 3, keys)
        for problem, group in zip(problems, groups, strict=True):
            for rollout in group.rollouts:
                rollout.reward = task.grade(problem, rollout.text)
                expected.append((step, problem.id, rollout.token_ids, rollout.logprobs, rollout.versions, rollout.reward))
        samples = samples_of(groups, torch.float64)
        learner.infer(samples)
        learner.algorithm.compute_advantages(samples)
        learner.update(samples, step)
        engine.update_weights(learner.weights(), step + 1)
    found = [(step, group.key, r.token_ids, pytest.approx(r.logprobs, rel=0, abs=tolerance), r.versions, r.reward)
             for step, groups in recorder.trained for group in groups for r in group.rollouts]
    assert expected == found
    final, weights = recorder.policies[-1].state_dict(), dict(learner.weights())
    assert weights and all((final[name] - tensor).abs().max() <= tolerance for name, tensor in weights.items())
    assert not any(name.startswith("async/") for name in read_metrics(tmp_path / "run")[0])


class Recorder(TrainerCallback):
    """Keeps what every policy was trained on, and the weights of every policy."""

    def __init__(self) -> None:
        self.trained: list[tuple[int, list[RolloutGroup]]] = []
        self.policies: list[Decoder] = []

    def on_run_begin(self, trainer: Any) -> None:
        self._trainer = trainer
        self._keep()

    def on_step_end(self, step: int, metrics: dict[str, float], groups: list[RolloutGroup]) -> None:
        self.trained.append((step - 1, groups))
        self._keep()

    def _keep(self) -> None:
        weights = {name: tensor.detach().clone() for name, tensor in self._trainer.learner.weights()}
        policy = load_model(resolve_model(self._trainer.config.model), "cpu", "float64")[0].requires_grad_(False)
        policy.load_state_dict(weights, strict=False)
        self.policies.append(policy)


def check_versions(recorder: Recorder, max_staleness: int, tolerance: float = 1e-9) -> set[int]:
    """Every trained token is at most so old and has the log-probability that the policy of its version gives. Returns the ages
    of tokens, by number of updates."""
    ages = set()
    for version, groups in recorder.trained:
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            ages |= {version - each for each in rollout.versions}
            for each in set(rollout.versions):
                expected = logprobs_of(recorder.policies[each], rollout)
                mine = [i for i, found in enumerate(rollout.versions) if found == each]
                assert all(abs(rollout.logprobs[i] - expected[i]) < tolerance for i in mine)
    assert ages and min(ages) >= 0 and max(ages) <= max_staleness
    return ages


def logprobs_of(policy: Decoder, rollout: Rollout) -> list[float]:
    """Log-probabilities of an answer's tokens under a policy."""
    sample = Sample([*rollout.prompt_ids, *rollout.token_ids], len(rollout.prompt_ids), 0, 0.0, False,
                    torch.zeros(len(rollout.token_ids)))
    with torch.no_grad():
        return Policy(policy, torch.float64).logprobs(pack([sample], 1000)[0], 1.0)[0].tolist()


@pytest.mark.parametrize(("algorithm", "max_staleness"), [("grpo", 1), ("dapo", 1), ("ppo", 2)])
def test_every_trained_token_is_as_old_as_it_may_be_and_has_its_own_policys_log_probability(tmp_path, algorithm, max_staleness):
    """Evaluations run between the steps, while answers for training are under way."""
    recorder = Recorder()
    config = make_config(tmp_path, algorithm=algorithm, rollout={"max_staleness": max_staleness}, steps=5,
                         evaluation={"every": 2, "problems": 3})
    assert Trainer(config, callbacks=[recorder], progress=False).run().status is RunStatus.COMPLETED
    assert max_staleness in check_versions(recorder, max_staleness)
    rollouts = [rollout for _, groups in recorder.trained for group in groups for rollout in group.rollouts]
    assert any(len(set(rollout.versions)) > 1 for rollout in rollouts), "the policy was updated while they were generated"
    used = [group.key for _, groups in recorder.trained for group in groups]
    assert len(used[:9]) == len(set(used[:9])), "nine problems are trained on in the first epoch"
    records = read_metrics(tmp_path / "run")
    assert records[-1]["async/staleness_max"] == max_staleness and 0 < records[-1]["async/staleness_mean"] <= max_staleness
    assert all(record["async/dropped_groups"] == 0 and record["async/open_groups"] == 2 * max_staleness for record in records)
    assert all(record["async/wait_s"] >= 0 and "importance/mean" in record for record in records)


class Interrupt(TrainerCallback):
    """Ends the run while the answers of the third step are generated."""

    def on_step_begin(self, step: int) -> None:
        self._step = step

    def on_engine_step(self, *_: Any) -> None:
        if self._step == 3:
            raise KeyboardInterrupt


@pytest.mark.parametrize("stale_groups", ["wait", "drop"])
def test_an_interrupted_run_that_is_resumed_trains_on_every_prompt_once(tmp_path, stale_groups):
    rollout = {"max_staleness": 1, "stale_groups": stale_groups}
    config = make_config(tmp_path, rollout=rollout, checkpoint_every=1, epochs=1, steps=9)
    interrupted = Trainer(config, callbacks=[Interrupt()], progress=False).run()
    assert interrupted.status is RunStatus.INTERRUPTED
    state = read_state(tmp_path / "run" / "checkpoints" / "step-000002")
    assert state.cursor == 4 and len(state.unfinished) == 2
    result = Trainer(config, resume=True, progress=False).run()
    assert result.status is RunStatus.COMPLETED and result.num_steps == 6, "12 prompts, two per step"
    groups = dict.fromkeys((line["step"], line["id"]) for line in toy.rollouts(tmp_path / "run"))
    assert sorted(name for _, name in groups) == sorted(f"p{i}" for i in range(12))
    assert read_state(tmp_path / "run" / "checkpoints" / "step-000006").unfinished == ()


@pytest.mark.parametrize("correction", ["truncate", "off"])
def test_the_gradient_is_that_of_truncated_importance_weights(correction):
    """Beside plain PyTorch: sum over tokens of weight · min(pi / mu, cap) · A · grad log pi, where mu is what the tokens were
    sampled with."""
    model, draw = deepcopy(tiny.model("llama")), torch.Generator().manual_seed(0)
    samples = []
    for i in range(6):
        tokens = torch.randint(0, tiny.VOCAB, (9,), generator=draw).tolist()
        own = logprobs_of(model, Rollout(0, 0, tokens[:3], tokens[3:], [], "", "stop", []))
        away = 0.6 * torch.randn(6, generator=draw, dtype=torch.float64)
        behaviour = torch.tensor(own, dtype=torch.float64) + away + 0.01 * away.sign()  # not mere rounding
        samples.append(Sample(tokens, 3, i // 3, float(i % 3), False, behaviour))
    settings = LearnerConfig(importance_correction=correction, importance_cap=1.5)
    learner = Learner(deepcopy(model), make_algorithm("grpo", 16), settings, OptimizerConfig(max_grad_norm=1e9), 10, 1.0,
                      torch.float64)
    learner.algorithm.compute_advantages(samples)
    gradients: dict[str, torch.Tensor] = {}
    learner._apply = lambda losses: gradients.update(  # type: ignore[method-assign]
        {name: p.grad.clone() for name, p in learner.policy.model.named_parameters()}) or {}
    learner.infer(samples)
    learner.update(samples, 0)

    policy, loss, capped = Policy(model.requires_grad_(True), torch.float64), torch.zeros((), dtype=torch.float64), 0
    for sample in samples:
        logprobs = policy.logprobs(pack([sample], 100)[0], 1.0)[0]
        ratio = (logprobs.detach() - sample.sampled).exp()
        capped += int((ratio > 1.5).sum())
        weight = ratio.clamp(max=1.5) if correction == "truncate" else torch.ones_like(ratio)
        loss = loss - (weight * sample.advantages * logprobs).mean() / len(samples)
    assert 2 < capped < 34, "some weights are cut, and some are not"
    loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, msg=name)


@pytest.mark.parametrize(("change", "said"), [
    ({"compare_off": True}, "answers are under way during updates, which compare_off cannot have"),
    ({"sleep_during_update": True}, "answers are under way during updates, which sleep_during_update cannot have")])
def test_settings_that_cannot_work_are_refused_in_one_line(tmp_path, change, said):
    config = make_config(tmp_path, rollout={"max_staleness": 1}, engine=EngineConfig(), **change)
    with pytest.raises(ValueError, match=said) as refused:
        Trainer(config, progress=False).run()
    assert "\n" not in str(refused.value) and not (tmp_path / "run").exists()
