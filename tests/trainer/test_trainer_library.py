"""`Trainer` from Python: what callbacks are told, what a run returns, and that nothing is printed."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from e2e import toy

from paceline.drafters.checkpoint import save_eagle
from paceline.drafters.fingerprint import fingerprint_of
from paceline.models.weights import load_model
from paceline.report import read_metrics
from paceline.spot import fresh_eagle
from paceline.spot.budget import Comparison
from paceline.trainer import ReportWriter, RunStatus, TrainConfig, Trainer, TrainerCallback
from paceline.trainer.drafter import OnlineDrafterTrainer


@pytest.fixture
def folder(tmp_path):
    toy.make_folder(tmp_path)
    return tmp_path


def make_config(folder, **changes) -> TrainConfig:
    values = {
        "model": str(folder / "model"), "task": "python", "steps": 3, "dtype": "float64", "seed": 3, "out": str(folder / "run"),
        "task_options": {"function": f"{folder}/reward.py:score", "data": f"{folder}/prompts.jsonl"}, "threads": 1,
        "checkpoint_every": 2, "strategy": "suffix:d4w2v8", "optimizer": {"lr": 0.01}, "reward": {"workers": 0},
        "rollout": {"prompts": 3, "group_size": 4, "max_new_tokens": 12, "stop": tuple("ABCDEFGH")},
        "engine": {"kv_tokens": 2048, "max_batch": 8}}
    return TrainConfig(**{**values, **changes})


class Recorder(TrainerCallback):
    def __init__(self):
        self.events, self.engine_steps = [], []

    def on_run_begin(self, trainer):
        self.events.append(("run begin", trainer.engine.version))

    def on_step_begin(self, step):
        self.events.append(("step begin", step))

    def on_phase(self, phase):
        self.events.append(("phase", phase))

    def on_warm_up(self, done, total):
        self.events.append(("warm-up", (done, total)))

    def on_engine_step(self, result, progress):
        assert progress.num_finished <= progress.num_total == 12 and progress.stats.generated_tokens >= 0
        self.engine_steps.append(result)

    def on_step_end(self, step, metrics, groups):
        assert len(groups) == 3 and "reward/mean" in metrics
        self.events.append(("step end", step))

    def on_checkpoint(self, path, step):
        assert (path / "policy" / "model.safetensors").is_file()
        self.events.append(("checkpoint", step))

    def on_warning(self, message):
        self.events.append(("warning", message))

    def on_run_end(self, result):
        self.events.append(("run end", result.status))


def step_events(step: int) -> list[tuple[str, object]]:
    return [("step begin", step), *(("phase", phase) for phase in ("generate", "reward", "infer", "train")), ("step end", step)]


def test_callbacks_are_told_and_nothing_is_printed(folder, capfd):
    recorder = Recorder()
    result = Trainer(make_config(folder), callbacks=[recorder], progress=False).run()
    warm_up = [("warm-up", (part, 3)) for part in (1, 2, 3)]
    assert recorder.events == [("run begin", 0), *warm_up, *step_events(1), *step_events(2), ("checkpoint", 2), *step_events(3),
                               ("checkpoint", 3), ("run end", RunStatus.COMPLETED)]
    assert recorder.engine_steps and not "".join(capfd.readouterr())
    assert result.status is RunStatus.COMPLETED and result.num_steps == 3 and result.folder == folder / "run"
    assert result.summary == json.loads((result.folder / "summary.json").read_text()) and result.summary["steps"] == 3
    assert result.policy == folder / "run" / "checkpoints" / "step-000003" / "policy" and result.policy.is_dir()
    assert not (result.folder / "report.html").exists()


def test_the_report_is_a_callback_and_a_run_resumes(folder):
    Trainer(make_config(folder, steps=2)).run()
    with pytest.raises(ValueError, match="is not empty"):
        Trainer(make_config(folder)).run()
    result = Trainer(make_config(folder), callbacks=[ReportWriter()], resume=True).run()
    assert result.num_steps == 3 and (result.folder / "report.html").stat().st_size > 1000
    assert [record["step"] for record in read_metrics(result.folder)] == [1, 2, 3]


def test_a_task_can_be_given_as_an_object(folder):
    class Shout:
        name = "shout"

        def __len__(self):
            return 4

        def __getitem__(self, index):
            from paceline.tasks import Problem

            return Problem(f"p{index}", "abc"[index % 3 :], None)

        def grade(self, problem, answer):
            return float(answer.isupper())

    result = Trainer(make_config(folder, task="ignored", task_options={}, steps=1), task=Shout()).run()
    assert result.status is RunStatus.COMPLETED


def test_an_interrupt_is_part_of_the_result(folder, caplog):
    class Interrupt(Recorder):
        def on_step_begin(self, step):
            if step == 3:
                raise KeyboardInterrupt

    recorder = Interrupt()
    with caplog.at_level(logging.WARNING, "paceline.trainer"):
        result = Trainer(make_config(folder), callbacks=[recorder]).run()
    assert result.status is RunStatus.INTERRUPTED and result.num_steps == 2 and result.summary == {}
    assert "step-000002" in result.message and ("warning", result.message) not in recorder.events
    assert [record.getMessage() for record in caplog.records] == [result.message]
    assert recorder.events[-1] == ("run end", RunStatus.INTERRUPTED)
    assert Trainer(make_config(folder), resume=True).run().num_steps == 3


def test_refused_problems_are_warnings(folder, caplog):
    file = folder / "prompts.jsonl"
    file.write_text(file.read_text() + json.dumps({"id": "long", "prompt": "a" * 5000, "answer": ""}) + "\n")

    class Warnings(TrainerCallback):
        seen: list[str] = []  # noqa: RUF012

        def on_warning(self, message):
            self.seen.append(message)

    Trainer(make_config(folder, steps=4), callbacks=[Warnings()]).run()
    assert any(message.startswith("left out: long: prompt: 5000 tokens") for message in Warnings.seen)
    assert "left out: long" in caplog.text


def test_the_drafter_is_trained_once_per_step_under_dynamic_sampling(folder, monkeypatch):
    """DAPO refills a batch by generating several times per step; the drafter's step begins and ends once."""
    calls = []
    begin, learn = OnlineDrafterTrainer.begin_step, OnlineDrafterTrainer.train
    monkeypatch.setattr(OnlineDrafterTrainer, "begin_step", lambda self, step: (calls.append(("begin", step)), begin(self, step)))

    def recorded(self, groups, step, generation_s):
        calls.append(("train", step))
        return learn(self, groups, step, generation_s)

    monkeypatch.setattr(OnlineDrafterTrainer, "train", recorded)
    # A reward of mostly equal values: groups without a signal are replaced, so every step refills.
    (folder / "reward.py").write_text("def score(problem, answer):\n    return float(answer[:1] == 'a')\n")
    policy, _ = load_model(folder / "model", "cpu", torch.float64)
    drafter = fresh_eagle(policy)
    drafter.policy_fingerprint = fingerprint_of(policy)
    save_eagle(drafter, folder / "start")
    recorder = Recorder()
    recorder.on_step_end = lambda step, metrics, groups: recorder.events.append(("step end", step))
    recorder.on_engine_step = lambda result, progress: None
    config = make_config(folder, algorithm="dapo", drafter=str(folder / "start"), strategy="eagle:d3w1v3", steps=2)
    Trainer(config, callbacks=[recorder]).run()
    phases = [name for kind, name in recorder.events if kind == "phase"]
    assert phases.count("generate") > 2, "there were refills"
    assert calls == [("begin", 1), ("train", 1), ("begin", 2), ("train", 2)] and phases.count("drafter") == 2


