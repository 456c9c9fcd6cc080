"""Requests of several turns: paused at the end of a turn, resumed behind a reply. Their tokens are those of one plain request
after the other, each with everything before it as its prompt."""

from __future__ import annotations

import random
from functools import cache

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_contract import RandomSelector
from tiny import VOCAB, captured, eagle, model

from paceline import Engine, Rollout, SamplingParams, Strategy
from paceline.config import EngineConfig
from paceline.models.state_dict import export_state

STOPS = (3, 4, 5, 17, 30)
SHARED = [5, 9, 9, 2, 40, 17, 3, 3, 8]
PROMPTS = [[1], [*SHARED, 11], [*SHARED, 12, 13], [7, 8] * 12]
PARAMS = [SamplingParams(seed=1, max_new_tokens=90, stop_token_ids=STOPS, pauses=True, max_turn_tokens=12),
          SamplingParams(seed=2, max_new_tokens=70, stop_token_ids=STOPS, pauses=True, temperature=0.7, raw_logprobs=True),
          SamplingParams(seed=3, max_new_tokens=90, stop_token_ids=STOPS, pauses=True, max_turn_tokens=1),
          SamplingParams(seed=4, max_new_tokens=80, stop_token_ids=STOPS, pauses=True, max_turn_tokens=20, temperature=0.3)]
ANSWERS, MOST_TURNS = 2, 5
Episode = tuple[list[int], list[int], list[float], str]


def reply_to(turn: list[int]) -> list[int] | None:
    """A pure function of the turn: nothing, a token, or many. None: the episode ends."""
    rng = random.Random(repr(turn))
    if rng.random() < 0.1:
        return None
    return [rng.randrange(VOCAB) for _ in range(rng.choice([0, 1, 2, 7, 25]))]


@cache
def reference(kind: str, job: int, sample: int) -> Episode:
    """One turn after the other, each a plain request of an engine that knows of no turns."""
    params = PARAMS[job]
    engine = Engine(model(kind), drafter=None, strategy="off", config=EngineConfig(max_batch=1, kernels="torch"))
    seeds = engine.add(PROMPTS[job], params, ANSWERS)
    seed = engine.planner.requests[seeds[sample]].params.seed
    engine.abort(seeds)
    answer: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    for _ in range(MOST_TURNS):
        left = params.max_new_tokens - len(answer)
        plain = SamplingParams(temperature=params.temperature, stop_token_ids=STOPS,
                               max_new_tokens=min(left, params.max_turn_tokens or left))
        engine.add(PROMPTS[job] + answer, plain, seeds=[seed])
        turn: list[int] = []
        while engine.has_work:
            for rollout in engine.step().finished:
                turn, values, reason = rollout.token_ids, rollout.logprobs, rollout.finish_reason
        answer, mask, logprobs = answer + turn, mask + [1] * len(turn), logprobs + values
        if reason == "length" and len(answer) >= params.max_new_tokens:
            return answer, mask, logprobs, "length"
        reply = reply_to(turn)
        if reply is None or len(answer) + len(reply) >= params.max_new_tokens:
            return answer, mask, logprobs, reason
        answer, mask, logprobs = answer + reply, mask + [0] * len(reply), logprobs + [0.0] * len(reply)
    return answer, mask, logprobs, "abort"


def episode(rollout: Rollout) -> Episode:
    return rollout.token_ids, rollout.loss_mask or [1] * len(rollout.token_ids), rollout.logprobs, rollout.finish_reason


def assert_same(got: Episode, want: Episode, what: object) -> None:
    assert got[:2] == want[:2], f"{what}: tokens or masks differ"
    assert got[2] == pytest.approx(want[2], abs=1e-9), f"{what}: log-probabilities differ"
    assert got[3] == want[3], f"{what}: finish reasons differ"


