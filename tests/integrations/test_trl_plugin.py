"""TRL's `GRPOTrainer` with Paceline's rollouts: weights follow, log-probabilities agree, tokens are the engine's."""

from __future__ import annotations

import importlib.util
import statistics
import time
from pathlib import Path

import pytest
import torch
from small_policy import BUNDLED, write_policy
from trl_training import AGREEMENT, ENGINE, Recorded, answers, logged, make_trainer

from paceline import Engine, SamplingParams
from paceline.config import ConfigError
from paceline.engine.prompts import derive_seed
from paceline.integrations import trl as trl_plugin
from paceline.integrations.trl import DRAFTER_FOLDER, PacelineRollout
from paceline.models.parameters import num_parameters

pytestmark = pytest.mark.integration
EXAMPLE = Path(__file__).resolve().parents[2] / "examples/integrations/trl_grpo.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_policy(tmp_path_factory.mktemp("policy"))


@pytest.mark.parametrize(("drafter", "lora"), [("suffix", False), ("learned", False), ("suffix", True)])
def test_three_steps(folder, tmp_path, drafter, lora):
    rollout = Recorded(drafter=drafter, engine=ENGINE)
    trainer = make_trainer(folder, tmp_path, rollout, lora=lora)
    trainer.train()
    assert len(rollout.calls) == len(logged(trainer, AGREEMENT)) == 3 and rollout.engine.version == 2
    assert max(logged(trainer, AGREEMENT)) < 1e-4
    assert all(abs(ratio - 1) < 1e-3 for ratio in logged(trainer, "sampling/importance_sampling_ratio/mean"))
    weights = [trained["model.layers.0.self_attn.q_proj.weight"] for _, trained in rollout.calls]
    assert not torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])
    assert min(logged(trainer, "paceline/accept_length")) >= 1
    if drafter == "learned":
        assert max(logged(trainer, "drafter/steps")) >= 1 and (tmp_path / DRAFTER_FOLDER).is_dir()
        assert rollout.drafter_trainer is None  # it ends with the trainer's training


def double(number: int) -> str:
    """Double a number.

    Args:
        number: what to double
    """
    return str(2 * number)


class Doubling:
    """An environment with that tool, which counts its calls."""

    num_calls = 0

    def reset(self, **row) -> str:
        return "7"

    def double(self, number: int) -> str:
        """Double a number.

        Args:
            number: what to double
        """
        Doubling.num_calls += 1
        return double(number)


@pytest.mark.parametrize("kind", ["tools", "environment"])
def test_tools_and_environments(folder, tmp_path, monkeypatch, kind):
    """The trainer calls them, and each further turn comes from the engine: what was sampled is what is trained on. The policy
    speaks no format of tools, so an answer that begins with an even digit counts as a call."""
    from trl.trainer import grpo_trainer

    def parse(tokenizer, ids, prefix=None, tools=None):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        calls = [{"type": "function", "function": {"name": "double", "arguments": {"number": int(text[0])}}}]
        return {"role": "assistant", "content": text, **({"tool_calls": calls} if text[:1] in tuple("02468") else {})}

    monkeypatch.setattr(grpo_trainer, "parse_response", parse)
    monkeypatch.setattr(grpo_trainer, "add_response_schema", lambda tokenizer: tokenizer)
    rollout = Recorded(engine=ENGINE)
    own = {"tools": [double]} if kind == "tools" else {"environment_factory": Doubling}
    trainer = make_trainer(folder, tmp_path, rollout, prompts=[[{"role": "user", "content": f"{n}:"}] for n in range(3, 40)],
                           max_completion_length=40, max_tool_calling_iterations=3, **own)
    trainer._tokenizer.response_schema = {"type": "object"}
    turns, answer = [], rollout.continue_answers
    rollout.continue_answers = lambda texts: turns.append(len(texts)) or answer(texts)
    trainer.train()
    assert max(logged(trainer, "tools/call_frequency")) > 0 and sum(turns) > 0
    assert max(logged(trainer, AGREEMENT)) < 1e-4 and len(rollout.calls) == 3
    assert max(logged(trainer, "tools/failure_frequency")) == 0 and (kind == "tools" or Doubling.num_calls > 0)
    if kind == "environment":
        prompts = {tuple(ids) for output, _ in rollout.calls for ids in output["prompt_ids"]}
        assert all(trainer._tokenizer.decode(list(ids)).endswith("7") for ids in prompts), "what reset says is read"