@pytest.mark.filterwarnings("ignore:the drafter was trained for other weights:UserWarning")
def test_the_drafters_records_survive_a_restart_within_their_budget(folder):
    """Captured answers are on disk in the run folder; a resumed run has them, except those of steps that it repeats."""
    policy, _ = load_model(folder / "model", "cpu", torch.float64)
    save_eagle(fresh_eagle(policy), folder / "start")
    options = {"drafter": str(folder / "start"), "strategy": "eagle:d3w1v3", "drafter_buffer_gb": 1e-6, "drafter_disk_gb": 1e-4}
    seen = {}

    class Look(TrainerCallback):
        def on_run_begin(self, trainer):
            seen["begin"] = [entry.step for entry in trainer.drafter_trainer.buffer.entries()]

        def on_step_end(self, step, metrics, groups):
            buffer = self.trainer.drafter_trainer.buffer
            assert buffer.disk_bytes <= buffer.max_disk_bytes == int(1e-4 * 2**30)
            assert buffer.memory_bytes <= max(buffer.max_bytes, 10_000), "one record at least is in memory"
            assert all(rollout.features is None for group in groups for rollout in group.rollouts)
            seen[step] = len(buffer)

    for steps, resume in ((2, False), (3, True)):
        look = Look()
        look.trainer = Trainer(make_config(folder, steps=steps, **options), callbacks=[look], resume=resume)
        look.trainer.run()
    assert seen["begin"] and set(seen["begin"]) <= {1, 2} and seen[1] > 0
    assert list((folder / "run" / "drafter" / "records").glob("*.record"))


