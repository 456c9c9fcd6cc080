"""The learned drafter of a run on several workers: trained from the first step on, measured, saved, resumed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from cluster.test_cluster_trainer import LocalTrainer, config, tokens

from paceline.drafters.checkpoint import load_eagle
from paceline.models.weights import load_model
from paceline.optim import NonFiniteError
from paceline.spot import SpotTrainer, load_snapshot
from paceline.trainer import RunStatus, Trainer, TrainerCallback

SPOT = {"form": "eagle", "step_tokens": 64, "micro_batch_tokens": 64}
LEARNED = {"drafter": "learned", "spot": SPOT, "strategy": "eagle:d2w2v3", "checkpoint_every": 1,
           "drafter_budget": {"trial_share": 100.0, "longest_s": 0.5},
           "rollout": {"prompts": 7, "group_size": 2, "max_new_tokens": 24}}
TWO = {"workers": 2, "shard_training": False}


def run(out: Path, trainer: type[Trainer] = LocalTrainer, resume: bool = False, callbacks: Any = (), **changes: Any) -> Any:
    made = trainer(config(out, **{"cluster": TWO, **LEARNED, **changes}), resume=resume, callbacks=list(callbacks))
    assert made.run().status is RunStatus.COMPLETED
    return made


@pytest.fixture(scope="module", autouse=True)
def clock() -> Iterator[None]:
    """The time that the run waits for its drafter is simulated: 50 ms for each micro-batch, and hardly any for each look at the
    clock. So the same happens on a busy machine."""
    seconds, run_micro_batch = [0.0], SpotTrainer._run_micro_batch

    def now() -> float:
        seconds[0] += 1e-6
        return seconds[0]

    def timed(trainer: SpotTrainer) -> Any:
        seconds[0] += 0.05
        return run_micro_batch(trainer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.cluster.drafter.time", SimpleNamespace(perf_counter=now))
        patch.setattr("paceline.spot.budget._MIN_HELD_OUT", 2)
        patch.setattr(SpotTrainer, "_run_micro_batch", timed)
        yield


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    """Run the same configuration on one worker, for three steps instead of two."""
    out = tmp_path_factory.mktemp("one") / "run"
    run(out, Trainer, cluster={}, strategy="auto", steps=3)
    return out


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> tuple[Path, Any, list[str]]:
    """A run on two workers, its trainer, and its notes."""

    class Notes(TrainerCallback):
        def on_note(self, message: str) -> None:
            notes.append(message)

    notes: list[str] = []
    out = tmp_path_factory.mktemp("two") / "run"
    return out, run(out, callbacks=[Notes()], strategy="auto"), notes


def test_a_drafter_is_trained_from_the_first_step_on(one, two):
    """After generation, by all workers, for as long as the budget says; what it gained is measured, said and saved."""
    out, trainer, notes = two
    first, *_ = lines = metrics(out)
    trained = trainer.engine.coordinator.trained
    assert tokens(out) == tokens(one)[: 2 * 14], "the drafter changes no token"
    assert 0 < first["drafter/seconds"] < 5  # half a second and the micro-batch in which it ends, which is long on a busy machine
    assert first["drafter/steps"] > 0 and first["drafter/tokens"] > 0
    assert first["drafter/expected_before"] >= 1 <= first["drafter/expected_after"]
    assert "eagle" not in first["strategy"], "an untrained drafter is not used"
    assert any("tokens per verification on held-out answers" in note for note in notes)
    assert json.loads((out / "summary.json").read_text())["drafter_held_out_length"] == round(
        [line["drafter/expected_after"] for line in lines if "drafter/expected_after" in line][-1], 3)
    (*_, last) = sorted((out / "checkpoints").iterdir())
    policy, _ = load_model(last / "policy")
    deployed = load_eagle(last / "drafter", policy)
    assert replace(deployed.policy_fingerprint, descendant="") == trained.fingerprint and deployed.attention.o.weight.any()
    assert deployed.policy_fingerprint.mismatch(policy) is None, "it is for the version before, of the same run"


def test_metrics_alarms_and_charts_of_one_worker_exist_for_several(one, two):
    out, *_ = two
    for alone, several in zip(metrics(one)[:1], metrics(out), strict=False):  # nothing is trained in a run's last step
        # Workers train while they are idle: all of `drafter/seconds` is idle time, and nobody waits for it.
        assert alone.keys() - several.keys() <= {"drafter/wait_seconds", "drafter/idle_seconds", "notes"}
        assert several["select/cost_error"] >= 0 and several["alarm/age"] == 0.0
    traces = [[json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()] for folder in (one, out)]
    for alone, several in zip(*traces, strict=False):
        assert alone.keys() == several.keys() and several["batch"]
        at_positions = [sum(cell[0] for cell in trace["position"]["all"]) for trace in (alone, several)]
        in_batches = [sum(cell[2] for batch in trace["batch"].values() for cell in batch.values()) for trace in (alone, several)]
        assert len({*at_positions, *in_batches}) == 1, "all tokens of all workers"


@pytest.mark.parametrize("is_spot", [True, False])
def test_seconds_of_training_during_generation_are_a_metric(tmp_path, is_spot):
    """One of two workers has one prompt and the other two. It trains when it is done, unless idle workers may not."""

    class EvenBriefly(TrainerCallback):
        def on_run_begin(self, trainer: LocalTrainer) -> None:
            coordinator = trainer.engine.coordinator
            coordinator.config = replace(coordinator.config, min_train_s=0.0)

    workers = {**TWO, "spot_training": is_spot, "scheduling": False, "reallocation": False}
    run(tmp_path / "run", callbacks=[EvenBriefly()], cluster=workers, strategy="off", engine={"max_batch": 1},
        rollout={"prompts": 3, "group_size": 2, "max_new_tokens": 24})
    seconds = [line.get("drafter/beside_seconds") for line in metrics(tmp_path / "run")]
    assert any(seconds) == is_spot, seconds
    assert all(found is None or found > 0 for found in seconds), "left out where there was no such time"


class Watched(LocalTrainer):
    """Keeps the coordinator's workers, which end with the run."""

    def _on_step_end(self, outcome: Any) -> None:
        super()._on_step_end(outcome)
        self.kept = {number: worker.training for number, worker in self.engine.coordinator.runtime.workers.items()}


