"""Servers in this process: a plain one, and one for trainers."""

from __future__ import annotations

import threading

import httpx
import pytest
import rl_clients
from rl_clients import KEY, ok, serve, write_weights
from running import RunningServer, make_engine, tokenizer


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return tokenizer(tmp_path_factory.mktemp("server"))


@pytest.fixture(scope="module")
def server(tokens):
    with RunningServer(make_engine(tokens)) as running:
        yield running


@pytest.fixture(scope="module")
def engines(tokens):
    """Engines without speculation that say what is right, for three different weights."""
    return [rl_clients.make_engine(tokens, seed) for seed in range(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("weights")
    for seed in range(3):
        write_weights(found / f"step-{seed}", seed)
    return found


@pytest.fixture(scope="module")
def rl_server(tokens, folder):
    with serve(tokens, folder) as running:
        running.http = httpx.Client(base_url=running.address, headers=KEY, timeout=300)
        yield running
        running.http.close()


@pytest.fixture
def http(rl_server, folder):
    """A client of a server whose weights are those of seed 0."""
    yield rl_server.http
    rl_server.http.post("/resume")
    rl_server.http.post("/wake_up")
    ok(rl_server.http.post("/update_weights", json={"weight_dir": str(folder / "step-0")}))


@pytest.fixture
def slow(rl_server):
    """Steps that take long enough to do something meanwhile."""
    step = rl_server.engine.step
    hold = threading.Event()
    rl_server.engine.step = lambda: (hold.wait(0.02), step())[1]
    yield rl_server
    rl_server.engine.step = step
