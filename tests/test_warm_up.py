"""`paceline generate` and `train` warm their engine up before the work begins, for as many requests as there are, and show how
far that is; `serve` does so while it has no request."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from e2e import toy
from tiny import captured, model

import paceline.generation.generator
import paceline.server.run
from paceline import SamplingParams
from paceline.cli import main
from paceline.config import EngineConfig
from paceline.engine import Engine
from paceline.engine.graphs import GraphReport
from paceline.engine.thread import EngineThread
from paceline.strategy import CostCurve

NUM_PARTS = 7
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
        for done in range(1, NUM_PARTS + 1):
            on_progress(done, NUM_PARTS)
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
    shown = progress_lines(capsys.readouterr().err, "warm-up, ")
    assert shown == [f"warm-up, {done} of {NUM_PARTS}" for done in range(1, NUM_PARTS + 1)]
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


@pytest.mark.parametrize("compare_off", [False, True])
def test_train_warms_every_engine_up_for_the_answers_of_a_step(folder, calls, capsys, compare_off):
    """`compare_off` has a second engine, without speculation."""
    assert run(*toy.settings(folder, "run", steps=1, compare_off=compare_off)) == 0
    num_engines = 1 + compare_off
    assert calls == [WarmUp(3 * 4, float("inf"), 0)] * num_engines
    shown = progress_lines(capsys.readouterr().err, "warm-up, ")
    assert shown == [f"warm-up, {done} of {NUM_PARTS}" for done in range(1, NUM_PARTS + 1)] * num_engines


def test_a_warm_up_that_is_stopped_early_does_not_say_that_it_is_complete():
    engine = Engine(model(), drafter="suffix", config=EngineConfig(profile=False))
    captured(engine, (1, 2, 4, 8))
    shown: list[tuple[int, int]] = []
    engine.warm_up(seconds=0, on_progress=lambda done, total: shown.append((done, total)))
    ((done, total),) = shown
    assert done == 1 < total
    engine.warm_up(on_progress=lambda done, total: shown.append((done, total)))
    assert shown[1:] == [(done, total) for done in range(1, total + 1)]
    assert engine.graph_report().num_graphs > 3


def test_serve_answers_at_once_and_warms_up_when_it_has_no_request(folder, monkeypatch, capsys):
    """The first request arrives in the middle of a warm-up of which every part takes long."""
    begun: list[int] = []
    parts: list[int] = []
    allowed = threading.Semaphore(2)

    def warming_up(engine: Engine, max_requests: int | None = None) -> Iterator[tuple[int, int]]:
        for done in range(1, NUM_PARTS + 1):
            begun.append(done)
            assert allowed.acquire(timeout=60) and not engine.has_work
            parts.append(engine.stats().generated_tokens)
            yield done, NUM_PARTS

    def run_server(app: Any, *_: object) -> bool:
        thread = app.state.thread
        thread.start()
        until(lambda: len(begun) == 3)
        answered = asyncio.new_event_loop()
        answer = answered.create_task(thread.generate([1, 2, 3], SamplingParams(max_new_tokens=9, ignore_eos=True)))
        answered.call_later(0.1, allowed.release)  # the part that the request waits for
        assert len(answered.run_until_complete(answer).rollout.token_ids) == 9
        assert not thread.is_warm and len(parts) == 3
        for _ in range(NUM_PARTS):
            allowed.release()
        until(lambda: thread.is_warm)
        thread.close()
        return True

    monkeypatch.setattr(Engine, "warming_up", warming_up)
    monkeypatch.setattr(paceline.server.run, "run_server", run_server)
    monkeypatch.setattr("paceline.engine.thread._PROGRESS_EVERY_S", 0.0)
    assert run("serve", "--model", folder / "model", "--port", "0", *ARGS) == 0
    assert parts == [0] * 3 + [9] * (NUM_PARTS - 3)
    shown = capsys.readouterr().err
    assert progress_lines(shown, "warm-up: ") == [f"warm-up: {n + 1} of {NUM_PARTS}" for n in range(NUM_PARTS)]
    assert "the engine is warmed up" in shown


def test_a_warm_up_that_fails_leaves_a_server_that_answers(caplog):
    def warming_up() -> Iterator[tuple[int, int]]:
        yield 1, 2
        raise RuntimeError("out of memory")

    engine = Engine(model(), drafter="none", strategy="off")
    engine.warming_up = lambda: warming_up()
    thread = EngineThread(engine, warm_up=True)
    thread.start()
    until(lambda: "the warm-up failed" in caplog.text)
    answer = asyncio.run(thread.generate([1, 2, 3], SamplingParams(max_new_tokens=5, ignore_eos=True)))
    thread.close()
    assert len(answer.rollout.token_ids) == 5 and not thread.is_warm


def test_a_profile_that_fails_is_not_tried_again_and_stops_nothing(monkeypatch, caplog):
    tried: list[int] = []

    def fail(*_: object) -> CostCurve:
        tried.append(1)
        raise RuntimeError("out of memory")

    monkeypatch.setattr("paceline.engine.engine.load_or_profile", fail)
    engine = Engine(model(), drafter="suffix", strategy="auto")
    engine.warm_up()
    (group,) = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=20, ignore_eos=True))
    assert len(group.rollouts[0].token_ids) == 20 and len(tried) == 1
    assert caplog.text.count("step times could not be measured") == 1


def test_the_time_for_a_warm_up_begins_after_the_profile(monkeypatch):
    """Measured on a GPU with empty caches: kernels are compiled for most of a minute, of which nothing is captured."""
    made = Engine(model(), drafter="suffix", config=EngineConfig(profile=False))
    captured(made, (1, 2, 4, 8))
    made.warm_up(seconds=0)  # compiles what the suffix drafter needs
    shown, profiled = [], []
    clock = [0.0]
    monkeypatch.setattr("paceline.engine.engine.time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def profile() -> None:
        clock[0] += 0 if profiled else 60.0
        profiled.append(True)

    monkeypatch.setattr(made, "_profile_if_possible", profile)
    made.warm_up(seconds=1.8, on_progress=lambda done, total: shown.append((done, total)))
    assert shown[-1][0] == shown[-1][1] > 1, "all parts were done after a profile that took longer than the time for them"


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)
