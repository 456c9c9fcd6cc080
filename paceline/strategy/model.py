"""`model`: argmax of expected tokens over predicted milliseconds, nodes given to the requests where they are likeliest to be
accepted (RLHFSpec). `auto`: the same, corrected by what strategies earned when they were used.

A decision stands for some steps; between them drafters are probed: a step with a larger tree, watched closely, tells what every
smaller tree of that drafter would give, so one probe stands for many arms. A drafter that does not pay is probed less and less,
the suffix drafter, once it is known, aside: it guesses, and the text that comes tells.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from paceline.strategy.cost import CostCurve, bucket_of
from paceline.strategy.earned import Earned
from paceline.strategy.gains import MAX_NODES
from paceline.strategy.hopes import Hopes
from paceline.strategy.options import MAX_ROWS, Option, max_nodes, spread, suffix_nodes
from paceline.strategy.survival import Survival
from paceline.strategy.tau import TauTuner
from paceline.types import DrafterName, StepOutcome, StepView, Strategy, Watched

LEARNED_SHAPES = ((1, 1), (2, 1), (3, 1), (4, 1), (6, 1), (8, 1), (4, 2), (6, 4), (8, 4))
"""(depth, width) of the learned drafter's trees; how many of their nodes are verified is another question."""
SUFFIX_SHAPE = (8, 2)
_BOTH_UP_TO = 4
"""Requests: trees are merged on the host, one after the other."""
_AHEAD, _STAYS_AHEAD, _BETTER = 1.05, 1.02, 1.04
"""Speculation must be so much faster than off to be switched on, and to be kept; a strategy than the one in use to replace it."""
_FIRST_PATIENCE, _MOST_PATIENCE = 8, 96
"""Steps between decisions: the more the longer they agree. Hopes that prove wrong end them at once."""
_TRY_TAU_EVERY = 32
_LEAST_PROBED = 3
_PROBE_SHAPES = ((32, (8, 4)), (12, (6, 4)), (6, (6, 2)), (4, (4, 1)))
"""Nodes from which on → shape."""
_FIRST_REST, _LONGEST_REST = 48, 192
_OFF_EVERY = 128
_SUFFIX_REST, _NEAR, _MATTERS = 12, 0.8, 0.1
"""What the suffix drafter offers changes with the text, and a look aside costs next to nothing. Another so many tokens for each
request are worth a decision, and if it is near the best strategy, steps of its own that tell what it costs."""


