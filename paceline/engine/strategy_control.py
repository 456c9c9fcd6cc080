"""Strategy selection for one engine: `StrategyControl.next_strategy` is where `auto` (or any other selector) decides.

It holds the engine's selectors, builds the view that they decide from, reports step outcomes back to them, and decides which
steps are observed draft token by draft token for their calibration. Generated tokens never depend on what is decided here.
"""

from __future__ import annotations

from paceline.engine.draft_outcomes import ShadowDrafts
from paceline.engine.drafting import Drafting
from paceline.engine.request import Request, Status, count_qualities
from paceline.engine.scheduler import Scheduler
from paceline.strategy import CostCurve, FixedSelector, ModelSelector, Selector, make_selector
from paceline.types import DrafterName, StepOutcome, StepView, Strategy, Watched

_OBSERVE_EVERY, _SMALL_BATCH = 32, 16
"""Every so many speculative steps the draft tokens are observed without a request for it; twice as often in batches smaller than
`_SMALL_BATCH` requests."""


class StrategyControl:
    """Selects the strategy of every step and feeds the selectors with outcomes."""

    def __init__(self, strategy: str | Strategy | Selector) -> None:
        self.costs = CostCurve.unknown()
        """Cost of a step by its size, measured by `Engine.profile`."""
        self._by_name: dict[str, Selector] = {}
        self.current = self.selector(strategy)
        """The selector that decides the next step."""
        self.distrusted: DrafterName | None = None
        """A drafter that is hidden from the selectors."""
        self._last: StepOutcome | None = None
        self._watched: Watched | None = None
        self._shadow = ShadowDrafts()
        self._num_drafters = self._num_speculated = 0

    def selector(self, strategy: str | Strategy | Selector) -> Selector:
        """Return the selector for a strategy. A name always gives the same selector, with all that it has learned on this
        engine."""
        if not isinstance(strategy, str):
            return make_selector(strategy)
        if strategy not in self._by_name:
            made = self._by_name[strategy] = make_selector(strategy)
            if isinstance(made, ModelSelector):
                made.costs = self.costs
        return self._by_name[strategy]

    @property
    def needs_profile(self) -> bool:
        """Whether the current selector predicts step times and no cost curve has been measured yet."""
        return isinstance(self.current, ModelSelector) and not self.costs.profiled

    def set_costs(self, costs: CostCurve) -> None:
        """Use a measured cost curve in all selectors that predict step times."""
        self.costs = costs
        for selector in (self.current, *self._by_name.values()):
            if isinstance(selector, ModelSelector):
                selector.costs = costs

    def next_strategy(self, scheduler: Scheduler, drafters: tuple[DrafterName, ...]) -> Strategy:
        """Ask the current selector for the strategy of the next step. `drafters`: the drafters that are loaded."""
        if isinstance(self.current, FixedSelector):
            return self.current.strategy  # it needs no view
        return self.current(self._view(scheduler, drafters))

    def observes(self, strategy: Strategy, num_requests: int) -> bool:
        """Whether the draft tokens of the step that is being launched are observed: if the strategy asks for it, and
        regularly."""
        self._num_speculated += strategy.drafter != "none"
        every = _OBSERVE_EVERY if num_requests >= _SMALL_BATCH else _OBSERVE_EVERY // 2
        return strategy.watch or (strategy.drafter != "none" and self._num_speculated % every == 0)

    def start_shadow(self, strategy: Strategy, running: list[Request], drafting: Drafting) -> None:
        """Start a shadow draft beside the step that is being launched, if its strategy asks for one."""
        if strategy.aside is not None:
            self._shadow.start(strategy.aside, running, drafting)

    def record(self, outcome: StepOutcome, watched: Watched | None) -> None:
        """Keep the outcome of a completed step for the next view. `watched`: its draft outcomes, if they were observed; otherwise
        those of the shadow draft, if it is complete."""
        self._last = outcome
        self._watched = self._shadow.result() if watched is None else watched

    def drafter_replaced(self) -> None:
        """The learned drafter has new weights: earlier measurements of it are outdated, and it is trusted again."""
        self._num_drafters += 1
        self.distrusted = None

    def _view(self, scheduler: Scheduler, drafters: tuple[DrafterName, ...]) -> StepView:
        decode = Status.DECODE
        decoding = [request for request in scheduler.running if request.status is decode]
        prefilling = sum([request.num_to_prefill for request in scheduler.running if request.status is not decode])
        context = sum([request.num_computed for request in decoding]) / max(1, len(decoding))
        if self.distrusted is not None:
            drafters = tuple(name for name in drafters if name not in (self.distrusted, "both"))
        step = 0 if self._last is None else self._last.step + 1
        return StepView(step, len(decoding), prefilling, drafters, scheduler.pages.num_available, self._last, self._num_drafters,
                        count_qualities(decoding), context, self._watched)
