"""The protocol with the process of vLLM, tested with a stand-in: one client after the other, and none waits for ever."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.lib.vllm_gpu import Vllm

STAND_IN = '''
class SamplingParams:
    def __init__(self, max_tokens, **options):
        self.max_tokens = max_tokens


class LLM:
    def __init__(self, **options):
        pass

    def generate(self, prompts, params, use_tqdm):
        return [type("Out", (), {"outputs": [type("One", (), {"token_ids": [0] * p.max_tokens})]}) for p in params]


__version__ = "0"
'''


@pytest.fixture
def site(tmp_path) -> Path:
    (tmp_path / "site/vllm").mkdir(parents=True)
    (tmp_path / "site/vllm/__init__.py").write_text(STAND_IN)
    return tmp_path / "site"


def test_scripts_take_turns_at_one_peer(site, tmp_path):
    peer = Vllm.start(site, "0.5B", tmp_path / "peers")
    try:
        assert peer.wait(60)["version"] == "0"
        other = Vllm(tmp_path / "peers/0.5B", None)
        assert "error" in other.wait(0.3)  # it serves one at a time
        other.hang_up()
        assert peer.seconds([[1, 2]], [3]) >= 0
        peer.hang_up()
        assert other.wait(20)["version"] == "0" and other.seconds([[1]], [2]) >= 0
        other.close()
        assert peer.is_alive
    finally:
        peer.close()
    assert not peer.is_alive


def test_a_rollout_is_measured_and_a_peer_that_ends_is_an_error(site, tmp_path):
    peer = Vllm.start(site, "0.5B", tmp_path / "peers")
    try:
        assert peer.wait(60)["version"] == "0"
        peer.hang_up()
        client = Vllm(tmp_path / "peers/0.5B", None)
        assert client.measure([[1]], [2], [[1]], [1], timeout=20)["seconds"][0] >= 0
        assert "error" in client.measure([[1]], ["no number"], [[1]], [1], timeout=20), "the peer has ended on the way"
    finally:
        peer.close()
    assert "not there" in client.measure([[1]], [2], [[1]], [1], timeout=0.3)["error"]


def test_a_long_context_is_the_models_own(site, tmp_path):
    peer = Vllm.start(site, "0.5B", tmp_path / "peers", max_context=12288)
    try:
        assert json.loads((tmp_path / "peers/0.5B-model/config.json").read_text())["max_position_embeddings"] == 12288
    finally:
        peer.close()


def test_a_peer_that_cannot_start_says_why(tmp_path):
    (tmp_path / "site/vllm").mkdir(parents=True)
    (tmp_path / "site/vllm/__init__.py").write_text("raise RuntimeError('no such card')")
    peer = Vllm.start(tmp_path / "site", "0.5B", tmp_path / "peers")
    assert "no such card" in peer.wait(60)["error"]