def test_the_kv_cache_is_planned_for_the_parameters_that_are_trained(folder, tmp_path, monkeypatch):
    """With adapters all others are frozen: they have no gradients and no moments."""
    planned = []
    make = trl_plugin.engine_for
    monkeypatch.setattr(trl_plugin, "engine_for", lambda *args, num_trained, **options: (
        planned.append(num_trained), make(*args, num_trained=num_trained, **options))[1])
    for lora in (True, False):
        rollout = PacelineRollout(engine=ENGINE)
        trainer = make_trainer(folder, tmp_path / str(lora), rollout, lora=lora, max_steps=1)
        trainer.train()
    config = rollout.engine.model.config
    heads, kv, hidden = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.hidden_size
    adapters = config.num_layers * 4 * (heads + hidden + kv + hidden + config.intermediate_size + hidden)
    assert planned == [adapters, num_parameters(config)]


def test_tokens_are_those_of_the_engine(folder, tmp_path):
    rollout = Recorded(strategy="suffix:d4w2v8", engine=ENGINE)
    trainer = make_trainer(folder, tmp_path, rollout, max_steps=2, temperature=0.9, top_p=0.95, repetition_penalty=1.1,
                           generation_kwargs={"logit_bias": {2: 1.5}})
    trainer.train()
    engine = Engine.load(folder, dtype="float32", drafter="none", strategy="off", **ENGINE)
    for step, (output, weights) in enumerate(rollout.calls):
        engine.update_weights(weights)
        assert len(output["prompt_ids"]) == 16 and output["prompt_ids"][0] == output["prompt_ids"][7]
        for index, prompt in enumerate(output["prompt_ids"]):
            params = SamplingParams(temperature=0.9, top_p=0.95, max_new_tokens=24, repetition_penalty=1.1, logit_bias={2: 1.5})
            [request] = engine.add(prompt, params, seeds=[derive_seed(7, f"train/{step}/0/0", index)])
            while not (finished := engine.step().finished):
                pass
            assert finished[0].request_id == request and finished[0].token_ids == output["completion_ids"][index]
            assert finished[0].logprobs == pytest.approx(output["logprobs"][index], abs=1e-4)


def test_conversations_and_evaluation(folder, tmp_path):
    rollout = Recorded(engine=ENGINE, sleep=True)
    prompts = [[{"role": "user", "content": f"{n}:"}] for n in range(3, 20)]
    trainer = make_trainer(folder, tmp_path, rollout, prompts, max_steps=1, per_device_eval_batch_size=8)
    trainer.train()
    expected = trainer.processing_class("5:")["input_ids"]
    assert any(ids[-len(expected):] == expected for ids in (*rollout.calls[0][0]["prompt_ids"], expected))
    assert len({tuple(ids) for ids in rollout.calls[0][0]["prompt_ids"]}) == 2
    metrics = trainer.evaluate(trainer.train_dataset.select(range(2)))
    assert "eval_reward" in metrics and rollout.engine.version == 1


def test_evaluation_after_the_best_checkpoint_is_loaded(folder, tmp_path):
    """`load_best_model_at_end` exchanges the weights without a step."""
    rollout = Recorded(engine=ENGINE)
    trainer = make_trainer(folder, tmp_path, rollout, max_steps=3, eval_strategy="steps", eval_steps=1, save_strategy="steps",
                           save_steps=1, load_best_model_at_end=True, metric_for_best_model="eval_reward",
                           per_device_eval_batch_size=8, evaluate=1)
    rewards = iter((1.0, 0.0, 0.0, 0.0))
    plain_evaluate = trainer.evaluate
    trainer.evaluate = lambda *arguments, **options: {**plain_evaluate(*arguments, **options), "eval_reward": next(rewards)}
    trainer.train()
    assert trainer.state.best_global_step == 1
    version = rollout.engine.version
    trainer.evaluate()  # Recorded compares the weights
    assert rollout.engine.version == version + 1
    best, last = rollout.evaluations[0], rollout.evaluations[-1]
    assert all(torch.equal(value, last[1][name]) for name, value in best[1].items())
    assert answers([best]) == answers([last]) != answers(rollout.evaluations[-2:-1])


