"""Selection: seconds of off, of fixed strategies, of the bandit, the model and auto, on six workloads.

    python benchmarks/selection.py --setting default                        # on a CPU, the policy that comes with the package
    python benchmarks/selection.py --setting smollm2 --model SmolLM2.gguf   # on a CPU, the suffix drafter, or --drafter FOLDER
    python benchmarks/selection.py --setting gpu --model FOLDER --prompts gsm8k_test.jsonl --train-prompts gsm8k_train.jsonl \\
        --drafter build/drafter                                             # the policy and its 7B-cost twin

Workloads: `repetitive` (answers that are known by and by, temperature 0.3), `ordinary` (answers of the task, four to a prompt),
`random` (random prompts, temperature 2), `high_temperature` (1.3), `shrinking` (64 answers, the lengths' tail is long), `stale`
(when half of the tokens are drawn, a random drafter takes the good one's place; without a learned one the text turns random).

Every strategy has its own engine around the same weights: no history leaks. In a round all get the same prompts and seeds, in
turns (on a CPU slices of 50 ms, on a GPU whole rounds); the first round is not counted. Selectors keep what they learn from round
to round, and begin anew with each workload. Goals for auto: within 5 % of the fixed strategy (off is one) that was best on the
workload, faster than all of them on `shrinking`, never below 0.97 of off, choosing under 2 % of the time.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import gpu_drafter
import torch
from gpu_common import ROOT, Budget, Report, parser_of
from selection_subjects import SIZES, Subject, subjects
from selection_summary import BARE, GOALS, SELECTORS, conclusions, show, show_goals, workload_record, write_summary
from selection_work import WORKLOADS, Round, Workload, make_workload, num_differing, plain_json, ruined

from paceline.bench.steps import StepTally, TimedEngine
from paceline.config import EngineConfig
from paceline.drafters.eagle import Eagle
from paceline.engine import Engine
from paceline.strategy import ModelSelector, make_selector
from paceline.types import StepResult

FIXED = ("eagle:d6w4v16", "eagle:d4w2v8", "eagle:d4w1v4", "eagle:d2w1v2", "suffix:d8w2v16")
SLICE = 0.05
"""Seconds, on a CPU: then the next strategy goes on, so that all see the same machine, whatever else it does. On a GPU steps run
ahead of the host, and nobody else is there: a round at once."""


def main() -> None:
    args = arguments()
    budget = Budget(args.minutes)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    device = torch.device("cuda" if args.setting == "gpu" else "cpu")
    report = Report(args.out / f"{args.setting}.json", device, goals=GOALS, sizes=SIZES[args.setting]._asdict(),
                    threads=torch.get_num_threads(), models={})
    for subject in subjects(args, report, budget):
        print(f"{args.setting}, {subject.name}", flush=True)
        bench = Bench(subject, args, report, budget)
        for name in args.workloads:
            if budget.left < bench.longest:
                print(f"no time left for {name}", flush=True)
                continue
            bench.workload(name)
        del bench
        gc.collect()
        torch.cuda.empty_cache()
    show_goals(conclusions(report.content["models"]))
    print("all settings:")
    show_goals(write_summary(args.out))


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__ or "", "selection", 30)
    gpu_drafter.add_arguments(parser)
    parser.add_argument("--setting", choices=["default", "smollm2", "gpu"], default="default")
    parser.add_argument("--models", nargs="+", choices=["policy", "twin"], default=["policy", "twin"], help="of the gpu setting")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--fixed", nargs="+", default=list(FIXED))
    parser.add_argument("--selectors", nargs="+", choices=SELECTORS, default=["auto", "beg", "model"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--bare", action="store_true", help="also an engine without drafters")
    parser.set_defaults(out=None, train_seconds=None)
    args = parser.parse_args()
    args.out = args.out or ROOT / ("build/selection" if args.tiny else "benchmarks/results/selection")
    if args.tiny:
        args.setting, args.rounds, args.threads = "tiny", 1, 1
    args.train_seconds = args.train_seconds or (160 if args.setting == "gpu" else 60)
    if "auto" not in args.selectors:
        raise SystemExit("--selectors: auto is what the figures are about")
    return args


class Bench:
    """A policy's engines, one a strategy. On a GPU they last, captured graphs are dear; on a CPU a workload has fresh ones."""

    def __init__(self, subject: Subject, args: argparse.Namespace, report: Report, budget: Budget) -> None:
        self._subject, self._args, self._report, self._budget = subject, args, report, budget
        self._sizes, self._engines = SIZES[args.setting], dict[str, TimedEngine]()
        self._ruined = None if subject.drafter is None else ruined(subject.drafter)
        self._record: dict[str, Any] = {}
        self._slice = float("inf") if args.setting == "gpu" else SLICE
        self.longest = 0.0
        """Seconds of a workload so far."""
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
            turn = number % len(names)
            plays = {n: self._play(n, work, number) for n in [*names[turn:], *names[:turn]]}
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
                         "overhead_share": engine.choosing.seconds / sum(found[n]["each"]), "steps": plain_json(tally.strategies)}
            if isinstance(engine.select, ModelSelector):
                found[n] |= {"cost_error": engine.select.cost_error, "calibration_error": engine.select.calibration_error}
        self._check(name, found)
        self._record[name] = workload_record(found)
        show(name, self._record[name])
        self.longest = max(self.longest, time.perf_counter() - began)
        self._report.content |= {"seconds": self._budget.used, "conclusions": conclusions(self._report.content["models"])}
        self._report.save()

    def _check(self, name: str, found: dict[str, Any]) -> None:
        differing = sum(record["differing"] for record in found.values())
        self._report.content["differing_answers"] = self._report.content.get("differing_answers", 0) + differing
        assert not differing or self._args.setting == "gpu", f"{name}: {differing} answers differ from those of off"

    def _prepare(self, work: Workload) -> None:
        """Engines, and selectors that know nothing of this workload."""
        on_gpu = self._args.setting == "gpu"
        if not on_gpu:
            self._engines.clear()
        for name in self._names:
            if name not in self._engines:
                self._engines[name] = self._engine(name, self._sizes.tail_batch if on_gpu else work.max_batch)
            engine = self._engines[name]
            if self._subject.drafter is not None and name != BARE:  # a workload before may have left a ruined one
                engine.update_drafter(self._subject.drafter, 0)
            if name in SELECTORS:
                engine.select = make_selector(name)
                if isinstance(engine.select, ModelSelector):
                    engine.select.costs = engine.costs
            engine.choosing.seconds = 0.0

    def _engine(self, name: str, max_batch: int) -> TimedEngine:
        on_gpu, learned = self._args.setting == "gpu", self._subject.drafter
        drafter = "none" if name == BARE else "suffix" if learned is None else deepcopy(learned)
        config = EngineConfig(max_batch=max_batch, kv_memory_gb=5.0 if on_gpu else 1.0, deterministic=not on_gpu,
                              max_context=1024 if on_gpu else None, kernels="torch" if self._args.tiny else "auto",
                              profile=not self._args.tiny)
        engine = TimedEngine(self._subject.model, None, drafter, "off" if name == BARE else name, config)
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


