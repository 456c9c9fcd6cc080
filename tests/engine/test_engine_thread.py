"""`EngineThread`: answers that are awaited are those of `Engine.generate`, whatever happens to other requests."""

from __future__ import annotations

import asyncio
import copy
import threading

import pytest
from tiny import eagle, model

from paceline import Engine, SamplingParams
from paceline.engine.thread import EngineThread, Overloaded, Unavailable
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
    thread.start()
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


def test_a_caller_that_is_cancelled_harms_nobody(thread):
    """Neither before its work has begun nor meanwhile."""
    async def run():
        begun, go_on = threading.Event(), threading.Event()

        def work(engine):
            begun.set()
            assert go_on.wait(10)

        calls = [asyncio.create_task(thread.call(work)) for _ in range(2)]
        await asyncio.to_thread(begun.wait, 10)
        for call in calls:
            call.cancel()
        go_on.set()
        assert [type(error) for error in await asyncio.gather(*calls, return_exceptions=True)] == [asyncio.CancelledError] * 2
        return await generate_all(thread)

    assert [answer.rollout.token_ids for answer in asyncio.run(run())] == expected((1, 2, 3, 4))


def test_no_more_answers_than_allowed():
    thread = EngineThread(make_engine(), max_pending=3)
    thread.start()

    async def run():
        tasks = [asyncio.create_task(thread.generate(PROMPTS[0], LONG)) for _ in range(3)]
        await started(thread)
        with pytest.raises(Overloaded, match="3 answers are pending"):
            await thread.generate(PROMPTS[1], params(1))
        tasks[0].cancel()
        await asyncio.gather(tasks[0], return_exceptions=True)
        assert len((await thread.generate(PROMPTS[1], params(2))).rollout.token_ids) == 24
        await asyncio.gather(*tasks[1:])
        assert thread.num_pending == 0

    asyncio.run(run())
    thread.close()


def test_answers_end_with_an_error_when_the_thread_is_closed_or_the_engine_fails():
    async def run(thread, end):
        task = asyncio.create_task(thread.generate(PROMPTS[0], LONG))
        await started(thread)
        await end(thread)
        with pytest.raises(RuntimeError) as error:
            await task
        with pytest.raises(Unavailable) as later:
            await thread.generate(PROMPTS[0], LONG)
        assert str(error.value) == str(later.value) == thread.problem and thread.num_pending == 0
        return thread.problem

    async def close(thread):
        await asyncio.to_thread(thread.close)

    async def fail(thread):
        def broken():
            raise OSError("no more")

        await thread.call(lambda engine: setattr(engine, "step", broken))

    for end, problem in ((close, "the engine is shutting down"), (fail, "the engine has failed: OSError: no more")):
        thread = EngineThread(make_engine())
        thread.start()
        assert asyncio.run(run(thread, end)) == problem
        thread.close()
