"""Strategy selection for one engine: `StrategyControl.select` is where `auto` (or any other selector) decides.

It holds the engine's selectors, builds the view that they decide from, reports step outcomes back to them, and decides which
steps are observed draft token by draft token. Generated tokens never depend on what is decided here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.engine.command import StepCommand, StepOutputs
from paceline.engine.draft_outcomes import draft_outcomes
from paceline.engine.request import Request, Status
from paceline.engine.scheduler import Scheduler
from paceline.strategy import AnyStrategy, AutoSelector, CostCurve, FixedSelector, Selector, last_progress, make_selector
from paceline.types import Decision, DrafterName, DraftOutcomes, Rollout, StepOutcome, StepView, Strategy

_OBSERVE_EVERY = 128
"""Number of speculative steps after which draft tokens are observed although nobody asked for it, for the drafter's monitor."""
_LEAST_SHARE = 0.8
"""Share of the time below which the rest of a step with forced rows does not count as a measured step of a strategy."""
_CUT_MEMORY, _MOSTLY_CUT = 0.05, 0.9
"""Weight of the newest answer in the share of answers that end at their limit; share from which on limits are taken for
lengths."""


class StrategyControl:
    """Selects the strategy of every step and feeds the selectors with outcomes."""

    def __init__(self, strategy: AnyStrategy) -> None:
        self.costs = CostCurve.unknown()
        """Cost of a step by its size, measured by `Engine.profile`."""
        self._by_name: dict[str, Selector] = {}
        self.current = self.selector_of(strategy)
        """The selector that decides the next step."""
        self.distrusted: DrafterName | None = None
        """A drafter that is hidden from the selectors."""
        self._share_cut = 0.0  # recent share of answers that ended at their limit
        self._num_unobserved = 0  # speculative steps since draft tokens were observed

    def selector_of(self, strategy: AnyStrategy) -> Selector:
        """Return the selector for a strategy. A name always gives the same selector, with all that it has learned on this
        engine."""
        if not isinstance(strategy, str):
            return make_selector(strategy)
        if strategy not in self._by_name:
            made = self._by_name[strategy] = make_selector(strategy)
            if isinstance(made, AutoSelector):
                made.costs = self.costs
        return self._by_name[strategy]

    @property
    def needs_profile(self) -> bool:
        """Whether the current selector predicts step times and no cost curve has been measured yet."""
        return isinstance(self.current, AutoSelector) and not self.costs.profiled

    def set_costs(self, costs: CostCurve) -> None:
        """Use a measured cost curve in all selectors that predict step times."""
        self.costs = costs
        for selector in self._selectors():
            if isinstance(selector, AutoSelector):
                selector.costs = costs

    def select(self, scheduler: Scheduler, drafters: tuple[DrafterName, ...]) -> Decision:
        """Ask the current selector about the next step. `drafters`: the drafters that are loaded."""
        if isinstance(self.current, FixedSelector):
            return Decision(self.current.strategy)  # it needs no view
        return self.current.select(self._view(scheduler, drafters))

    def observes(self, decision: Decision) -> bool:
        """Whether the draft tokens of the step that is being launched are observed: on request, and regularly."""
        if decision.strategy.drafter == "none":
            return False
        self._num_unobserved += 1
        observed = decision.observe or self._num_unobserved == _OBSERVE_EVERY
        self._num_unobserved *= not observed
        return observed

    def outcomes(self, strategy: Strategy, command: StepCommand, outputs: StepOutputs) -> DraftOutcomes | None:
        """Return what became of a step's draft tokens; None if they were not observed."""
        return draft_outcomes(strategy, command, outputs) if command.observe else None

    def last_progress(self, scheduler: Scheduler, decoding: list[Request], tokens: Mapping[int, Sequence[int]]) -> float | None:
        """Return by how many tokens a completed step brought the requests that finish last forward; None if it is not known which
        those are, or if requests wait."""
        if scheduler.waiting or not decoding or not self._knows_lengths(decoding):
            return None
        new = [len(tokens.get(request.id, ())) for request in decoding]
        return last_progress([request.max_tokens - len(request.tokens) + count
                              for request, count in zip(decoding, new, strict=True)], new)

    def record(self, outcome: StepOutcome, finished: list[Rollout]) -> None:
        """Report a completed step to the current selector."""
        for rollout in finished:
            self._share_cut += _CUT_MEMORY * ((rollout.finish_reason == "length") - self._share_cut)
        self.current.observe(self._without_prefill(outcome) if outcome.num_prefill_rows else outcome)

    def _without_prefill(self, outcome: StepOutcome) -> StepOutcome:
        """Return the outcome of a step as if it had had no forced rows: by the cost curve, the rest of the step would have taken
        its share of the time. Where much of the time went to forced rows, that says too little."""
        if not self.costs.profiled or outcome.num_rows < outcome.num_requests:
            return outcome
        cost = self.costs.policy.at
        alone, together = cost(outcome.num_rows), cost(outcome.num_rows + outcome.num_prefill_rows)
        if alone < _LEAST_SHARE * together:
            return outcome
        return replace(outcome, num_prefill_rows=0, ms=outcome.ms * float(alone / together))

    def drafter_replaced(self) -> None:
        """The learned drafter has new weights: earlier measurements of it are outdated, and it is trusted again."""
        for selector in self._selectors():
            selector.drafter_replaced()
        self.distrusted = None

    @property
    def has_learned(self) -> bool:
        """Whether `auto` has measured steps, or was told of such."""
        return any(isinstance(each, AutoSelector) and bool(each.times) for each in self._selectors())

    def state(self) -> dict[str, Any] | None:
        """Return what `auto` has learned, as plain numbers; None if it is not used."""
        return next((each.state() for each in self._selectors() if isinstance(each, AutoSelector)), None)

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what `auto` learned in an earlier run."""
        for selector in self._selectors():
            if isinstance(selector, AutoSelector):
                selector.restore(state)

    def _selectors(self) -> list[Selector]:
        known = list(self._by_name.values())
        return known if any(selector is self.current for selector in known) else [*known, self.current]

    def _view(self, scheduler: Scheduler, drafters: tuple[DrafterName, ...]) -> StepView:
        decode, decoding, prefilling, context = Status.DECODE, [], 0, 0  # one pass: this is done before every step
        for request in scheduler.running:
            if request.status is decode:
                decoding.append(request)
                context += request.num_computed
            else:
                prefilling += request.num_to_feed
        if self.distrusted is not None:
            drafters = tuple(name for name in drafters if name != self.distrusted)
        count, remaining = len(decoding), list[int]()
        if not (scheduler.waiting or prefilling) and self._knows_lengths(decoding):
            remaining = sorted([request.max_tokens - len(request.tokens) for request in decoding], reverse=True)
        return StepView(count, prefilling, drafters, context / max(1, count), tuple(remaining))

    def _knows_lengths(self, decoding: list[Request]) -> bool:
        """Whether requests run to their limits; usually answers end before."""
        return self._share_cut >= _MOSTLY_CUT or all(request.params.ignore_eos for request in decoding)
