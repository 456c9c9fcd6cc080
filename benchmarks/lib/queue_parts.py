"""The parts of benchmarks/gpu/queue.py: arrivals among running requests, queues through a batch, and prefill."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.lib.models import QWEN_7B, TINY_TWIN
from benchmarks.lib.prompts import distinct_chat, random_prompts
from benchmarks.lib.results import Report
from benchmarks.lib.setup import Budget, Setting, free_memory, freeze_memory
from benchmarks.lib.speculation import Flips, fixed_strategies
from benchmarks.lib.upscale import upscale, upscale_drafter
from benchmarks.lib.vllm_gpu import Vllm
from paceline import Engine, SamplingParams
from paceline.drafters.eagle import Eagle
from paceline.models.decoder import Decoder
from paceline.types import Rollout, StepResult

QUEUES = {8: 12, 32: 12, 128: 7, 256: 4}
"""Number of prompts per slot of the batch, by batch size."""
POLICY_KV_GB, PREFILL_KV_GB = 6.0, 8.0


class Sizes(NamedTuple):
    """Numbers of requests, and prompts of each part."""

    running: tuple[int, ...] = (1, 8, 32)
    """Numbers of requests that decode when a prompt arrives."""
    arrivals: int = 24
    """Number of arrivals that are measured at each batch size."""
    warm_arrivals: int = 4
    window: int = 12
    """Number of steps over which an arrival is measured."""
    prefill: tuple[int, int] = (64, 1024)
    """Number of prompts and their length."""


TINY_SIZES = Sizes((1, 2), 3, 1, 4, (4, 24))


class Prompts:
    """Prompts that differ from the first tokens on; none is used twice."""

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        self._tokenizer, self._texts, self._next = tokenizer, texts, 0
        self.lengths: list[int] = []

    def take(self, count: int) -> list[list[int]]:
        texts = [self._texts[number % len(self._texts)] for number in range(self._next, self._next + count)]
        found = distinct_chat(self._tokenizer, texts, self._next)
        self._next += count
        self.lengths += map(len, found)
        return found

    def take_near(self, count: int, length: int) -> list[list[int]]:
        """The prompts whose lengths are nearest to `length` among four times as many."""
        return sorted(self.take(4 * count), key=lambda prompt: abs(len(prompt) - length))[:count]


class Bench(NamedTuple):
    """The setting, the models and the prompts that all parts share."""

    setting: Setting
    policy: Decoder
    drafter: Eagle | None
    prompts: Prompts
    params: SamplingParams
    sizes: Sizes
    report: Report
    budget: Budget

    def record(self, part: str, found: dict[str, Any]) -> None:
        """Keeps what a part has measured so far in the result file."""
        self.report.content["parts"][part] = found
        self.report.content["seconds"] = self.budget.used
        self.report.save()

    def engines(self, max_batch: int) -> dict[str, Engine]:
        """An engine without speculation, and one with `auto` if there is a drafter, both warm."""
        made = {"off": self.setting.engine(self.policy, None, max_batch, kv_gb=POLICY_KV_GB)}
        if self.drafter is not None:
            made["auto"] = self.setting.engine(self.policy, self.drafter, max_batch, kv_gb=POLICY_KV_GB, strategy="auto")
        for engine in made.values():
            engine.warm_up()
            finished(engine, self.prompts.take(max_batch), self.params)
        freeze_memory()
        return made


# --- an arrival


def measure_arrivals(bench: Bench) -> None:
    """The cost of an arrival without speculation and, if there is a drafter, with a fixed strategy that suits the batch."""
    found: dict[str, Any] = {}
    for name in ("off", "drafter")[: 1 if bench.drafter is None else 2]:
        learned = None if name == "off" else bench.drafter
        engine = bench.setting.engine(bench.policy, learned, 2 * max(bench.sizes.running), kv_gb=POLICY_KV_GB)
        engine.warm_up()
        freeze_memory()
        found[name] = {}
        for batch in bench.sizes.running:
            strategy = "off" if name == "off" else fixed_strategies(batch)[1]
            found[name][str(batch)] = arrivals(bench, engine, strategy, batch)
            bench.record("arrival", found)
            print(f"arrival, batch {batch}, {name}: {found[name][str(batch)]}", flush=True)
        del engine
        free_memory()


def arrivals(bench: Bench, engine: Engine, strategy: str, batch: int) -> dict[str, Any]:
    """Windows of steps with and without an arrival, in turns, while `batch` requests decode."""
    sizes = bench.sizes
    engine.selector = engine.selector_of(strategy)
    forever = SamplingParams(temperature=1.0, max_new_tokens=10**6, seed=11, ignore_eos=True)
    running = [engine.add(prompt, forever)[0] for prompt in bench.prompts.take(batch)]
    advance(engine, running, 2 * sizes.window)
    prompts = bench.prompts.take_near(sizes.warm_arrivals + sizes.arrivals, 100)
    pairs = [(advance(engine, running, sizes.window), advance(engine, running, sizes.window, prompt)) for prompt in prompts]
    engine.abort(running)
    while engine.has_work:
        engine.step()
    pairs = pairs[sizes.warm_arrivals :]
    step_ms = statistics.median(plain.step_ms for plain, _ in pairs)
    extra = [disturbed.ms - disturbed.steps * plain.step_ms for plain, disturbed in pairs]
    low, _, high = statistics.quantiles(extra, n=4)
    return {"strategy": strategy, "prompt_tokens": statistics.fmean(map(len, prompts)), "arrivals": len(pairs),
            "step_ms": step_ms, "extra_ms": statistics.median(extra), "extra_ms_quartiles": [low, high],
            "extra_steps": statistics.median(extra) / step_ms,
            "add_ms": statistics.median(disturbed.add_ms for _, disturbed in pairs),
            "first_token_ms": statistics.median(disturbed.first_token_ms for _, disturbed in pairs)}


class Advance(NamedTuple):
    """The time of some steps of the running requests, and of an arrival among them."""

    ms: float
    steps: int
    add_ms: float = 0.0
    """Time that `Engine.add` took for the arriving prompt."""
    first_token_ms: float = 0.0

    @property
    def step_ms(self) -> float:
        return self.ms / self.steps


def advance(engine: Engine, running: Sequence[int], steps: int, arriving: list[int] | None = None) -> Advance:
    """Runs until all running requests have advanced in so many steps and the arriving prompt, if there is one, has its token."""
    began, done, added, first = time.perf_counter(), 0, 0.0, 0.0
    waiting: set[int] = set()
    if arriving is not None:
        waiting.update(engine.add(arriving, SamplingParams(temperature=1.0, max_new_tokens=1)))
        added = time.perf_counter() - began
    while done < steps or waiting:
        result = engine.step()
        done += all(request in result.tokens for request in running)
        for rollout in result.finished:
            assert rollout.request_id in waiting, f"a running request has ended: {rollout.finish_reason} {rollout.error}"
            waiting.remove(rollout.request_id)
            first = time.perf_counter() - began
    return Advance(1e3 * (time.perf_counter() - began), done, 1e3 * added, 1e3 * first)


# --- a queue


def measure_queues(bench: Bench, batches: Sequence[int], rounds: int, peer: Vllm | None) -> None:
    found: dict[str, Any] = {}
    for batch in batches:
        if bench.budget.left < 30:
            print(f"no time left for a queue through a batch of {batch}", flush=True)
            break
        engines, runs, flips = bench.engines(batch), QueueRuns(), Flips()
        if peer is not None:
            peer.seconds(bench.prompts.take(batch), [min(24, bench.params.max_new_tokens)] * batch, max_batch=batch)
        for number in range(rounds):
            if number and bench.budget.left < runs.seconds / number:
                print(f"no time left for round {number + 1} at batch {batch}", flush=True)
                break
            prompts = bench.prompts.take(QUEUES[batch] * batch)
            answers = {name: runs.ours(name, engine, prompts, bench.params) for name, engine in engines.items()}
            if "auto" in answers:
                flips.compare("auto", answers["off"], answers["auto"])
            if peer is not None:
                runs.theirs(peer, prompts, list(map(len, answers["off"])), batch)
            found[str(batch)] = {"prompts": len(prompts), **runs.record(), "flips": flips.summary()}
            bench.record("queue", found)
        print(f"queue, batch {batch}: {found[str(batch)]}", flush=True)
        del engines
        free_memory()


class QueueRuns:
    """Tokens per second of each engine, by round, and what `auto` chose."""

    def __init__(self) -> None:
        self.rates: dict[str, list[float]] = {}
        self.seconds = 0.0
        self._tokens = self._verifications = 0
        self._strategies: Counter[str] = Counter()

    def ours(self, name: str, engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
        """Runs the queue and returns the answers."""
        began = time.perf_counter()
        rollouts = finished(engine, prompts, params, self._observe if name == "auto" else None)
        answers = [rollout.token_ids for rollout in rollouts]
        self._add(name, sum(map(len, answers)), time.perf_counter() - began)
        return answers

    def theirs(self, peer: Vllm, prompts: list[list[int]], lengths: list[int], batch: int) -> None:
        self._add("vllm", sum(lengths), peer.seconds(prompts, lengths, max_batch=batch))

    def _add(self, name: str, tokens: int, seconds: float) -> None:
        self.rates.setdefault(name, []).append(tokens / seconds)
        self.seconds += seconds

    def _observe(self, result: StepResult) -> None:
        self._tokens += sum(map(len, result.tokens.values()))
        self._verifications += result.num_requests
        self._strategies[str(result.strategy)] += 1

    def record(self) -> dict[str, Any]:
        cells: dict[str, Any] = {name: {"tokens_per_s": statistics.median(rates), "each": rates}
                                 for name, rates in self.rates.items()}
        for name in cells.keys() - {"vllm"}:
            for other in cells.keys() & {"vllm", "off"} - {name}:
                pairs = zip(self.rates[name], self.rates[other], strict=True)
                cells[name][f"ratio_to_{other}"] = statistics.median(ours / theirs for ours, theirs in pairs)
        if "auto" in cells:
            cells["auto"] |= {"accept_length": self._tokens / max(1, self._verifications),
                              "steps": dict(self._strategies.most_common(8))}
        return cells


def finished(engine: Engine, prompts: list[list[int]], params: SamplingParams,
             on_step: Callable[[StepResult], None] | None = None) -> list[Rollout]:
    """One rollout per prompt; a RuntimeError if one of them ended with an error."""
    rollouts = [group.rollouts[0] for group in engine.generate(prompts, params, on_step=on_step)]
    for rollout in rollouts:
        if rollout.finish_reason == "error":
            raise RuntimeError(rollout.error)
    return rollouts


# --- a batch that starts at once


def measure_prefill(bench: Bench, on: str, peer: Vllm | None) -> None:
    """Seconds until every prompt has its first token, the median of three rounds after a warm-up."""
    model, learned = bench.policy, bench.drafter
    if on == "twin":
        model = upscale(bench.policy, TINY_TWIN if bench.setting.tiny else QWEN_7B)
        learned = None if learned is None else upscale_drafter(learned, model.config)
    count, length = bench.sizes.prefill
    engines = {name: bench.setting.engine(model, drafter, count, kv_gb=PREFILL_KV_GB, max_context=length + 16)
               for name, drafter in (("off", None), ("drafter", learned)) if name == "off" or drafter is not None}
    seconds: dict[str, list[float]] = {name: [] for name in (*engines, *(["vllm"] if peer is not None else []))}
    params = SamplingParams(temperature=1.0, max_new_tokens=1, ignore_eos=True)
    found: dict[str, Any] = {"prompts": count, "prompt_tokens": length, "on": on}
    for number in range(4):
        prompts = random_prompts(count, length, model.config.vocab_size, number)
        for name, taken in seconds.items():
            began = time.perf_counter()
            if name == "vllm":
                assert peer is not None
                took = peer.seconds(prompts, [1] * count)
            else:
                finished(engines[name], prompts, params)
                took = time.perf_counter() - began
            if number:
                taken.append(took)
        if number:
            for name, taken in seconds.items():
                found[name] = {"seconds": statistics.median(taken), "each": taken}
                if peer is not None and name != "vllm":
                    pairs = zip(seconds["vllm"], taken, strict=False)
                    found[name]["ratio_to_vllm"] = statistics.median(theirs / ours for theirs, ours in pairs)
            bench.record("prefill", found)
    print(f"prefill: {found}", flush=True)
