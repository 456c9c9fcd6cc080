"""The request pool: rollouts come back with their owners, requests may be added meanwhile, and none is left behind."""

from __future__ import annotations

import pytest
import tiny

from paceline import Engine
from paceline.config import EngineConfig
from paceline.engine.pool import RequestPool
from paceline.types import SamplingParams

SIX = SamplingParams(max_new_tokens=6, ignore_eos=True)


@pytest.fixture
def engine() -> Engine:
    return Engine(tiny.model(), None, None, "off", EngineConfig(kernels="torch", max_batch=4))


def test_every_rollout_comes_with_its_owner_and_a_consumer_may_add_more_meanwhile(engine):
    waiting, found = [[3, 4], [5, 6], [7, 8]], {}
    with RequestPool[str](engine) as requests:
        requests.add([1, 2], SIX, ["first", "second"], seeds=[7, 8])
        for _, finished, _ in requests.steps():
            found |= dict(finished)
            if finished and waiting:
                requests.add(waiting.pop(0), SIX, [f"later {len(waiting)}"])
    assert found.keys() == {"first", "second", "later 0", "later 1", "later 2"} and not engine.has_work
    (group,) = engine.generate([[3, 4]], SIX)
    assert found["later 2"].token_ids == group.rollouts[0].token_ids
    assert (found["first"].seed, found["second"].seed) == (7, 8) and found["second"].sample == 1


def test_an_exception_of_the_consumer_ends_what_is_left(engine):
    requests = RequestPool[None](engine)

    def consume() -> None:
        with requests:
            requests.add([1, 2], SIX, [None] * 9)
            for _ in requests.steps():
                raise KeyError

    with pytest.raises(KeyError):
        consume()
    assert not requests and not engine.scheduler.has_work and engine.scheduler.pages.num_held == 0


def test_a_step_that_raises_ends_its_requests_in_the_next_one(engine, monkeypatch):
    with RequestPool[int](engine) as requests:
        requests.add([1, 2], SIX, list(range(6)))
        requests.step()
        monkeypatch.setattr(engine.model, "forward", lambda *args, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            requests.step()
        monkeypatch.undo()
        assert len(requests) == 6
        found = {owner: rollout for _, finished, _ in requests.steps() for owner, rollout in finished}
    assert sorted(rollout.finish_reason for rollout in found.values()) == ["error"] * 4 + ["length"] * 2
    assert sorted(found) == list(range(6)), "two were waiting and are generated"


def test_aborted_requests_keep_what_they_have_and_those_of_others_are_not_touched(engine):
    (other,) = engine.add([9, 9], SIX)
    with RequestPool[str](engine) as requests:
        ids = requests.add([1, 2], SIX, ["a", "b"])
        for _ in range(3):
            requests.step()
        ((owner, rollout),) = requests.abort([*ids[:1], 12345, other])
        assert owner == "a" and 0 < len(rollout.token_ids) < 6 and list(requests.owners.values()) == ["b"]
        assert requests.abort(ids[:1]) == []
        assert [owner for _, finished, _ in requests.steps() for owner, _ in finished] == ["b"], "the other's rollout is not ours"


def test_requests_are_added_in_blocks_and_the_batch_stays_almost_full(engine):
    requests = RequestPool[None](engine)
    cases = (0, 64, 64), (64, 64, 0), (63, 64, 0), (57, 64, 0), (56, 64, 8), (30, 64, 34), (0, 1, 1), (1, 1, 0)
    for live, most, wanted in cases:
        requests.owners = dict.fromkeys(range(live))
        assert requests.num_to_add(most) == wanted
