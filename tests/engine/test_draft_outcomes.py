"""Outcomes of draft tokens equal what the steps did; observing, profiling and partial drafting change no token."""

from __future__ import annotations

import numpy as np
import pytest
import tiny

from paceline import Engine, SamplingParams, Strategy
from paceline.config import EngineConfig
from paceline.strategy import AutoSelector
from paceline.trainer.checkpoints import restore_selection, save_selection
from paceline.types import Decision

PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True, seed=5)
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [7, 8, 7, 8, 7], [5]]


@pytest.fixture(scope="module")
def model():
    return tiny.model()


def engine(model, strategy="off", **options):
    return Engine(model, None, tiny.eagle(), strategy, EngineConfig(max_batch=8, max_context=128, kv_tokens=2048, **options))


@pytest.mark.parametrize("text", ["suffix:d4w2v6", "eagle:d3w2v5"])
def test_observed_outcomes_are_what_was_accepted(model, text):
    made, strategy, seen = engine(model), Strategy.parse(text), []
    made.generate(PROMPTS, PARAMS, n=2, strategy=Observing(text), on_step=seen.append)
    observed = [result for result in seen if result.drafts is not None]
    assert observed and all(result.drafts is not None for result in seen if result.drafted)
    for result in observed:
        nodes = result.drafts
        assert len(nodes.request) == result.drafted and nodes.accepted.sum() == result.accepted
        assert np.all((nodes.survival > 0) & (nodes.survival <= 1)) and np.all(np.diff(nodes.request) >= 0)
        assert nodes.width.max(initial=0) <= strategy.width
        for request in range(nodes.num_requests):  # one path is accepted, and it is a path
            path = nodes.depth[(nodes.request == request) & nodes.accepted]
            assert path.tolist() == list(range(1, len(path) + 1))


def test_the_width_of_a_draft_token_is_the_largest_on_its_path(model):
    made, seen = engine(model), []
    made.generate(PROMPTS, PARAMS, strategy=Observing("eagle:d3w3v12"), on_step=seen.append)
    for drafts in (result.drafts for result in seen if result.drafts is not None):
        first = drafts.depth == 1
        for request in range(drafts.num_requests):
            own = drafts.request == request
            assert sorted(drafts.width[own & first].tolist()) == list(range(1, int((own & first).sum()) + 1))
            assert drafts.width[own].min(initial=1) == 1
    chain = []
    made.generate(PROMPTS, PARAMS, strategy=Observing("eagle:d3w1v3"), on_step=chain.append)
    assert all(np.all(result.drafts.width == 1) for result in chain if result.drafts is not None)


def test_a_step_without_draft_tokens_is_observed_too(model):
    """Otherwise a selector would ask again and again for observations of a drafter that drafts nothing."""
    made, seen = engine(model), []
    made.generate([[5]], SamplingParams(max_new_tokens=3, ignore_eos=True), strategy=Observing("suffix:d2w1v2"),
                  on_step=seen.append)
    first = next(result for result in seen if result.num_requests)
    assert first.drafted == 0 and first.drafts is not None and first.drafts.num_requests == 1


class Observing:
    """A fixed strategy, every step of which is observed. Keeps what it is told."""

    def __init__(self, strategy, **decision):
        self.decision, self.views, self.outcomes = Decision(Strategy.parse(strategy), observe=True, **decision), [], []

    def select(self, view):
        self.views.append(view)
        return self.decision

    def observe(self, outcome):
        self.outcomes.append(outcome)

    def drafter_replaced(self):
        pass


def test_a_selector_is_told_of_every_step_once(model):
    made, selector = engine(model), Observing("eagle:d3w1v3")
    made.generate(PROMPTS, PARAMS, strategy=selector)
    assert len(selector.outcomes) == len(selector.views) == made.stats().steps
    assert sum(outcome.num_tokens for outcome in selector.outcomes) == made.stats().generated_tokens
    assert all(outcome.decision is selector.decision for outcome in selector.outcomes)
    timed = [outcome for outcome in selector.outcomes if outcome.is_timed]
    assert timed and all(1 <= outcome.progress <= 4 for outcome in timed)
    alike = [outcome for outcome in timed if outcome.num_tokens % outcome.num_requests == 0]
    assert any(outcome.last_progress is not None for outcome in timed), "all run to their limits"
    assert alike and all(outcome.progress >= 1 for outcome in alike)


def test_remaining_lengths_are_known_where_answers_run_to_their_limit(model):
    for params, known in ((PARAMS, True), (SamplingParams(max_new_tokens=24, stop_token_ids=(63,), seed=5), False)):
        made, selector = engine(model), Observing("off")
        made.generate(PROMPTS, params, strategy=selector)
        views = [view for view in selector.views if view.num_running == len(PROMPTS)]
        assert views and all(bool(view.remaining) == known for view in views)
        assert all(view.remaining == tuple(sorted(view.remaining, reverse=True)) for view in views)


