"""The bandit against simulated steps: it finds the best arm of a bucket, off among them, follows drift, and repeats itself."""

from __future__ import annotations

import random
from collections import Counter

from paceline.strategy import BegSelector, make_selector
from paceline.strategy.beg import arms_of, bucket_of
from paceline.types import StepOutcome, StepView, Strategy

ALL = ("suffix", "eagle", "both")


def play(selector, batch, tokens_per_ms, steps, first=0, available=ALL, seed=0, num_drafters=0):
    """What it chose, when a strategy earns `tokens_per_ms(strategy)` with noise."""
    noise, last, chosen = random.Random(seed), None, []
    for step in range(first, first + steps):
        strategy = selector(StepView(step, batch, 0, {}, None, None, available, 100, last, num_drafters))
        chosen.append(strategy)
        rate = tokens_per_ms(strategy) * noise.uniform(0.7, 1.3)
        last = StepOutcome(step, strategy, batch, 0, 100, 100 / rate)
    return chosen


def test_finds_the_best_arm():
    best = Strategy.parse("eagle:d6w1v6")
    chosen = play(BegSelector(), 5, lambda s: 2.0 if s == best else 1.5 if s.drafter == "eagle" else 1.0, 400)
    assert Counter(chosen[-200:])[best] > 160


def test_a_drafter_that_is_always_wrong_costs_little():
    rate = {"none": 1.0, "suffix": 0.9, "eagle": 0.4}
    chosen = play(BegSelector(), 1, lambda s: rate[s.drafter], 600)
    spent = [1 / rate[s.drafter] for s in chosen[50:]]
    assert sum(spent) / len(spent) < 1.03


def test_follows_an_abrupt_change():
    """A drafter that went stale is dropped within its window, and taken up again when it is good."""
    good, bad = (lambda s: 2.0 if s.drafter == "eagle" else 1.0), (lambda s: 0.5 if s.drafter == "eagle" else 1.0)
    selector = BegSelector(window=60)
    play(selector, 3, good, 300)
    chosen = play(selector, 3, bad, 300, first=300)
    assert all(s.drafter != "eagle" for s in chosen[-20:]) or sum(s.drafter != "eagle" for s in chosen[-100:]) > 90
    chosen = play(selector, 3, good, 3000, first=600)
    assert sum(s.drafter == "eagle" for s in chosen[-200:]) > 150


def test_a_new_drafter_is_measured_at_once():
    selector = BegSelector()
    play(selector, 3, lambda s: 0.5 if s.drafter == "eagle" else 1.0, 200)
    chosen = play(selector, 3, lambda s: 2.0 if s.drafter == "eagle" else 1.0, 30, first=200, num_drafters=1)
    assert all(s.drafter == "eagle" for s in chosen[-15:])


def test_buckets_have_arms_and_repeat():
    for batch in (1, 2, 3, 7, 20, 64, 100, 500):
        arms = arms_of(bucket_of(batch), ALL)
        assert arms[0] == Strategy.OFF and len(arms) >= 3 and len(set(arms)) == len(arms)
        assert arms_of(bucket_of(batch), ("suffix",)) == arms[:2]
    rate = lambda s: 1.0 + s.budget / 50  # noqa: E731
    assert play(BegSelector(), 9, rate, 300) == play(BegSelector(), 9, rate, 300)
    assert BegSelector()(StepView(0, 4, 0, {}, None, None, (), 100)) == Strategy.OFF
    assert isinstance(make_selector("beg"), BegSelector)
