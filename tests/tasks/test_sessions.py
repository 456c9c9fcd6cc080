"""Environments with a state: sessions are kept where they are, opened again where they are not, and closed."""

from __future__ import annotations

import pickle

import pytest
from tasks.talkers import Counting, Forgetful

from paceline.tasks import RewardPool, Transcript
from paceline.tasks.environment import is_environment


@pytest.fixture(autouse=True)
def _count():
    Counting.num_opened = Counting.num_closed = 0


def play(environment, turns: list[str], reply=None) -> Transcript:
    """An episode with these turns. `reply`: who answers them."""
    problem = environment[3]
    messages = environment.reset(problem)
    for turn in turns:
        messages = [*messages, {"role": "assistant", "content": turn}]
        found = (reply or environment.reply)(Transcript(problem, messages))
        if found is None:
            return Transcript(problem, messages, "environment")
        messages = [*messages, *found]
    return Transcript(problem, messages, "turns")


def test_a_session_goes_on_where_it_is():
    environment = Counting()
    assert is_environment(environment)
    transcript = play(environment, ["2", "5", "stop"])
    assert [message["content"] for message in transcript.messages[::2]] == ["begin at 3", "5", "10"]
    assert environment.reward(transcript) == [2.0, 5.0, 0.0]
    assert Counting.num_opened == 1 and Counting.num_closed == 1 and not environment._live


def test_any_process_can_go_on_with_any_episode():
    """Each reply comes from an environment that has never heard of the episode."""
    other = lambda transcript: pickle.loads(pickle.dumps(Counting())).reply(transcript)  # noqa: E731
    transcript = play(Counting(), ["2", "5", "stop"], other)
    assert [message["content"] for message in transcript.messages[::2]] == ["begin at 3", "5", "10"]
    assert Counting.num_opened == 4 and Counting().reward(transcript) == [2.0, 5.0, 0.0]


def test_the_answers_of_a_group_have_sessions_of_their_own():
    environment = Counting()
    problem = environment[1]
    opening = environment.reset(problem)
    said = [Transcript(problem, [*opening, {"role": "assistant", "content": text}]) for text in ("1", "2", "1")]
    assert [environment.reply(transcript)[0]["content"] for transcript in said] == ["2", "3", "2"]


def test_a_limit_ends_a_session():
    environment = Counting()
    problem = environment[0]
    messages = [*environment.reset(problem), {"role": "assistant", "content": "4"}]
    assert environment.reward(Transcript(problem, messages, "turns")) == [4.0], "the last turn was told to it first"


def test_an_environment_that_says_something_else_is_told_apart():
    environment = Forgetful()
    messages = [*environment.reset(environment[0]), {"role": "assistant", "content": "1"}]
    with pytest.raises(ValueError, match=r"has said something else than before.*set reward\.workers = 1"):
        Forgetful().reply(Transcript(environment[0], messages))


def test_rewards_of_turns_in_workers():
    with RewardPool(Counting(), 2, 20.0) as pool:
        transcript = play(Counting(), ["2", "stop"])
        found = pool.collect([pool.submit_episode(transcript)])[0]
        assert (found.value, found.turns, found.error) == (2.0, [2.0, 0.0], None)