class Episodes:
    """Runs episodes on engines; replies come after a random delay."""

    def __init__(self, engines: list[Engine], rng: random.Random) -> None:
        self.engines, self.rng = engines, rng
        self.owner: dict[tuple[int, int], tuple[int, int]] = {}
        self.turns: dict[tuple[int, int], int] = {}
        self.paused: list[tuple[int, int, list[int]]] = []
        self.done: dict[tuple[int, int], Episode] = {}
        self.moved: dict[tuple[int, int], tuple[int, int]] = {}

    def add(self, job: int, where: int) -> None:
        params = PARAMS[job]
        for sample, request in enumerate(self.engines[where].add(PROMPTS[job], params, ANSWERS)):
            self.owner[where, request], self.turns[job, sample] = (job, sample), 0

    def step(self, where: int) -> None:
        result = self.engines[where].step()
        for turn in result.paused:
            self.paused.append((*self.moved.get((where, turn.request_id), (where, turn.request_id)), turn.token_ids))
        for rollout in result.finished:
            self.end(where, rollout)
        self.engines[where].scheduler.pages.check_integrity()

    def end(self, where: int, rollout: Rollout) -> None:
        self.done[self.owner.pop((where, rollout.request_id))] = episode(rollout)

    def reply(self, chance: float) -> None:
        for item in self.paused.copy():
            where, request, turn = item
            if self.rng.random() >= chance:
                continue
            self.paused.remove(item)
            key, engine, reply = self.owner[where, request], self.engines[where], reply_to(turn)
            self.turns[key] += 1
            if reply is None or not engine.resume(request, reply):
                self.end(where, engine.end(request))
            elif self.turns[key] == MOST_TURNS:
                for rollout in engine.abort([request]):
                    self.end(where, rollout)

    @property
    def unfinished(self) -> bool:
        return bool(self.owner) or any(engine.has_work for engine in self.engines)


def check(found: Episodes, kind: str, jobs: range) -> None:
    for job in jobs:
        for sample in range(ANSWERS):
            assert_same(found.done[job, sample], reference(kind, job, sample), (job, sample))
    for engine in found.engines:
        stats = engine.stats()
        assert stats.free_pages == stats.total_pages, "pages leaked"
        assert not engine.planner.requests and not engine.scheduler.holding


SETTINGS = {
    "kind": st.sampled_from(["llama", "qwen3"]), "form": st.sampled_from(["eagle", "eagle3", None]),
    "page_size": st.integers(1, 17), "max_batch": st.integers(1, 10), "max_rows": st.integers(10, 60),
    "kv_tokens": st.integers(160, 400), "pipelined": st.sampled_from(["no", "launches first", "captures"]),
    "disturb": st.sampled_from([0.0, 0.05]), "on_update": st.sampled_from(["continue", "recompute"]),
    "seed": st.integers(0, 2**32)}


@settings(max_examples=4, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(**SETTINGS)
def test_episodes_do_not_depend_on_how_they_are_made(**options):
    compare_with_reference(**options)


@pytest.mark.slow
@settings(max_examples=80, derandomize=False, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(**SETTINGS)
def test_episodes_do_not_depend_on_how_they_are_made_thoroughly(**options):
    compare_with_reference(**options)


def compare_with_reference(kind, form, page_size, max_batch, max_rows, kv_tokens, pipelined, disturb, on_update, seed):
    rng = random.Random(seed)
    drafter = "suffix" if form is None else eagle(kind, form, draft_vocab=rng.choice([0, 20]))
    config = EngineConfig(page_size=page_size, max_batch=max_batch, max_rows=max_rows, kv_tokens=kv_tokens, on_update=on_update)
    engine = Engine(model(kind), drafter=drafter, strategy=RandomSelector(rng), config=config)
    engine.planner.pipelined = pipelined != "no"
    if pipelined == "captures":
        captured(engine, (1, 4, 16, 40))
    same = {name: tensor.clone() for name, tensor in export_state(engine.model).items()}
    found, jobs, chance = Episodes([engine], rng), list(range(len(PROMPTS))), rng.choice([0.1, 0.5, 1.0])
    rng.shuffle(jobs)
    while jobs or found.unfinished:
        if jobs and rng.random() < 0.4:
            found.add(jobs.pop(), 0)
        found.step(0)
        found.reply(chance)
        if rng.random() < disturb and engine.scheduler.running:
            engine._drain()
            if engine.scheduler.running:
                engine.scheduler.preempt(rng.choice(engine.scheduler.running))
        if rng.random() < disturb / 2:
            engine.update_weights(same)
        if rng.random() < disturb / 2:
            engine.sleep()
            engine.wake()
    check(found, kind, range(len(PROMPTS)))


@pytest.mark.parametrize(("seed", "pipelined"), [(0, False), (1, True)])
def test_paused_requests_move_to_another_engine(seed, pipelined):
    """Running, paused and waiting requests move at random times, with their pages or without."""
    rng = random.Random(seed)
    config = EngineConfig(page_size=4, max_batch=4, max_rows=48, kv_tokens=300)
    engines = [Engine(model(), drafter=eagle(), strategy=RandomSelector(rng), config=config) for _ in range(2)]
    for engine in engines:
        engine.planner.pipelined = pipelined
    found, moved = Episodes(engines, rng), set()
    for job in range(len(PROMPTS)):
        found.add(job, job % 2)
    while found.unfinished:
        for where in (0, 1):
            found.step(where)
        found.reply(0.2)
        where, request = rng.choice([*found.owner, (0, -1)])
        if rng.random() < 0.3 and request >= 0:
            state = engines[where].migration.export_request(request, 0)
            if state is None:
                continue
            moved.add(("paused" if state.paused else "runs", state.kv is not None))
            if rng.random() < 0.3:
                state.kv = None
            new = engines[1 - where].migration.import_request(state, 0)
            found.owner[1 - where, new] = found.owner.pop((where, request))
            found.moved[where, request] = 1 - where, new  # its turn may have ended just before, which the next step reports
            found.paused = [(1 - where, new, turn) if (a, b) == (where, request) else (a, b, turn) for a, b, turn in found.paused]
    assert {("paused", True), ("runs", True)} <= moved
    check(found, "llama", range(len(PROMPTS)))


def test_a_paused_request_keeps_its_pages_and_leaves_its_slot():
    engine = Engine(model(), drafter="none", strategy="off", config=EngineConfig(max_batch=1, page_size=4))
    (first,) = engine.add(PROMPTS[1], SamplingParams(max_new_tokens=60, max_turn_tokens=5, pauses=True))
    turn = next(t for _ in range(20) for t in engine.step().paused)
    assert (turn.request_id, len(turn.token_ids), turn.reason) == (first, 5, "length")
    assert not engine.has_work and len(engine.planner.requests[first].pages) == 4
    engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4))  # in the only slot
    before = engine.stats().prompt_tokens
    assert engine.resume(first, [9, 9, 9])
    while engine.has_work:
        result = engine.step()
    assert engine.stats().prompt_tokens - before == 4, "the reply and the token before it, nothing twice"
    assert result.paused and engine.end(first).loss_mask == [1] * 5 + [0] * 3 + [1] * 5
    assert engine.stats().free_pages == engine.stats().total_pages


