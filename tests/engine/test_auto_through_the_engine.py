"""`auto` through the engine, on a simulated clock: steps take what a GPU would, drafts are as good as a test says.

The learned drafter's costs or predictions are made wrong in the ways that misled earlier versions; the tokens are checked, too.
"""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import tiny
import torch

from benchmarks.lib.selection.liars import LIARS
from benchmarks.lib.selection.world import gpu_costs
from paceline import Engine, SamplingParams
from paceline.config import EngineConfig
from paceline.drafters.tree import Drafts
from paceline.engine.command import LearnedDrafts
from paceline.engine.graphs import Timestamp
from paceline.strategy import AutoSelector, CostCurve, Points

PARAMS = [SamplingParams(max_new_tokens=200, ignore_eos=True, seed=seed) for seed in range(6)]
"""Sampling parameters of successive calls of `Simulated.generate`: another seed each, so that no answer comes twice."""
PROMPTS = [[i, i + 1, i + 2] for i in range(1, 9)]
HOST_MS = 1.5
"""What the suffix drafter's steps wait for."""


Answers = dict[tuple[tuple[int, ...], int], list[int]]
"""Answers of off by prompt and seed."""


class Simulated:
    """An engine whose clock is moved by its steps, and whose learned drafter knows the answers and proposes the right token with
    a given probability."""

    def __init__(self, skill: float, answers: Answers, strategy="auto", profile=None) -> None:
        config = EngineConfig(max_batch=16, max_context=240, profile=False)
        self.engine = Engine(tiny.model(), None, tiny.eagle(), strategy, config)
        self.skill, self.answers, self.costs, self.seconds = skill, answers, gpu_costs(), 0.0
        self.rng, self.used, self.num_calls = random.Random(0), Counter(), 0
        engine = self.engine
        engine._control.set_costs(profile or gpu_costs())
        engine.executor.graphs.now = lambda: Timestamp(self.seconds)
        engine.executor.learned.draft = self.draft
        run = engine.executor.runner.run

        def timed(batch, *args, **options):
            rows = batch.num_rows
            suffix = HOST_MS if batch.survival is not None and not self.drafted else 0.0
            self.seconds += 1e-3 * (float(self.costs.policy.at(rows)) + suffix)
            self.drafted = False
            return run(batch, *args, **options)

        engine.executor.runner.run, self.drafted = timed, False

    def draft(self, draft: LearnedDrafts, slots: np.ndarray) -> Drafts:
        by_slot, strategy = {request.slot: request for request in self.engine.scheduler.running}, draft.strategy
        requests = [by_slot[slot] for slot in slots.tolist()]
        n, width = len(requests), strategy.width
        levels = float(self.costs.start.at(n)) + (strategy.depth - 1) * float(self.costs.level.at(n * width))
        self.seconds, self.drafted = self.seconds + 1e-3 * levels, True
        shape = (n, max(strategy.depth * width, strategy.budget))
        tokens, parents, depths = torch.zeros((3, *shape), dtype=torch.int64)
        parents -= 1
        depths += 1
        survival = torch.zeros(shape)
        for line, request in enumerate(requests):
            answer = self.answers[tuple(request.prompt_ids), request.params.seed]
            for depth in range(1, strategy.depth + 1):
                place = len(request.output_ids) + depth - 1
                right = answer[place] if place < len(answer) else 0
                first = right if self.rng.random() < self.skill else (right + 1) % tiny.VOCAB
                for rank in range(width):
                    node = (depth - 1) * width + rank
                    tokens[line, node] = (first + 2 * rank) % tiny.VOCAB
                    parents[line, node], depths[line, node] = -1 if depth == 1 else (depth - 2) * width, depth
                    survival[line, node] = 0.9 ** (depth - 1) * (0.9 if rank == 0 else 0.05)
        return Drafts(tokens, parents, depths, survival)

    def generate(self) -> float:
        """Simulated seconds that the answers take, which must be those of off."""
        began, params = self.seconds, PARAMS[self.num_calls]
        self.num_calls += 1
        groups = self.engine.generate(PROMPTS, params, on_step=lambda result: self.used.update([result.strategy.drafter]))
        for group in groups:
            rollout = group.rollouts[0]
            assert rollout.token_ids == self.answers[tuple(group.prompt_ids), rollout.seed]
        return self.seconds - began


@pytest.fixture(scope="module")
def answers():
    plain = Engine(tiny.model(), None, "none", "off", EngineConfig(max_batch=16, max_context=240))
    return {(tuple(group.prompt_ids), r.seed): r.token_ids for params in PARAMS for group in plain.generate(PROMPTS, params)
            for r in group.rollouts}


def busy_profile() -> CostCurve:
    """As measured while something else kept the device busy: the learned drafter's levels seem to cost more than a step."""
    costs = gpu_costs()
    return CostCurve(costs.policy, Points.through([(1, 5.0), (256, 10.0)]), Points.through([(1, 5.0), (1024, 20.0)]))


@pytest.mark.parametrize(("profile", "gain"), [(gpu_costs, 1.75), (busy_profile, 1.45)], ids=["right profile", "busy device"])
def test_a_good_learned_drafter_is_used_whatever_the_profile_says(answers, profile, gain):
    off, auto = Simulated(0.8, answers, "off"), Simulated(0.8, answers, profile=profile())
    for simulated in (off, auto):
        simulated.generate()
    assert off.generate() / auto.generate() > gain
    assert auto.used["eagle"] > auto.used["suffix"] + auto.used["none"]


@pytest.mark.parametrize("liar", [*LIARS[:2], *(pytest.param(liar, marks=pytest.mark.slow) for liar in LIARS[2:])])
def test_a_lying_predictor_costs_three_per_cent_at_most(answers, liar):
    off, auto = Simulated(0.02, answers, "off"), Simulated(0.02, answers)
    selector = auto.engine.selector
    assert isinstance(selector, AutoSelector)
    selector.predictor = liar(gpu_costs())
    seconds = [(off.generate(), auto.generate()) for _ in range(5)]
    assert sum(a for a, _ in seconds) / sum(b for _, b in seconds) > 0.97
    assert auto.used["suffix"] + auto.used["eagle"] > 0


def test_a_replaced_drafter_is_taken_up(answers):
    """As in training: the first drafter is untrained, then a better one is published."""
    auto = Simulated(0.0, answers)
    auto.generate()
    before = auto.used["eagle"]
    assert before < 0.2 * sum(auto.used.values())
    auto.skill = 0.8
    auto.engine.update_drafter(tiny.eagle(), 0)
    auto.generate()
    assert auto.used["eagle"] - before > 20
