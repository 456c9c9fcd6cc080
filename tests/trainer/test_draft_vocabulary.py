"""A new drafter of a policy with a large vocabulary can predict its most frequent tokens only, in runs as in benchmarks."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from tiny import model
from trainer.test_trainer_library import folder, make_config  # noqa: F401 (a fixture)

from paceline.drafters.checkpoint import load_eagle, save_eagle
from paceline.models.weights import load_model
from paceline.spot import SpotConfig, fresh_eagle
from paceline.spot.initialization import is_untrained
from paceline.trainer import Trainer, TrainerCallback
from paceline.trainer.drafter import new_drafter

SIZE = 20


class Look(TrainerCallback):
    """The ids of the engine's drafter before and after each step, and the tokens of the answers."""

    def __init__(self):
        self.ids, self.tokens = [], Counter()

    def on_run_begin(self, trainer):
        self.trainer = trainer
        self._look()

    def on_step_end(self, step, metrics, groups):
        self.tokens.update(token for group in groups for rollout in group.rollouts for token in rollout.token_ids)
        self._look()

    def _look(self):
        self.ids.append(set(self.trainer.engine.eagle.module.draft_ids.tolist()))


def test_only_large_vocabularies_are_reduced():
    assert SpotConfig().draft_vocab_for(151_936) == 32_768
    assert SpotConfig().draft_vocab_for(65_536) == 0
    assert SpotConfig(draft_vocab=0).draft_vocab_for(151_936) == 0 and SpotConfig(draft_vocab=100).draft_vocab_for(150) == 100


def test_a_run_chooses_the_tokens_of_its_answers_and_keeps_them(folder):  # noqa: F811
    policy, _ = load_model(folder / "model", "cpu", torch.float64)
    options = {"drafter": "learned", "strategy": "eagle:d3w1v3", "spot": {"draft_vocab": SIZE}, "checkpoint_every": 1,
               "drafter_budget": {"trial_share": 1000.0, "longest_s": 2.0}}  # generation takes milliseconds
    first, second = Look(), Look()
    Trainer(make_config(folder, steps=2, **options), callbacks=[first]).run()
    start, chosen = first.ids[0], first.ids[-1]
    lowest = set(range(SIZE)) | set(policy.config.eos_token_ids)
    assert start <= lowest and len(start) == len(chosen) == SIZE, "nothing is known before the first answers"
    assert first.ids[1] == chosen and set(policy.config.eos_token_ids) <= chosen, "they are chosen once"
    known = [sum(first.tokens[token] for token in ids) / first.tokens.total() for ids in (start, chosen)]
    assert known[1] > known[0] + 0.1, known
    saved = load_eagle(folder / "run" / "checkpoints" / "step-000002" / "drafter", policy)
    assert set(saved.draft_ids.tolist()) == chosen and not is_untrained(saved)
    Trainer(make_config(folder, steps=3, **options), callbacks=[second], resume=True).run()
    assert all(ids == chosen for ids in second.ids), "a resumed run continues with them"


@pytest.mark.filterwarnings("ignore:the drafter was trained for other weights:UserWarning")
def test_a_drafter_from_elsewhere_keeps_its_vocabulary(folder):  # noqa: F811
    """For which policy it was trained is not known, but it is trained."""
    policy, _ = load_model(folder / "model", "cpu", torch.float64)
    drafter = fresh_eagle(policy, draft_vocab=SIZE)
    drafter.attention.o.weight.normal_(0.0, 0.01, generator=torch.Generator().manual_seed(0))
    save_eagle(drafter, folder / "start")
    look = Look()
    Trainer(make_config(folder, steps=2, drafter=str(folder / "start"), strategy="eagle:d3w1v3"), callbacks=[look]).run()
    assert all(ids == set(drafter.draft_ids.tolist()) for ids in look.ids)


@pytest.mark.parametrize(("changes", "size"), [
    ({}, SIZE), ({"cluster": {"workers": 2}}, SIZE)], ids=str)
def test_a_new_drafter_has_a_reduced_vocabulary(folder, monkeypatch, changes, size):  # noqa: F811
    monkeypatch.setattr("paceline.spot.config._DRAFT_VOCAB", SIZE)
    drafter = new_drafter(make_config(folder, drafter="learned", **changes), model("qwen3"))
    assert (0 if drafter.draft_ids is None else len(drafter.draft_ids)) == size
