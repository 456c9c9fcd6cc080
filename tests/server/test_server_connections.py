"""The server with slow, many and half-open connections, and requests that never end."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median

import httpx
import openai
import pytest
from running import RunningServer, make_engine, wait_until

from paceline.server.connections import Connections

LATE_S = 2.0
"""Seconds that a process may take to end once it has been told to."""
BODY = json.dumps({"model": "tiny", "prompt": "abc", "max_tokens": 2}).encode()


@contextmanager
def connected(server: RunningServer, sent: bytes = b""):
    with socket.create_connection(("127.0.0.1", int(server.address.rsplit(":", 1)[1])), timeout=60) as found:
        found.sendall(sent)
        yield found


def received(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    found = b""
    while part := connection.recv(1 << 16):
        found += part
    return found


def head(*lines: str, end: str = "\r\n") -> bytes:
    return end.join(["POST /v1/completions HTTP/1.1", "Host: x", *lines, "", ""]).encode()


LENGTH = f"Content-Length: {len(BODY)}"
CHUNKS = b"%x\r\n%s\r\n0\r\n" % (len(BODY), BODY)


def test_requests_that_proxies_may_read_differently_are_refused(server):
    for sent in (head(LENGTH, "Transfer-Encoding: chunked") + CHUNKS + b"\r\n", head(LENGTH, end="\n") + BODY,
                 head("Transfer-Encoding: chunked") + CHUNKS + b"X: y\n\r\n", head("Transfer-Encoding: chunked") + CHUNKS + b"\n",
                 head("A: b\nC: d", LENGTH) + BODY, head(LENGTH, "Content-Length: 3") + BODY,
                 head("Transfer-Encoding: chunked, identity") + CHUNKS + b"\r\n", head("Transfer-Encoding : chunked") + CHUNKS,
                 b"HEAD / HTTP/1.1\nHost: x\n\n", b"\n\n", b"\x16\x03\x01"):
        with connected(server, sent) as connection:
            assert received(connection).startswith(b"HTTP/1.1 400 "), sent
    chunked = head("Transfer-Encoding: chunked", "Connection: close") + CHUNKS
    for sent in (head(LENGTH, "Connection: close") + BODY, chunked + b"\r\n", head(LENGTH) + BODY + chunked + b"X: y\r\n\r\n"):
        with connected(server, sent) as connection:
            assert received(connection).count(b"HTTP/1.1 200 OK") == sent.count(b"POST")


def test_half_requests_and_idle_connections_end(tokens):
    limits = {"head_timeout_s": 0.3, "body_timeout_s": 0.3, "idle_timeout_s": 0.3}
    with RunningServer(make_engine(tokens), **limits) as server:
        for sent, wanted in ((b"", b""), (head(LENGTH)[:-2], b"HTTP/1.1 408 "), (head(LENGTH) + BODY[:5], b"HTTP/1.1 408 "),
                             (head(LENGTH) + BODY, b"HTTP/1.1 200 "), (head(LENGTH) + BODY + b"POST", b"HTTP/1.1 200 ")):
            with connected(server, sent) as connection:
                found = received(connection)
                assert found.startswith(wanted) and bool(found) == bool(wanted), sent
        with connected(server) as connection, suppress(OSError):  # one byte at a time does not help
            while connection.send(b"a"):
                time.sleep(0.02)
        assert server.client.completions.create(model="tiny", prompt="abc").choices
        wait_until(lambda: server.is_idle)


def test_the_longest_idle_connections_make_room(tokens, monkeypatch):
    with ExitStack() as stack:
        server = stack.enter_context(RunningServer(make_engine(tokens), max_idle_connections=5))
        first = stack.enter_context(connected(server))
        connections = server.server.server_state.connections
        wait_until(lambda: len(connections) == 1)
        monkeypatch.setattr("paceline.server.connections._MIN_IDLE_S", 0.0)
        for _ in range(20):
            stack.enter_context(connected(server))
        assert received(first) == b""
        wait_until(lambda: len(connections) <= 6)
        assert httpx.get(f"{server.address}/health").status_code == 200


def test_there_are_not_more_connections_than_allowed(tokens):
    with RunningServer(make_engine(tokens), max_connections=3) as server, ExitStack() as stack:
        busy = [stack.enter_context(connected(server, head(LENGTH) + BODY[:5])) for _ in range(3)]
        wait_until(lambda: len(server.server.server_state.connections) == 3)
        assert httpx.get(f"{server.address}/health").status_code == 503
        for connection in busy:
            connection.sendall(BODY[5:])
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
            connection.close()
        wait_until(lambda: len(server.server.server_state.connections) == 0)
        assert httpx.get(f"{server.address}/health").status_code == 200


def test_a_client_that_reads_nothing_is_let_go(tokens):
    body = json.dumps({"model": "tiny", "prompt": ["abc"] * 100, "max_tokens": 250, "stream": True, "logprobs": 1,
                       "ignore_eos": True}).encode()
    with RunningServer(make_engine(tokens), send_timeout_s=0.3) as server, \
            socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", int(server.address.rsplit(":", 1)[1])))
        connection.sendall(head(f"Content-Length: {len(body)}") + body)
        wait_until(lambda: server.thread.num_pending)
        wait_until(lambda: server.is_idle and not server.server.server_state.connections)


def test_clients_that_leave_cause_no_traceback(tokens, caplog):
    asked = json.dumps({"model": "tiny", "prompt": "abc", "max_tokens": 100, "ignore_eos": True, "stream": True}).encode()
    whole = asked.replace(b"true}", b"false}")
    with caplog.at_level(logging.INFO), RunningServer(make_engine(tokens), step_s=0.01) as server:
        for body in (asked, whole):
            sent = head(f"Content-Length: {len(body)}") + body
            for length in (3, 40, len(sent) - 5, len(sent)):
                for reset in (False, True):
                    with connected(server, sent[:length]) as connection:
                        if reset:  # the connection is reset, not closed
                            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                        if length == len(sent):
                            wait_until(lambda: server.thread.num_pending)
                    wait_until(lambda: server.is_idle)
        wait_until(lambda: not server.server.server_state.connections)
        text = httpx.get(f"{server.address}/metrics").text
    assert 'status="499"' in text
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


def test_many_large_bodies_at_once_are_refused(tokens, monkeypatch):
    monkeypatch.setattr("paceline.server.app._MAX_BODIES", 2)
    part = head("Content-Length: 1000") + b" " * 900
    with RunningServer(make_engine(tokens), max_body_bytes=1000) as server, ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(connected(server, part))
        wait_until(lambda: server.server._app.state.server._num_body_bytes == 1800)
        with connected(server, part) as connection:
            assert connection.recv(1000).startswith(b"HTTP/1.1 503 ")
        stack.close()
        wait_until(lambda: server.server._app.state.server._num_body_bytes == 0)
        assert server.client.completions.create(model="tiny", prompt="abc").choices


def test_the_system_may_allow_fewer_connections(monkeypatch):
    from paceline.server import run

    limits = [(1024, 1024)]
    monkeypatch.setattr(run.resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(run.resource, "setrlimit", lambda _, new: limits.append(new))
    assert run._max_connections(500) == 500 and run._max_connections(5000) == 768
    limits[:] = [(1024, 4096)]
    assert run._max_connections(2000) == 2000 and limits[-1] == (2256, 4096)


# -- shutdown


def test_requests_that_do_not_finish_in_time_end_with_an_error(tokens, caplog):
    with RunningServer(make_engine(tokens, "off"), step_s=0.1, shutdown_s=1.2) as server:
        asked = {"model": "tiny", "prompt": "abc", "max_tokens": 200, "extra_body": {"ignore_eos": True}}
        stream = iter(server.client.completions.create(**asked, stream=True))
        next(stream)
        errors = []

        def ask() -> None:
            try:
                server.client.completions.create(**asked)
            except openai.APIError as error:
                errors.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        with connected(server, head(LENGTH) + BODY[:5]) as half:
            wait_until(lambda: server.thread.num_pending == 2)
            stopping = threading.Thread(target=server.stop)
            stopping.start()
            with pytest.raises(openai.APIError, match="the server is shutting down"):
                list(stream)
            asking.join(60)
            assert errors[0].status_code == 503 and "shutting down" in errors[0].message
            assert received(half).startswith(b"HTTP/1.1 503 ")
            stopping.join(60)
    assert not [record for record in caplog.records if record.exc_info]
    assert isinstance(server.server.config.http_protocol_class.keywords["limits"], Connections)


STUCK = """
import sys, time
from pathlib import Path
from running import make_engine, tokenizer
from paceline.server import ServerConfig, create_app
from paceline.server.run import run_server

