"""`model`: argmax of expected tokens over predicted milliseconds, nodes given to the requests where they are likeliest to be
accepted (RLHFSpec). `auto`: the same, corrected by what strategies earned when they were used.

A decision stands for some steps; between them drafters are probed: a step with a larger tree, watched closely, tells what every
smaller tree of that drafter would give, so one probe stands for many arms. A drafter that does not pay is probed less and less.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.strategy.cost import CostCurve, bucket_of
from paceline.strategy.survival import MAX_NODES, Gain, Survival
from paceline.strategy.tau import TauTuner
from paceline.types import MAX_TREE_ROWS, NUM_QUALITIES, DrafterName, StepOutcome, StepView, Strategy

LEARNED_SHAPES = ((1, 1), (2, 1), (3, 1), (4, 1), (6, 1), (8, 1), (4, 2), (6, 4), (8, 4))
"""(depth, width) of the learned drafter's trees; how many of their nodes are verified is another question."""
SUFFIX_SHAPE = (8, 2)
_SUFFIX_NODES = 16
_BOTH_UP_TO = 4
"""Requests: trees are merged on the host, one after the other."""
_MAX_ROWS = 512
_AHEAD, _BETTER = 1.03, 1.04
"""Speculation must be so much faster than off to be switched on, and a strategy than the one in use to replace it."""
_DECIDE_EVERY, _TRY_TAU_EVERY = 32, 32
_PROBE_NODES, _LEAST_PROBED = 48, 3
_PROBE_SHAPES = ((32, (8, 4)), (12, (6, 4)), (6, (6, 2)), (4, (4, 1)))
"""Nodes from which on → shape."""
_FIRST_REST, _LONGEST_REST = 48, 192
_OFF_EVERY = 128
_SUFFIX_REST = 24
"""The suffix drafter says itself when it has nothing to offer, and what it offers changes with the text: a look costs little."""
_PRIOR = 12.0
"""Measured steps that the model's word counts as, in `auto`."""
_KEEP = 0.97


class Promise(NamedTuple):
    """What a decision expects."""

    strategy: Strategy
    tokens_per_ms: float
    tokens: float
    ms: float
    batch: int


