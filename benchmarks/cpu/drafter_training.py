"""Drafter training: accept length of each drafter form after given training times, and the cost of packing and checkpoints.

    python benchmarks/cpu/drafter_training.py --threads 1          # the policy that comes with the package, on a CPU
    python benchmarks/gpu/drafter_training.py --model FOLDER --prompts gsm8k_train.jsonl --test-prompts gsm8k_test.jsonl \\
        --records build/records                                    # on a GPU: all forms, one after the other
    python benchmarks/gpu/drafter_training.py … --records build/records --sections capture      # or: capture responses once,
    python benchmarks/gpu/drafter_training.py … --records build/records --sections forms --only hass --out hass.json

- `forms`: for eagle, hass, eagle3 and variants of hass, after each of `--marks` seconds of training: training throughput,
  the share of tokens covered by the top 1, 2 and 4 draft tokens at depth 1 to 6 on responses to held-out prompts, the tokens per
  verification expected of a full tree of depth 6, and those that the engine measures at temperature 1 on fresh responses.
  Goal on an H200: 6.2 at depth 6, width 4 after 120 s.
- `packing`: responses per second of training, packed and padded to the longest, with long-tailed lengths. Goal: 2.2 times.
- `checkpoints`: milliseconds for which a checkpoint stops training: blocking, asynchronous, only trained parameters. Goal: 10.

With `--records` the responses are captured once and later runs read them; `--save FOLDER` keeps the drafter of every mark.
`frozen_vs_adaptive.py` measures frozen against adaptive drafters over an RL run.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from benchmarks.lib.checkpoint_stalls import measure_stalls
from benchmarks.lib.models import TINY
from benchmarks.lib.results import Report
from benchmarks.lib.setup import Budget, make_parser
from paceline import Engine, SamplingParams
from paceline.bundled import resolve_model
from paceline.config import EngineConfig
from paceline.drafters.checkpoint import save_eagle
from paceline.drafters.eagle import Eagle, EagleConfig
from paceline.generation import NamedPrompt, encode_prompt, read_prompts
from paceline.kernels import TorchOps
from paceline.models.decoder import Decoder, Rope
from paceline.models.weights import load_model
from paceline.packing import first_fit_decreasing
from paceline.spot import SpotConfig, SpotTrainer, capture_layers, fresh_eagle
from paceline.spot.losses import DrafterLoss
from paceline.spot.packing import num_rows, pack
from paceline.trainer.answer_capture import AnswerCapture, CaptureOptions
from paceline.trainer.drafter_eval import coverage_record, held_out_coverage
from paceline.trainer.standalone_drafter import standalone_config
from paceline.types import FeatureRecord

FORMS: dict[str, dict[str, Any]] = {
    "eagle": {"form": "eagle"}, "hass": {"form": "hass"}, "eagle3": {"form": "eagle3"},
    "hass-cross-entropy": {"form": "hass", "objective": "cross_entropy"},
    "hass-4-steps": {"form": "hass", "unroll": 4}, "hass-6-steps": {"form": "hass", "unroll": 6},
    "hass-linear-lr": {"form": "hass", "schedule": "linear"},
}
SECTIONS = ("capture", "forms", "packing", "checkpoints")
STRATEGIES = ("eagle:d6w4v48", "eagle:d6w1v6")
GOALS = {"packing": 2.2, "checkpoint_ms": 10.0, "tokens_per_verification_d6w4_120s": 6.2}


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    device = torch.device(args.device)
    report = Report(args, device, goals=GOALS, marks=args.marks)
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(args, device, args.records or Path(scratch) / "records", report)
        for section in args.sections:
            bench.section(section, Path(scratch))
            report.save()
        bench.captured.close()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, "drafter_training", minutes=60)
    parser.add_argument("--model", default="default", help="the policy: a folder or GGUF file (default: the one in the package)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--prompts", default="task:collatz", help="JSON lines (prompt, messages, question), or task:NAME")
    parser.add_argument("--test-prompts",
                        help="JSON lines or task:NAME: prompts that the engine is measured on (default: the held-out ones)")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--only", nargs="+", choices=list(FORMS), default=list(FORMS)[:4], help="drafter forms")
    parser.add_argument("--marks", type=float, nargs="+",
                        help="seconds of training after which figures are taken (default: 30 60 120 300)")
    parser.add_argument("--answers", type=int, help="number of captured responses (default: 1024 on a CPU, 3000 on a GPU)")
    parser.add_argument("--new-tokens", type=int, default=512, help="longest response")
    parser.add_argument("--measured", type=int, default=64, help="number of responses that the engine is measured on")
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), help="strategies that the engine is measured with")
    parser.add_argument("--draft-vocab", type=int, default=32768)
    parser.add_argument("--records", type=Path, help="folder of captured responses, written once and read by later runs")
    parser.add_argument("--save", type=Path, help="folder for the trained drafters, FORM-SECONDSs for each mark")
    parser.add_argument("--threads", type=int, help="CPU threads")
    args = parser.parse_args(arguments)
    if args.tiny:
        args.device, args.threads, args.answers, args.new_tokens, args.measured = "cpu", 1, 32, 16, 4
        args.marks = args.marks or [0.1, 0.2]
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    args.marks = sorted(args.marks or [30, 60, 120, 300])
    args.answers = args.answers or (1024 if args.device == "cpu" else 3000)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: there is no CUDA device")
    return args


class Bench:
    """One policy and its captured responses, which all sections share."""

    def __init__(self, args: argparse.Namespace, device: torch.device, records: Path, report: Report) -> None:
        self.args, self.report, self.budget = args, report, Budget(args.minutes)
        self.policy, self.tokenizer, prompts = self._policy(device)
        self.on_gpu = device.type == "cuda"
        options = CaptureOptions(args.answers, 1, SamplingParams(max_new_tokens=args.new_tokens), 32 << 30, device=device)
        self.captured = AnswerCapture(records, prompts, options)
        self._capture()
        self.fresh = self.captured.held_out_prompts()
        if args.test_prompts is not None:
            self.fresh = read_prompts(args.test_prompts, print)

    def section(self, name: str, scratch: Path) -> None:
        sections: dict[str, Callable[[], dict[str, Any]]] = {
            "capture": lambda: {}, "forms": self.forms, "packing": self.packing,
            "checkpoints": lambda: self.checkpoints(scratch)}
        found = sections[name]()
        if found:
            self.report.content[name] = found

    # --- forms

    def forms(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        self.report.content["forms"] = found  # so that every measurement is saved at once
        for name in self.args.only:
            if self.budget.left < self.args.marks[-1]:
                print(f"no time left for {name}", flush=True)
                continue
            found[name] = {}
            self.form(name, found[name])
        return found

    def form(self, name: str, found: dict[str, Any]) -> None:
        """Trains one form; figures and drafter are written at every mark."""
        trainer = self.trainer(standalone_config(SpotConfig(**FORMS[name]), seconds=self.args.marks[-1]))
        held_out, tau = self.captured.held_out(), EngineConfig().tau
        marks: dict[str, Any] = {}
        found |= {"marks": marks, "parameters": sum(p.numel() for p in trainer.parameters.values())}
        seconds, tokens = 0.0, 0
        for mark in self.args.marks:
            report = trainer.run(mark - seconds)
            seconds, tokens = seconds + report.seconds, tokens + report.tokens
            drafter = trainer.drafter()
            if self.args.save is not None:
                save_eagle(drafter, self.args.save / f"{name}-{mark:g}s")
            covered = held_out_coverage(drafter, self.policy, held_out, tau, 1.0)
            record = {k: v for k, v in coverage_record(covered).items() if k in ("by_depth", "by_quarter", "by_position")}
            marks[f"{mark:g}"] = record | {
                "steps": trainer.progress.step, "tokens": tokens, "tokens_per_s": tokens / seconds,
                "longest_micro_batch_ms": 1e3 * report.max_micro_batch_s,
                "expected_d6": {str(k): values[-1] for k, values in covered.accept_length.items()},
                "measured": {strategy: self.measure(drafter, strategy) for strategy in self.args.strategies}}
            show(name, mark, marks[f"{mark:g}"])
            self.report.save()

    def measure(self, drafter: Eagle, strategy: str) -> float:
        """Tokens per verification, with room for whole trees, so that the engine prunes none."""
        engine = self._engine(drafter, strategy)
        asked = [self.fresh[i % len(self.fresh)] for i in range(self.args.measured)]
        params = SamplingParams(max_new_tokens=self.args.new_tokens, seed=77)
        keys = [f"measured {i}" for i in range(len(asked))]
        engine.generate([encode_prompt(engine, each) for each in asked], params, keys=keys)
        found = engine.stats().tokens_per_verification
        del engine
        gc.collect()  # the engine is part of a reference cycle
        if self.on_gpu:
            torch.cuda.empty_cache()
        return found

    def trainer(self, config: SpotConfig) -> SpotTrainer:
        draft_vocab = self.args.draft_vocab if self.args.draft_vocab < self.policy.config.vocab_size else 0
        eagle = fresh_eagle(self.policy, config.module_form, self.captured.some(), draft_vocab, window=config.window)
        return SpotTrainer(eagle, self.policy, self.captured.buffer, config)

    # --- packing and checkpoints

    def packing(self) -> dict[str, Any]:
        """Forward and backward on the same responses: packed, and in batches of similar size padded to the longest response."""
        trainer = self.trainer(SpotConfig())
        config = trainer.config
        assert config.micro_batch_tokens is not None
        size = 256 if self.args.tiny else 4 * config.micro_batch_tokens
        records = long_tailed(self.captured.some(), size // 8, 16 * size if self.on_gpu else 4 * size)
        rope = Rope(self.policy.config, size + 16, torch.float32, self.policy.norm.device)
        objective = DrafterLoss(self.policy, config, trainer.scales, TorchOps(), rope)
        packed = [[records[i] for i in members] for members in
                  first_fit_decreasing([num_rows(len(r.token_ids)) for r in records], size)]
        padded = padded_batches(records, size)
        rates: dict[str, list[float]] = {"packed": [], "padded": []}
        for turn in range(4):  # the first is a warm-up
            for name, batches in (("packed", packed), ("padded", padded)):
                seconds = timed(objective, trainer.module, batches, self.policy)
                if turn:
                    rates[name].append(len(records) / seconds)
        lengths = sorted(len(r.token_ids) for r in records)
        ratio = statistics.median(a / b for a, b in zip(rates["packed"], rates["padded"], strict=True))
        middle = {name: statistics.median(each) for name, each in rates.items()}
        print(f"packing: {middle['packed']:.1f} responses/s packed, {middle['padded']:.1f} padded: {ratio:.2f}x "
              f"(goal {GOALS['packing']})", flush=True)
        return {"answers": len(records), "tokens": sum(lengths), "median_length": statistics.median(lengths),
                "longest": lengths[-1], "packed_per_s": rates["packed"], "padded_per_s": rates["padded"], "ratio": ratio,
                "rows_padded": sum(len(r.token_ids) for batch in padded for r in batch)}

    def checkpoints(self, scratch: Path) -> dict[str, Any]:
        trainer = self.trainer(SpotConfig())
        trainer.run(0.2 if self.args.tiny else 2.0)  # now the optimizer has its moments
        found = measure_stalls(trainer, scratch)
        print(f"checkpoints: {found.blocking:.1f} ms blocking, {found.asynchronous:.1f} asynchronous, {found.selective:.2f} "
              f"asynchronous and selective (goal {GOALS['checkpoint_ms']:g})", flush=True)
        return {"blocking_ms": found.blocking, "async_ms": found.asynchronous, "selective_async_ms": found.selective,
                "selective_bytes": found.selective_bytes}

    # --- the policy and its responses

    def _policy(self, device: torch.device) -> tuple[Decoder, Any, list[NamedPrompt]]:
        if self.args.tiny:
            prompts = [NamedPrompt(str(i), [(7 * i + j * j) % TINY.vocab_size for j in range(6)]) for i in range(16)]
            return Decoder.random(replace(TINY, num_layers=4), std=0.3), None, prompts
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        return *load_model(resolve_model(self.args.model), device, dtype), read_prompts(self.args.prompts, print)

    def _capture(self) -> None:
        """Captures responses with the hidden states that every form needs."""
        began, missing = time.perf_counter(), len(self.captured.missing)
        if missing:
            layers = capture_layers(EagleConfig.for_policy(self.policy.config, "eagle3"))
            more = {"max_batch": 256, "kv_memory_gb": 16.0} if self.on_gpu else {}
            self.captured.run(self._engine(None, "off", capture=layers, **more))
            gc.collect()
        self.captured.require_enough()
        self.report.content["answers"] = {
            "trained_on": len(self.captured.buffer), "tokens": self.captured.buffer.num_tokens,
            "held_out": len(self.captured.held_out()), "generated_now": missing, "seconds": time.perf_counter() - began}
        print(self.report.content["answers"], flush=True)
        if self.on_gpu:
            torch.cuda.empty_cache()

    def _engine(self, drafter: Eagle | None, strategy: str, **options: Any) -> Engine:
        sizes: dict[str, Any] = {"max_batch": 64, "max_rows": 8192, "kv_memory_gb": 4.0 if self.on_gpu else None}
        if self.args.tiny:
            sizes |= {"max_batch": 8, "kv_tokens": 2048, "kernels": "torch"}
        return Engine(self.policy, self.tokenizer, drafter, strategy, EngineConfig(**sizes | options))


def show(name: str, mark: float, found: dict[str, Any]) -> None:
    top = "  ".join(f"top-{k} " + " ".join(f"{x:.2f}" for x in shares) for k, shares in found["by_depth"].items())
    measured = ", ".join(f"{strategy} {value:.2f}" for strategy, value in found["measured"].items())
    print(f"{name:18} {mark:5g} s  {found['tokens_per_s']:7.0f} tokens/s  {top}\n{'':27}expected d6 w1 "
          f"{found['expected_d6']['1']:.2f}, w4 {found['expected_d6']['4']:.2f}; measured {measured}", flush=True)


def long_tailed(records: Sequence[FeatureRecord], longest: int, num_tokens: int) -> list[FeatureRecord]:
    """Records with lognormal lengths (sigma 1, median longest / 10, at most `longest`), made by cutting and joining responses."""
    draw, found, total = random.Random(0), list[FeatureRecord](), 0
    while total < num_tokens:
        wanted = max(8, min(longest, int(longest / 10 * draw.lognormvariate(0.0, 1.0))))
        tokens, parts = list[int](), list[torch.Tensor]()
        while len(tokens) < wanted:
            record = draw.choice(records)
            tokens += record.token_ids[: len(record.features)]
            parts.append(record.features)
        features = torch.cat(parts)[: wanted - 1]
        found.append(FeatureRecord(tokens[:wanted], features, records[0].layers, [], 3))
        total += wanted
    return found


def padded_batches(records: Sequence[FeatureRecord], rows: int) -> list[list[FeatureRecord]]:
    """Batches in the given order, with as many records as fit into `rows` when each is padded to the longest."""
    batches: list[list[FeatureRecord]] = [[]]
    for record in records:
        longest = max(len(r.token_ids) for r in [*batches[-1], record])
        if batches[-1] and longest * (len(batches[-1]) + 1) > rows:
            batches.append([])
        batches[-1].append(record)
    return [[padded(record, max(len(r.token_ids) for r in batch)) for record in batch] for batch in batches]


def padded(record: FeatureRecord, length: int) -> FeatureRecord:
    more = length - len(record.token_ids)
    features = torch.cat([record.features, record.features[-1:].expand(more, -1)])
    return FeatureRecord(record.token_ids + [0] * more, features, record.layers, [], record.prompt_length)


def timed(objective: DrafterLoss, module: Eagle, batches: list[list[FeatureRecord]], policy: Decoder) -> float:
    """Seconds of one forward and backward pass over all batches."""
    device = policy.norm.device
    began = time.perf_counter()
    for records in batches:
        rows = pack(records, module.config.feature_layers, policy.config.hidden_size, device)
        shares = objective.row_weights([(len(r.token_ids), r.prompt_length) for r in records])
        objective(module, rows, shares).total.backward()
        module.zero_grad(set_to_none=True)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
