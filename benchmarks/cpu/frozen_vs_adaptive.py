"""Frozen against adaptive drafter over an RL run: every batch is generated twice, with the drafter that is trained during the run
and with the drafter that the run started with. Both draft for the same policy, and tokens depend on neither, so only the accept
length differs.

    python benchmarks/cpu/frozen_vs_adaptive.py --steps 32                            # the default run, one thread
    python benchmarks/gpu/frozen_vs_adaptive.py --config configs/qwen2.5-1.5b-gsm8k.toml --set model=FOLDER \\
        --set task_options.data=gsm8k_train.jsonl [--drafter FOLDER]                  # 40 steps in at most four minutes

`saved_s` is the generation time that the adaptive drafter saved, less the time that its training took. A run that is stopped
(Ctrl-C, SIGTERM, no time left) reports the steps it has finished. No checkpoint is written.
"""

from __future__ import annotations

import gc
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from benchmarks.lib.results import Report
from benchmarks.lib.setup import Budget, make_parser
from paceline import Engine, SamplingParams
from paceline.bundled import resolve_model
from paceline.cli.train import TerminalView
from paceline.config import TrainConfig
from paceline.drafters.checkpoint import save_eagle
from paceline.drafters.eagle import Eagle, EagleConfig
from paceline.generation import plain_prompt
from paceline.models.weights import load_model, parse_dtype
from paceline.report import RunFigures, read_metrics
from paceline.spot import FeatureBuffer, SpotConfig, SpotTrainer, capture_layers, fresh_eagle
from paceline.spot.coverage import coverage
from paceline.tasks import make_task
from paceline.trainer import Trainer, TrainerCallback, load_config
from paceline.trainer.backend import LocalBackend
from paceline.trainer.parts import make_engine
from paceline.trainer.rollouts import PromptStream
from paceline.types import RolloutGroup

_TINY = ["steps=2", "rollout.prompts=2", "rollout.group_size=2", "rollout.max_new_tokens=16", "engine.kv_tokens=4096",
         "drafter_budget.trial_share=1000", "drafter_budget.longest_s=0.5"]  # generation takes milliseconds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, "frozen_vs_adaptive", minutes=60)
    parser.add_argument("--config", type=Path, help="a training configuration (default: the one in the package)")
    parser.add_argument("--set", action="append", default=[], help="change a field of the configuration, like optimizer.lr=1e-5")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--strategy", default="eagle:d6w1v6", help="strategy of both, so that only the drafter differs")
    parser.add_argument("--drafter", type=Path, help="folder of the first drafter (default: one is trained for --warm-seconds)")
    parser.add_argument("--warm-seconds", type=float, default=30.0, help="seconds of drafter training before the run")
    parser.add_argument("--warm-prompts", type=int, default=48, help="number of prompts whose responses that training uses")
    args = parser.parse_args(arguments)
    args.device = "cpu" if args.tiny else args.device
    changes = [f"steps={args.steps}", f"device={args.device}", f"strategy={args.strategy}",
               "compare_off=false", "checkpoint_every=1000000", *(["threads=1"] if args.device == "cpu" else []), *args.set,
               *(_TINY if args.tiny else [])]
    config = load_config(args.config, changes)
    report = Report(args, config.device, steps=config.steps, strategy=config.strategy,
                    model=config.model, task=config.task)
    budget = Budget(args.minutes)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    usual = signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as scratch:
        start, out = args.drafter or Path(scratch) / "start", Path(scratch) / "run"
        if args.drafter is None:
            seconds, prompts = (0.5, 2) if args.tiny else (args.warm_seconds, args.warm_prompts)
            report.content["warm_up"] = warm_up(config, start, seconds, prompts)
        config = config.model_copy(update={"out": str(out), "drafter": str(start), "train_drafter": True})
        with TerminalView(config) as view:
            run = Paired(config, callbacks=[view, StopInTime(config.steps, budget)])
            run.run()
        report.content |= figures(read_metrics(out))
        found = RunFigures.of(read_metrics(out))
        report.content |= {"rollouts": found.compared, "differing_rollouts": found.differing, "minutes": budget.used / 60}
    signal.signal(signal.SIGTERM, usual)
    report.save()
    show(report.content)


class StopInTime(TrainerCallback):
    """Interrupts a run after its last step, before the policy is saved, or when there is no time for another step."""

    def __init__(self, num_steps: int, budget: Budget) -> None:
        self._num_steps, self._budget, self._began, self._longest = num_steps, budget, 0.0, 0.0

    def on_step_begin(self, step: int) -> None:
        self._began = self._budget.used

    def on_step_end(self, step: int, metrics: Mapping[str, Any], groups: Sequence[RolloutGroup]) -> None:
        self._longest = max(self._longest, self._budget.used - self._began)
        if step >= self._num_steps or self._budget.left < self._longest:
            raise KeyboardInterrupt