engine = make_engine(tokenizer(Path(sys.argv[1])))
engine.step = lambda: time.sleep(1000)
app = create_app(engine, ServerConfig(model_name="tiny", warm_up=False, shutdown_s=float(sys.argv[2])))
run_server(app, "127.0.0.1", 0, lambda address: print(address, flush=True))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("shutdown_s", "num_signals", "seconds"), [(3, 1, 3), (1000, 2, 2.5)])
def test_the_process_ends_in_time_whatever_the_engine_does(tmp_path, shutdown_s, num_signals, seconds):
    """A second signal, here half a second after the first, leaves it two seconds."""
    tests = Path(__file__).resolve().parent.parent
    path = os.pathsep.join(map(str, (tests.parent, tests, tests / "server")))
    with subprocess.Popen([sys.executable, "-c", STUCK, str(tmp_path), str(shutdown_s)], stdout=subprocess.PIPE, text=True,
                          stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}) as process:
        try:
            address = process.stdout.readline().strip()
            with httpx.stream("POST", f"{address}/completions", timeout=60,
                              json={"model": "tiny", "prompt": "abc", "stream": True}) as response:
                began = time.monotonic()
                for number in range(num_signals):
                    time.sleep(0.5 if number else 0.0)
                    process.send_signal(signal.SIGTERM)
                if num_signals == 1:
                    assert "the server is shutting down" in response.read().decode()
                process.wait(60)
                assert time.monotonic() - began < seconds + LATE_S
                assert "Traceback" not in process.stderr.read()
        except httpx.RemoteProtocolError:
            assert num_signals == 2, "the stream ended without an error event"
        finally:
            process.kill()


