"""Steps of an RL run with a learned drafter, through the trainer library as `paceline train` uses it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lib.interruptions import Interruptions
from benchmarks.lib.setup import Budget, freeze_memory
from benchmarks.lib.stages import Stages
from paceline.models.decoder import Decoder
from paceline.models.save import save_model
from paceline.trainer import RolloutProgress, RunStatus, TrainConfig, Trainer, TrainerCallback
from paceline.types import RolloutGroup, StepResult

_METRICS = {"tokens_per_second": "tokens_per_s", "accept_length": "accept_length", "reward/mean": "reward",
            "time/generate": "generate_seconds", "time/step": "seconds",
            "logprob_difference/mean": "logprob_difference_mean", "logprob_difference/max": "logprob_difference_max"}
"""Metric of the trainer → name in the result."""


def rl_config(model: str, data: Path, drafter: Path, out: Path, tiny: bool) -> TrainConfig:
    """GRPO on grade-school problems with a drafter that was trained before the run, and is trained further during it."""
    common: dict[str, Any] = {"model": model, "task": "gsm8k", "drafter": str(drafter), "out": str(out), "strategy": "auto",
                              "steps": 100, "checkpoint_every": 100, "optimizer": {"lr": 2e-6}, "reward": {"workers": 0}}
    if tiny:
        return TrainConfig(**common, task_options={"data": str(data), "instruction": ""}, threads=1,
                           rollout={"prompts": 2, "group_size": 2, "max_new_tokens": 12},
                           engine={"max_batch": 4, "kv_tokens": 2048, "kernels": "torch", "profile": False})
    return TrainConfig(**common, task_options={"data": str(data)}, dtype="bfloat16", device="cuda",
                       rollout={"prompts": 32, "group_size": 8, "max_new_tokens": 640},
                       engine={"max_batch": 256, "kv_memory_gb": 20, "max_context": 2048})


def run_steps(config: TrainConfig, num_steps: int, budget: Budget,
              watch_type: type[StepWatch] | None = None) -> list[dict[str, Any]]:
    """Figures of the first `num_steps` steps of the run, or of as many as the time allows. The run is then interrupted, so that
    no checkpoint of the whole policy is written. A RuntimeError says why a run failed. `watch_type`: what records the figures."""
    watch = (watch_type or StepWatch)(num_steps, budget)
    with watch.interruptions:
        result = Trainer(config, callbacks=[watch]).run()
    if result.status is RunStatus.FAILED:
        raise RuntimeError(result.message)
    return watch.steps


class StepWatch(TrainerCallback):
    """Records the figures of each step, and interrupts the run after `num_steps` of them or when no time is left."""

    def __init__(self, num_steps: int, budget: Budget) -> None:
        self.steps: list[dict[str, Any]] = []
        self._num_steps, self._budget = num_steps, budget
        self._strategies: Counter[str] = Counter()
        self._stages = Stages()
        self.interruptions = Interruptions()

    def on_step_begin(self, step: int) -> None:
        if not self.steps:  # the engine is warm; without it, a check, which has much in memory, is stopped for half a second
            freeze_memory()
        self.interruptions.found = []
        if step > self._num_steps or self._budget.left <= 0:
            raise KeyboardInterrupt

    def on_engine_step(self, result: StepResult, progress: RolloutProgress) -> None:
        self._stages.add(result)
        if result.num_requests:
            self._strategies[str(result.strategy)] += 1

    def on_step_end(self, step: int, metrics: Mapping[str, Any], groups: Sequence[RolloutGroup]) -> None:
        total = self._strategies.total()
        self.steps.append({**{name: float(metrics[key]) for key, name in _METRICS.items()}, "engine_steps": total,
                           "share_off": self._strategies["off"] / max(1, total),
                           "strategies": dict(self._strategies.most_common(8)),
                           "stages": self._stages.take(), "interruptions": self.interruptions.found})
        self._strategies.clear()


def write_tiny_model(policy: Decoder, folder: Path) -> None:
    """The tiny policy of smoke runs as a folder, with a tokenizer of one ASCII character per token."""
    model = Decoder(replace(policy.config, eos_token_ids=(0,)))
    model.load_state_dict(policy.state_dict())
    save_model(model, character_tokenizer(), folder)


def character_tokenizer() -> Any:
    """A tokenizer without merges, of the kind that transformers expects of Qwen2."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import Qwen2Tokenizer

    end = "<|endoftext|>"
    letters = sorted(letter for letter in pre_tokenizers.ByteLevel.alphabet() if letter.isascii() or letter in "ĠĊ")
    plain = Tokenizer(models.BPE({letter: i for i, letter in enumerate([end, *letters])}, []))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return Qwen2Tokenizer(tokenizer_object=plain, eos_token=end, pad_token=end)


def write_tiny_problems(file: Path) -> None:
    """Sums as problems in the form of GSM8K."""
    lines = [json.dumps({"question": f"What is {a} + {b}?", "answer": f"{a} and {b} are {a + b}\n#### {a + b}"})
             for a in range(3, 7) for b in range(3, 7)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
