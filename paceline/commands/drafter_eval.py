"""`paceline drafter eval`: how often a drafter's guesses hold the policy's token: by depth, along the answer, by policy version,
for one tau or several."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.commands.drafter_capture import read_records
from paceline.commands.drafter_picture import write_picture
from paceline.commands.drafter_prompts import encoded, read_prompts
from paceline.commands.drafter_slices import coverage_record
from paceline.commands.generate import check_device
from paceline.commands.policy import policy_source
from paceline.commands.progress import ProgressView
from paceline.config import EngineConfig
from paceline.drafters.checkpoint import load_eagle
from paceline.drafters.eagle import Eagle
from paceline.engine import Engine
from paceline.models.decoder import Decoder
from paceline.models.weights import load_model
from paceline.report.files import write_file
from paceline.spot import capture_layers
from paceline.spot.coverage import Coverage, coverage
from paceline.types import FeatureRecord, SamplingParams, StepResult, Strategy

_ROWS = 8192
"""Of a step: room for whole trees, or the engine prunes them and what is measured is not the drafter."""


@dataclass(frozen=True, slots=True)
class DrafterEvalOptions:
    model: str
    drafter: Path
    prompts: str | None
    records: Path | None
    """What training left, instead of answers to prompts."""
    answers: int
    params: SamplingParams
    taus: tuple[float, ...]
    depth: int
    widths: tuple[int, ...]
    strategy: str
    """That answers are generated with."""
    device: str
    dtype: str
    threads: int | None = None
    json_file: Path | None = None
    html_file: Path | None = None


def eval_drafter(options: DrafterEvalOptions) -> int:
    check_device(options.device)
    if (options.prompts is None) == (options.records is None):
        raise ValueError("--prompts, --records: one of them says which answers to evaluate on")
    if options.params.temperature == 0:
        raise ValueError("--temperature: 0 is not > 0; greedy answers have no noise to share")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model, tokenizer = load_model(policy_source(options.model), options.device, options.dtype)
    drafter = load_eagle(options.drafter, model)
    measured: dict[str, Any] = {}
    if options.records is not None:
        records = read_records(options.records, options.answers)
    else:
        records, measured = generated(options, model, tokenizer, drafter)
    found = [coverage(drafter, model, records, tau, options.depth, options.widths, options.params.temperature)
             for tau in options.taus]
    best = best_of(found)
    show(found, best, records, measured)
    if options.json_file is not None:
        content = {"answers": len(records), "tokens": sum(len(r.token_ids) - r.prompt_length for r in records), **measured,
                   "best_tau": best.tau, "coverage": [coverage_record(each) for each in found]}
        write_file(options.json_file, (json.dumps(content, indent=1) + "\n").encode())
    if options.html_file is not None:
        write_picture(options.html_file, found, best, f"Drafter {options.drafter.resolve().name}")
    return 0


def generated(options: DrafterEvalOptions, model: Decoder, tokenizer: Any,
              drafter: Eagle) -> tuple[list[FeatureRecord], dict[str, Any]]:
    """Answers drawn with this very drafter (it changes none), and what it gave the engine."""
    assert options.prompts is not None
    strategy = Strategy.parse(options.strategy)
    kv_memory_gb = None if model.norm.device.type == "cpu" else 16.0
    engine = Engine(model, tokenizer, drafter, strategy,
                    EngineConfig(capture=capture_layers(drafter.config), kv_memory_gb=kv_memory_gb, max_rows=_ROWS))
    with ProgressView("answers", options.answers) as progress:
        asked = read_prompts(options.prompts, progress.say)
        chosen = [asked[i % len(asked)] for i in range(options.answers)]
        keys = [f"{each.key}/{i // len(asked)}" for i, each in enumerate(chosen)]

        def on_step(result: StepResult) -> None:
            progress.add_done(len(result.finished))
            progress.update(engine.stats(), options.strategy)

        groups = engine.generate([encoded(engine, each) for each in chosen], options.params, keys=keys, on_step=on_step)
    stats = engine.stats()
    records = [r.features for group in groups for r in group.rollouts if r.features is not None]
    return records, {"strategy": options.strategy, "measured_tokens_per_verification": stats.tokens_per_verification}


def best_of(found: Sequence[Coverage]) -> Coverage:
    """Most tokens per verification with the widest tree, full depth; of equals the first."""
    widest = max(found[0].expected)
    return max(found, key=lambda each: each.expected[widest][-1])


def show(found: Sequence[Coverage], best: Coverage, records: Sequence[FeatureRecord], measured: dict[str, Any]) -> None:
    print(f"{len(records)} answers, {sum(len(r.token_ids) - r.prompt_length for r in records)} tokens")
    for each in found:
        print(each)
    if len(found) > 1:
        print(f"best tau: {best.tau:g}")
    print("first guesses right along the answer (tau " + f"{best.tau:g}):")
    for start, share in best.by_position:
        print(f"  from token {start:>6}  {share.covered:.3f}  of {share.rows}")
    print("  by quarter  " + " ".join(f"{share.covered:.3f}" for share in best.by_quarter))
    for version, share in best.by_version.items():
        print(f"  policy version {version:>4}  {share.covered:.3f}  of {share.rows}")
    if measured:
        print(f"measured by the engine with {measured['strategy']}: "
              f"{measured['measured_tokens_per_verification']:.2f} tokens per verification")