def test_drafts_for_the_requests_with_the_most_tokens_left(model):
    made = engine(model)
    lengths = [8, 24, 16]
    for prompt, tokens in zip(PROMPTS, lengths, strict=True):
        made.add(prompt, SamplingParams(max_new_tokens=tokens, ignore_eos=True))
    for _ in range(4):
        made.step(Strategy.OFF)
    plan = made.scheduler.schedule(Decision(Strategy("suffix", 4, 2, 6), num_drafted_for=2))
    assert [nodes > 0 for nodes in plan.num_nodes] == [False, True, True]


@pytest.mark.parametrize("strategy", ["auto", "beg", Observing("eagle:d3w2v5", num_drafted_for=2)])
def test_rollouts_are_those_of_off(model, strategy):
    plain = engine(model).generate(PROMPTS, PARAMS, n=3)
    other = engine(model, strategy).generate(PROMPTS, PARAMS, n=3)
    assert [r.token_ids for g in plain for r in g.rollouts] == [r.token_ids for g in other for r in g.rollouts]


def test_the_profile_is_kept_and_read_again(model, tmp_path):
    for _ in range(3):  # all of these measure
        made = engine(model, "auto")
        costs = made.profile(0.2, tmp_path)
    assert costs.profiled and len(costs.policy.x) >= 2 and np.all(np.diff(costs.policy.y) >= 0) and costs.level.y.max() > 0
    file = next(tmp_path.iterdir())
    assert isinstance(made.selector, AutoSelector) and made.selector.costs is costs
    again = engine(model, "auto").profile(0.2, tmp_path)
    assert np.array_equal(again.policy.y, costs.policy.y) and np.array_equal(again.with_trees.y, costs.with_trees.y)
    assert np.array_equal(costs.with_trees.x, costs.policy.x) and np.all(costs.with_trees.y >= costs.policy.y - 1e-9)
    file.write_text("{")  # damaged
    assert engine(model, "auto").profile(0.2, tmp_path).profiled


def test_what_was_learned_is_there_at_the_next_start(model, tmp_path):
    made = engine(model, "auto")
    assert made.selector.times == {} and made.selection_state()["times"] == []
    made.profile(0.2, tmp_path)
    made.generate(PROMPTS, PARAMS)
    made.remember_selection(tmp_path)
    known, again = made.selector.times, engine(model, "auto")
    again.profile(0.2, tmp_path)
    assert known and {k: time.log for k, time in again.selector.times.items()} == {k: time.log for k, time in known.items()}
    for name, acceptance in again.selector.predictor.acceptance.items():
        before = made.selector.predictor.acceptance[name].expected()[1]
        assert np.allclose(acceptance.expected()[1], before, atol=1e-3)
    resumed = engine(model, "auto")
    resumed.restore_selection({"acceptance": made.selection_state()["acceptance"], "times": [["none", 1, 0.5, 3.0]]})
    resumed.profile(0.2, tmp_path)
    assert list(resumed.selector.times) == [("none", 1)], "what the run itself has learned comes first"
    next(tmp_path.glob("*.learned.json")).write_text("{")  # damaged
    damaged = engine(model, "auto")
    damaged.profile(0.2, tmp_path)
    assert damaged.selector.times == {}
    assert engine(model, "off").selection_state() is None


def test_a_checkpoint_holds_what_was_learned(model, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made, checkpoint = engine(model, "auto"), tmp_path / "step-000001"
    checkpoint.mkdir()
    made.generate(PROMPTS, PARAMS)
    save_selection(made, checkpoint)
    resumed = engine(model, "auto")
    restore_selection(resumed, checkpoint)
    assert resumed.selector.times.keys() == made.selector.times.keys() != set()
    (checkpoint / "selection.json").write_text('{"times": [[1]]}')  # damaged
    for state in (checkpoint, tmp_path, None):
        again = engine(model, "auto")
        restore_selection(again, state)
        assert again.selector.times == {}


def test_a_named_selector_keeps_what_it_learned(model):
    made = engine(model)
    assert made.selector_of("auto") is made.selector_of("auto") is not made.selector_of("beg")


@pytest.mark.parametrize(("temperature", "tau"), [(1.0, 0.35), (1.3, 0.519), (2.0, 0.99), (2.5, 1.0)])
def test_tau_grows_with_the_temperature(model, temperature, tau):
    made = engine(model, "eagle:d3w2v5")
    made.generate(PROMPTS[:1], SamplingParams(max_new_tokens=4, temperature=temperature, ignore_eos=True))
    assert float(made.eagle.tau) == pytest.approx(tau, abs=0.001)
