"""Episodes on a cluster of tiny engines: turns, and replies that are a pure function of what was said."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache

from cluster.local import GROUP, PROMPTS, make_engine, submit

from paceline import Rollout, SamplingParams
from paceline.cluster.coordinator import Coordinator
from paceline.types import Turn

PARAMS = SamplingParams(max_new_tokens=60, max_turn_tokens=9, pauses=True, seed=3)
NUM_TURNS = 4


def reply(turns: Sequence[Turn]) -> list[int] | None:
    """What an environment says to these turns; None ends the episode."""
    draw = random.Random(str([turn.token_ids for turn in turns]))
    if len(turns) == NUM_TURNS or draw.random() < 0.1:
        return None
    return [draw.randrange(61) for _ in range(draw.randrange(1, 12))]


@cache
def reference() -> dict[int, Rollout]:
    """Return the rollouts that a single engine generates, by seed."""
    engine, turns, found = make_engine(kv_tokens=4000, max_batch=20), {}, {}
    for prompt in PROMPTS:
        engine.add(prompt, PARAMS, GROUP)
    while engine.has_work:
        result = engine.step()
        found |= {rollout.seed: rollout for rollout in result.finished}
        for turn in result.paused:
            said = turns.setdefault(turn.request_id, [])
            said.append(turn)
            answer = reply(said)
            if answer is None or not engine.resume(turn.request_id, answer):
                rollout = engine.end(turn.request_id)
                found[rollout.seed] = rollout
    assert len(found) == GROUP * len(PROMPTS) and len({len(said) for said in turns.values()}) > 1
    return found


def run_episodes(coordinator: Coordinator, late: random.Random, rounds: int = 4000,
                 on_round: Callable[[int], None] = lambda number: None) -> dict[int, Rollout]:
    """Generate the same episodes on a cluster, by seed. `late`: draws how many rounds an environment takes. `on_round` is called
    with the number of every round."""
    submit(coordinator, PARAMS)
    turns: dict[int, list[Turn]] = {}
    waiting: list[tuple[int, int]] = []
    found: dict[int, Rollout] = {}
    for number in range(rounds):
        on_round(number)
        for _, rollout in coordinator.step():
            assert rollout.seed not in found, "a rollout came twice"
            found[rollout.seed] = rollout
        for turn in coordinator.placement.take_turns():
            turns.setdefault(turn.request_id, []).append(turn)
            waiting.append((number + late.randrange(6), turn.request_id))
        for due, request in [pair for pair in waiting if pair[0] <= number]:
            waiting.remove((due, request))
            answer = reply(turns[request])
            if answer is None or not coordinator.resume(request, answer, 0):
                rollout = coordinator.end(request, None)
                found[rollout.seed] = rollout
        if len(found) == GROUP * len(PROMPTS):
            return found
    raise AssertionError(f"{GROUP * len(PROMPTS) - len(found)} episodes are lost")


def assert_same(found: dict[int, Rollout]) -> None:
    expected = reference()
    assert found.keys() == expected.keys()
    for seed, rollout in found.items():
        other = expected[seed]
        assert (rollout.token_ids, rollout.loss_mask, rollout.finish_reason, rollout.versions) == (
            other.token_ids, other.loss_mask, other.finish_reason, other.versions)
        assert max(abs(a - b) for a, b in zip(rollout.logprobs, other.logprobs, strict=True)) < 1e-12