@pytest.mark.filterwarnings("ignore:the drafter was trained for other weights:UserWarning")
@pytest.mark.parametrize(("trial_share", "steps"), [(0.01, {1}), (100.0, {1, 2, 3, 4})])
def test_features_are_read_only_while_there_is_time_to_train(folder, trial_share, steps):
    """Reading and copying features took 5 to 8 % of the generation time of a run in which the drafter was not trained."""
    policy, _ = load_model(folder / "model", "cpu", torch.float64)
    drafter = fresh_eagle(policy)
    drafter.policy_fingerprint = fingerprint_of(policy)
    save_eagle(drafter, folder / "start")
    budget = {"shortest_s": 0.1, "longest_s": 0.1, "trial_share": trial_share, "warm_up_s": 0}
    trainer = Trainer(make_config(folder, drafter=str(folder / "start"), strategy="eagle:d3w1v3", steps=5, drafter_budget=budget))
    trainer.run()
    assert {entry.step for entry in trainer.drafter_trainer.buffer.entries()} == steps


@pytest.mark.parametrize("is_better", [True, False])
def test_a_drafter_is_used_once_it_is_measured_to_be_better(folder, monkeypatch, is_better):
    """On answers that neither was trained on. In benchmarks short training on few answers made drafters worse."""
    compared: list[Comparison] = []

    def compare(before, after, engine, records, temperature):
        assert not torch.equal(before.fc.weight, after.fc.weight) and records
        compared.append(Comparison(100, 50.0, 40.0 if is_better else 60.0, 0.0))
        return compared[-1]

    monkeypatch.setattr("paceline.trainer.drafter.compare", compare)
    monkeypatch.setattr("paceline.spot.budget._MIN_HELD_OUT", 2)
    policy, _ = load_model(folder / "model", "cpu", torch.float64)
    start = fresh_eagle(policy)
    torch.nn.init.normal_(start.attention.o.weight, std=0.01)
    start.policy_fingerprint = fingerprint_of(policy)
    save_eagle(start, folder / "start")
    config = make_config(folder, drafter=str(folder / "start"), strategy="eagle:d3w1v3", steps=5,
                         drafter_budget={"shortest_s": 0.05, "longest_s": 0.1, "trial_share": 100.0})
    trainer = Trainer(config)
    trainer.run()
    used = trainer.engine.eagle.module.attention.o.weight
    assert compared and torch.equal(used, start.attention.o.weight) is not is_better
    assert {line.get("drafter/published") for line in read_metrics(folder / "run")} == {None, float(is_better)}