def test_a_second_training_generates_with_the_weights_of_the_first(folder, tmp_path):
    rollout = Recorded(engine=ENGINE)
    trainer = make_trainer(folder, tmp_path, rollout, max_steps=1)
    trainer.train()
    trainer.train()  # begins at step 0, as the first did
    assert max(logged(trainer, AGREEMENT)) < 1e-4 and rollout.engine.version == 1


def test_weights_that_change_within_a_step(folder, tmp_path):
    """Weights that a callback writes, past autograd's version counters, reach the engine; those that are the same keep its
    version."""
    rollout = Recorded(engine=ENGINE)
    trainer = make_trainer(folder, tmp_path, rollout, max_steps=1, evaluate=1, per_device_eval_batch_size=8)
    trainer.evaluate()
    trainer.evaluate()
    assert rollout.engine.version == 0 and len(set(map(str, answers(rollout.evaluations)))) == 1
    with torch.no_grad():
        trainer.model.model.layers[1].mlp.down_proj.weight.data[3, 5] += 0.5
    trainer.evaluate()
    assert rollout.engine.version == 1


def test_evaluations_do_not_change_what_is_trained_on(folder, tmp_path):
    """With and without evaluations between the steps, and resumed from a checkpoint: the same training samples. Evaluations of
    the same weights give the same answers."""
    def train(name, evaluate, resume=None, **options):
        rollout = Recorded(engine=ENGINE)
        trainer = make_trainer(folder, tmp_path / name, rollout, evaluate=2 * evaluate, per_device_eval_batch_size=8,
                               eval_strategy="steps" if evaluate else "no", eval_steps=1, max_steps=3, **options)
        trainer.train(resume_from_checkpoint=resume)
        return rollout

    plain, evaluated = train("plain", False), train("evaluated", True, save_strategy="steps", save_steps=2)
    assert answers(plain.calls) == answers(evaluated.calls) and len(evaluated.evaluations) == 6
    resumed = train("resumed", False, str(tmp_path / "evaluated/checkpoint-2"))
    assert answers(resumed.calls) == answers(plain.calls)[2:]


def test_a_second_training_continues_the_drafter(folder, tmp_path):
    budget = {"shortest_s": 0.1, "longest_s": 0.1, "trial_share": 100.0}
    rollout = PacelineRollout(drafter="learned", engine=ENGINE, drafter_budget=budget)
    trainer = make_trainer(folder, tmp_path, rollout, max_steps=2)
    trainer.train()
    first = logged(trainer, "drafter/steps")[-1]
    trainer.train()
    assert logged(trainer, "drafter/steps")[-1] > first


def test_what_is_not_supported_is_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match="steps"):
        PacelineRollout(steps=3)
    with pytest.raises(ConfigError, match=r"draftr.*drafter"):
        PacelineRollout(draftr="suffix")
    with pytest.raises(ValueError, match="num_beams"):
        make_trainer(folder, tmp_path, PacelineRollout(engine=ENGINE), generation_kwargs={"num_beams": 2}).train()
    with pytest.raises(ValueError, match="kv_tokens"):
        make_trainer(folder, tmp_path, PacelineRollout(engine={"kv_tokens": 16})).train()


def test_reward_rises_in_the_example(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("example_trl", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    rewards = example.main(str(tmp_path), use_cpu=True)
    assert len(rewards) == 20 and statistics.mean(rewards[-3:]) > statistics.mean(rewards[:3]) + 0.1
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert len(printed) == 20 and all(float(line.split()[-1]) < 1e-3 for line in printed)


def test_a_step_is_twice_as_fast_as_with_own_generation(tmp_path):
    """The bundled policy, 16 answers of 128 tokens each step. Both trainers take turns, so that a changing machine affects both
    alike."""
    seconds = {}
    trainers = {name: make_trainer(BUNDLED, tmp_path / name, rollout, max_steps=1, max_completion_length=128, learning_rate=1e-6)
                for name, rollout in (("paceline", PacelineRollout(engine=ENGINE)), ("own", None))}
    for turn in range(4):
        for name, trainer in trainers.items():
            began = time.perf_counter()
            trainer.train()
            if turn:  # the first one compiles
                seconds.setdefault(name, []).append(time.perf_counter() - began)
    ratio = statistics.median(seconds["own"]) / statistics.median(seconds["paceline"])
    print(f"\none GRPO step: {statistics.median(seconds['own']):.2f} s with TRL's generation, "
          f"{statistics.median(seconds['paceline']):.2f} s with Paceline's: {ratio:.1f}x")
    assert ratio >= 2
