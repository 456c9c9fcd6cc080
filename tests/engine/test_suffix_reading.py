"""When the suffix drafter reads the text of running requests."""

from __future__ import annotations

from tiny import model

from paceline import Engine, SamplingParams, Strategy


def test_the_suffix_drafter_reads_many_tokens_at_once():
    """Read token by token, at a batch size of 256 the text took longer than the step on a GPU."""
    engine, calls = Engine(model(), strategy="off"), []
    suffix = engine.drafting.suffix
    extend_all = suffix.extend_all
    suffix.extend_all = lambda accepted: (calls.append({i: len(tokens) for i, tokens in accepted.items()}), extend_all(accepted))
    params = SamplingParams(max_new_tokens=64, ignore_eos=True)
    first = engine.generate([[1, 2, 3]], params, 4)[0].rollouts
    read = [count for call in calls for count in call.values()]
    assert sum(read) == 4 * 64 and len(read) <= 4 * 6
    assert not engine.drafting._unread
    calls.clear()
    again = engine.generate([[1, 2, 3]], params, 4, strategy="suffix:d8w2v16")[0].rollouts
    assert [rollout.token_ids for rollout in again] == [rollout.token_ids for rollout in first]
    assert engine.stats().accepted > 100, "it has read all of the first answers"


def test_while_the_device_waits_for_the_host_the_suffix_drafter_reads_later():
    """Whatever is unread when an answer ends, or is drafted for, is read then."""
    engine = Engine(model(), strategy="off")
    params = SamplingParams(max_new_tokens=300, ignore_eos=True)
    engine.add([1, 2, 3], params, 4)
    on_complete, most = engine.drafting.on_complete, 0
    engine.drafting.on_complete = lambda requests, accepted, tokens, _: on_complete(requests, accepted, tokens, True)
    for _ in range(200):
        engine.step()
        most = max([most, *map(len, engine.drafting._unread.values())])
    assert 64 <= most <= 64 + 16, "a turn comes every 16 steps"
    engine.step(Strategy.parse("suffix:d4w2v8"))
    assert all(len(tokens) <= 5 for tokens in engine.drafting._unread.values())
    while engine.has_work:
        engine.step()
    assert not engine.drafting._unread
    engine.generate([[1, 2, 3]], params, 4, strategy="suffix:d8w2v16")
    assert engine.stats().accepted > 500, "it has read all of the first answers"
