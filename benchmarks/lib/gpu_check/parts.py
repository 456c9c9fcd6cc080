"""What a GPU check measures, part by part. The drafter is trained in the process that then uses it, as in an RL run."""

from __future__ import annotations

import argparse
import json
import shutil
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu import decode
from benchmarks.lib import drafter as trained_drafter
from benchmarks.lib import long_tail
from benchmarks.lib.gpu_check.gpu_tests import run_tests
from benchmarks.lib.gpu_check.rl import rl_config, run_steps, write_tiny_model, write_tiny_problems
from benchmarks.lib.models import QWEN_7B, TINY_TWIN
from benchmarks.lib.prompts import chat, long_tailed_lengths
from benchmarks.lib.results import Report
from benchmarks.lib.setup import Budget, Setting
from benchmarks.lib.speculation import BatchBench, fixed_strategies, num_parts, select_long, show
from benchmarks.lib.upscale import upscale, upscale_drafter
from benchmarks.lib.vllm_gpu import Vllm
from paceline import Engine
from paceline.drafters.checkpoint import load_eagle
from paceline.drafters.eagle import Eagle
from paceline.models.decoder import Decoder


class Sizes(NamedTuple):
    """How much is measured."""

    decode_batches: tuple[int, ...]
    batches: tuple[int, ...]
    """Batch sizes at which auto, off and fixed strategies are compared, the most important first."""
    new_tokens: int
    rounds: int
    requests: int
    """Number of responses in the long tail."""
    max_length: int
    """Length of the longest of them."""
    rl_steps: int = 3


FULL = Sizes((1, 32, 128), (1, 32, 128, 256, 8, 64), 160, 2, 256, 2048)
TINY = Sizes((1, 2), (1, 2), 10, 1, 8, 48)
TAIL_FIXED = ("eagle:d3w2v4", "eagle:d4w2v8")
MINUTES = {"drafter": 3.15, "decode": 0.25, "speculate": 1.4, "long_tail": 0.75, "rl": 0.6, "tests": 1.85}
"""Parts in the order in which they run, and their minutes of a check of eight minutes. What a part leaves, later ones may use."""


class Skipped(Exception):
    """A part is not measured; the message says why."""


