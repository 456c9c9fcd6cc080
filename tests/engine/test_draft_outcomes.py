"""Outcomes of draft tokens, of verified steps and of shadow drafts, equal what the steps did; observing, profiling and shares
change no token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tiny

from paceline import Engine, SamplingParams, Strategy
from paceline.config import EngineConfig
from paceline.strategy import ModelSelector

PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True, seed=5)
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [7, 8, 7, 8, 7], [5]]


@pytest.fixture(scope="module")
def model():
    return tiny.model()


def engine(model, strategy="off", **options):
    return Engine(model, None, tiny.eagle(), strategy, EngineConfig(max_batch=8, max_context=128, kv_tokens=2048, **options))


@pytest.mark.parametrize("text", ["suffix:d4w2v6", "eagle:d3w2v5", "both:d3w2v6"])
def test_observed_outcomes_are_what_was_accepted(model, text):
    made = engine(model)
    strategy = Strategy.parse(text)
    watched = Strategy(strategy.drafter, strategy.depth, strategy.width, strategy.budget, watch=True)
    seen = []
    made.generate(PROMPTS, PARAMS, n=2, strategy=watched, on_step=seen.append)
    observed = [result for result in seen if result.watched is not None]
    assert observed and all(result.watched is not None for result in seen if result.drafted)
    for result in observed:
        nodes = result.watched
        assert len(nodes.line) == result.drafted and nodes.hit.sum() == result.accepted
        assert np.all(nodes.hit <= nodes.tested) and np.all((nodes.chance > 0) & (nodes.chance <= 1))
        assert np.all(nodes.parent < np.arange(len(nodes.line)))
        child = nodes.parent >= 0
        assert np.all(nodes.depth[child] == nodes.depth[nodes.parent[child]] + 1)
        assert np.all(nodes.line[child] == nodes.line[nodes.parent[child]])
        families = set(zip(nodes.line.tolist(), nodes.parent.tolist(), nodes.rank.tolist(), strict=True))
        assert len(families) == len(nodes.line) and nodes.rank.max(initial=0) < strategy.width * (2 if "both" in text else 1)


def test_a_step_without_draft_tokens_is_observed_too(model):
    """Otherwise a selector would ask again and again for observations of a drafter that drafts nothing."""
    made = engine(model)
    seen = []
    made.generate([[5]], SamplingParams(max_new_tokens=3, ignore_eos=True), strategy=Strategy("suffix", 2, 1, 2, watch=True),
                  on_step=seen.append)
    first = next(result for result in seen if result.num_requests)
    assert first.drafted == 0 and first.watched is not None and first.watched.num_lines == 1


@pytest.mark.parametrize("steps", [4, 11])
def test_a_shadow_draft_has_the_outcomes_of_a_verified_one(model, steps):
    """Both draft the same tokens for the same texts, and the generated text is the same, so the outcomes are, too."""
    drafts, found = Strategy("suffix", 4, 2, 6), []
    for strategy in (replace(drafts, watch=True), replace(Strategy.OFF, aside=drafts)):
        made = engine(model, Capturing())
        made.generate(PROMPTS, PARAMS, strategy="off")  # the suffix drafter has seen these answers
        for prompt in PROMPTS:
            made.add(prompt, PARAMS)
        for _ in range(steps):
            made.step(Strategy.OFF)
        made.step(strategy)
        for _ in range(6):
            made.step()
        found += [view.watched for view in made.select.views if view.watched is not None][:1]
    real, shadow = found
    assert real.num_lines == shadow.num_lines == 3 and len(real.line) > 0 and real.hit.any()
    for name in ("quality", "line", "parent", "depth", "rank", "chance", "tested", "hit"):
        assert np.array_equal(getattr(real, name), getattr(shadow, name)), name


def test_a_shadow_draft_leaves_out_answers_that_end_too_early(model):
    made = engine(model, Capturing())
    for tokens in (4, 20):
        made.add(PROMPTS[0], SamplingParams(max_new_tokens=tokens, ignore_eos=True))
    made.step(Strategy.OFF)
    made.step(replace(Strategy.OFF, aside=Strategy("suffix", 8, 2, 16)))
    for _ in range(10):
        made.step()
    outcomes = [view.watched for view in made.select.views if view.watched is not None]
    assert len(outcomes) == 1 and outcomes[0].num_lines == 1
    made.step(replace(Strategy.OFF, aside=Strategy("suffix", 8, 2, 16)))
    made.abort(list(made._requests))
    made.add(PROMPTS[0], PARAMS)
    made.step()
    assert not made._control._shadow.is_pending and made.select.views[-1].watched is None


def test_shadow_drafting_needs_the_suffix_drafter(model):
    with pytest.raises(ValueError, match="aside"):
        Strategy(aside=Strategy("eagle", 2, 1, 2))
    bare = Engine(model, None, "none", "off", EngineConfig(max_batch=8, kv_tokens=512))
    bare.add([1, 2, 3], PARAMS)
    with pytest.raises(ValueError, match="without that drafter"):
        bare.step(replace(Strategy.OFF, aside=Strategy("suffix", 2, 1, 2)))
    assert bare.step().num_rows > 0


class Capturing:
    """A selector that never speculates and keeps the views that it gets."""

    def __init__(self) -> None:
        self.views = []

    def __call__(self, view):
        self.views.append(view)
        return Strategy.OFF


@pytest.mark.parametrize("strategy", ["auto", "model", "beg", Strategy("eagle", 3, 2, 5, shares=(0, 1, 3, 5)),
                                      Strategy("eagle", 3, 2, 5, tau=1.0, watch=True)])
def test_rollouts_are_those_of_off(model, strategy):
    plain = engine(model).generate(PROMPTS, PARAMS, n=3)
    other = engine(model, strategy).generate(PROMPTS, PARAMS, n=3)
    assert [r.token_ids for g in plain for r in g.rollouts] == [r.token_ids for g in other for r in g.rollouts]


def test_shares_follow_the_requests_quality(model):
    made = engine(model)
    ids = made.add(PROMPTS[0], PARAMS, 2)
    for _ in range(3):
        made.step()
    good, bad = (made._requests[i] for i in ids)
    good.first_token_acceptance, bad.first_token_acceptance = 0.95, 0.1
    plan = made.scheduler.schedule(Strategy("suffix", 4, 2, 6, shares=(1, 2, 3, 6)))
    assert plan.num_nodes == [6, 1]


def test_the_profile_is_kept_and_read_again(model, tmp_path):
    made = engine(model, "auto")
    costs = made.profile(0.2, tmp_path)
    assert costs.profiled and len(costs.policy.x) >= 2 and np.all(np.diff(costs.policy.y) >= 0) and costs.level.y.max() > 0
    file = next(tmp_path.iterdir())
    assert isinstance(made.select, ModelSelector) and made.select.costs is costs
    again = engine(model, "auto").profile(0.2, tmp_path)
    assert np.array_equal(again.policy.y, costs.policy.y) and np.array_equal(again.with_trees.y, costs.with_trees.y)
    assert np.array_equal(costs.with_trees.x, costs.policy.x) and np.all(costs.with_trees.y >= costs.policy.y - 1e-9)
    file.write_text("{")  # damaged
    assert engine(model, "auto").profile(0.2, tmp_path).profiled


def test_a_named_selector_keeps_what_it_learned(model):
    made = engine(model)
    assert made.selector("auto") is made.selector("auto") is not made.selector("model")