def test_evaluations_are_not_trained_on(tmp_path):
    trainer = run(tmp_path / "run", Watched, evaluation={"every": 1, "problems": 3})
    answers = {tuple(line[3]) for line in tokens(tmp_path / "run")}
    records = [training._buffer.get(entry.key) for training in trainer.kept.values() for entry in training._buffer.entries()]
    records += [record for training in trainer.kept.values() for record, _ in training._held_out]
    assert len(records) == 2 * 14 and {tuple(r.token_ids[r.prompt_length :]) for r in records} == answers


def test_a_reduced_vocabulary_is_chosen_from_the_first_answers(tmp_path):
    """From those of all workers: whichever trains first has only its own."""
    run(tmp_path / "run", spot={**SPOT, "draft_vocab": 8}, steps=4)  # on a busy machine it may not be trained in the first ones
    (*_, last) = sorted((tmp_path / "run" / "checkpoints").iterdir())
    policy, _ = load_model(last / "policy")
    drafter = load_eagle(last / "drafter", policy)
    counts = Counter(chain.from_iterable(line[3] for line in tokens(tmp_path / "run") if line[0] == 1))
    chosen = set(drafter.draft_ids.tolist())
    assert len(chosen) == 8 and max(counts[token] for token in counts.keys() - chosen) <= min(
        counts[token] for token in chosen - set(policy.config.eos_token_ids) - set(range(8)))


@pytest.mark.parametrize(("changes", "warning"), [
    ({"cluster": {"workers": 3, "shard_training": False}}, None), ({"spot": {**SPOT, "form": "eagle3"}}, "spot.form = eagle"),
    ({"drafter": "suffix"}, None), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ({}, None), ({"spot": {**SPOT, "draft_vocab": 8}}, "settings ask for 8"),
        ({"cluster": {**TWO, "spot_training": False}}, None)))])
def test_a_run_resumes_with_other_drafter_settings(tmp_path, one, two, changes, warning):
    class Warnings(TrainerCallback):
        def on_warning(self, message: str) -> None:
            said.append(message)

    said: list[str] = []
    out = Path(copytree(two[0], tmp_path / "run"))
    before = num_steps(out)
    trainer = run(out, resume=True, callbacks=[Warnings()], strategy="auto", **{"steps": 3, **changes})
    assert tokens(out) == tokens(one)
    about = [message for message in said if "drafter of the checkpoint" in message]
    assert [warning in message for message in about] == [True] if warning else not about
    if warning is None and trainer.config.drafter == "learned":
        assert trainer.engine.coordinator.trained.num_steps >= before > 0, "it went on from there"


def test_one_worker_continues_the_drafter_of_several(tmp_path, one, two):
    out = Path(copytree(two[0], tmp_path / "run"))
    before = num_steps(out)
    run(out, Trainer, resume=True, cluster={}, steps=4, strategy="auto")
    assert tokens(out)[: 3 * 14] == tokens(one) and num_steps(out) > before > 0


def num_steps(folder: Path) -> int:
    """Number of optimizer steps of the drafter in a run folder."""
    return load_snapshot(folder / "drafter").metadata["progress"]["step"]


@pytest.mark.parametrize("worker", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_worker_dies_while_it_trains_the_drafter(tmp_path, one, worker):
    class Killer(TrainerCallback):
        def on_run_begin(self, trainer: LocalTrainer) -> None:
            self._coordinator = trainer.engine.coordinator
            self._advance, self._coordinator.advance = self._coordinator.advance, self._advance_and_kill

        def _advance_and_kill(self, timeout_s: float | None = None) -> None:
            self._advance(timeout_s)
            training = self._coordinator.runtime.workers[worker].training
            if self._coordinator.drafter.is_awaited and training.active and not killed:
                killed.append(training)
                self._coordinator.runtime.kill(worker)

    killed: list[Any] = []
    trainer = run(tmp_path / "run", callbacks=[Killer()], steps=3)
    assert killed and trainer.engine.coordinator.num_lost == 1 and tokens(tmp_path / "run") == tokens(one)
    assert trainer.engine.coordinator.trained.num_steps > 0, "it was trained afterwards"


def test_a_drafter_whose_weights_are_not_finite_ends_its_training_only(tmp_path, one, monkeypatch):
    def fails(self: SpotTrainer) -> None:
        raise NonFiniteError("drafter: fc.weight is not finite")

    monkeypatch.setattr(SpotTrainer, "_optimizer_step", fails)
    trainer = run(tmp_path / "run")
    assert tokens(tmp_path / "run") == tokens(one)[: 2 * 14] and "fc.weight is not finite" in trainer.drafter_trainer.failure
    assert [line.get("drafter/failed") for line in metrics(tmp_path / "run")] == [1.0, None]
    assert trainer.engine.coordinator.trained is None
