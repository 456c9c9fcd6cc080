"""`paceline export`: drafters and policies for other engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from paceline.bundled import resolve_model
from paceline.drafters.checkpoint import load_eagle
from paceline.export import export_adapter, export_drafter, export_policy, find_source
from paceline.export.loaders import LOADERS
from paceline.models.weights import load_model, open_checkpoint
from paceline.rl.checkpoint import read_adapters
from paceline.trainer.config_files import load_run_config

_HOW = {"vllm": "vllm serve {policy} --speculative-config '{config}'",
        "sglang": "python -m sglang.launch_server --model-path {policy} --speculative-algorithm {method} "
                  "--speculative-draft-model-path {out} --speculative-num-steps 5 --speculative-eagle-topk 1 "
                  "--speculative-num-draft-tokens 6",
        "speculators": "vllm serve {out}"}


class ExportOptions(NamedTuple):
    """The options of `paceline export`."""

    source: Path
    to: str
    out: Path
    model: str | None
    step: int | None
    merge_lora: bool
    force: bool
    dtype: str


def export(options: ExportOptions) -> int:
    """Exports, and prints what was written and how to load it."""
    if options.to == "hf":
        print(_export_policy(options))
    elif options.to in LOADERS:
        print(_export_drafter(options))
    else:
        raise ValueError(f"--to: {options.to} is not one of {', '.join(LOADERS)}, hf")
    return 0


def _export_drafter(options: ExportOptions) -> str:
    found = find_source(options.source, options.step)
    if found.drafter is None:
        raise ValueError(f"{options.source}: the run has no learned drafter")
    if found.policy is None and options.model is None:
        raise ValueError("--model: name the policy of the drafter")
    policy = str(found.policy if options.model is None else resolve_model(options.model))
    model, _ = load_model(policy, "cpu", options.dtype)
    drafter = load_eagle(found.drafter, model)
    # A run's drafter may have been trained for the policy before the last update: those two belong together all the same.
    export_drafter(drafter, model, options.to, options.out, policy, options.force or found.run is not None)  # type: ignore[arg-type]
    three = drafter.config.form == "eagle3"
    speculative = json.dumps({"method": "eagle3" if three else "eagle", "model": str(options.out), "num_speculative_tokens": 5})
    how = _HOW[options.to].format(policy=policy, out=options.out, config=speculative, method="EAGLE3" if three else "EAGLE")
    return f"{options.out}: {'EAGLE-3' if three else 'EAGLE'} drafter for {options.to}\n{how}"


def _export_policy(options: ExportOptions) -> str:
    found = find_source(options.source, options.step)
    if found.policy is None or found.run is None or found.checkpoint is None:
        raise ValueError(f"--to hf: exports the policy of a run, and {options.source} is a drafter")
    config = load_run_config(found.run)
    if not config.learner.lora_rank or options.merge_lora:
        export_policy(found.policy, options.out, options.dtype)
        return f"{options.out}: policy of {found.checkpoint}"
    base = str(resolve_model(config.model))
    export_adapter(read_adapters(found.checkpoint), open_checkpoint(found.policy).config, config.learner, base, options.out)
    return f"{options.out}: LoRA adapters for {base} (--merge-lora writes the whole policy)"