def test_pages_of_paused_requests_are_given_up_before_anybody_is_preempted():
    params = SamplingParams(max_new_tokens=100, max_turn_tokens=10, pauses=True, ignore_eos=True)
    roomy = Engine(model(), drafter="none", strategy="off")
    tight = Engine(model(), drafter="none", strategy="off", config=EngineConfig(page_size=4, kv_tokens=64))
    tokens = []
    for engine in (roomy, tight):
        (first,) = engine.add(PROMPTS[1], params, seeds=[5])
        while engine.has_work:
            engine.step()
        engine.generate([PROMPTS[3]], SamplingParams(max_new_tokens=30, ignore_eos=True))
        held = bool(engine.planner.requests[first].pages)
        assert held == (engine is roomy) and engine.stats().preemptions == 0
        assert engine.resume(first, [7] * 9)
        while engine.has_work:
            engine.step()
        tokens.append(engine.end(first).token_ids)
    assert tokens[0] == tokens[1]


def test_a_step_that_fails_leaves_paused_requests():
    engine = Engine(model(), drafter="suffix", strategy="suffix:d4w2v6", config=EngineConfig(page_size=4))
    params = SamplingParams(max_new_tokens=60, max_turn_tokens=5, pauses=True)
    (first,) = engine.add(PROMPTS[1], params, seeds=[5])
    while engine.has_work:
        engine.step()
    (broken,) = engine.add(PROMPTS[3])
    execute = engine.executor.execute
    engine.executor.execute = lambda command: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine.executor.execute = execute
    assert [rollout.request_id for rollout in engine.step().finished] == [broken]
    assert engine.resume(first, [9, 8, 7])
    while engine.has_work:
        engine.step()
    other = Engine(model(), drafter=None, strategy="off")
    (again,) = other.add(PROMPTS[1], params, seeds=[5])
    for reply in ([9, 8, 7], None):
        while other.has_work:
            other.step()
        assert reply is None or other.resume(again, reply)
    assert engine.end(first).token_ids == other.end(again).token_ids


def paused_once(drafter, strategy: Strategy, first_turn: Strategy) -> tuple[Engine, int, list[int]]:
    """An engine, a request of it that was paused after its first turn, and its tokens."""
    engine = Engine(model(), drafter=drafter, strategy=strategy)
    params = SamplingParams(max_new_tokens=80, max_turn_tokens=24, pauses=True, temperature=0.5, ignore_eos=True)
    (request,) = engine.add(PROMPTS[3], params, seeds=[1])
    while engine.has_work:
        engine.step(first_turn)
    return engine, request, engine.planner.requests[request].tokens.copy()


