"""The protocol with the process of vLLM, tested with a stand-in: one client after the other, and none waits for ever."""

from __future__ import annotations

import json

import pytest

from benchmarks.lib.vllm_gpu import Vllm


def test_scripts_take_turns_at_one_peer(vllm_site, tmp_path):
    peer = Vllm.start(vllm_site, "0.5B", tmp_path / "peers")
    try:
        assert peer.wait(60)["version"] == "0"
        other = Vllm(tmp_path / "peers/0.5B", None)
        assert "error" in other.wait(0.3)  # it serves one at a time
        other.hang_up()
        assert peer.seconds([[1, 2]], [3]) >= 0
        peer.hang_up()
        assert other.wait(60)["version"] == "0" and other.seconds([[1]], [2]) >= 0
        other.close()
        assert peer.is_alive
    finally:
        peer.close()
    assert not peer.is_alive


def test_a_rollout_is_measured_and_a_peer_that_ends_is_an_error(vllm_site, tmp_path):
    peer = Vllm.start(vllm_site, "0.5B", tmp_path / "peers")
    try:
        assert peer.wait(60)["version"] == "0"
        peer.hang_up()
        client = Vllm(tmp_path / "peers/0.5B", None)
        assert client.measure([[1]], [2], [[1]], [1], timeout=60)["seconds"][0] >= 0
        assert "error" in client.measure([[1]], ["no number"], [[1]], [1], timeout=60), "the peer has ended on the way"
    finally:
        peer.close()
    assert "not there" in client.measure([[1]], [2], [[1]], [1], timeout=0.3)["error"]


@pytest.mark.slow
def test_a_job_may_limit_the_batch(vllm_site, tmp_path):
    peer = Vllm.start(vllm_site, "0.5B", tmp_path / "peers", max_batch=8)
    try:
        assert peer.wait(60)["version"] == "0"
        five = [[1]] * 5
        few, all_at_once, more = (peer.seconds(five, [3] * 5, max_batch=most) for most in (1, None, 99))
        assert few > 2 * all_at_once and few > 2 * more, "the stand-in takes 10 ms per step, and 15 steps one by one"
    finally:
        peer.close()


def test_a_long_context_is_the_models_own(vllm_site, tmp_path):
    peer = Vllm.start(vllm_site, "0.5B", tmp_path / "peers", max_context=12288)
    try:
        assert json.loads((tmp_path / "peers/0.5B-model/config.json").read_text())["max_position_embeddings"] == 12288
    finally:
        peer.close()


def test_a_peer_that_cannot_start_says_why(tmp_path):
    (tmp_path / "site/vllm").mkdir(parents=True)
    (tmp_path / "site/vllm/__init__.py").write_text("raise RuntimeError('no such card')")
    peer = Vllm.start(tmp_path / "site", "0.5B", tmp_path / "peers")
    assert "no such card" in peer.wait(60)["error"]
