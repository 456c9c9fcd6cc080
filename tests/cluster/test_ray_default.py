"""The command that docs/cluster.md begins with, as a new user types it: the default configuration on two workers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
STEPS = 6
LEARNS = ("drafter_budget.trial_share=1.0", "strategy=eagle:d4w2v6")
"""A drafter that is new has little to gain in a few steps, so it is trained and used whatever it gains."""
PATIENCE_S = 1800.0
"""Longest time for a run, which takes a minute on two cores, on a machine that does ten other things."""


def train(out: Path, *settings: str) -> str:
    """Runs the command as a shell would, and returns what it prints on stdout and stderr."""
    words = [word for setting in (f"out={out}", f"steps={STEPS}", *settings) for word in ("--set", setting)]
    done = subprocess.run([sys.executable, "-m", "paceline.cli", "train", "--no-page", *words], cwd=out.parent, text=True,
                          capture_output=True, timeout=PATIENCE_S, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def lines(folder: Path, pattern: str) -> list[dict[str, Any]]:
    return [json.loads(line) for file in sorted(folder.glob(pattern)) for line in file.read_text().splitlines()]


def rollouts(folder: Path) -> list[tuple[Any, ...]]:
    return [(line["step"], line["id"], line["sample"], line["token_ids"], line["reward"]) for line in lines(folder, "rollouts-*")]


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory) -> list[tuple[Any, ...]]:
    """The rollouts of a run without workers, which no drafter changes."""
    out = tmp_path_factory.mktemp("one") / "run"
    train(out, "compare_off=false", "evaluation.every=0")
    return rollouts(out)


@pytest.mark.parametrize("settings", [(), ("drafter=learned",), ("drafter=learned", *LEARNS)],
                         ids=["default", "a new drafter", "a new drafter that is used"])
def test_two_workers_with_the_default_configuration(tmp_path, one_worker, settings):
    """Rollouts are those of one worker. The report has a row for each of the two, the metrics have their idle and training time,
    and the accept length of the learned drafter is printed, or why it did not draft."""
    out = tmp_path / "two"
    printed = train(out, "cluster.workers=2", *settings)
    assert rollouts(out) == one_worker
    metrics = lines(out, "metrics.jsonl")
    for line in metrics:
        assert 0 <= line["cluster/idle"] <= 1 and 0 <= line["cluster/training"] <= 1
    assert sum(line["compare/rollouts"] for line in metrics) == len(one_worker), "it compares with generation without speculation"
    report = (out / "report.html").read_text()
    assert "What each worker did" in report and "worker 0" in report and "worker 1" in report
    (*_, last) = sorted((out / "checkpoints").iterdir())
    assert (last / "drafter" / "config.json").is_file()
    found = json.loads((out / "summary.json").read_text()).get("drafter_accept_length")
    if settings[1:]:
        assert found is not None and any(line.get("drafter/steps") for line in metrics), "it was trained, and drafted"
    if found is None:
        assert "The learned drafter did not draft: " in printed
    else:
        assert found >= 1 and re.search(r"drafter_accept_length +[1-9]", printed) and "did not draft" not in printed
