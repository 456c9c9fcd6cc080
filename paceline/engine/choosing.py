"""How one engine comes to its next strategy: its selectors, what they are shown, which steps are watched for them and what is
guessed aside. Tokens never depend on what is decided here."""

from __future__ import annotations

from paceline.engine.asides import Asides
from paceline.engine.drafting import Drafting
from paceline.engine.request import Request, Status, count_qualities
from paceline.engine.scheduler import Scheduler
from paceline.engine.watch import EVERY, FEW
from paceline.strategy import CostCurve, FixedSelector, ModelSelector, Selector, make_selector
from paceline.types import DrafterName, StepOutcome, StepView, Strategy, Watched


class Choosing:
    def __init__(self, strategy: str | Strategy | Selector) -> None:
        self.costs = CostCurve.unknown()
        """What steps cost."""
        self._by_name: dict[str, Selector] = {}
        self.select = self.selector(strategy)
        self.distrusted: DrafterName | None = None
        """Whom selectors do without."""
        self._last: StepOutcome | None = None
        self._watched: Watched | None = None
        self._asides = Asides()
        self._num_drafters = self._num_speculated = 0

    def selector(self, strategy: str | Strategy | Selector) -> Selector:
        """By name always the same one, with what it has learned."""
        if not isinstance(strategy, str):
            return make_selector(strategy)
        if strategy not in self._by_name:
            made = self._by_name[strategy] = make_selector(strategy)
            if isinstance(made, ModelSelector):
                made.costs = self.costs
        return self._by_name[strategy]

    @property
    def wants_profile(self) -> bool:
        """It is to predict, and knows no costs yet."""
        return isinstance(self.select, ModelSelector) and not self.costs.profiled

    def use(self, costs: CostCurve) -> None:
        self.costs = costs
        for selector in (self.select, *self._by_name.values()):
            if isinstance(selector, ModelSelector):
                selector.costs = costs

    def strategy(self, scheduler: Scheduler, drafters: tuple[DrafterName, ...]) -> Strategy:
        """drafters: those that are loaded."""
        if isinstance(self.select, FixedSelector):
            return self.select.strategy  # it need not look
        return self.select(self._view(scheduler, drafters))

    def is_watched(self, strategy: Strategy, batch: int) -> bool:
        """Whenever it is asked for, and now and then."""
        self._num_speculated += strategy.drafter != "none"
        every = EVERY if batch >= FEW else EVERY // 2
        return strategy.watch or (strategy.drafter != "none" and self._num_speculated % every == 0)

    def aside(self, strategy: Strategy, running: list[Request], drafting: Drafting) -> None:
        """A step of this strategy is being launched."""
        if strategy.aside is not None:
            self._asides.begin(strategy.aside, running, drafting)

    def record(self, outcome: StepOutcome, watched: Watched | None) -> None:
        """A step has been read."""
        self._last = outcome
        self._watched = self._asides.result() if watched is None else watched

    def drafter_replaced(self) -> None:
        """What was measured of the learned one is history, and so is what was said of it."""
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
