"""The selection benchmark: seconds of off, fixed strategies, the bandit, and auto on the six workloads.

Every strategy has an engine of its own around the same weights, so that no history leaks. In a round all get the same prompts and
seeds, in turns (slices of 50 ms on a CPU, whole rounds on a GPU); the first round is a warm-up. Selectors keep what they learn
from round to round and start anew with each workload.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch

from benchmarks.lib import drafter as trained_drafter
from benchmarks.lib.figures import rotated
from benchmarks.lib.results import RESULTS, Report
from benchmarks.lib.selection import choosing, drawn, simulated
from benchmarks.lib.selection.subjects import SIZES, Subject, subjects
from benchmarks.lib.selection.summary import BARE, GOALS, SELECTORS, conclusions, show, show_goals, summarize, workload_record
from benchmarks.lib.selection.workloads import (
    WORKLOADS,
    Round,
    Workload,
    make_workload,
    most_frequent,
    num_differing,
    ruined,
)
from benchmarks.lib.setup import Budget, free_memory, freeze_memory, make_parser
from paceline.bench.steps import StepTally, TimedEngine
from paceline.config import EngineConfig
from paceline.drafters.eagle import Eagle
from paceline.engine import Engine
from paceline.strategy import AutoSelector, make_selector
from paceline.types import DrafterName, StepResult

FIXED = ("eagle:d6w4v16", "eagle:d4w2v8", "eagle:d4w1v4", "eagle:d2w1v2", "suffix:d8w2v16")
SLICE = 0.05
"""Seconds after which the next strategy continues on a CPU, so that all strategies see the same load of the machine. On a GPU
steps run ahead of the host, and each strategy runs a whole round at once."""

_MOST_STRETCHES = 100
"""How many stretches of the last round are written down."""


def run(doc: str | None, settings: Sequence[str], arguments: Sequence[str] | None = None) -> None:
    """Measures one of `settings` (the first by default) as the command line says, and prints how far its goals are met."""
    args = parse(doc, settings, arguments)
    budget = Budget(args.minutes)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    variant = "" if args.setting in ("gpu", "tiny") else args.setting
    sizes = SIZES[args.setting]._asdict() if args.setting in SIZES else {}
    report = Report(args, "cuda" if args.setting == "gpu" else "cpu", variant, setting=args.setting, goals=GOALS, sizes=sizes,
                    threads=torch.get_num_threads(), models={})
    if args.setting in ("simulated", "tuning", "held-out"):
        report.content["choosing_us"] = choosing.microseconds()
        print("choosing, us of CPU time per step: " + ", ".join(f"{k} {v:.0f}" for k, v in report.content["choosing_us"].items()))
    if args.setting == "simulated":
        simulated.measure(simulated.cells(), args, report)
    if args.setting in ("tuning", "held-out"):
        seed = drawn.TUNING_SEED if args.setting == "tuning" else drawn.HELD_OUT_SEED
        simulated.measure(drawn.draw(seed), args, report)
    for subject in () if args.setting in ("simulated", "tuning", "held-out") else subjects(args, report, budget):
        print(f"{args.setting}, {subject.name}", flush=True)
        bench = Bench(subject, args, report, budget)
        for name in args.workloads:
            if budget.left < bench.longest:
                print(f"no time left for {name}", flush=True)
                continue
            bench.workload(name)
        del bench
        free_memory()
    show_goals(conclusions(report.content["models"]))
    if not args.tiny:
        print("all settings:")
        show_goals(summarize(list(RESULTS.glob("?pu/selection*.json"))))


def parse(doc: str | None, settings: Sequence[str], arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(doc, "selection", 30)
    trained_drafter.add_arguments(parser)
    parser.add_argument("--setting", choices=settings, default=settings[0], help="policy and device")
    parser.add_argument("--models", nargs="+", choices=["policy", "twin"], default=["policy", "twin"], help="of the gpu setting")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--fixed", nargs="+", default=list(FIXED), help="fixed strategies")
    parser.add_argument("--selectors", nargs="+", choices=SELECTORS, default=["auto", "beg"])
    parser.add_argument("--rounds", type=int, help="rounds that are measured (default: 2; simulated: 8, each with its own seed)")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--bare", action="store_true", help="also measure an engine without drafters, which shows the noise")
    parser.set_defaults(train_seconds=None)
    args = parser.parse_args(arguments)
    if args.tiny:
        args.setting, args.rounds, args.threads = "tiny", 1, 1
    args.rounds = args.rounds or ({"simulated": 8, "tuning": 2, "held-out": 2}.get(args.setting, 2))
    args.train_seconds = args.train_seconds or (160 if args.setting == "gpu" else 60)
    if "auto" not in args.selectors:
        raise SystemExit("--selectors must contain auto, which the figures are about")
    return args


class Bench:
    """The engines of a policy, one per strategy. On a GPU they are kept, because captured graphs are expensive; on a CPU every
    workload has fresh ones."""

    def __init__(self, subject: Subject, args: argparse.Namespace, report: Report, budget: Budget) -> None:
        self._subject, self._args, self._report, self._budget = subject, args, report, budget
        self._sizes, self._engines = SIZES[args.setting], dict[str, TimedEngine]()
        self._ruined = None if subject.drafter is None else ruined(subject.drafter)
        self._record: dict[str, Any] = {}
        self._slice = float("inf") if args.setting == "gpu" else SLICE
        self.longest = 0.0
        """Seconds of the longest workload so far."""
        fixed = [name for name in args.fixed if subject.drafter is not None or name.startswith("suffix")]
        self._names = ["off", *([BARE] if args.bare else []), *fixed, *args.selectors]
        report.content["models"][subject.name] = {"workloads": self._record}

    def workload(self, name: str) -> None:
        began = time.perf_counter()
        work = make_workload(name, self._subject.texts, self._sizes, self._args.rounds, self._subject.drafter is not None)
        self._prepare(work)
        names = [n for n in self._names if not (work.goes_stale and n == BARE)]
        empty = {"capture_seconds": 0.0, "differing": 0}
        found: dict[str, dict[str, Any]] = {n: {"each": [], "cpu_each": [], **empty} for n in names}
        tallies = {n: StepTally() for n in names}
        for number in range(len(work.rounds)):
            plays = {n: self._play(n, work, number) for n in rotated(names, number)}
            under_way = list(plays)
            while under_way:
                under_way = [n for n in under_way if plays[n].go(self._slice)]
            print(f"    {name} {number}: " + ", ".join(f"{n} {plays[n].seconds:.2f}" for n in names), flush=True)
            for n, play in plays.items():
                found[n]["differing"] += num_differing(plays["off"].tokens, play.tokens)
                if number:
                    found[n]["each"].append(play.seconds)
                    found[n]["cpu_each"].append(play.cpu_seconds)
                    found[n]["capture_seconds"] += play.capture_seconds
                    _add(tallies[n], play.tally)
                else:
                    self._engines[n].choosing.seconds = 0.0
        for n in names:
            engine, tally = self._engines[n], tallies[n]
            found[n] |= {"tokens_per_verification": tally.tokens_per_verification, "tokens": tally.tokens,
                         "overhead_share": engine.choosing.seconds / sum(found[n]["each"]),
                         "steps": most_frequent(tally.strategies)}
            if isinstance(engine.select, AutoSelector):
                found[n] |= {"cost_error": engine.select.cost_error, "progress_error": engine.select.progress_error,
                             "last_round": plays[n].stretches[:_MOST_STRETCHES]}
        self._check(name, found)
        self._record[name] = workload_record(found)
        show(name, self._record[name])
        self.longest = max(self.longest, time.perf_counter() - began)
        self._report.content |= {"seconds": self._budget.used, "conclusions": conclusions(self._report.content["models"])}
        self._report.save()

    def _check(self, name: str, found: dict[str, Any]) -> None:
        differing = sum(record["differing"] for record in found.values())
        self._report.content["differing_answers"] = self._report.content.get("differing_answers", 0) + differing
        assert not differing, f"{name}: {differing} responses differ from those of off"

    def _prepare(self, work: Workload) -> None:
        """Makes the engines, and selectors that know nothing of this workload."""
        on_gpu = self._args.setting == "gpu"
        if not on_gpu:
            self._engines.clear()
            free_memory()
        for name in self._names:
            if name not in self._engines:
                self._engines[name] = self._engine(name, self._sizes.tail_batch if on_gpu else work.max_batch)
            engine = self._engines[name]
            if self._subject.drafter is not None and name != BARE:  # an earlier workload may have replaced it
                engine.update_drafter(self._subject.drafter, 0)
            if name in SELECTORS:
                engine.select = make_selector(name)
                if isinstance(engine.select, AutoSelector):
                    engine.select.costs = engine.costs
            engine.choosing.seconds = 0.0
        freeze_memory()

    def _engine(self, name: str, max_batch: int) -> TimedEngine:
        on_gpu, learned = self._args.setting == "gpu", self._subject.drafter
        drafter = "none" if name == BARE else "suffix" if learned is None else deepcopy(learned)
        config = EngineConfig(max_batch=max_batch, kv_memory_gb=8.0 if on_gpu else 1.0, deterministic=True,
                              max_context=2048 if on_gpu else None, kernels="auto", profile=not self._args.tiny)
        strategy = "off" if name == BARE else make_selector(name)
        engine = TimedEngine(self._subject.model, None, drafter, strategy, config)
        if name in SELECTORS:
            engine.warm_up()
        return engine

    def _play(self, name: str, work: Workload, number: int) -> Play:
        engine, rnd = self._engines[name], work.rounds[number]
        spoil = None
        if work.goes_stale:
            assert self._subject.drafter is not None and self._ruined is not None
            engine.update_drafter(self._subject.drafter, 0)
            spoil = Spoil(engine, self._ruined, len(rnd.prompts) if self._sizes.natural else
                          sum(params.max_new_tokens for params in rnd.params), self._sizes.natural)
        return Play(engine, rnd, spoil)


class Stretch(NamedTuple):
    """Consecutive steps with the same drafter."""

    drafter: DrafterName
    requests: int
    """Number of requests of the first step."""
    steps: int
    tokens: int
    ms: float


class Play:
    """A round of one strategy, slice by slice. Its time excludes the slices of others and the capture of graphs."""

    def __init__(self, engine: TimedEngine, rnd: Round, spoil: Spoil | None) -> None:
        self.tally, self.seconds, self.cpu_seconds, self.capture_seconds = StepTally(), 0.0, 0.0, 0.0
        self._engine, self._round, self._spoil = engine, rnd, spoil
        self._ids: list[int] = []
        self._answers: dict[int, list[int]] = {}
        self.stretches: list[Stretch] = []
        """What was used from step to step."""

    def go(self, seconds: float) -> bool:
        """Runs for so many seconds; whether requests are left then."""
        began, cpu, captured = time.perf_counter(), time.process_time(), capture_seconds(self._engine)
        if not self._ids:
            self._ids = [self._engine.add(prompt, params, key=key)[0] for prompt, params, key in zip(*self._round, strict=True)]
        lost = [0.0, 0.0]
        while len(self._answers) < len(self._ids) and time.perf_counter() - began < seconds:
            result = self._engine.step()
            self.tally(result)
            if result.num_requests:
                self._add_to_stretch(result)
            self._answers |= {rollout.request_id: rollout.token_ids for rollout in result.finished}
            if self._spoil is not None:
                lost = [a + b for a, b in zip(lost, self._spoil(result), strict=True)]
        captured = capture_seconds(self._engine) - captured
        self.capture_seconds += captured
        self.seconds += time.perf_counter() - began - lost[0] - captured
        self.cpu_seconds += time.process_time() - cpu - lost[1]
        return len(self._answers) < len(self._ids)

    def _add_to_stretch(self, result: StepResult) -> None:
        drafter, tokens = result.strategy.drafter, sum(map(len, result.tokens.values()))
        if self.stretches and self.stretches[-1].drafter == drafter:
            last = self.stretches.pop()
            self.stretches.append(Stretch(drafter, last.requests, last.steps + 1, last.tokens + tokens, last.ms + result.ms))
        else:
            self.stretches.append(Stretch(drafter, result.num_requests, 1, tokens, result.ms))

    @property
    def tokens(self) -> list[list[int]]:
        return [self._answers[i] for i in self._ids]


class Spoil:
    """Replaces the drafter midway: when half of `total` responses are finished, or half of `total` tokens generated."""

    def __init__(self, engine: Engine, drafter: Eagle, total: int, by_answers: bool) -> None:
        self._engine, self._drafter, self._left, self._by_answers = engine, drafter, total // 2, by_answers

    def __call__(self, result: StepResult) -> tuple[float, float]:
        """Wall and CPU seconds that the replacement took."""
        before = self._left
        self._left -= len(result.finished) if self._by_answers else sum(map(len, result.tokens.values()))
        if not self._left <= 0 < before:
            return 0.0, 0.0
        began, cpu = time.perf_counter(), time.process_time()
        self._engine.update_drafter(self._drafter, 0)
        return time.perf_counter() - began, time.process_time() - cpu


def capture_seconds(engine: Engine) -> float:
    return engine.executor.graphs.capture_seconds


def _add(total: StepTally, more: StepTally) -> None:
    total.tokens += more.tokens
    total.verifications += more.verifications
    total.strategies.update(more.strategies)

