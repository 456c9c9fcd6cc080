"""Evaluating a learned drafter: how often its draft tokens are the policy's, by depth, along the answer and by policy version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.config import EngineConfig
from paceline.drafters.checkpoint import check_drafter_folder, load_eagle
from paceline.drafters.eagle import Eagle
from paceline.engine import Engine
from paceline.generation import NamedPrompt, encode_prompt, read_prompts
from paceline.models.decoder import Decoder
from paceline.models.weights import check_device, check_model, load_model
from paceline.spot import capture_layers
from paceline.spot.coverage import Coverage, coverage
from paceline.trainer.answer_capture import read_records
from paceline.types import EngineStats, FeatureRecord, SamplingParams, StepResult, Strategy

_MAX_ROWS = 8192
"""Rows per engine step: enough for whole trees. The engine would otherwise prune them, and the drafter would be
underestimated."""
_DEPTH, _WIDTHS = 6, (1, 2, 4)


@dataclass(frozen=True, slots=True)
class DrafterEvalOptions:
    """Which drafter is evaluated on which answers."""

    model: str
    """Policy: Hugging Face folder, hub id, GGUF file, or `default` for the bundled one."""
    drafter: Path
    """Folder of the drafter."""
    prompts: str | None
    """File of prompts as JSON lines, or `task:NAME`; answers to them are generated. None: `records` is given."""
    records: Path | None
    """Folder of standalone drafter training, whose held-out answers are used. None: `prompts` is given."""
    answers: int
    """Maximum number of answers."""
    params: SamplingParams
    """How the answers are, or were, sampled."""
    taus: tuple[float, ...]
    """Values of tau to evaluate."""
    depth: int
    """Number of tokens drafted ahead."""
    widths: tuple[int, ...]
    """Numbers of draft tokens per position that are evaluated."""
    strategy: str
    """Strategy that answers are generated with."""
    device: str
    """Device, such as `cpu` or `cuda`; `auto`: a GPU if there is one."""
    dtype: str
    """Data type of the policy, or `auto`."""
    threads: int | None = None
    """Number of CPU threads. None: PyTorch's default."""


@dataclass(frozen=True, slots=True)
class DrafterEvaluation:
    """Result of `evaluate_drafter`."""

    coverages: list[Coverage]
    """One coverage per tau, in the order of the options."""
    num_answers: int
    """Number of answers evaluated on."""
    num_tokens: int
    """Number of their tokens."""
    measured: dict[str, Any]
    """Strategy and accept length of the engine that generated the answers; empty if they came from records."""

    @property
    def best(self) -> Coverage:
        """The coverage with the most tokens per verification at the largest width and full depth; the first of equals."""
        widest = max(self.coverages[0].accept_length)
        return max(self.coverages, key=lambda each: each.accept_length[widest][-1])

    def as_record(self) -> dict[str, Any]:
        """The evaluation as plain JSON."""
        return {"answers": self.num_answers, "tokens": self.num_tokens, **self.measured, "best_tau": self.best.tau,
                "coverage": [coverage_record(each) for each in self.coverages]}


class EvalCallback:
    """Told how the generation of answers proceeds. All methods do nothing by default."""

    def on_generation_begin(self, num_answers: int) -> None:
        """Generation of the answers begins."""

    def on_engine_step(self, result: StepResult, stats: EngineStats) -> None:
        """The engine has made a step."""

    def on_generation_end(self) -> None:
        """All answers are generated."""

    def on_message(self, message: str) -> None:
        """Something the user should know, such as a line of prompts that cannot be used."""


def evaluate_drafter(options: DrafterEvalOptions, callback: EvalCallback | None = None) -> DrafterEvaluation:
    """Evaluates a drafter on held-out or newly generated answers."""
    callback = callback or EvalCallback()
    if (options.prompts is None) == (options.records is None):
        raise ValueError("prompts, records: exactly one of them is required")
    if options.params.temperature == 0:
        raise ValueError("temperature: must be > 0, not 0; greedy answers have no noise to share")
    check_device(options.device)
    check_model(options.model)
    check_drafter_folder(options.drafter)
    Strategy.parse(options.strategy)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    prompts = [] if options.prompts is None else read_prompts(options.prompts, callback.on_message)
    model, tokenizer = load_model(options.model, options.device, options.dtype)
    drafter = load_eagle(options.drafter, model)
    measured: dict[str, Any] = {}
    if options.records is not None:
        records = read_records(options.records, options.answers)
    else:
        records, measured = _generate(options, prompts, model, tokenizer, drafter, callback)
    found = [coverage(drafter, model, records, tau, options.depth, options.widths, options.params.temperature)
             for tau in options.taus]
    return DrafterEvaluation(found, len(records), sum(len(r.token_ids) - r.prompt_length for r in records), measured)


def held_out_coverage(drafter: Eagle, policy: Decoder, records: Sequence[FeatureRecord], tau: float,
                      temperature: float) -> Coverage:
    """Coverage of held-out answers at the depth and widths that drafter training reports."""
    return coverage(drafter, policy, records, tau, _DEPTH, _WIDTHS, temperature)


def coverage_record(found: Coverage) -> dict[str, Any]:
    """A coverage as plain JSON. Tokens per verification are listed by width, then by depth."""
    return {"tau": found.tau, "by_depth": {str(k): shares for k, shares in found.by_depth.items()},
            "tokens_per_verification": {str(k): values for k, values in found.accept_length.items()},
            "by_position": [{"from": start, "covered": share.covered, "rows": share.rows} for start, share in found.by_position],
            "by_quarter": [share._asdict() for share in found.by_quarter],
            "by_version": {str(version): share._asdict() for version, share in found.by_version.items()}}


def _generate(options: DrafterEvalOptions, prompts: Sequence[NamedPrompt], model: Decoder, tokenizer: Any, drafter: Eagle,
              callback: EvalCallback) -> tuple[list[FeatureRecord], dict[str, Any]]:
    """Generates answers with the drafter under evaluation, which changes no token; also returns its accept length."""
    strategy = Strategy.parse(options.strategy)
    kv_memory_gb = None if model.norm.device.type == "cpu" else 16.0
    engine = Engine(model, tokenizer, drafter, strategy,
                    EngineConfig(capture=capture_layers(drafter.config), kv_memory_gb=kv_memory_gb, max_rows=_MAX_ROWS))
    callback.on_generation_begin(options.answers)
    chosen = [prompts[i % len(prompts)] for i in range(options.answers)]
    keys = [f"{each.key}/{i // len(prompts)}" for i, each in enumerate(chosen)]

    def on_step(result: StepResult) -> None:
        callback.on_engine_step(result, engine.stats())

    groups = engine.generate([encode_prompt(engine, each) for each in chosen], options.params, keys=keys, on_step=on_step)
    callback.on_generation_end()
    records = [r.features for group in groups for r in group.rollouts if r.features is not None]
    return records, {"strategy": options.strategy, "measured_tokens_per_verification": engine.stats().tokens_per_verification}
