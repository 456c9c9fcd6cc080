"""A world in which selectors can be judged: steps cost what a true curve says, and drafts are accepted by true chances. Time is
virtual and all draws are seeded, so every run gives the same figures on every machine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from paceline.strategy import CostCurve, FixedSelector, Points, Selector, last_progress
from paceline.types import Decision, DraftOutcomes, StepOutcome, StepView, Strategy


def gpu_costs() -> CostCurve:
    """Like a 7B model on a GPU: rows are nearly free up to 128."""
    return CostCurve(Points.through([(1, 4.3), (32, 4.5), (64, 4.8), (128, 5.6), (256, 8.0), (512, 14.0)]),
                     Points.through([(1, 0.5), (256, 1.0)]), Points.through([(1, 0.35), (128, 0.45), (1024, 2.0)]))


def cpu_costs() -> CostCurve:
    """Rows are dear."""
    return CostCurve(Points.through([(1, 4.0), (8, 5.0), (64, 12.0), (512, 80.0)]), Points.through([(1, 0.3), (64, 1.5)]),
                     Points.through([(1, 0.25), (256, 5.0)]))


@dataclass
class World:
    costs: CostCurve
    batch: int
    skill: dict[str, float]
    """Drafter → mean chance that a first draft token is right."""
    belief: float = 1.0
    """What the drafters think of themselves, as a power of the truth: < 1 is boasting."""
    noise: float = 0.05
    seed: int = 0
    host_ms: float = 0.0
    lookup_ms: float = 0.0
    """What suffix drafts cost for each request, beyond what the curve says."""
    decay: tuple[float, ...] = (1.0,)
    """Skill at each depth as a multiple of that at depth 1."""
    ms: float = 0.0
    quiet_ms: float = 0.0
    """What the steps would have taken without noise."""
    tokens: int = 0
    steps: int = 0
    chosen: list[Decision] = field(default_factory=list)
    accepted: np.ndarray = field(default_factory=lambda: np.zeros(0, int))
    """Draft tokens accepted in the last step, by request that was drafted for."""
    requests: np.ndarray = field(default_factory=lambda: np.zeros(0, int))
    """Numbers of the requests, if they differ, those with the most tokens left first."""

    def __post_init__(self) -> None:
        self.draw = np.random.default_rng(self.seed)

    def known_lengths(self, left: np.ndarray) -> StepView:
        """The view if it is known how many tokens are left, in descending order."""
        return replace(self.view(), remaining=tuple(left.tolist()))

    def last_progress(self, left: np.ndarray) -> float:
        """What the step that was just played gave to the requests that finish last. `left`: tokens left before it."""
        tokens = np.ones(len(left))
        tokens[: len(self.accepted)] += self.accepted
        return last_progress(left, tokens)

    def finish_step(self, decision: Decision, left: np.ndarray) -> np.ndarray:
        """What is left after a step has been played, in descending order, without the requests that are done."""
        drafted = min(decision.num_drafted_for or len(left), len(left))
        left = left - 1
        left[:drafted] -= self.accepted[:drafted]
        order = np.argsort(-left, kind="stable")
        order = order[left[order] > 0]
        self.requests, self.batch = self.requests[order], len(order)
        return left[order]

    @property
    def available(self) -> tuple[str, ...]:
        return tuple(name for name in ("suffix", "eagle") if name in self.skill)

    @property
    def strategies(self) -> list[Strategy]:
        return [decision.strategy for decision in self.chosen]

    def view(self) -> StepView:
        return StepView(self.batch, 0, self.available, 200.0)

    def run(self, selector: Selector, steps: int) -> float:
        """Tokens per ms over these steps."""
        ms, tokens = self.ms, self.tokens
        for _ in range(steps):
            selector.observe(self.play(selector.select(self.view())))
        return (self.tokens - tokens) / (self.ms - ms)

    def play(self, decision: Decision) -> StepOutcome:
        strategy, drafts = decision.strategy, None
        self.steps += 1
        self.chosen.append(decision)
        rows, tokens, self.accepted = self.batch, self.batch, np.zeros(self.batch, int)
        if strategy.drafter != "none":
            nodes = self.drafts(strategy, min(decision.num_drafted_for or self.batch, self.batch))
            rows, tokens = self.batch + len(nodes.request), self.batch + int(nodes.accepted.sum())
            drafts = nodes if decision.observe else None
            self.accepted = np.bincount(nodes.request[nodes.accepted], minlength=self.batch)
        ms = self.true_ms(strategy, min(decision.num_drafted_for or self.batch, self.batch), rows)
        if strategy.drafter == "suffix":
            ms += self.lookup_ms * min(decision.num_drafted_for or self.batch, self.batch)
        self.quiet_ms += ms
        ms *= float(np.exp(self.draw.normal(0, self.noise)))
        self.ms, self.tokens = self.ms + ms, self.tokens + tokens
        return StepOutcome(decision, self.batch, 0, tokens, self.measured(ms), rows, 200.0, self.host_ms, drafts)

    def measured(self, ms: float) -> float:
        """What a selector is told that a step took."""
        return ms

    def true_ms(self, strategy: Strategy, drafted: int, rows: int) -> float:
        if strategy.drafter == "none":
            return float(self.costs.off_ms(self.batch))
        return float(self.costs.ms(strategy.drafter, strategy.depth, strategy.width, self.batch, drafted, rows))

    def skills(self, drafter: str, batch: int) -> np.ndarray:
        """[batch, 1] chance that a first draft token is right, by request."""
        return np.full((batch, 1), self.skill[drafter])

    def drafts(self, strategy: Strategy, batch: int) -> DraftOutcomes:
        """Trees grown as a drafter grows them: the likeliest `width` of a level go on, the likeliest nodes of all remain."""
        width, draw = strategy.width, self.draw
        skills = self.skills(strategy.drafter, batch)
        levels = []
        parents = np.full((batch, 1), -1)
        chance, alive, size = np.ones((batch, 1)), np.ones((batch, 1), bool), 0
        for depth in range(1, strategy.depth + 1):
            skill = skills * self.decay[min(depth, len(self.decay)) - 1]
            top = draw.beta(6 * skill + 1e-3, 6 * (1 - skill) + 1e-3, chance.shape)
            shares = np.array([1.0, 0.4, 0.15, 0.08])[:width]
            own = np.minimum(top[..., None] * shares, (1 - top[..., None]) * shares + top[..., None] * (shares == 1.0))
            which = (draw.random(chance.shape)[..., None] > np.cumsum(own, -1)).sum(-1)  # the child that is right, or none
            right = alive[..., None] & (which[..., None] == np.arange(width))
            cell = {"parent": np.repeat(parents, width, 1), "depth": depth, "own": own.reshape(batch, -1),
                    "total": (chance[..., None] * own).reshape(batch, -1), "tested": np.repeat(alive, width, 1),
                    "hit": right.reshape(batch, -1), "rank": np.tile(np.arange(width), chance.shape[1])}
            levels.append(cell)
            keep = np.argsort(-cell["total"], axis=1, kind="stable")[:, :width]
            parents, size = size + keep, size + cell["total"].shape[1]
            chance, alive = (np.take_along_axis(cell[name], keep, 1) for name in ("total", "hit"))
        return self._chosen(strategy, levels, batch)

    def _chosen(self, strategy: Strategy, levels: list[dict], batch: int) -> DraftOutcomes:
        total = np.concatenate([cell["total"] for cell in levels], 1)
        fields = {name: np.concatenate([np.broadcast_to(cell[name], cell["total"].shape) for cell in levels], 1)
                  for name in ("parent", "depth", "own", "tested", "hit", "rank")}
        keep = np.argsort(-total, axis=1, kind="stable")[:, : strategy.budget]
        place = np.full(total.shape, -1)
        np.put_along_axis(place, keep, np.arange(keep.shape[1])[None].repeat(len(keep), 0), 1)
        found = {name: np.take_along_axis(values, keep, 1) for name, values in fields.items()}
        line = np.repeat(np.arange(batch), keep.shape[1])
        above = np.where(found["parent"] < 0, -1, np.take_along_axis(place, np.maximum(found["parent"], 0), 1))
        parent = np.where(above < 0, -1, above + (np.arange(batch) * keep.shape[1])[:, None]).ravel()
        survival, width = found["own"].ravel() ** self.belief, found["rank"].ravel() + 1
        for depth in range(2, strategy.depth + 1):
            here = (found["depth"].ravel() == depth).nonzero()[0]
            survival[here] *= survival[parent[here]]
            width[here] = np.maximum(width[here], width[parent[here]])
        shown = survival >= strategy.min_survival
        return DraftOutcomes(strategy, batch, line[shown], found["depth"].ravel()[shown], width[shown], survival[shown],
                             found["hit"].ravel()[shown])


def rate_of(world: World, strategy: Strategy, steps: int = 300) -> float:
    """Tokens per ms of one strategy, in a world of its own."""
    alone = World(world.costs, world.batch, dict(world.skill), world.belief, world.noise, world.seed + 1)
    return alone.run(FixedSelector(strategy), steps)


def time_to_finish(world: World, selector: Selector, lengths: list[int], known: bool = True) -> float:
    """Milliseconds until answers of these lengths are finished. `known`: whether the selector is told how much remains."""
    left, began = np.sort(lengths)[::-1], world.ms
    world.batch, world.requests = len(left), np.arange(len(left))
    while len(left):
        decision = selector.select(world.known_lengths(left) if known else world.view())
        outcome = world.play(decision)
        if known:
            outcome = replace(outcome, last_progress=world.last_progress(left))
        left = world.finish_step(decision, left)
        selector.observe(outcome)
    return world.ms - began
