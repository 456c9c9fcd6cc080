"""`paceline generate`, `serve` and `train` warm their engine up before the work begins, for as many requests as there are, and
show how far that is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from e2e import toy
from tiny import captured

import paceline.generation.generator
import paceline.server.run
from paceline.cli import main
from paceline.engine import Engine
from paceline.engine.graphs import GraphReport

NUM_GRAPHS = 7
ARGS = ["--dtype", "float64", "--strategy", "off", "--threads", "1", "--max-batch", "8"]


class WarmUp(NamedTuple):
    """The arguments of a call, and how many steps the engine had made before."""

    max_requests: int | None
    seconds: float
    steps_before: int


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    toy.make_folder(tmp_path)
    return tmp_path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[WarmUp]:
    """Calls of `Engine.warm_up`, which only reports progress."""
    found: list[WarmUp] = []

    def warm_up(engine: Engine, max_requests: int | None = None, seconds: float = float("inf"),
                on_progress: Callable[[int, int], None] = lambda done, total: None) -> GraphReport:
        found.append(WarmUp(max_requests, seconds, engine.stats().steps))
        for done in range(1, NUM_GRAPHS + 1):
            on_progress(done, NUM_GRAPHS)
        return engine.graph_report()

    monkeypatch.setattr(Engine, "warm_up", warm_up)
    monkeypatch.setattr("paceline.cli.progress._LINE_EVERY_S", 0.0)  # lines of progress are shown without a pause
    monkeypatch.setattr("paceline.cli.train._LINE_EVERY_S", 0.0)
    return found


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of `paceline generate` capture their steps, as they do on a GPU."""
    load = paceline.generation.generator.load_engine

    def load_captured(options: Any) -> Engine:
        engine = load(options)
        captured(engine, (1, 2, 4, 8))
        return engine

    monkeypatch.setattr(paceline.generation.generator, "load_engine", load_captured)


def run(*args: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(arg) for arg in args])
    return int(ended.value.code or 0)


def generate(folder: Path, *more: str | Path) -> int:
    return run("generate", "--model", folder / "model", "--out", folder / "out.jsonl", "--n", "3", "--max-new-tokens", "20",
               *ARGS, *more)


def progress_lines(text: str, start: str) -> list[str]:
    return [line[line.index(start):] for line in text.splitlines() if start in line]


@pytest.mark.usefixtures("on_gpu")
def test_generate_warms_up_for_the_rollouts_of_the_file(folder, calls, capsys):
    assert generate(folder, "--prompts", folder / "prompts.jsonl") == 0
    (call,) = calls
    assert call.max_requests == 6 * 3 and call.steps_before == 0
    assert call.seconds == pytest.approx(0.05 * 6 * 3 * 20 / 10_000)  # 5 % of the time at 10 000 tokens/s
    shown = progress_lines(capsys.readouterr().err, "capturing CUDA graphs")
    assert shown == [f"capturing CUDA graphs, {done} of {NUM_GRAPHS}" for done in range(1, NUM_GRAPHS + 1)]
    assert len((folder / "out.jsonl").read_text().splitlines()) == 18


@pytest.mark.usefixtures("on_gpu")
def test_generate_does_not_warm_up_for_an_unknown_number_of_prompts(folder, calls, monkeypatch):
    with (folder / "prompts.jsonl").open() as lines:
        monkeypatch.setattr("sys.stdin", lines)
        assert generate(folder, "--prompts", "-") == 0
    assert not calls and len((folder / "out.jsonl").read_text().splitlines()) == 18


def test_generate_does_not_warm_up_where_nothing_is_captured(folder, calls):
    assert generate(folder, "--prompts", folder / "prompts.jsonl", "--device", "cpu") == 0
    assert not calls


def test_serve_warms_up_for_a_full_batch_before_it_listens(folder, calls, monkeypatch, capsys):
    num_calls = []

    def run_server(*_: object) -> bool:
        num_calls.append(len(calls))
        return True

    monkeypatch.setattr(paceline.server.run, "run_server", run_server)
    assert run("serve", "--model", folder / "model", "--port", "0", *ARGS) == 0
    assert num_calls == [1] and calls == [WarmUp(None, float("inf"), 0)]  # None: the engine's largest batch
    shown = progress_lines(capsys.readouterr().err, "warm-up: ")
    assert shown == ["warm-up: measuring what steps cost",
                     *(f"warm-up: CUDA graph {done} of {NUM_GRAPHS}" for done in range(1, NUM_GRAPHS + 1))]


@pytest.mark.parametrize("compare_off", [False, True])
def test_train_warms_every_engine_up_for_the_answers_of_a_step(folder, calls, capsys, compare_off):
    """`compare_off` has a second engine, without speculation."""
    assert run(*toy.settings(folder, "run", steps=1, compare_off=compare_off)) == 0
    num_engines = 1 + compare_off
    assert calls == [WarmUp(3 * 4, float("inf"), 0)] * num_engines
    shown = progress_lines(capsys.readouterr().err, "capturing CUDA graphs")
    assert shown == [f"capturing CUDA graphs, {done} of {NUM_GRAPHS}" for done in range(1, NUM_GRAPHS + 1)] * num_engines