# -- thousands of connections


@contextmanager
def open_files(num: int):
    """This process may have so many files open. The test is skipped where the system does not allow it."""
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < num:
        pytest.skip(f"the system allows {hard} open files, and {num} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (num if soft == resource.RLIM_INFINITY else max(num, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.slow
@pytest.mark.parametrize("limits", [{}, {"max_connections": 4000, "max_idle_connections": 4000, "head_timeout_s": 600}],
                         ids=["default", "all are kept"])
def test_thousands_of_idle_connections_delay_nobody(tokens, limits):
    with open_files(10_000), RunningServer(make_engine(tokens), **limits) as server, ExitStack() as stack:
        for _ in range(3000):
            stack.enter_context(connected(server))
        connections = server.server.server_state.connections
        wait_until(lambda: len(connections) >= 3000 if limits else len(connections) <= server.config.max_connections)
        time.sleep(1)  # connections that have been idle for less are not closed in favour of new ones
        delays = []
        for _ in range(30):
            began = time.monotonic()
            answer = httpx.get(f"{server.address}/health", headers={"Connection": "close"}, timeout=60)
            delays.append(time.monotonic() - began)
            assert answer.status_code == 200
        assert max(delays) < 1.5 and median(delays) < 0.3, delays
        assert server.client.completions.create(model="tiny", prompt="abc").choices
