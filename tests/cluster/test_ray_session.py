"""What a run says of a Ray that is not there, and of workers that have something to say: one line each."""

from __future__ import annotations

import logging
import socket
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("ray")

from ray.exceptions import ActorDiedError, NodeDiedError, OutOfMemoryError, RayTaskError, WorkerCrashedError

from paceline.cluster.learning import WorkerDied
from paceline.cluster.ray_actor import CannotStart, WarningList
from paceline.cluster.ray_runtime import RayRuntime, _Calls, _cannot_start, _reason
from paceline.cluster.ray_session import RaySession
from paceline.cluster.reports import Lost
from paceline.trainer.device import cluster_address
from paceline.types import WorkersLost


@pytest.fixture
def listener():
    """A port on which connections are accepted; what happens to them is up to the test."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server, f"127.0.0.1:{server.getsockname()[1]}"


def test_an_address_that_nobody_answers(listener, monkeypatch):
    monkeypatch.setattr("paceline.trainer.device._ANSWER_S", 0.3)
    _, address = listener
    began = time.monotonic()
    with pytest.raises(ValueError, match=rf"^there is no Ray cluster at {address} \((timed out|no answer within 0 s)\)$"):
        cluster_address(address)
    assert time.monotonic() - began < 10


def test_the_time_for_an_answer_is_short_enough():
    from paceline.trainer import device

    assert device._CONNECT_S < device._ANSWER_S < 20


@pytest.mark.parametrize(("greeting", "why"), [
    (b"SSH-2.0-OpenSSH_9.6\r\n", "what answers there is not Ray"), (b"", "what answers there is not Ray"),
    (bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)), None)], ids=["another service", "closed", "gRPC"])
def test_what_answers_at_an_address(listener, greeting, why):
    server, address = listener

    def answer() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(100)
            connection.sendall(greeting)

    threading.Thread(target=answer, daemon=True).start()
    if why is None:
        assert cluster_address(address) == address
    else:
        with pytest.raises(ValueError, match=why):
            cluster_address(address)


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:1", "127.0.0.1:99999999", ":6379", "no.such.host.invalid:6379"])
def test_an_address_of_nobody(address):
    with pytest.raises(ValueError, match=rf"^there is no Ray cluster at {address} \(.+\)$"):
        cluster_address(address)


def test_a_ray_that_starts_too_slowly_is_started_again(monkeypatch):
    """Ray gives its own processes half a minute, which is not enough on a machine that is very busy. Nothing stays of them."""
    late, folders = "The current node timed out during startup. This could happen because", []

    def init(**options):
        folders.append(Path(options["_temp_dir"]))
        assert folders[-1].is_dir()
        (folders[-1] / "session").mkdir()
        raise RuntimeError("no ports" if len(folders) == 5 else late)

    monkeypatch.setattr("paceline.cluster.ray_session.ray.init", init)
    with pytest.raises(WorkersLost, match=r"^Ray cannot be started or joined: The current node timed out"):
        RaySession()
    assert len(folders) == 3
    with pytest.raises(WorkersLost, match=r"^Ray cannot be started or joined: no ports$"):
        RaySession()
    assert len(set(folders)) == 5 and not any(folder.exists() for folder in folders)


def test_workers_warnings_are_single_lines_without_colours():
    found, logger = WarningList(), logging.getLogger("paceline.somewhere")
    logger.addHandler(found)
    try:
        logger.warning("first \x1b[31mred\x1b[0m line\nsecond line %s", 5)
        logger.info("not this")
        for number in range(1000):
            logger.warning("again %d", number)
    finally:
        logger.removeHandler(found)
    lines = found.take()
    assert lines[0] == "first red line second line 5" and len(lines) == 20 and found.take() == []


def task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("report", "\x1b[36mray::report()\x1b[39m (pid=1)\nTraceback (most recent call last):\n  File\n", cause)


def test_why_a_worker_is_lost():
    assert _reason(task_error(RuntimeError("two\nlines \x1b[1mbold\x1b[0m"))) == "two lines bold"
    assert _reason(task_error(KeyError())) == "KeyError"


@pytest.mark.parametrize("error", [OutOfMemoryError("low on memory.\nMemory on the node"), WorkerCrashedError(), ActorDiedError(),
                                   NodeDiedError("gone")], ids=lambda error: type(error).__name__)
def test_a_worker_is_lost_whatever_has_killed_its_process(monkeypatch, error):
    """Ray's own monitor, for example, kills workers where others have taken the machine's memory."""
    killed = []

    def get(reference):
        raise error

    monkeypatch.setattr("paceline.cluster.ray_runtime.ray.get", get)
    monkeypatch.setattr("paceline.cluster.ray_runtime.ray.kill", killed.append)
    runtime = RayRuntime.__new__(RayRuntime)
    runtime._reports, runtime._failed_starts, runtime._actors = {"asked": (1, 0.0)}, {1: 1}, {1: "actor"}
    lost = runtime._result("asked")
    assert isinstance(lost, Lost) and lost.worker == 1 and lost.reason == _reason(error) and "\n" not in lost.reason
    assert killed == ["actor"] and not runtime._reports
    with pytest.raises(WorkerDied, match="worker 1 has died"):
        _Calls({1: ("actor", ["first", "second"])}).results()
    runtime._reports, runtime._failed_starts = {"asked": (1, 0.0)}, {1: 3}
    with pytest.raises(WorkersLost, match="worker 1 cannot be started, it has died 3 times"):
        runtime._result("asked")


def test_a_defect_in_a_worker_has_a_traceback_without_colours():
    found = _cannot_start(3, task_error(RuntimeError("why")))
    assert "worker 3 cannot be started" in str(found) and "\x1b" not in str(found) and "File" in str(found)
    assert not isinstance(found, WorkersLost) and issubclass(CannotStart, ValueError)