class Play:
    """A round of one strategy, slice by slice. Only its own slices count, without captures, which are made once."""

    def __init__(self, engine: TimedEngine, rnd: Round, spoil: Spoil | None) -> None:
        self.tally, self.seconds, self.cpu_seconds, self.capture_seconds = StepTally(), 0.0, 0.0, 0.0
        self._engine, self._round, self._spoil = engine, rnd, spoil
        self._ids: list[int] = []
        self._answers: dict[int, list[int]] = {}

    def go(self, seconds: float) -> bool:
        """Whether there is more to do after so many."""
        began, cpu, captured = time.perf_counter(), time.process_time(), capture_seconds(self._engine)
        if not self._ids:
            self._ids = [self._engine.add(prompt, params, key=key)[0] for prompt, params, key in zip(*self._round, strict=True)]
        lost = [0.0, 0.0]
        while len(self._answers) < len(self._ids) and time.perf_counter() - began < seconds:
            result = self._engine.step()
            self.tally(result)
            self._answers |= {rollout.request_id: rollout.token_ids for rollout in result.finished}
            if self._spoil is not None:
                lost = [a + b for a, b in zip(lost, self._spoil(result), strict=True)]
        captured = capture_seconds(self._engine) - captured
        self.capture_seconds += captured
        self.seconds += time.perf_counter() - began - lost[0] - captured
        self.cpu_seconds += time.process_time() - cpu - lost[1]
        return len(self._answers) < len(self._ids)

    @property
    def tokens(self) -> list[list[int]]:
        return [self._answers[i] for i in self._ids]


class Spoil:
    """Replaces the drafter midway: half of `total` answers are finished, or tokens drawn."""

    def __init__(self, engine: Engine, drafter: Eagle, total: int, by_answers: bool) -> None:
        self._engine, self._drafter, self._left, self._by_answers = engine, drafter, total // 2, by_answers

    def __call__(self, result: StepResult) -> tuple[float, float]:
        """Seconds, and CPU seconds, that replacing it took."""
        before = self._left
        self._left -= len(result.finished) if self._by_answers else sum(map(len, result.tokens.values()))
        if not self._left <= 0 < before:
            return 0.0, 0.0
        began, cpu = time.perf_counter(), time.process_time()
        self._engine.update_drafter(self._drafter, 0)
        return time.perf_counter() - began, time.process_time() - cpu


def capture_seconds(engine: Engine) -> float:
    return 0.0 if engine.runner.graphs is None else engine.runner.graphs.capture_seconds


def _add(total: StepTally, more: StepTally) -> None:
    total.tokens += more.tokens
    total.verifications += more.verifications
    total.strategies.update(more.strategies)


if __name__ == "__main__":
    main()
