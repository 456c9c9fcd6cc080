"""TRL's `GRPOTrainer` with Paceline's rollouts: weights follow, log-probabilities agree, tokens are the engine's."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import pytest
import torch
from small_policy import BUNDLED, write_policy

from paceline import Engine, SamplingParams
from paceline.config import ConfigError
from paceline.engine.prompts import derive_seed
from paceline.integrations import trl as trl_plugin
from paceline.integrations.huggingface import merged_weights
from paceline.integrations.trl import DRAFTER_FOLDER, PacelineRollout
from paceline.models.state_dict import export_state
from paceline.trainer.memory import num_parameters

pytestmark = pytest.mark.integration
AGREEMENT = "sampling/sampling_logp_difference/mean"
EXAMPLE = Path(__file__).resolve().parents[2] / "examples/integrations/trl_grpo.py"
ENGINE = {"kv_tokens": 8192, "profile": False}


def reward_twos(completions, **kwargs):
    """The share of the digit 2, in texts or in messages."""
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [text.count("2") / max(1, len(text)) for text in texts]


def make_trainer(folder, out, rollout, prompts=None, lora=False, **options):
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    settings = {"max_steps": 3, "per_device_train_batch_size": 16, "num_generations": 8, "max_completion_length": 24,
                "learning_rate": 1e-3, "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True, "bf16": False,
                "disable_tqdm": True, "seed": 7}
    data = Dataset.from_dict({"prompt": prompts or [f"{n}:" for n in range(3, 40)]})
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False) if lora else None
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), reward_funcs=reward_twos, train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(folder), rollout_func=rollout, peft_config=adapters,
        args=GRPOConfig(output_dir=str(out), **{**settings, **options}))


class Recorded(PacelineRollout):
    """Keeps what the trainer got, and compares the engine's weights with the trainer's at every call."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.calls = []

    def __call__(self, prompts, trainer):
        output = super().__call__(prompts, trainer)
        state = export_state(self.engine.model)
        trained = {name: value.clone() for name, value in merged_weights(trainer.model)}
        assert trained.keys() - {"lm_head.weight"} <= state.keys() <= trained.keys()
        for name, value in state.items():
            assert torch.equal(value, trained[name]), name
        self.calls.append((output, trained))
        return output


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_policy(tmp_path_factory.mktemp("policy"))


def logged(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


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


def test_a_second_training_continues_the_drafter(folder, tmp_path):
    rollout = PacelineRollout(drafter="learned", engine=ENGINE, drafter_budget={"shortest_s": 0.1})
    trainer = make_trainer(folder, tmp_path, rollout, max_steps=2)
    trainer.train()
    first = logged(trainer, "drafter/steps")[-1]
    trainer.train()
    assert logged(trainer, "drafter/steps")[-1] > first


def train_in_one_of_two_processes(folder, out):
    """What `torch.distributed.run` calls in each process."""
    rollout = Recorded(drafter="learned", engine=ENGINE)
    trainer = make_trainer(folder, out, rollout, max_steps=2, per_device_train_batch_size=8)
    trainer.train()
    outputs = [output for output, _ in rollout.calls]
    assert len(outputs) == 2 and max(logged(trainer, AGREEMENT)) < 1e-4
    (out / f"answers-{os.environ['RANK']}.json").write_text(json.dumps([one["completion_ids"] for one in outputs]))


def test_two_processes_generate_different_answers(folder, tmp_path):
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", __file__, str(folder), str(tmp_path)],
                   check=True, timeout=300, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    first, second = (json.loads((tmp_path / f"answers-{rank}.json").read_text()) for rank in (0, 1))
    assert [len(step) for step in first] == [len(step) for step in second] == [8, 8]
    assert first[0] != second[0] and first[1] != second[1]
    assert {path.name for path in tmp_path.glob(f"{DRAFTER_FOLDER}*")} == {DRAFTER_FOLDER, f"{DRAFTER_FOLDER}-1"}


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


if __name__ == "__main__":
    train_in_one_of_two_processes(*map(Path, sys.argv[1:]))