class PairedBackend(LocalBackend):
    def _make_baseline(self) -> Engine:
        return make_engine(self.config.model_copy(update={"train_drafter": False}), self.learner, self.tokenizer, speculate=True)


class Paired(Trainer):
    """A run that also generates every batch with the drafter it started with."""

    def _make_backend(self) -> LocalBackend:
        return PairedBackend(self.config, self.folder.path)

    def _engine_metrics(self, timed: dict[str, float]) -> dict[str, Any]:
        assert self.baseline is not None
        frozen = self.baseline.stats().tokens_per_verification
        return {**super()._engine_metrics(timed), "frozen/accept_length": frozen}

    def _summary(self) -> dict[str, Any]:
        return {}


def warm_up(config: TrainConfig, folder: Path, seconds: float, prompts: int) -> dict[str, Any]:
    """Trains a drafter for the policy that the run starts with, on responses to other problems, and writes it to `folder`."""
    policy, tokenizer = load_model(resolve_model(config.model), config.device, parse_dtype(config.dtype) or torch.float32)
    options = SpotConfig(**{"temperature": config.rollout.temperature, **config.spot})
    layers = capture_layers(EagleConfig.for_policy(policy.config, options.module_form))
    engine = Engine(policy, tokenizer, "none", "off", config.engine.model_copy(update={"capture": layers}))
    problems = PromptStream(make_task(config.task, **config.task_options), config.seed + 1, None).take(0, prompts)
    params = SamplingParams(temperature=config.rollout.temperature, max_new_tokens=config.rollout.max_new_tokens,
                            seed=config.seed + 1)
    groups = engine.generate([plain_prompt(engine, p.prompt) for p in problems], params, config.rollout.group_size)
    del engine
    gc.collect()  # the engine is part of a reference cycle
    records = [r.features for group in groups for r in group.rollouts if r.features is not None]
    held_out = records[:: max(2, len(records) // 16)][:16]
    buffer = FeatureBuffer(4 << 30)
    for record in records:
        if not any(record is other for other in held_out):
            buffer.add(record, 0)
    start = fresh_eagle(policy, options.module_form, records, options.draft_vocab_for(policy.config.vocab_size),
                        window=options.window)
    trainer = SpotTrainer(start, policy, buffer, options)
    found = trainer.run(seconds)
    drafter: Eagle = trainer.drafter()
    save_eagle(drafter, folder)
    expected = coverage(drafter, policy, held_out, config.engine.tau, 6, (1,), config.rollout.temperature).accept_length[1][-1]
    print(f"drafter: {found.seconds:.0f} s, {buffer.num_tokens} tokens, {expected:.2f} tokens per verification", flush=True)
    return {"seconds": found.seconds, "tokens": buffer.num_tokens, "expected_tokens_per_verification": expected}


def figures(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures by step, and means over the last quarter of the steps."""
    names = {"frozen": "frozen/accept_length", "adaptive": "accept_length", "reward": "reward/mean",
             "length_p50": "length/p50", "generate_s_frozen": "time/generate_off", "generate_s_adaptive": "time/generate",
             "drafter_s": "time/drafter"}
    found: dict[str, Any] = {name: [record.get(key, 0.0) for record in records] for name, key in names.items()}
    found["trained_s"] = [r.get("drafter/seconds", r.get("drafter/beside_seconds", 0.0)) for r in records]
    found |= {name: {r["step"]: r[name] for r in records if name in r} for name in ("alarms", "notes")}
    found["saved_s"] = sum(found["generate_s_frozen"]) - sum(found["generate_s_adaptive"]) - sum(found["drafter_s"])
    last = max(1, len(records) // 4)
    return found | {f"{side}_at_end": fmean(found[side][-last:]) for side in ("frozen", "adaptive") if records}


def show(content: dict[str, Any]) -> None:
    print(f"{'step':>5}{'frozen':>9}{'adaptive':>9}{'trained s':>11}")
    lines = zip(content["frozen"], content["adaptive"], content["trained_s"], strict=True)
    for step, (a, b, s) in enumerate(lines, 1):
        print(f"{step:5d}{a:9.3f}{b:9.3f}{s:11.1f}")
    if content["frozen"]:
        print(f"last quarter of {len(content['frozen'])} steps: frozen {content['frozen_at_end']:.3f}, adaptive "
              f"{content['adaptive_at_end']:.3f}; {content['differing_rollouts']} of {content['rollouts']} rollouts differ; "
              f"generation {sum(content['generate_s_frozen']):.1f} s and {sum(content['generate_s_adaptive']):.1f} s, "
              f"training the drafter {sum(content['trained_s']):.1f} s, {sum(content['drafter_s']):.1f} s in all: the adaptive "
              f"one saves {content['saved_s']:.1f} s")


if __name__ == "__main__":
    main()
