"""An engine that gives its memory away and takes it back, and what its graphs cost."""

from __future__ import annotations

from copy import deepcopy

import pytest
from tiny import eagle, model

from paceline import Engine, SamplingParams
from paceline.config import EngineConfig
from paceline.engine.graphs import GraphReport
from paceline.models.state_dict import export_state

PROMPTS = [[1, 2, 3, 4, 5] * 3, [7, 8, 9], [3]]
PARAMS = SamplingParams(max_new_tokens=40, temperature=0.3, seed=2)


def engine(strategy: str = "eagle:d4w2v8") -> Engine:
    return Engine(model("qwen3"), drafter=eagle("qwen3", "eagle3", draft_vocab=20), strategy=strategy,
                  config=EngineConfig(max_batch=8, page_size=3, kv_tokens=900))


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("strategy", ["eagle:d4w2v8", "eagle:d3w2v6", "off"])
@pytest.mark.parametrize("weights", [False, True])
def test_requests_sleep_and_go_on_with_the_same_tokens(strategy, weights, pipelined):
    want = [r.token_ids for group in engine("off").generate(PROMPTS, PARAMS, n=2) for r in group.rollouts]
    sleeper = engine(strategy)
    sleeper.planner.pipelined = pipelined
    ids = [request for prompt in PROMPTS for request in sleeper.add(prompt, PARAMS, n=2)]
    got = {}
    for nap in range(200):
        if nap in (5, 9, 10):
            sleeper.sleep(weights)
            store = sleeper.executor.store
            assert store.tensors()[0].numel() == 0 and store.layers == [] and not sleeper.scheduler.running
            while sleeper._results:  # what was in flight is not lost
                got |= {r.request_id: r.token_ids for r in sleeper.step().finished}
            with pytest.raises(RuntimeError, match="wake"):
                sleeper.step()
            sleeper.wake()
        got |= {r.request_id: r.token_ids for r in sleeper.step().finished}
    assert [got[i] for i in ids] == want
    assert sleeper.stats().free_pages == sleeper.stats().total_pages


def test_the_drafter_is_as_good_after_a_sleep():
    sleeper, rates = engine("eagle:d3w3v9"), []
    for nap in (False, True):
        if nap:
            sleeper.sleep(weights=True)
            sleeper.update_weights(export_state(sleeper.model))  # new weights may come while it sleeps
            sleeper.wake()
        sleeper.reset_stats()
        texts = [r.token_ids for group in sleeper.generate(PROMPTS, PARAMS, n=2) for r in group.rollouts]
        rates.append((texts, sleeper.stats().drafted, sleeper.stats().accepted))
    assert rates[0] == rates[1] and rates[0][2] > 0


def test_discarded_weights_have_to_be_replaced():
    """A sleeping engine frees the memory of weights that it discards, except for tensors that the caller keeps."""
    sleeper = Engine(deepcopy(model("qwen3")), drafter=eagle("qwen3", "eagle3", draft_vocab=20), strategy="eagle:d3w2v6",
                     config=EngineConfig(max_batch=8, page_size=3, kv_tokens=900))
    before = [r.token_ids for group in sleeper.generate(PROMPTS, PARAMS) for r in group.rollouts]
    weights = {name: tensor.clone() for name, tensor in export_state(sleeper.model).items()}
    kept = sleeper.model.norm.data_ptr()
    sleeper.sleep("discard", keep={"norm"})
    held = {name for name, p in sleeper.model.named_parameters() if p.untyped_storage().size()}
    assert held == {"norm"} and sleeper.model.norm.data_ptr() == kept
    sleeper.wake()
    with pytest.raises(RuntimeError, match="update_weights has to bring new ones"):
        sleeper.generate(PROMPTS, PARAMS)
    sleeper.update_weights(weights)
    assert [r.token_ids for group in sleeper.generate(PROMPTS, PARAMS) for r in group.rollouts] == before


def test_sleeping_twice_and_waking_twice_is_once():
    sleeper = engine()
    before = [r.token_ids for group in sleeper.generate(PROMPTS, PARAMS) for r in group.rollouts]
    sleeper.sleep()
    sleeper.sleep(weights=True)
    sleeper.wake()
    sleeper.wake()
    assert [r.token_ids for group in sleeper.generate(PROMPTS, PARAMS) for r in group.rollouts] == before


def test_without_graphs_there_is_nothing_to_report():
    assert engine().graph_report() == GraphReport(0, 0, 0.0)
