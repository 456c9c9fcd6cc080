"""A world in which selectors can be judged: steps cost what a true curve says, drafts are accepted by true chances, and the time
that the best fixed strategy would have taken is known."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from paceline.strategy import CostCurve, Points
from paceline.types import NUM_QUALITIES, StepOutcome, StepView, Strategy, Watched


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
    """Drafter → mean chance that a first guess is right."""
    belief: float = 1.0
    """What the drafters think of themselves, as a power of the truth: < 1 is boasting."""
    noise: float = 0.05
    seed: int = 0
    num_drafters: int = 0
    step: int = 0
    ms: float = 0.0
    tokens: int = 0
    last: StepOutcome | None = None
    watched: Watched | None = None
    aside: tuple[int, Watched] | None = None
    """A guess for nobody, and when it can be judged."""
    chosen: list[Strategy] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.draw = np.random.default_rng(self.seed)

    @property
    def available(self) -> tuple[str, ...]:
        return tuple(name for name in ("suffix", "eagle") if name in self.skill)

    def view(self) -> StepView:
        qualities = tuple(self.batch if q == 2 else 0 for q in range(NUM_QUALITIES))
        return StepView(self.step, self.batch, 0, self.available, 1000, self.last, self.num_drafters, qualities, 200.0,
                        self.watched)

    def run(self, selector, steps: int) -> float:
        """Tokens per ms over these steps."""
        ms, tokens = self.ms, self.tokens
        for _ in range(steps):
            self.play(selector(self.view()))
        return (self.tokens - tokens) / (self.ms - ms)

    def play(self, strategy: Strategy) -> None:
        self.step += 1
        self.chosen.append(strategy)
        rows, tokens, self.watched = self.batch, self.batch, None
        if strategy.drafter != "none":
            nodes = self.drafts(strategy)
            rows, tokens = self.batch + len(nodes.line), self.batch + int(nodes.hit.sum())
            if strategy.watch or self.step % (32 if self.batch >= 16 else 16) == 0:
                self.watched = nodes
        if strategy.aside is not None and self.aside is None:
            self.aside = self.step + strategy.aside.depth, self.drafts(strategy.aside)
        if self.watched is None and self.aside is not None and self.step >= self.aside[0]:
            self.watched, self.aside = self.aside[1], None
        ms = float(self.costs.base_ms(strategy, self.batch, rows)) * float(np.exp(self.draw.normal(0, self.noise)))
        self.ms, self.tokens = self.ms + ms, self.tokens + tokens
        self.last = StepOutcome(self.step, strategy, self.batch, 0, tokens, ms, rows, 200.0)

    def drafts(self, strategy: Strategy) -> Watched:
        """Trees grown as a drafter grows them: the likeliest `width` of a level go on, the likeliest nodes of all remain."""
        batch, width, draw = self.batch, strategy.width, self.draw
        levels = []
        parents = np.full((batch, 1), -1)
        chance, alive, size = np.ones((batch, 1)), np.ones((batch, 1), bool), 0
        for depth in range(1, strategy.depth + 1):
            top = draw.beta(6 * self.skill[strategy.drafter] + 1e-3, 6 * (1 - self.skill[strategy.drafter]) + 1e-3, chance.shape)
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
        return self._chosen(strategy, levels)

    def _chosen(self, strategy: Strategy, levels: list[dict]) -> Watched:
        total = np.concatenate([cell["total"] for cell in levels], 1)
        fields = {name: np.concatenate([np.broadcast_to(cell[name], cell["total"].shape) for cell in levels], 1)
                  for name in ("parent", "depth", "own", "tested", "hit", "rank")}
        nodes = strategy.shares[2] if strategy.shares else strategy.budget
        keep = np.argsort(-total, axis=1, kind="stable")[:, :nodes]
        place = np.full(total.shape, -1)
        np.put_along_axis(place, keep, np.arange(keep.shape[1])[None].repeat(len(keep), 0), 1)
        found = {name: np.take_along_axis(values, keep, 1) for name, values in fields.items()}
        line = np.repeat(np.arange(self.batch), keep.shape[1])
        above = np.where(found["parent"] < 0, -1, np.take_along_axis(place, np.maximum(found["parent"], 0), 1))
        parent = np.where(above < 0, -1, above + (np.arange(self.batch) * keep.shape[1])[:, None]).ravel()
        believed = found["own"].ravel() ** self.belief
        shown = np.ones(len(line), bool)
        if strategy.min_survival > 0:
            survival = believed.copy()
            for depth in range(2, strategy.depth + 1):
                here = found["depth"].ravel() == depth
                survival[here] *= survival[parent[here]]
            shown = survival >= strategy.min_survival
        new = np.cumsum(shown) - 1
        parent = np.where(parent < 0, -1, new[np.maximum(parent, 0)])[shown]
        return Watched(strategy, self.batch, np.full(self.batch, 2), line[shown], parent, found["depth"].ravel()[shown],
                       found["rank"].ravel()[shown], believed[shown], found["tested"].ravel()[shown], found["hit"].ravel()[shown])


def rate_of(world: World, strategy: Strategy, steps: int = 300) -> float:
    """Tokens per ms of one strategy, in a world of its own."""
    alone = World(world.costs, world.batch, dict(world.skill), world.belief, world.noise, world.seed + 1)
    return alone.run(lambda view: strategy, steps)
