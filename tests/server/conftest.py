"""Fixtures of the server for trainers. Other tests of this folder have their own of the same names."""

from __future__ import annotations

import threading

import httpx
import pytest
from rl_clients import KEY, make_engine, ok, serve, write_weights
from running import tokenizer


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return tokenizer(tmp_path_factory.mktemp("rl"))


@pytest.fixture(scope="module")
def engines(tokens):
    """Engines without speculation that say what is right, for three different weights."""
    return [make_engine(tokens, seed) for seed in range(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("weights")
    for seed in range(3):
        write_weights(found / f"step-{seed}", seed)
    return found


@pytest.fixture(scope="module")
def server(tokens, folder):
    with serve(tokens, folder) as running:
        running.http = httpx.Client(base_url=running.address, headers=KEY, timeout=300)
        yield running
        running.http.close()


@pytest.fixture
def http(server, folder):
    """A client of a server whose weights are those of seed 0."""
    yield server.http
    server.http.post("/resume")
    server.http.post("/wake_up")
    ok(server.http.post("/update_weights", json={"weight_dir": str(folder / "step-0")}))


@pytest.fixture
def slow(server):
    """Steps that take long enough to do something meanwhile."""
    step = server.engine.step
    hold = threading.Event()
    server.engine.step = lambda: (hold.wait(0.02), step())[1]
    yield server
    server.engine.step = step
