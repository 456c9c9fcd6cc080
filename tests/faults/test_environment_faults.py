"""Environments that are killed, hang or raise in the middle of an episode: that episode is repeated or ends with an error, the
others go on."""

from __future__ import annotations

import pytest
import tiny
from e2e.toy import make_folder
from tasks.talkers import Mortal
from trainer.test_episodes import TEMPLATE
from transformers import PreTrainedTokenizerFast

from paceline import Engine
from paceline.config import RolloutConfig
from paceline.rl.loop import PhaseTimer
from paceline.tasks import RewardPool
from paceline.trainer.episodes import make_collector
from paceline.trainer.rollouts import PromptStream


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_folder(folder)
    found = PreTrainedTokenizerFast.from_pretrained(folder / "model")
    found.chat_template = TEMPLATE
    return found


def collect(tokens, environment: Mortal, retries: int, timeout_s: float = 30.0) -> tuple[list, RewardPool]:
    engine, config = Engine(tiny.model(), tokens, "none", "off"), RolloutConfig(
        group_size=3, max_new_tokens=90, max_turn_tokens=7, max_turns=5)
    with RewardPool(environment, 2, timeout_s, retries=retries) as pool:
        collector = make_collector(engine, None, PromptStream(environment, 0, None, shuffle=False), pool, config, 3,
                                   lambda *_: None)
        collector.begin_step()
        groups = collector(0, 4, PhaseTimer())
    assert engine.stats().free_pages == engine.stats().total_pages and not engine.planner.requests
    return [rollout for group in groups for rollout in group.rollouts], pool


def told(rollouts: list) -> list:
    return [(r.token_ids, r.loss_mask, r.reward, r.episode.messages, r.episode.error) for r in rollouts]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "hang", "raise"])
def test_an_environment_that_fails_once_is_asked_again(tokens, tmp_path, how):
    expected, _ = collect(tokens, Mortal("echo-1", "", ""), 0)
    found, pool = collect(tokens, Mortal("echo-1", how, str(tmp_path / "failed")), 1, timeout_s=10.0 if how == "hang" else 30.0)
    assert told(found) == told(expected) and (tmp_path / "failed").exists()
    assert (pool.num_errors, pool.num_timeouts, pool.num_crashes) == (0, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "says"), [("kill", "ended with code -9"), ("raise", "RuntimeError: broken")])
def test_an_environment_that_fails_always_costs_its_episodes(tokens, how, says):
    expected, _ = collect(tokens, Mortal("echo-1", "", ""), 0)
    found, _ = collect(tokens, Mortal("echo-1", how, ""), 1)
    failed = [rollout for rollout in found if rollout.episode.error is not None]
    assert 0 < len(failed) <= 3 and all(rollout.reward is None and says in rollout.episode.error for rollout in failed)
    left = [i for i, rollout in enumerate(found) if rollout not in failed]
    assert told([found[i] for i in left]) == told([expected[i] for i in left])
