"""`model`: argmax of expected tokens over predicted milliseconds, nodes given to the requests where they are likeliest to be
accepted (RLHFSpec). `auto`: the same, corrected by what strategies earned when they were used.

A decision stands for some steps; between them drafters are looked at (`looks.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from paceline.strategy.cost import CostCurve, bucket_of
from paceline.strategy.earned import Earned
from paceline.strategy.hopes import Hopes
from paceline.strategy.looks import MATTERS, Looks, probe, suffix_probe
from paceline.strategy.options import LEARNED_SHAPES, SUFFIX_SHAPE, Option, spread, suffix_nodes
from paceline.strategy.survival import Survival
from paceline.strategy.tau import TauTuner
from paceline.types import DrafterName, StepOutcome, StepView, Strategy, Watched

_BOTH_UP_TO = 4
"""Requests: trees are merged on the host, one after the other."""
_AHEAD, _STAYS_AHEAD, _BETTER = 1.05, 1.02, 1.04
"""Speculation must be so much faster than off to be switched on, and to be kept; a strategy than the one in use to replace it."""
_FIRST_PATIENCE, _MOST_PATIENCE = 8, 96
"""Steps between decisions: the more the longer they agree. Hopes that prove wrong end them at once."""
_TRY_TAU_EVERY = 32
_OFF_EVERY = 128
_NEAR = 0.8
"""Of the best strategy's worth."""


def compile_loops() -> None:
    """With a look and a decision about nothing: on a new installation that takes seconds."""
    survival, zero, one = Survival(LEARNED_SHAPES), np.zeros(1, int), np.ones(1, int)
    survival.learn(Watched(Strategy("eagle", 1, 1, 1), 1, zero, zero, zero - 1, one, zero, np.full(1, 0.5), one > 0, one > 0))
    spread(CostCurve.unknown(), "eagle", survival.shapes, survival.gains, survival.gains, StepView(0, 1, 0, ("eagle",), 0))


class Promise(NamedTuple):
    """What a decision expects."""

    strategy: Strategy
    tokens_per_ms: float
    tokens: float
    ms: float
    batch: int
    nodes: float = 0.0
    hoped: float = 0.0
    """To be accepted, by what looks have shown alone."""


