"""Evaluation during training: held-out problems, pass@k, and the best checkpoint."""

from __future__ import annotations

import json
from statistics import stdev

import pytest
from e2e import toy
from trainer.test_trainer_library import Recorder, make_config

from paceline.config import EvaluationConfig
from paceline.report import read_metrics
from paceline.trainer import Trainer
from paceline.trainer.evaluation import evaluation_metrics
from paceline.types import Rollout, RolloutGroup


@pytest.fixture
def folder(tmp_path):
    toy.make_folder(tmp_path, problems=8)
    return tmp_path


def records(path):
    return [json.loads(line) for line in (path / "evaluations.jsonl").read_text().splitlines()]


def test_held_out_problems_are_evaluated_and_never_trained_on(folder):
    recorder = Recorder()
    recorder.on_engine_step = lambda result, progress: None
    config = make_config(folder, steps=5, evaluation={"every": 2, "problems": 2})
    result = Trainer(config, callbacks=[recorder]).run()
    found = records(result.folder)
    assert [record["step"] for record in found] == [0, 2, 4, 5]
    assert [name for kind, name in recorder.events if kind == "phase"].count("evaluate") == 4
    assert {line["id"] for line in toy.rollouts(result.folder)} == {f"p{i}" for i in range(6)}
    logged = {record["step"]: record for record in read_metrics(result.folder)}
    assert found[0]["rewards"].keys() == found[-1]["rewards"].keys() and len(found[0]["rewards"]) == 2
    assert sum(found[2]["rewards"].values()) / 2 == pytest.approx(found[2]["eval/reward"]) and "rewards" not in logged[4]
    assert logged[4]["eval/reward"] == found[2]["eval/reward"] and "eval/reward" not in logged[3]
    for name, record in (("eval_first", found[0]), ("eval_last", found[-1])):
        assert result.summary[name] == round(record["eval/reward"], 4)


def test_evaluation_changes_no_weight_and_is_the_same_after_a_resume(folder):
    data = folder / "more.jsonl"
    lines = [json.dumps({"id": f"q{i}", "prompt": toy.LETTERS[i : i + 4], "answer": ""}) for i in range(3)]
    data.write_text("\n".join(lines) + "\n")
    evaluation = {"every": 1, "problems": 3, "samples": 2, "temperature": 0.7, "task_options": {"data": str(data)}}
    Trainer(make_config(folder, steps=4, out=str(folder / "plain"))).run()
    Trainer(make_config(folder, steps=4, out=str(folder / "whole"), evaluation=evaluation)).run()
    Trainer(make_config(folder, steps=2, out=str(folder / "parts"), evaluation=evaluation)).run()
    Trainer(make_config(folder, steps=4, out=str(folder / "parts"), evaluation=evaluation), resume=True).run()
    toy.assert_same_run(folder / "plain", folder / "whole")
    toy.assert_same_run(folder / "whole", folder / "parts")
    assert records(folder / "whole") == records(folder / "parts") and "eval/pass@2" in records(folder / "whole")[0]


def test_the_best_checkpoint_is_kept(folder):
    """The reward falls from step to step, so the first checkpoint that is evaluated stays the best."""
    config = make_config(folder, steps=4, evaluation={"every": 1, "problems": 2}, keep_checkpoints=1, checkpoint_every=100)
    trainer = Trainer(config)
    scores = iter([0.1, 0.9, 0.5, 0.4, 0.3])

    class Falling(Recorder):
        def on_run_begin(self, trainer):
            def evaluate(step):
                trainer.evaluator.records.append({"step": step, "eval/reward": next(scores)})
                return {}

            trainer._evaluate = evaluate

        def on_engine_step(self, result, progress):
            pass

    trainer.callbacks.append(Falling())
    result = trainer.run()
    assert [path.name for path in trainer.checkpoints.all()] == ["step-000001", "step-000004"]
    assert result.best_policy == result.folder / "checkpoints" / "step-000001" / "policy" and result.best_policy.is_dir()
    assert result.summary["eval_best_step"] == 1


def test_pass_at_k():
    def group(*rewards):
        return RolloutGroup([1], [Rollout(0, i, [1], [2, 3], [0.0, 0.0], "", "stop", [0, 0], reward=reward)
                                  for i, reward in enumerate(rewards)])

    config = EvaluationConfig(samples=2, temperature=1.0)
    found = evaluation_metrics([group(1.0, 0.0), group(0.5, 0.0), group(None, 1.0), group(None, None)], config)
    assert found == pytest.approx({"eval/reward": 2.5 / 5, "eval/pass@1": (0.5 + 0 + 1) / 3, "eval/pass@2": 2 / 3,
                                   "eval/length": 2, "eval/prompts": 3, "eval/standard_error": stdev([0.5, 0.25, 1.0]) / 3**0.5})
    assert evaluation_metrics([group(None)], config) == {}


@pytest.mark.parametrize(("evaluation", "message"), [
    ({"every": 1, "problems": 8}, "evaluation.problems: 8 cannot be held out of the 8 problems"),
    ({"every": 1, "samples": 3}, "several greedy answers")])
def test_impossible_evaluations_are_refused(folder, evaluation, message):
    with pytest.raises(ValueError, match=message):
        Trainer(make_config(folder, evaluation=evaluation)).run()