def drafts_at(requests: int) -> list[Strategy]:
    """Of the learned drafter, whatever may be used or probed with so many requests."""
    most = max(1, MAX_ROWS // requests - 1)
    shapes = dict.fromkeys((*LEARNED_SHAPES, *(shape for _, shape in _PROBE_SHAPES), (min(most, _LEAST_PROBED), 1)))
    return [Strategy("eagle", depth, width, min(most, max_nodes(depth, width))) for depth, width in shapes
            if depth <= most or (depth, width) == (1, 1)]


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
class _Rest:
    """When a drafter is looked at again."""

    interval: int = _FIRST_REST
    next_step: int = 0
    probed: bool = False
    """Since the last decision."""


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
    _rests: dict[DrafterName, _Rest] = field(default_factory=dict)
    _last: StepOutcome | None = None
    _num_drafters: int = 0
    _step: int = 0
    _next_probe: int = 0
    _next_aside: int = 0
    _suffix_brings: float = 0.0
    """Tokens for each request, when the last decision was taken …"""
    _suffix_is_near: bool = False
    """… and whether that came near the best strategy."""
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
            self._set_rests(view, self.promise.strategy.drafter)
        assert self.promise is not None, "decided"
        chosen = self.promise.strategy
        if chosen.drafter in ("eagle", "both") and self._step % _TRY_TAU_EVERY == 0:
            chosen = replace(chosen, tau=self.tau.trial(), watch=True)
        if self._wants_aside(view):
            self._next_aside = self._step + _SUFFIX_REST
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
                self._has_looked |= looked_at != "suffix" or self._suffix_has_changed()
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
            self._rests.pop(name, None)
        self.tau.forget()
        self._decided, self._next_probe = -_MOST_PATIENCE, 0

    def survival_of(self, drafter: DrafterName) -> Survival:
        if drafter not in self._survival:
            self._survival[drafter] = Survival((SUFFIX_SHAPE,) if drafter == "suffix" else LEARNED_SHAPES)
            self._hopes[drafter] = Hopes(sparse=drafter == "suffix")
        return self._survival[drafter]

    # -- probing

    def _meet(self, view: StepView) -> None:
        """Most of those that run are new: what came of the few before says little of them, and every drafter is looked at."""
        if view.num_running >= 2 * self._crowd and self._crowd > 0:
            for drafter, rest in self._rests.items():
                rest.next_step, self._hopes[drafter] = 0, Hopes(sparse=drafter == "suffix")
            self._next_probe = self._next_aside = 0
            self._crowd = view.num_running

    def _probe(self, view: StepView) -> Strategy | None:
        """The largest tree worth a look, of a drafter that is unknown or has rested; now and then none, to know its cost."""
        if self.costs.num_off < 3 or self._step % _OFF_EVERY == 0:
            return Strategy.OFF
        if self._step < self._next_probe:
            return None
        self._next_probe = self._step + _FIRST_REST
        for drafter in view.available:
            if drafter == "both" and (view.num_running > _BOTH_UP_TO or not self._both_may_pay()):
                continue
            rest = self._rests.setdefault(drafter, _Rest())
            if drafter == "suffix" and self._is_idle(drafter) and not self._suffix_is_near:  # looked at aside
                continue
            if not self.survival_of(drafter).is_known or self._step >= rest.next_step:
                rest.next_step, rest.probed, self._next_probe = self._step + rest.interval, True, self._step + 1
                return self.probe_of(drafter, view.num_running)
            self._next_probe = min(self._next_probe, rest.next_step)
        return None

    def _is_idle(self, drafter: DrafterName) -> bool:
        """Known, but not in use."""
        return (self.survival_of(drafter).is_known and self.promise is not None
                and self.promise.strategy.drafter not in (drafter, "both"))

    def _suffix_has_changed(self) -> bool:
        brings = self._survival["suffix"].expected(SUFFIX_SHAPE)
        return abs(brings - self._suffix_brings) > _MATTERS * (1 + self._suffix_brings)

    def _wants_aside(self, view: StepView) -> bool:
        """The suffix drafter can be judged without a step of its own: the text that comes tells."""
        return "suffix" in view.available and self._is_idle("suffix") and self._step >= self._next_aside

    def probe_of(self, drafter: DrafterName, requests: int) -> Strategy:
        """As many nodes as a step may have that costs half as much again as without, but a few in any case."""
        if drafter == "suffix":  # it brings what it has, and says itself what that is worth
            threshold = self.survival_of(drafter).threshold(0.5 * self._price(requests))
            return Strategy("suffix", *SUFFIX_SHAPE, suffix_nodes(self.costs, requests), threshold, watch=True)
        rows = requests * np.arange(2, MAX_NODES + 2)
        fits = self.costs.with_trees.at(self.costs.padded(rows)) <= 1.5 * self.costs.policy.at(requests)
        fits |= rows <= (_LEAST_PROBED + 1) * requests
        nodes = max(1, int((fits & (rows <= MAX_ROWS)).sum()))
        depth, width = next((shape for least, shape in _PROBE_SHAPES if nodes >= least), (nodes, 1))
        return Strategy(drafter, depth, width, min(nodes, max_nodes(depth, width)), tau=self.tau.best, watch=True)

    def _price(self, requests: int) -> float:
        """What a row more costs in tokens, about: nodes below that chance do not pay."""
        more = max(8, requests)
        plain, larger = self.costs.policy.at(np.array([requests, requests + more]))
        return float(min(0.9, (larger - plain) / more * requests / plain))

    def _both_may_pay(self) -> bool:
        """Each of the two must be of use by itself."""
        known = [self._survival[name].gain(SUFFIX_SHAPE if name == "suffix" else (1, 1)) for name in ("suffix", "eagle")
                 if name in self._survival]
        return len(known) == 2 and all(gain is not None and float((gain.survival * gain.present)[2, 0]) > 0.6 for gain in known)

    def _set_rests(self, view: StepView, used: DrafterName) -> None:
        """Who was probed and is not used rests longer; who is used is looked at again soon, with a larger tree."""
        for drafter in view.available:
            rest = self._rests.setdefault(drafter, _Rest())
            if not rest.probed:
                continue
            rest.probed = False
            if drafter == used:
                rest.interval = 2 * _FIRST_REST
            elif drafter == "suffix":
                rest.interval = 2 * _SUFFIX_REST
            else:
                rest.interval = min(2 * rest.interval, _LONGEST_REST)

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
        self._suffix_brings, self._suffix_is_near = self.survival_of("suffix").expected(SUFFIX_SHAPE), False
        if not options:
            return off
        worth = [option.tokens_per_ms * self._factor(option.drafter, option.shape, batch) for option in options]
        best = worth.index(max(worth))
        self._suffix_is_near = self._suffix_brings > _MATTERS and any(
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