@dataclass(slots=True)
class ModelSelector:
    """Holds what it has seen; the same views in the same order give the same decisions, on every rank."""

    costs: CostCurve = field(default_factory=CostCurve.unknown)
    corrected: bool = False
    """By what was earned: `auto`."""
    tau: TauTuner = field(default_factory=TauTuner)
    promise: Promise | None = None
    _survival: dict[DrafterName, Survival] = field(default_factory=dict)
    _hopes: dict[DrafterName, Hopes] = field(default_factory=dict)
    _earned: Earned = field(default_factory=Earned)
    _looks: Looks = field(default_factory=Looks)
    _last: StepOutcome | None = None
    _num_drafters: int = 0
    _step: int = 0
    _suffix_is_near: bool = False
    """It came near the best strategy at the last decision: steps of its own tell what it costs."""
    _crowd: int = 0
    """Requests that ran at the last decision."""
    _decided: int = -_MOST_PATIENCE
    _patience: int = _FIRST_PATIENCE
    """Steps until the next decision: the longer the more often the last ones agreed."""
    _has_looked: bool = False
    """At a drafter that is not in use, since the last decision."""

    def __call__(self, view: StepView) -> Strategy:
        self._learn(view)
        if view.num_running == 0 or not view.available:
            return Strategy.OFF
        self._step += 1
        if view.num_prefill_rows == 0:
            self._meet(view)
            probe = self._probe(view)
            if probe is not None:
                return probe
        if self._is_due(view):
            before, self.promise = self.promise, self._decide(view)
            same = before is not None and _place(before) == _place(self.promise)
            self._patience = min(2 * self._patience, _MOST_PATIENCE) if same else _FIRST_PATIENCE
            self._decided, self._crowd, self._has_looked = self._step, view.num_running, False
            self._looks.decided(view.available, self.promise.strategy.drafter, self._suffix_brings)
        assert self.promise is not None, "decided"
        chosen = self.promise.strategy
        if chosen.drafter in ("eagle", "both") and self._step % _TRY_TAU_EVERY == 0:
            chosen = replace(chosen, tau=self.tau.trial(), watch=True)
        if "suffix" in view.available and self._is_idle("suffix") and self._looks.aside(self._step):
            chosen = replace(chosen, aside=self.probe_of("suffix", view.num_running))
        return chosen

    # -- learning

    def _learn(self, view: StepView) -> None:
        if view.num_drafters != self._num_drafters:
            self._num_drafters = view.num_drafters
            self._forget()
        last = view.last
        if last is None or last is self._last:
            return
        self._last = last
        if view.watched is not None:
            looked_at = view.watched.strategy.drafter
            self.survival_of(looked_at).learn(view.watched)
            self.tau.learn(view.watched)
            if self.promise is not None and looked_at != self.promise.strategy.drafter:
                self._has_looked |= looked_at != "suffix" or self._looks.suffix_matters(self._suffix_brings)
                self._hopes[looked_at].fade()
        promise = self.promise  # of which this step was one, or None
        if promise is None or last.num_requests == 0 or not _same(last.strategy, promise.strategy):
            promise = None
        elif promise.nodes > 0 and not last.crowded:
            share = last.num_requests / promise.batch
            self._hopes[last.strategy.drafter].add(
                last.num_requests, promise.nodes * share, promise.hoped * share, (promise.tokens - promise.batch) * share,
                last.num_tokens - last.num_requests, last.strategy.depth)
        if last.num_requests == 0 or last.num_prefill_rows or last.ms <= 0:
            return  # its time says nothing
        self.costs.learn(last)
        if promise is not None:
            self._earned.add(last.num_tokens, promise.tokens_per_ms * last.num_requests / promise.batch * last.ms)

    def _forget(self) -> None:
        """The learned drafter has been replaced."""
        for name in ("eagle", "both"):
            self.survival_of(name).forget()
            self._hopes[name] = Hopes()
            self._earned.forget(name)
        self._looks.forget(("eagle", "both"))
        self.tau.forget()
        self._decided = -_MOST_PATIENCE

    def survival_of(self, drafter: DrafterName) -> Survival:
        if drafter not in self._survival:
            self._survival[drafter] = Survival((SUFFIX_SHAPE,) if drafter == "suffix" else LEARNED_SHAPES)
            self._hopes[drafter] = Hopes(sparse=drafter == "suffix")
        return self._survival[drafter]

    # -- looking

    def _meet(self, view: StepView) -> None:
        """Most of those that run are new: what came of the few before says little of them, and every drafter is looked at."""
        if view.num_running >= 2 * self._crowd and self._crowd > 0:
            for drafter in self._looks.all_at_once():
                self._hopes[drafter] = Hopes(sparse=drafter == "suffix")
            self._crowd = view.num_running

    def _probe(self, view: StepView) -> Strategy | None:
        """A step to learn from; now and then one without a drafter, to know its cost."""
        if self.costs.num_off < 3 or self._step % _OFF_EVERY == 0:
            return Strategy.OFF
        candidates = (drafter for drafter in view.available if self._may_be_probed(drafter, view.num_running))
        drafter = self._looks.turn(self._step, candidates, lambda name: self.survival_of(name).is_known)
        return None if drafter is None else self.probe_of(drafter, view.num_running)

    def _may_be_probed(self, drafter: DrafterName, requests: int) -> bool:
        if drafter == "both":
            return requests <= _BOTH_UP_TO and self._both_may_pay()
        return drafter != "suffix" or not self._is_idle(drafter) or self._suffix_is_near  # otherwise it is looked at aside

    def _is_idle(self, drafter: DrafterName) -> bool:
        """Known, but not in use."""
        return (self.survival_of(drafter).is_known and self.promise is not None
                and self.promise.strategy.drafter not in (drafter, "both"))

    @property
    def _suffix_brings(self) -> float:
        """Tokens for each request."""
        return self.survival_of("suffix").expected(SUFFIX_SHAPE)

    def probe_of(self, drafter: DrafterName, requests: int) -> Strategy:
        if drafter == "suffix":
            return suffix_probe(self.costs, self.survival_of(drafter), requests)
        return probe(drafter, self.costs, requests, self.tau.best)

    def _both_may_pay(self) -> bool:
        """Each of the two must be of use by itself."""
        known = [self._survival[name].gain(SUFFIX_SHAPE if name == "suffix" else (1, 1)) for name in ("suffix", "eagle")
                 if name in self._survival]
        return len(known) == 2 and all(gain is not None and float((gain.survival * gain.present)[2, 0]) > 0.6 for gain in known)

    # -- deciding

    def _is_due(self, view: StepView) -> bool:
        promise = self.promise
        if promise is None or promise.strategy.drafter not in ("none", *view.available):
            return True
        if not promise.batch < 2 * view.num_running < 4 * promise.batch:
            return True  # another place altogether
        since = self._step - self._decided
        hurry = abs(view.num_running - promise.batch) > promise.batch // 8
        hopes = self._hopes.get(promise.strategy.drafter)
        surprised = self._has_looked or (hopes is not None and hopes.are_wrong)
        return surprised or since >= (_FIRST_PATIENCE if hurry else self._patience)

    def _decide(self, view: StepView) -> Promise:
        for hopes in self._hopes.values():
            hopes.decided()
        if self.promise is not None:
            self._earned.book(self.promise.strategy, self.promise.batch)
        batch = view.num_running
        ms = float(self.costs.ms(Strategy.OFF, batch, batch, view.context))
        off, options = Promise(Strategy.OFF, batch / ms, batch, ms, batch), self._options(view)
        self._suffix_is_near = False
        if not options:
            return off
        worth = [option.tokens_per_ms * self._factor(option.drafter, option.shape, batch) for option in options]
        best = worth.index(max(worth))
        self._suffix_is_near = self._suffix_brings > MATTERS and any(
            option.drafter == "suffix" and w > _NEAR * worth[best] for option, w in zip(options, worth, strict=True))
        now = None if self.promise is None else self.promise.strategy
        if now is not None:
            keeping = [i for i, option in enumerate(options) if option.is_of(now)]
            if keeping and worth[best] < _BETTER * worth[keeping[0]]:
                best = keeping[0]
        needed = _STAYS_AHEAD if now is not None and now.drafter == options[best].drafter else _AHEAD
        if worth[best] < needed * off.tokens_per_ms * self._factor("none", (0, 0), batch):
            return off
        return self._promise(options[best], view)

    def _options(self, view: StepView) -> list[Option]:
        """The best that every known shape can do here."""
        found: list[Option] = []
        for drafter in view.available:
            if drafter == "both" and view.num_running > _BOTH_UP_TO:
                continue
            survival = self.survival_of(drafter)
            now = self._hopes[drafter].applied(survival.gains)
            found += spread(self.costs, drafter, survival.shapes, survival.gains, now, view)
        return found

    def _promise(self, option: Option, view: StepView) -> Promise:
        if option.drafter == "suffix":  # which nodes there are, it says itself
            threshold = self.survival_of("suffix").threshold(0.9 * option.price)
            strategy = Strategy("suffix", *option.shape, suffix_nodes(self.costs, view.num_running), threshold)
        else:
            shares = option.shares
            strategy = Strategy(option.drafter, *option.shape, max(shares), shares=shares, tau=self.tau.best)
        return Promise(strategy, option.tokens_per_ms, option.tokens, option.ms, view.num_running, option.rows - view.num_running,
                       option.hoped)

    def _factor(self, drafter: DrafterName, shape: tuple[int, int], batch: int) -> float:
        return self._earned.factor(drafter, shape, batch) if self.corrected else 1.0

    # -- figures

    @property
    def cost_error(self) -> float:
        return self.costs.error

    @property
    def calibration_error(self) -> float:
        """Of the drafter in use; while none is, of the one that is worst known."""
        used = None if self.promise is None else self._survival.get(self.promise.strategy.drafter)
        return max((s.error for s in self._survival.values()), default=0.0) if used is None else used.error


def _place(promise: Promise) -> tuple[DrafterName, int, int, int]:
    return promise.strategy.drafter, promise.strategy.depth, promise.strategy.width, bucket_of(promise.batch)


def _same(a: Strategy, b: Strategy) -> bool:
    return a.drafter == b.drafter and a.depth == b.depth and a.width == b.width