@pytest.mark.parametrize("drafts_before", [True, False])
def test_the_learned_drafter_goes_on_at_once_after_a_reply(drafts_before):
    """Its cache holds the reply and the turn before, whether or not it drafted then: as if all of it had been one prompt."""
    strategy, reply = Strategy.parse("eagle:d2w30v40"), [7, 8] * 10
    turns, request, tokens = paused_once(eagle(), strategy, strategy if drafts_before else Strategy.OFF)
    turns.reset_stats()
    assert turns.resume(request, reply)
    fresh = Engine(model(), drafter=eagle(), strategy=strategy)
    fresh.add(tokens + reply, SamplingParams(max_new_tokens=24, temperature=0.5, ignore_eos=True), seeds=[1])
    for engine in (turns, fresh):
        while engine.has_work:
            engine.step()
    assert turns.stats().accepted == fresh.stats().accepted > 0


def test_the_suffix_drafter_drafts_from_a_reply():
    strategy = Strategy.parse("suffix:d4w1v4")
    engine, request, tokens = paused_once("suffix", strategy, strategy)
    reply = [50, 51, 52, 53, 54] * 2
    assert not {50, 51, 52, 53, 54} <= set(tokens)
    assert engine.resume(request, reply)
    drafts = engine.drafting.draft_suffix([engine.planner.requests[request]], [4], strategy)
    assert drafts.tokens[0].tolist()[:4] == [50, 51, 52, 53]


def second_turn(engine: Engine, request: int, reply: list[int]) -> list[int]:
    """The tokens of a paused request's next turn."""
    assert engine.resume(request, reply)
    first = len(engine.planner.requests[request].tokens)
    while engine.has_work:
        engine.step()
    return engine.planner.requests[request].tokens[first:]


@pytest.mark.slow
@pytest.mark.parametrize("earlier", ["sibling", "epoch", "prompt"])
def test_the_suffix_drafter_learns_from_earlier_episodes(earlier):
    """What the policy said to a tool's output before is what is drafted behind the same output: in another answer of the group,
    in an earlier epoch, and, with a history for all prompts, to another problem."""
    strategy, reply = Strategy.parse("suffix:d6w1v6"), [50, 51, 52, 53, 54, 55]
    config = EngineConfig(suffix_scope="all" if earlier == "prompt" else "prompt")
    engine = Engine(model(), drafter="suffix", strategy=strategy, config=config)
    params = SamplingParams(max_new_tokens=80, max_turn_tokens=12, pauses=True, ignore_eos=True)
    if earlier == "sibling":
        one, two = engine.add(PROMPTS[3], params, 2, seeds=[1, 2])
    else:
        (one,) = engine.add(PROMPTS[3], params, seeds=[1])
    while engine.has_work:
        engine.step()
    said = second_turn(engine, one, reply)
    if earlier != "sibling":
        engine.end(one)
        (two,) = engine.add(PROMPTS[3 if earlier == "epoch" else 1], params, seeds=[2])
        while engine.has_work:
            engine.step()
    assert engine.resume(two, reply)
    request = engine.planner.requests[two]
    drafts = engine.drafting.draft_suffix([request], [6], strategy)
    drafted = drafts.tokens[0].tolist()[: int(drafts.num_nodes[0])]
    assert len(drafted) >= 2 and drafted == said[: len(drafted)]


def test_wrong_calls_say_what_is_wrong():
    engine = Engine(model(), drafter="none", strategy="off")
    params = SamplingParams(max_new_tokens=20, max_turn_tokens=4, pauses=True)
    (request,) = engine.add([1, 2], params)
    with pytest.raises(ValueError, match=f"request {request}: it is not paused"):
        engine.resume(request, [1])
    while engine.has_work:
        engine.step()
    with pytest.raises(ValueError, match="token id 61 is outside the vocabulary of 61 tokens"):
        engine.resume(request, [61])
    assert not engine.resume(request, [1] * 16), "no room for another token"
    assert engine.resume(request, [1] * 15)
    while engine.has_work:
        result = engine.step()
    assert result.finished[0].finish_reason == "length" and sum(result.finished[0].loss_mask) == 5
    with pytest.raises(ValueError, match="pauses"):
        engine.generate([[1]], params)
    with pytest.raises(ValueError, match="max_turn_tokens: 3"):
        SamplingParams(max_turn_tokens=3)
