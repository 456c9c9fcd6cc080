"""Six workloads in simulation: an H200 with a 7B model, by its measured cost curve and the measured acceptance of a drafter;
and constant batches of a 1.5B model, whose steps are so short that every trial costs more of them.

What disturbs a selector there is simulated, too, as it was seen in traces: outcomes arrive one step late, the first steps after
prefill and after a change of strategy take longer, single steps are stopped by something else, profiles are a few per cent off,
and some text is harder to draft than other. Responses have known lengths, and every round begins with new prompts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.lib.prompts import long_tailed_lengths
from benchmarks.lib.results import Report
from benchmarks.lib.selection.liars import LIARS
from benchmarks.lib.selection.summary import conclusions, show, workload_record
from benchmarks.lib.selection.world import World
from benchmarks.lib.speculation import fixed_strategies, num_parts
from paceline.strategy import AutoSelector, CostCurve, FixedSelector, Points, Selector, make_selector
from paceline.strategy.predict import Predictor
from paceline.types import Decision, StepOutcome, StepView, Strategy

SUFFIX = "suffix:d8w2v16"
CHECKED = (1, 32, 128, 256, 8)
"""Batch sizes that one selector sees one after the other, as in `benchmarks/gpu/check.py`."""
_DECAY = (1.0, 0.97, 0.96, 0.95, 0.94, 0.93, 0.91, 0.89)
_SLOW_AFTER_PREFILL, _SLOW_AFTER_CHANGE, _STOPPED = 2.0, 0.15, 12.0
_CATCH_UP_MS = 5e-5
"""Milliseconds for each token that was generated without the learned drafter, when it drafts for that request again."""


def h200_costs() -> CostCurve:
    """The profile of a 7B model on an H200."""
    return CostCurve.loads((Path(__file__).parent / "h200_costs.json").read_text(encoding="utf-8"))


def small_costs() -> CostCurve:
    """The profile of a 1.5B model on an H200."""
    return CostCurve.loads((Path(__file__).parent / "h200_costs_1.5b.json").read_text(encoding="utf-8"))


class Text(NamedTuple):
    """Chance that the first draft token is right."""

    eagle: float
    suffix: float


class Task(NamedTuple):
    """A round of a workload."""

    lengths: tuple[int, ...]
    text: Text
    stale: bool = False
    """Whether the learned drafter is replaced by a useless one midway."""
    has_queue: bool = False
    """Whether requests wait: then tokens per second count, and the round ends with the first response."""
    knows_lengths: bool = True
    """Whether the selector is told how many tokens are left of each response."""
    num_derailing: int = 0
    """Number of responses, beginning with the longest one, that derail at some point, from which on nothing can be predicted. At
    high temperatures all of them do."""
    num_repeating: int | None = None
    """If given, number of responses that the suffix drafter can predict; of the others it knows nothing."""
    is_changing: bool = False
    """Whether responses are predictable for some hundred tokens and unpredictable for the next hundred, and so on."""
    has_new_drafter: bool = False
    """Whether the learned drafter has got new weights, which are as good as the old ones."""


ORDINARY = Text(0.84, 0.2)
TEXTS = {"repetitive": Text(0.85, 0.9), "ordinary": ORDINARY, "random": Text(0.08, 0.02), "high_temperature": Text(0.65, 0.08),
         "shrinking": ORDINARY, "stale": ORDINARY}


def tasks(name: str, rounds: int) -> list[Task]:
    """The rounds of a workload; the first one is a warm-up."""
    lengths = tuple(long_tailed_lengths(None, 64, 512)) if name == "shrinking" else (192,) * 16
    usual = Task(lengths, TEXTS[name], name == "stale", num_derailing=16 if name == "high_temperature" else 0)
    return [usual._replace(text=Text(0.85, 0.3)) if name == "repetitive" else usual, *[usual] * rounds]


@dataclass
class H200(World):
    """The simulated GPU."""

    costs: CostCurve = field(default_factory=h200_costs)
    batch: int = 1
    skill: dict[str, float] = field(default_factory=lambda: ORDINARY._asdict())
    decay: tuple[float, ...] = _DECAY
    noise: float = 0.03
    is_gpu: bool = True
    """Whether the host works while the device does, and outcomes arrive one step late."""
    used: Counter[str] = field(default_factory=Counter)
    verifications: int = 0
    _last: str = "prefill"
    _slow: float = 1.0
    num_requests: int = 0
    """Number of requests so far."""
    num_repeating: int | None = None
    left: np.ndarray = field(default_factory=lambda: np.zeros(0))
    _hardness: np.ndarray = field(default_factory=lambda: np.zeros(0))
    _character: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """How predictable each response is."""
    _derails_at: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """Tokens that each response still has to get when it derails."""
    _is_hard: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), bool))
    """By response and number of tokens that it has still to get: whether it is unpredictable there."""
    _missing: np.ndarray = field(default_factory=lambda: np.zeros(0, int))
    """Tokens of each response that the learned drafter has not read."""
    _biases: dict[tuple[int, ...], float] = field(default_factory=dict)

    def skills(self, drafter: str, batch: int) -> np.ndarray:
        """Some responses are easier to draft than others, and all of them harder and easier for some dozen tokens."""
        here = (self.requests - self.num_requests)[:batch]  # counted from the end
        self._hardness = 0.96 * self._hardness + self.draw.normal(0, 0.14, len(self._hardness))
        chance = np.clip(self.skill[drafter], 1e-3, 0.999)
        odds = np.log(chance / (1 - chance)) + self._hardness[here] + self._character[here]
        odds -= 2.5 * self._is_hard[here, np.maximum(self.left[:batch], 0)]
        is_unknown = self.left[:batch] <= self._derails_at[here]
        if drafter == "suffix" and self.num_repeating is not None:
            is_unknown |= here < -self.num_repeating
        return np.where(is_unknown, 0.04, 1 / (1 + np.exp(-odds)))[:, None]

    def true_ms(self, strategy: Strategy, drafted: int, rows: int) -> float:
        host_ms = 0.8 + 0.018 * self.batch if self.is_gpu else 0.0  # measured: what suffix drafts wait for
        self.costs.observe_host(host_ms, self.batch)
        ms = super().true_ms(strategy, drafted, rows)
        if strategy.drafter != "none":
            ms *= self._bias(strategy)
        here = self.requests - self.num_requests
        if strategy.drafter == "eagle":
            ms += _CATCH_UP_MS * int(self._missing[here[:drafted]].sum())
            self._missing[here[:drafted]] = 0
            here = here[drafted:]
        self._missing[here] += 1 + self.accepted[len(self.accepted) - len(here) :]
        self._slow = 1.0
        if self._last == "prefill":
            self._slow += self.draw.exponential(_SLOW_AFTER_PREFILL) * (self.draw.random() < 0.4)
        elif self._last != str(strategy):
            ms *= 0.94 if strategy.drafter == "none" else 1 + self.draw.exponential(_SLOW_AFTER_CHANGE)
        self._last = str(strategy)
        return ms

    def measured(self, ms: float) -> float:
        """Steps are stopped by something else, whatever is selected: that is not counted in the time of a round."""
        return ms * self._slow * (_STOPPED if self.draw.random() < 1 / 600 else 1.0)

    def _bias(self, strategy: Strategy) -> float:
        """What the profile does not know of a tree shape at a batch size: the same for all selectors."""
        key = (self.seed, strategy.drafter == "suffix", strategy.depth, strategy.width, self.batch.bit_length())
        if key not in self._biases:
            self._biases[key] = float(np.exp(np.random.default_rng(key).normal(0.04, 0.05)))
        return self._biases[key]

    def play(self, decision: Decision) -> StepOutcome:
        if self.is_gpu:
            self.host_ms = 0.2 + 0.009 * self.batch if decision.strategy.drafter == "none" else 0.8 + 0.018 * self.batch
        is_first = self._last == "prefill"  # the drafter still reads the prompts: its time says nothing
        outcome = super().play(decision)
        self.used[str(decision.strategy)] += 1
        self.verifications += self.batch
        return replace(outcome, num_rows=self.costs.padded(outcome.num_rows), ms=0.0 if is_first else outcome.ms)

    def shown(self, task: Task) -> StepView:
        """What the selector sees of the requests."""
        return self.known_lengths(self.left) if task.knows_lengths and not task.has_queue else self.view()

    def begin(self, task: Task, selector: Selector) -> None:
        """New requests, and the step that reads their prompts: its time says nothing, and it keeps the host busy for long."""
        self.skill, self.left, self.batch = task.text._asdict(), np.sort(task.lengths)[::-1], len(task.lengths)
        self.requests = self.num_requests + np.arange(self.batch)
        self.num_requests += self.batch
        self.num_repeating = task.num_repeating
        self._last = "prefill"
        text = np.random.default_rng((self.seed, self.num_requests))  # the same for all selectors
        self._hardness, self._character = text.normal(0, 0.5, (2, self.batch))
        self._missing = np.zeros(self.batch, int)
        self._derails_at = self.left * text.uniform(0.2, 1.0, self.batch) * (np.arange(self.batch) < task.num_derailing)
        self._is_hard = np.zeros((self.batch, max(task.lengths) + 1), bool)
        for response in self._is_hard[:, : self._is_hard.shape[1] if task.is_changing else 0]:
            lasts = text.exponential(1.0, len(response)) * np.resize((560, 120), len(response))  # tokens
            response[:] = np.searchsorted(np.cumsum(lasts), np.arange(len(response))) % 2
        view = replace(self.view(), num_running=0, num_prefill_rows=120 * self.batch)
        selector.observe(StepOutcome(selector.select(view), 0, 120 * self.batch, 0, 25.0, 8192, 0.0, 25.0))


def seconds_of(gpu: H200, selector: Selector, task: Task) -> float:
    """Seconds that a selector needs for a round, or, if requests wait, for as many tokens."""
    began, first, done, total = gpu.ms, gpu.tokens, 0, sum(task.lengths)
    gpu.begin(task, selector)
    if task.stale or task.has_new_drafter:
        selector.drafter_replaced()
    pending: StepOutcome | None = None
    view = gpu.shown(task)
    while gpu.batch == len(task.lengths) if task.has_queue else gpu.batch:
        decision = selector.select(view)  # the tokens of the step in flight are not known yet
        if pending is not None:
            selector.observe(pending)
        view, pending = gpu.shown(task), gpu.play(decision)
        if task.knows_lengths and not task.has_queue:
            pending = replace(pending, last_progress=gpu.last_progress(gpu.left))
        gpu.left = gpu.finish_step(decision, gpu.left)
        if not gpu.is_gpu:
            selector.observe(pending)
            view, pending = gpu.shown(task), None
        before, done = done, gpu.tokens - first
        if task.stale and before < total / 2 <= done:
            gpu.skill["eagle"] = 0.02
            selector.drafter_replaced()
    if pending is not None:
        selector.observe(pending)
    return (gpu.ms - began) / 1e3 * (total / done if task.has_queue else 1.0)


def rl_task(seed: int) -> Task:
    """A step of RL: 256 responses, most of which end long before their limit of 640 tokens. Nobody knows where."""
    lengths = np.random.default_rng(seed).lognormal(5.5, 0.45, 256)
    return Task(tuple(np.clip(lengths, 40, 640).astype(int).tolist()), ORDINARY, knows_lengths=False)


def checked_task(batch: int) -> Task:
    """Ordinary text at a batch size; longer responses where there are few."""
    return Task((160 * num_parts(batch),) * batch, ORDINARY, has_queue=True)


def busy_profile() -> CostCurve:
    """A profile that was taken while something else kept the device busy: drafting seems ten times as expensive as it is."""
    found = h200_costs()
    found.start, found.level = (Points.through(zip(each.x, 10 * each.y, strict=True)) for each in (found.start, found.level))
    return found


def free_rows() -> CostCurve:
    """A profile in which rows cost nothing."""
    found = h200_costs()
    found.policy = found.trees = Points.through([(1, 4.0), (512, 4.1)])
    return found


class Cell(NamedTuple):
    """What is measured together: rounds that follow each other, of which some count, what steps cost, and what `auto` has: the
    profile (None: the truth), and a predictor in place of its own."""

    rounds: tuple[Task, ...]
    counted: slice = slice(1, None)
    costs: Callable[[], CostCurve] = h200_costs
    profile: Callable[[], CostCurve] | None = None
    predictor: type[Predictor] | None = None
    is_gpu: bool = True

    @property
    def batch(self) -> int:
        return len(self.rounds[self.counted][0].lengths)


def cells(rounds: int = 2) -> dict[str, Cell]:
    """The six workloads; a batch in which some responses repeat themselves; the first batch that a selector sees; text that
    repeats itself and text that does not in turn; batch sizes that one selector sees one after
    the other, as in `benchmarks/gpu/check.py`, with a 7B and with a 1.5B model; steps of RL, also ones whose four longest
    responses derail; few long responses of which some stretches are hard to predict; ordinary text with profiles that are wrong;
    and random text with predictors that lie."""
    found = {name: Cell(tuple(tasks(name, rounds))) for name in TEXTS}
    turns = (Task((192,) * 8, Text(0.85, 0.97)), Task((192,) * 8, ORDINARY))
    some_repeat = Task((512,) * 16, Text(0.5, 0.93), num_repeating=12)
    found["12 of 16 repeat"] = Cell((some_repeat._replace(text=ORDINARY), *[some_repeat] * rounds), costs=small_costs)
    found["first batch, 48"] = Cell((Task((512,) * 48, ORDINARY),), slice(0, None), small_costs)
    found["alternating"] = Cell(turns * (1 + rounds), slice(2, None))
    for prefix, costs in (("", h200_costs), ("1.5B, ", small_costs)):
        seen: tuple[Task, ...] = ()
        for batch in CHECKED:
            seen += (checked_task(batch),) * (rounds + 1)
            found[f"{prefix}batch {batch}"] = Cell(seen, slice(len(seen) - rounds, None), costs)
    found["rl"] = Cell(tuple(rl_task(seed) for seed in range(rounds + 1)), costs=small_costs)
    long_tail = Task(tuple(long_tailed_lengths(None, 256, 640)), ORDINARY, knows_lengths=False, num_derailing=4)
    found["long tail, 4 derail"] = Cell((long_tail,) * (rounds + 1), costs=small_costs)
    found["rl, 4 derail"] = found["rl"]._replace(rounds=tuple(task._replace(num_derailing=4) for task in found["rl"].rounds))
    for batch in (1, 4):
        changing = Task((3000,) * batch, ORDINARY, knows_lengths=False, is_changing=True)
        found[f"changing text, batch {batch}"] = Cell((changing,) * (rounds + 1), costs=small_costs)
    ordinary, random = found["ordinary"].rounds, found["random"].rounds
    found |= {"busy_profile": Cell(ordinary, profile=busy_profile), "free_rows": Cell(ordinary, profile=free_rows)}
    return found | {f"liar {liar.__name__}": Cell(random, predictor=liar) for liar in LIARS}


def measure(found_cells: dict[str, Cell], selectors: Sequence[str], seeds: int, report: Report) -> None:
    """All strategies in all cells, once with each seed."""
    workloads: dict[str, Any] = {}
    report.content["models"]["h200"] = {"workloads": workloads}
    for name, cell in found_cells.items():
        found = {strategy: figures(strategy, cell, seeds)
                 for strategy in ("off", *fixed_strategies(cell.batch), SUFFIX, *selectors)}
        workloads[name] = workload_record(found)
        show(name, workloads[name])
        report.content["conclusions"] = conclusions(workloads)
        report.save()


def figures(name: str, cell: Cell, seeds: int) -> dict[str, Any]:
    each, used, tokens, verifications = [], Counter[str](), 0, 0
    for seed in range(seeds):
        gpu, selector = H200(costs=cell.costs(), seed=seed, is_gpu=cell.is_gpu), make_selector(name)
        rounds = cell.rounds
        if isinstance(selector, AutoSelector):
            if cell.predictor is not None:
                selector.predictor = cell.predictor(selector.costs)
            selector.costs = (cell.profile or cell.costs)()
        elif isinstance(selector, FixedSelector):
            rounds = rounds[cell.counted]  # it learns nothing
            gpu.num_requests = sum(len(task.lengths) for task in cell.rounds[: len(cell.rounds) - len(rounds)])
        spent = [seconds_of(gpu, selector, task) for task in rounds]
        each.append(sum(spent[-len(cell.rounds[cell.counted]) :]))
        used += gpu.used
        tokens, verifications = tokens + gpu.tokens, verifications + gpu.verifications
    return {"each": each, "steps": dict(used.most_common(8)), "tokens_per_verification": tokens / verifications}
