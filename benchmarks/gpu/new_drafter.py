"""A GRPO run whose drafter begins with random weights (`drafter = "learned"`), as users start one: what the run decides about its
warm-up, and tokens per verification, tokens per second and seconds step by step.

    python benchmarks/gpu/new_drafter.py --model FOLDER --prompts gsm8k_train.jsonl

The run is that of the GPU check (256 answers of up to 640 tokens per step), interrupted after `--steps` steps or `--minutes`.
`off` has a few steps of the same run without speculation, for comparison.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.lib.figures import print_table
from benchmarks.lib.gpu_check.rl import StepWatch, rl_config, run_steps, write_tiny_model, write_tiny_problems
from benchmarks.lib.results import Report
from benchmarks.lib.setup import Budget, Setting, make_parser
from paceline.types import RolloutGroup

_OFF_STEPS = 3


class DrafterWatch(StepWatch):
    """Also records what the drafter's training took, and what the run says about it."""

    def on_step_end(self, step: int, metrics: Mapping[str, Any], groups: Sequence[RolloutGroup]) -> None:
        super().on_step_end(step, metrics, groups)
        self.steps[-1] |= {"drafter_seconds": metrics.get("time/drafter", 0.0), "train_seconds": metrics["time/train"],
                           "drafter_tokens": metrics.get("drafter/tokens", 0), "notes": metrics.get("notes", ""),
                           "expected_tokens_per_verification": metrics.get("drafter/expected_after")}
        print(f"step {step}: {self.steps[-1]}", flush=True)


def main() -> None:
    parser = make_parser(__doc__, "gpu/new_drafter", minutes=2.0)
    parser.add_argument("--model", help="the policy: a folder")
    parser.add_argument("--prompts", type=Path, help="JSON lines with GSM8K problems")
    parser.add_argument("--steps", type=int, default=24)
    args = parser.parse_args()
    setting, budget = Setting.of(args), Budget(args.minutes)
    report = Report(args, setting.device, sides={})
    with tempfile.TemporaryDirectory() as scratch:
        model, data = args.model, args.prompts
        if setting.tiny:
            model, data, args.steps = str(Path(scratch) / "model"), Path(scratch) / "problems.jsonl", 2
            write_tiny_model(setting.policy(None)[0], Path(model))
            write_tiny_problems(data)
        for side, drafter, steps in (("off", "none", min(_OFF_STEPS, args.steps)), ("learned", "learned", args.steps)):
            config = rl_config(model, data, Path(drafter), Path(scratch) / side, setting.tiny)
            config = config.model_copy(update={"steps": 1000, "strategy": "off" if side == "off" else "auto",
                                               "drafter_budget": {"warm_up_s": 1.5} if setting.tiny else {}})
            found = run_steps(config, steps, budget, DrafterWatch)
            report.content["sides"][side] = {"steps": found}
            report.content |= {"seconds": budget.used}
            report.save()
            setting.free()
    report.content["conclusions"] = conclusions(report.content["sides"])
    report.save()
    show(report.content)


def conclusions(sides: dict[str, Any]) -> dict[str, Any]:
    """What the last third of the steps with a drafter gives, against the median of those without one, and what it cost so far.
    Tokens per second are compared, because the policy's answers become longer or shorter."""
    steps, off = sides["learned"]["steps"], sides["off"]["steps"]
    last = steps[-max(1, len(steps) // 3) :]

    def median(found: Sequence[dict[str, Any]], key: str) -> float:
        return statistics.median(step[key] for step in found)

    return {"accept_length": median(last, "accept_length"), "drafter_seconds": sum(step["drafter_seconds"] for step in steps),
            "rollout_over_off": median(last, "tokens_per_s") / median(off, "tokens_per_s"),
            "notes": [f"step {number}: {step['notes']}" for number, step in enumerate(steps, 1) if step["notes"]]}


def show(content: dict[str, Any]) -> None:
    keys = ("tokens_per_s", "accept_length", "generate_seconds", "drafter_seconds", "train_seconds", "seconds", "share_off")
    rows = [(f"{side} {number}", *(step[key] for key in keys)) for side, found in content["sides"].items()
            for number, step in enumerate(found["steps"], 1)]
    print_table("a run with a new drafter", ("step", *(key.replace("_", " ") for key in keys)), rows)
    print(content["conclusions"])


if __name__ == "__main__":
    main()
