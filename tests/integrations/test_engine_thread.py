"""`EngineThread`: answers that are awaited are those of `Engine.generate`, whatever happens to other requests."""

from __future__ import annotations

import asyncio
import copy

import pytest
from tiny import eagle, model

from paceline import Engine, SamplingParams
from paceline.integrations.engine_thread import EngineThread
from paceline.models.state_dict import export_state

PROMPTS = [[1, 2, 3], [4, 5, 6, 7], [8, 9], [1, 2, 3]]
LONG = SamplingParams(max_new_tokens=200, ignore_eos=True, seed=1)


def make_engine() -> Engine:
    return Engine(copy.deepcopy(model()), drafter=eagle(), strategy="eagle:d3w2v4")


def params(seed: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=24, seed=seed)


@pytest.fixture
def thread():
    thread = EngineThread(make_engine())
    yield thread
    thread.close()


def expected(seeds) -> list[list[int]]:
    engine = Engine(model(), drafter="none", strategy="off")
    ids = [engine.add(prompt, params(seed), seeds=[seed])[0] for prompt, seed in zip(PROMPTS, seeds, strict=True)]
    found = {}
    while engine.has_work:
        found |= {rollout.request_id: rollout.token_ids for rollout in engine.step().finished}
    return [found[request] for request in ids]


async def generate_all(thread, seeds=(1, 2, 3, 4)):
    return await asyncio.gather(*[thread.generate(p, params(s)) for p, s in zip(PROMPTS, seeds, strict=True)])


def test_answers_are_those_of_the_engine(thread):
    answers = asyncio.run(generate_all(thread))
    assert [answer.rollout.token_ids for answer in answers] == expected((1, 2, 3, 4))
    stats = asyncio.run(thread.call(lambda engine: engine.stats()))
    assert sum(answer.num_verifications for answer in answers) == stats.verifications
    assert sum(answer.num_drafted for answer in answers) == stats.drafted > 0
    assert 0 < sum(answer.num_accepted for answer in answers) <= stats.accepted
    assert all(1 <= answer.accept_length <= 4 for answer in answers)


def test_a_prompt_that_cannot_be_served(thread):
    async def run():
        good = asyncio.create_task(thread.generate(PROMPTS[0], params(1)))
        with pytest.raises(ValueError, match="empty"):
            await thread.generate([], params(1))
        return await good

    assert asyncio.run(run()).rollout.token_ids == expected((1, 2, 3, 4))[0]


async def started(thread) -> None:
    while not await thread.call(lambda engine: engine.stats().generated_tokens):
        await asyncio.sleep(0.01)


def test_aborted_requests_keep_what_they_have(thread):
    async def run():
        task = asyncio.create_task(thread.generate(PROMPTS[0], LONG, "long"))
        await started(thread)
        assert await thread.abort("another") == []
        assert await thread.abort("long") == ["long"]
        return await task

    rollout = asyncio.run(run()).rollout
    assert rollout.finish_reason == "abort" and 0 < len(rollout.token_ids) < 200
    assert len(rollout.logprobs) == len(rollout.token_ids)


def test_a_cancelled_request_frees_its_pages(thread):
    async def run():
        task = asyncio.create_task(thread.generate(PROMPTS[0], LONG))
        await started(thread)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await thread.call(lambda engine: (engine.has_work, engine.stats().num_running))

    assert asyncio.run(run()) == (False, 0)


def test_requests_wait_while_the_engine_sleeps(thread):
    async def run():
        await thread.sleep(weights=True)
        tasks = asyncio.create_task(generate_all(thread))
        await asyncio.sleep(0.05)
        assert not tasks.done()
        await thread.wake()
        return await tasks

    assert [answer.rollout.token_ids for answer in asyncio.run(run())] == expected((1, 2, 3, 4))


def test_new_weights_between_two_steps(thread):
    async def run():
        await thread.call(lambda engine: engine.update_weights(export_state(model(seed=5)), 7))
        with pytest.raises(ValueError, match="missing"):
            await thread.call(lambda engine: engine.update_weights({}))
        return await thread.generate(PROMPTS[0], params(1))

    answer = asyncio.run(run())
    engine = Engine(model(seed=5), drafter="none", strategy="off")
    engine.add(PROMPTS[0], params(1), seeds=[1])
    while not (finished := engine.step().finished):
        pass
    assert answer.rollout.token_ids == finished[0].token_ids and set(answer.rollout.versions) == {7}