@dataclass(slots=True)
class _Earned:
    """Of measured over promised tokens per millisecond."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, ratio: float) -> None:
        self.total, self.weight = _KEEP * self.total + ratio, _KEEP * self.weight + 1

    def factor(self, prior: float = 1.0) -> float:
        return (self.total + _PRIOR * prior) / (self.weight + _PRIOR)


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
    _earned: dict[tuple[DrafterName, int, int, int], _Earned] = field(default_factory=dict)
    _rests: dict[DrafterName, _Rest] = field(default_factory=dict)
    _last: StepOutcome | None = None
    _num_drafters: int = 0
    _step: int = 0
    _decided: int = -_DECIDE_EVERY
    _patience: int = _DECIDE_EVERY // 4
    """Steps until the next decision: the longer the more often the last ones agreed."""
    _recent: float = 1.0
    """What decisions earned over what they promised, lately."""

    def __call__(self, view: StepView) -> Strategy:
        self._learn(view)
        if view.num_running == 0 or not view.available:
            return Strategy.OFF
        self._step += 1
        if view.num_prefill_rows == 0:
            probe = self._probe(view)
            if probe is not None:
                return probe
        if self._is_due(view):
            before, self.promise = self.promise, self._decide(view)
            same = before is not None and _arm(before.strategy, before.batch) == _arm(self.promise.strategy, self.promise.batch)
            self._patience = min(2 * self._patience, _DECIDE_EVERY) if same and not self._is_surprised else _DECIDE_EVERY // 4
            self._decided, self._recent = self._step, 1.0
            self._set_rests(view, self.promise.strategy.drafter)
        assert self.promise is not None, "decided"
        chosen = self.promise.strategy
        if chosen.drafter in ("eagle", "both") and self._step % _TRY_TAU_EVERY == 0:
            return replace(chosen, tau=self.tau.trial(), watch=True)
        return replace(chosen, watch=True) if self._is_surprised and chosen.drafter != "none" else chosen

    @property
    def _is_surprised(self) -> bool:
        """Something has changed: look at every step, and decide again soon."""
        return not 0.7 < self._recent < 1.4

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
            self.survival_of(view.watched.strategy.drafter).learn(view.watched)
            self.tau.learn(view.watched)
        if last.num_requests == 0 or last.num_prefill_rows or last.ms <= 0:
            return
        self.costs.learn(last)
        promise = self.promise
        if promise is not None and _arm(last.strategy, 0) == _arm(promise.strategy, 0):
            promised = promise.tokens_per_ms * last.num_requests / promise.batch
            ratio = min(4.0, last.num_tokens / last.ms / promised)
            for key in (_arm(last.strategy, last.num_requests), _all_arms(last.strategy, last.num_requests)):
                self._earned.setdefault(key, _Earned()).add(ratio)
            self._recent += 0.15 * (ratio - self._recent)

    def _forget(self) -> None:
        """The learned drafter has been replaced."""
        for name in ("eagle", "both"):
            self.survival_of(name).forget()
            self._rests.pop(name, None)
        for key in [key for key in self._earned if key[0] in ("eagle", "both")]:
            del self._earned[key]
        self.tau.forget()
        self._decided = -_DECIDE_EVERY

    def survival_of(self, drafter: DrafterName) -> Survival:
        if drafter not in self._survival:
            self._survival[drafter] = Survival((SUFFIX_SHAPE,) if drafter == "suffix" else LEARNED_SHAPES)
        return self._survival[drafter]

    # -- probing

    def _probe(self, view: StepView) -> Strategy | None:
        """The largest tree worth a look, of a drafter that is unknown or has rested; now and then none, to know its cost."""
        if self.costs.num_off < 3 or self._step % _OFF_EVERY == 0:
            return Strategy.OFF
        for drafter in view.available:
            if drafter == "both" and (view.num_running > _BOTH_UP_TO or not self._both_may_pay()):
                continue
            rest = self._rests.setdefault(drafter, _Rest())
            if not self.survival_of(drafter).is_known or self._step >= rest.next_step:
                rest.next_step, rest.probed = self._step + rest.interval, True
                return self.probe_of(drafter, view.num_running)
        return None

    def probe_of(self, drafter: DrafterName, requests: int) -> Strategy:
        """As many nodes as a step may have that costs half as much again as without, but a few in any case."""
        if drafter == "suffix":  # it brings what it has, and says itself what that is worth
            threshold = self.survival_of(drafter).threshold(0.5 * self._price(requests))
            return Strategy("suffix", *SUFFIX_SHAPE, _SUFFIX_NODES, threshold, watch=True)
        rows = requests * np.arange(2, _PROBE_NODES + 2)
        policy = self.costs.policy
        fits = (policy.at(self.costs.padded(rows)) <= 1.5 * policy.at(requests)) | (rows <= (_LEAST_PROBED + 1) * requests)
        nodes = max(1, int((fits & (rows <= _MAX_ROWS)).sum()))
        depth, width = next((shape for least, shape in _PROBE_SHAPES if nodes >= least), (nodes, 1))
        return Strategy(drafter, depth, width, nodes, tau=self.tau.best, watch=True)

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
                rest.interval = _SUFFIX_REST
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
        hurry = self._is_surprised or abs(view.num_running - promise.batch) > promise.batch // 8
        return since >= (_DECIDE_EVERY // 4 if hurry else self._patience)

    def _decide(self, view: StepView) -> Promise:
        options = self.options(view)
        off, best = options[0], max(options, key=self._worth)
        now = None if self.promise is None else self.promise.strategy
        keeping = [option for option in options if now is not None and _arm(option.strategy, 0) == _arm(now, 0)]
        if keeping and self._worth(best) < _BETTER * self._worth(keeping[0]):
            best = keeping[0]
        needed = 1.0 if now is not None and now.drafter == best.strategy.drafter else _AHEAD
        return off if self._worth(best) < needed * self._worth(off) else best

    def options(self, view: StepView) -> list[Promise]:
        """Off, and the best that every known shape can do here."""
        batch = view.num_running
        ms = float(self.costs.ms(Strategy.OFF, batch, batch, view.context))
        found = [Promise(Strategy.OFF, batch / ms, batch, ms, batch)]
        counts = np.array(view.qualities or _one_quality(batch), float)
        for drafter in view.available:
            if drafter == "both" and batch > _BOTH_UP_TO:
                continue
            survival = self.survival_of(drafter)
            for shape in survival.shapes:
                gain = survival.gain(shape)
                promise = None if gain is None else self._spread(drafter, shape, gain, counts, view)
                if promise is not None:
                    found.append(promise)
        return found

    def _spread(self, drafter: DrafterName, shape: tuple[int, int], gain: Gain, counts: NDArray[np.float64],
                view: StepView) -> Promise | None:
        """Nodes in the order of their chances, as many as pay."""
        depth, width = shape
        batch, order, most = view.num_running, gain.order, gain.survival.shape[1]
        weight = gain.present.ravel()[order] * counts[order // most]
        chances = gain.survival.ravel()[order]
        if (counts == 0).any():
            order, weight, chances = order[weight > 0], weight[weight > 0], chances[weight > 0]
        rows = batch + np.cumsum(weight)
        count = int(np.searchsorted(rows, min(_MAX_ROWS, batch * (1 + _max_nodes(drafter, shape))), side="right"))
        if count == 0:
            return None
        tokens = batch + np.cumsum(chances[:count] * weight[:count])
        ms = self.costs.ms(Strategy(drafter, depth, width, MAX_TREE_ROWS - 1), batch, rows[:count], view.context)
        best = int(np.argmax(tokens / ms))
        shares = np.bincount(order[: best + 1] // most, minlength=NUM_QUALITIES)
        if drafter == "suffix":  # which nodes there are, it says itself
            strategy = Strategy("suffix", depth, width, _SUFFIX_NODES, self.survival_of(drafter).threshold(0.9 * chances[best]))
        else:
            strategy = Strategy(drafter, depth, width, int(shares.max()), shares=tuple(shares.tolist()), tau=self.tau.best)
        return Promise(strategy, float(tokens[best] / ms[best]), float(tokens[best]), float(ms[best]), batch)

    def _worth(self, option: Promise) -> float:
        """Expected tokens per millisecond."""
        if not self.corrected:
            return option.tokens_per_ms
        same, own = (self._earned.get(key) or _Earned() for key in (_all_arms(option.strategy, option.batch),
                                                                    _arm(option.strategy, option.batch)))
        return option.tokens_per_ms * own.factor(same.factor())  # what one shape did not keep, its neighbours would not either

    # -- figures

    @property
    def cost_error(self) -> float:
        return self.costs.error

    @property
    def calibration_error(self) -> float:
        """Of the drafter that is worst known."""
        return max((s.error for s in self._survival.values()), default=0.0)


def _max_nodes(drafter: DrafterName, shape: tuple[int, int]) -> int:
    depth, width = shape
    return _SUFFIX_NODES if drafter == "suffix" else min(MAX_NODES, width + (depth - 1) * width**2)


def _arm(strategy: Strategy, batch: int) -> tuple[DrafterName, int, int, int]:
    return strategy.drafter, strategy.depth, strategy.width, bucket_of(batch)


def _all_arms(strategy: Strategy, batch: int) -> tuple[DrafterName, int, int, int]:
    """Whatever this drafter's shapes earned together."""
    return strategy.drafter, -1, -1, bucket_of(batch)


def _one_quality(batch: int) -> tuple[int, ...]:
    return tuple(batch if quality == NUM_QUALITIES - 2 else 0 for quality in range(NUM_QUALITIES))