class GpuCheck:
    """The state that parts leave for later ones: the policy, its trained drafter, prompts, and an engine that is warm."""

    def __init__(self, args: argparse.Namespace, setting: Setting, report: Report, scratch: Path) -> None:
        self._args, self._setting, self._report, self._scratch = args, setting, report, scratch
        self._sizes = TINY if args.tiny else FULL
        self._budget = Budget(args.minutes)
        self._policy: Decoder | None = None
        self._tokenizer: Any = None
        self._drafter: Eagle | None = None
        self._bench: BatchBench | None = None
        self._pool: list[list[int]] = []
        args.drafter = scratch / "drafter"
        asked, training = trained_drafter.split_questions(args)
        held = len(training) // 4  # the long tail has problems that neither the drafter nor an engine has seen
        self._asked, self._training, self._tail = asked, training[held:], training[:held]
        self._earlier = {} if args.earlier is None else json.loads(args.earlier.read_text())
        report.content |= {"parts": {}, "skipped": {}, "errors": {}}

    def run(self) -> None:
        """Runs the parts, each within its time, and saves the result after each."""
        for name, until in self._deadlines():
            if name in self._args.parts:
                self._run_part(name, self._budget.until(until))
            elif name in self._earlier.get("parts", {}):
                self._report.content["parts"][name] = self._earlier["parts"][name]
                self._report.content.setdefault("earlier_parts", {})[name] = self._earlier["revision"]
            else:
                self._report.content["skipped"][name] = "not asked for"
            self._report.content["seconds"] = self._budget.used
            self._report.save()

    def _run_part(self, name: str, budget: Budget) -> None:
        """A part that raises is a result: what it had measured by then counts, and later ones run nevertheless."""
        content, began, found = self._report.content, budget.used, dict[str, Any]()
        print(f"--- {name}, {began:.0f} s", flush=True)
        try:
            if budget.left <= 0:
                raise Skipped("no time left")
            self._parts()[name](budget, found)
        except Skipped as error:
            content["skipped"][name] = str(error)
        except Exception as error:
            traceback.print_exc()
            content["errors"][name] = f"{type(error).__name__}: {error}".splitlines()[0]
        if found:
            content["parts"][name] = found | {"seconds": budget.used - began}

    def _parts(self) -> dict[str, Callable[[Budget, dict[str, Any]], None]]:
        """By name: functions that measure within a budget and add their figures to a dictionary."""
        return {"drafter": self._train_drafter, "decode": self._decode, "speculate": self._speculate,
                "long_tail": self._long_tail, "rl": self._rl, "tests": self._run_tests}

    def _deadlines(self) -> Iterator[tuple[str, float]]:
        """The parts, and how many minutes after the start of the check each must be done."""
        until = 0.0
        for name, minutes in MINUTES.items():
            until += minutes * self._args.minutes / sum(MINUTES.values())
            yield name, until

    # --- the parts

    def _train_drafter(self, budget: Budget, found: dict[str, Any]) -> None:
        policy = self._loaded_policy()
        self._drafter = trained_drafter.obtain(self._setting, policy, self._tokenizer, self._training, self._args, self._report,
                                               budget)
        found |= self._report.content.pop("drafter")
        if self._args.keep_drafter is not None:
            shutil.copytree(self._args.drafter, self._args.keep_drafter, dirs_exist_ok=True)

    def _decode(self, budget: Budget, found: dict[str, Any]) -> None:
        """Tokens per second without speculation. The engine also finds the prompts whose responses are long enough."""
        policy, sizes = self._loaded_policy(), self._sizes
        engine = self._setting.engine(policy, None, max(*sizes.batches, *sizes.decode_batches))
        asked = chat(self._tokenizer, self._asked[:8] if self._setting.tiny else self._asked)
        needed = sizes.rounds * sum(batch * num_parts(batch) for batch in sizes.batches)
        self._pool, past_end = select_long(engine, asked, sizes.new_tokens, least=needed)
        found |= {"batches": {}, "share_past_end": past_end}
        for batch in sizes.decode_batches:
            if found["batches"] and budget.left <= 0:
                self._skip("decode", batch)
                continue
            rates = decode.rounds(engine, None, batch, policy.config.vocab_size, sizes.new_tokens, sizes.rounds)
            found["batches"][str(batch)] = decode.medians(batch, rates["paceline"])
        del engine
        self._setting.free()

    def _speculate(self, budget: Budget, found: dict[str, Any]) -> None:
        """auto, off and fixed strategies at constant batch sizes."""
        bench = self._ready_bench()
        found |= {"model": self._args.speculate_on, "new_tokens": self._sizes.new_tokens, "batches": {}}
        needed = 0.0  # half of what the longest took: the first one also waited for kernels and graphs
        for batch in self._sizes.batches:
            began = budget.used
            if found["batches"] and budget.left < needed:
                self._skip("speculate", batch)
                continue
            fixed = fixed_strategies(batch)
            cell = bench.measure(batch, self._sizes.rounds, budget, fixed[-1:] if self._setting.tiny else fixed)
            found["batches"][str(batch)] = cell
            needed = max(needed, (budget.used - began) / 2)
            show(self._args.speculate_on, batch, cell)
            found["flips_per_million"] = bench.flips.summary()["all"]

    def _long_tail(self, budget: Budget, found: dict[str, Any]) -> None:
        """A whole rollout, on the engine that has been measured at constant batch sizes."""
        engine, sizes = self._ready_bench().engine, self._sizes
        lengths = self._lengths()
        names = ["auto", "off", *TAIL_FIXED]
        prompts = chat(self._tokenizer, long_tail.compose(self._tail, lengths, 0))
        warm = chat(self._tokenizer, long_tail.compose(self._training, lengths, 99))
        long_tail.warm_up(engine, names, warm, lengths)
        found |= {"requests": sizes.requests, "max_length": sizes.max_length, "rollout": {}}
        longest = 0.0
        for name in names:
            if budget.left < longest:
                self._skip("long_tail", name)
                continue
            run = long_tail.run(engine, name, prompts, lengths)
            longest = max(longest, run.seconds)
            found["rollout"][name] = long_tail.summary([run])
            found |= long_tail.conclusions(found, names)
            print(f"{name}: {run.seconds:.2f} s", flush=True)
        peer = None if self._setting.tiny else Vllm.of(self._args, "7B" if self._args.speculate_on == "twin" else "1.5B")
        if peer is not None:
            found["vllm"] = theirs = peer.measure(prompts, lengths, warm, long_tail.shortened(lengths), timeout=10)
            found |= long_tail.conclusions(found, names)
            print(f"vllm: {theirs}", flush=True)
            if "error" in theirs:
                self._report.content["skipped"]["long_tail, vLLM"] = theirs["error"]

    def _rl(self, budget: Budget, found: dict[str, Any]) -> None:
        """Steps of RL on the policy itself with the drafter that was trained here."""
        policy, _ = self._loaded_policy(), self._trained_drafter()
        self._bench = None
        self._setting.free()
        model, data = self._args.model, self._args.train_prompts or self._args.prompts
        if self._setting.tiny:
            model, data = str(self._scratch / "model"), self._scratch / "problems.jsonl"
            write_tiny_model(policy, Path(model))
            write_tiny_problems(data)
        config = rl_config(model, data, self._args.drafter, self._scratch / "run", self._setting.tiny)
        found["steps"] = run_steps(config, self._sizes.rl_steps, budget)
        for number in range(len(found["steps"]), self._sizes.rl_steps):
            self._skip("rl", f"step {number + 1}")

    def _run_tests(self, budget: Budget, found: dict[str, Any]) -> None:
        self._bench = None
        self._setting.free()
        outcome = run_tests(self._scratch, budget.left)
        if outcome is None:
            raise Skipped("not done in time")
        found |= outcome

    # --- what parts need

    def _loaded_policy(self) -> Decoder:
        if self._policy is None:
            self._policy, self._tokenizer = self._setting.policy(self._args.model)
        return self._policy

    def _trained_drafter(self) -> Eagle:
        kept = self._args.keep_drafter
        if self._drafter is None and kept is not None and "drafter" in self._earlier.get("parts", {}):
            self._args.drafter, self._drafter = kept, load_eagle(kept, self._loaded_policy())
        if self._drafter is None:
            raise Skipped("no drafter was trained")
        return self._drafter

    def _lengths(self) -> list[int]:
        return long_tailed_lengths(self._args.lengths, self._sizes.requests, self._sizes.max_length)

    def _ready_bench(self) -> BatchBench:
        """The bench with its engine, warmed up on first use."""
        if self._bench is None:
            policy, drafter, sizes = self._loaded_policy(), self._trained_drafter(), self._sizes
            model = policy
            if self._args.speculate_on == "twin":
                model = upscale(policy, TINY_TWIN if self._setting.tiny else QWEN_7B)
                drafter = upscale_drafter(drafter, model.config)
            max_batch = max(*sizes.batches, sizes.requests)
            longest_prompt = max(map(len, chat(self._tokenizer, long_tail.compose(self._tail, self._lengths(), 0))))
            context = {} if self._setting.tiny else {"max_context": sizes.max_length + 2 * longest_prompt}

            def engine() -> Engine:
                made = self._setting.engine(model, drafter, max_batch, kv_gb=50, strategy="auto", **context)
                made.warm_up()
                return made

            warm = chat(self._tokenizer, self._training[:max_batch])
            self._bench = BatchBench(engine, self._pool or chat(self._tokenizer, self._asked), warm, sizes.new_tokens)
        return self._bench

    def _skip(self, part: str, what: object) -> None:
        name = f"{part}, {f'batch {what}' if isinstance(what, int) else what}"
        self._report.content["skipped"][name] = "no time left"
