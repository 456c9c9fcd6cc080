"""Collecting rollouts: what the chat template is told, and what graders are told about thinking."""

from __future__ import annotations

import gc

import pytest
import tiny
from e2e.toy import LETTERS
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from paceline import Engine
from paceline.config import EngineConfig, RolloutConfig
from paceline.garbage import no_garbage_collection
from paceline.rl.loop import OutOfPrompts, PhaseTimer
from paceline.tasks import Problem, RewardPool
from paceline.tasks.answers import after_thinking
from paceline.trainer.rollouts import PromptStream, RolloutCollector
from paceline.types import Rollout, SamplingParams

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if thinking %}<think>{% endif %}"


class Seen:
    """One chat problem. Remembers the answers that it was given to grade."""

    name = "seen"

    def __init__(self) -> None:
        self.answers: list[str] = []

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Problem:
        return Problem("p", [{"role": "user", "content": "abc"}], None)

    def grade(self, problem: Problem, answer: str) -> float:
        self.answers.append(answer)
        return 0.0


def chat_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: i for i, token in enumerate([*LETTERS, "<think>", "</think>"])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="~"))
    tokenizer.pre_tokenizer, tokenizer.decoder = Split("", "isolated"), Fuse()
    tokenizer.add_tokens(["<think>", "</think>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="~", chat_template=TEMPLATE,
                                   clean_up_tokenization_spaces=False)


def collect(**options):
    engine, task = Engine(tiny.model(), chat_tokenizer(), "none", "off"), Seen()
    with RewardPool(task, 0, 1.0) as pool:
        config = RolloutConfig(group_size=3, max_new_tokens=6, **options)
        collector = RolloutCollector(engine, None, PromptStream(task, 0, None), pool, config, 0, lambda *_: None)
        (group,) = collector(0, 1, PhaseTimer())
    return group, task.answers


def test_chat_template_arguments_reach_the_template():
    plain, _ = collect()
    thinking, _ = collect(chat_template_kwargs={"thinking": True})
    assert thinking.prompt_ids == [*plain.prompt_ids, len(LETTERS)]


def test_thinking_that_the_prompt_opened_and_no_end_tag_closed_is_no_answer():
    group, answers = collect(chat_template_kwargs={"thinking": True})
    assert sorted(answers) == sorted("<think>" + rollout.text for rollout in group.rollouts)
    assert all(after_thinking(answer) == "" for answer in answers if "</think>" not in answer) and len(answers) == 3
    group, answers = collect()
    assert sorted(answers) == sorted(rollout.text for rollout in group.rollouts), "without the tag, as generated"


class Numbers:
    """Problems whose prompts differ."""

    name = "numbers"

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Problem:
        return Problem(f"p{index}", "abcde"[index] * 3, None)

    def grade(self, problem: Problem, answer: str) -> float:
        raise AssertionError("answers ahead are not graded")


def ahead_of(cursor: int, epochs: int | None, stopped=None, of_step=frozenset(), enough=None) -> list[Rollout]:
    engine, task = Engine(tiny.model(), chat_tokenizer(), "none", "off", EngineConfig(max_batch=4)), Numbers()
    with RewardPool(task, 0, 1.0) as pool:
        config = RolloutConfig(group_size=3, max_new_tokens=6)
        collector = RolloutCollector(engine, None, PromptStream(task, 0, epochs), pool, config, 0, lambda *_: None)
        found = []
        collector._step_problems |= of_step
        collector._next_problem = cursor
        for rollout in collector.answers_ahead(lambda: stopped is not None and stopped(found)):
            found.append(rollout)
            if len(found) == enough:
                break
        assert not engine.scheduler.has_work, "nothing is left behind"
    return found


def test_there_is_one_answer_ahead_to_every_later_prompt():
    found = ahead_of(2, 2)
    assert len(found) == 8 and len({tuple(rollout.prompt_ids) for rollout in found}) == 5
    by_prompt: dict[tuple[int, ...], list[list[int]]] = {}
    for rollout in found:
        by_prompt.setdefault(tuple(rollout.prompt_ids), []).append(rollout.token_ids)
    assert any(len(answers) == 2 and answers[0] != answers[1] for answers in by_prompt.values()), "a prompt again, another answer"


def test_answers_ahead_that_are_unfinished_in_the_end_are_cut():
    calls = iter(range(100))
    found = ahead_of(0, None, lambda _: next(calls) == 9)
    assert {"abort"} < {rollout.finish_reason for rollout in found} and any(0 < len(r.token_ids) < 6 for r in found)


def test_problems_of_this_step_are_not_answered_ahead():
    """The drafter's gain is measured on answers to some of them."""
    seen = {tuple(rollout.prompt_ids) for rollout in ahead_of(0, 2, of_step={"p1", "p3"})}
    assert len(seen) == 3
    assert ahead_of(0, None, of_step={f"p{i}" for i in range(5)}) == []


def test_answers_ahead_that_nobody_wants_any_more_are_ended():
    assert len(ahead_of(0, None, enough=3)) == 3


class Graded(Numbers):
    def grade(self, problem: Problem, answer: str) -> float:
        return float(len(answer))


def a_collector(engine: Engine, pool: RewardPool, epochs: int | None = None) -> RolloutCollector:
    return RolloutCollector(engine, None, PromptStream(Graded(), 0, epochs), pool, config(8), 0, lambda *_: None)


def config(prompts: int, **options) -> RolloutConfig:
    return RolloutConfig(prompts=prompts, group_size=3, max_new_tokens=6, **options)


def test_further_groups_are_under_way_while_a_batch_finishes_and_come_next_with_the_same_answers():
    """Three slots, so that one group after the other is generated; the policy does not change."""
    engine, task, progress = Engine(tiny.model(), chat_tokenizer(), "none", "off", EngineConfig(max_batch=3)), Graded(), []
    with RewardPool(task, 0, 1.0) as pool:
        wanted = {group.key: [r.token_ids for r in group.rollouts] for group in a_collector(engine, pool, 1)(0, 5, PhaseTimer())}
        ahead = RolloutCollector(engine, None, PromptStream(task, 0, 1), pool, config(2), 0,
                                 lambda _engine, _result, done, total: progress.append((done, total)))
        first = ahead.next_batch(0, 2, PhaseTimer(), max_staleness=1)
        assert len(first) == 2 and len(ahead.open_groups) == 2 and progress[-1] == (6, 12)
        second = ahead.next_batch(2, 2, PhaseTimer(), max_staleness=1)
        assert len(second) == 2 and len(ahead.open_groups) == 1, "there are five prompts"
        last = ahead.next_batch(4, 2, PhaseTimer(), max_staleness=1)
        assert not ahead.open_groups and not engine.scheduler.has_work and progress[-1] == (3, 3)
        with pytest.raises(OutOfPrompts):
            ahead.next_batch(5, 2, PhaseTimer(), max_staleness=1)
    assert {group.key: [r.token_ids for r in group.rollouts] for group in first + second + last} == wanted
    assert [group.key for group in first + second + last] == list(wanted), "in the order of a synchronous run"
    assert all(rollout.reward is not None for group in first + second + last for rollout in group.rollouts)


def test_groups_that_are_too_old_are_dropped_and_their_prompts_are_used():
    """The first group has the last slots: answers to later prompts overtake it until it is two versions old."""
    engine = Engine(tiny.model(), chat_tokenizer(), "none", "off", EngineConfig(max_batch=64))
    with RewardPool(Graded(), 0, 1.0) as pool:
        collector = RolloutCollector(engine, None, PromptStream(Graded(), 0, 3), pool, config(1, stale_groups="drop"), 0,
                                     lambda *_: None)
        add, slow = collector._add, iter([True])

        def add_slowly(requests, problem, key, owners):
            """The first prompt's answers are long."""
            params, collector.params = collector.params, collector.params
            if next(slow, False):
                collector.params = SamplingParams(max_new_tokens=40, ignore_eos=True)
            add(requests, problem, key, owners)
            collector.params = params

        collector._add = add_slowly
        batches, cursor = [], 0
        for version in range(4):
            engine.version = version
            collector.begin_step()
            batches.append(collector.next_batch(cursor, 1, PhaseTimer(), max_staleness=1))
            cursor += len(batches[-1])
            if version < 2:
                assert collector.num_dropped == 0 and len(collector._requests) >= 3
        assert collector.num_dropped == 0 and [len(batch) for batch in batches] == [1, 1, 2, 1]
        assert [len(group.rollouts) for group in batches[2]] == [0, 3], "the dropped one has none"
        first = PromptStream(Graded(), 0, 3).take(0, 1)[0].id
        assert batches[2][0].key == first and first not in {batch[-1].key for batch in batches[:2]}
        assert all(v >= version - 1 for version, batch in enumerate(batches) for r in batch[-1].rollouts for v in r.versions)
        collector._requests.abort()


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_whatever_interrupts_collecting_leaves_no_request_behind(max_staleness):
    engine, steps = Engine(tiny.model(), chat_tokenizer(), "none", "off", EngineConfig(max_batch=3)), iter(range(100))

    def interrupt(*_: object) -> None:
        if next(steps) == 3:
            raise KeyboardInterrupt

    with RewardPool(Graded(), 0, 1.0) as pool:
        collector = RolloutCollector(engine, None, PromptStream(Graded(), 0, None), pool, config(2), 0, interrupt)
        with pytest.raises(KeyboardInterrupt):
            collector.next_batch(0, 2, PhaseTimer(), max_staleness)
        assert not collector.open_groups and not engine.scheduler.has_work
        assert len(collector.next_batch(0, 2, PhaseTimer(), max_staleness)) == 2


def test_answers_that_finish_while_another_collector_generates_are_not_lost():
    """The second collector is an evaluation, or answers ahead for a drafter."""
    engine, task = Engine(tiny.model(), chat_tokenizer(), "none", "off", EngineConfig(max_batch=64)), Graded()
    with RewardPool(task, 0, 1.0) as pool:
        training, other = (RolloutCollector(engine, None, PromptStream(task, seed, None), pool, config(2), seed, lambda *_: None)
                           for seed in (0, 1))
        other.share_engine(training)
        alone = other(0, 2, PhaseTimer())
        first = training.next_batch(0, 2, PhaseTimer(), max_staleness=2)
        assert len(training.open_groups) == 4
        beside = other(0, 2, PhaseTimer())
        assert [[r.token_ids for r in group.rollouts] for group in beside] == [[r.token_ids for r in g.rollouts] for g in alone]
        later = training.next_batch(2, 2, PhaseTimer(), max_staleness=2) + training.next_batch(4, 2, PhaseTimer())
        assert [len(group.rollouts) for group in first + later] == [3] * 6 and len(training.open_groups) == 2


def test_no_garbage_is_collected_while_answers_are_generated():
    engine, task, seen = Engine(tiny.model(), chat_tokenizer(), "none", "off"), Seen(), []
    with RewardPool(task, 0, 1.0) as pool:
        collector = RolloutCollector(engine, engine, PromptStream(task, 0, None), pool, RolloutConfig(group_size=2), 0,
                                     lambda *_: seen.append(gc.isenabled()))
        collector(0, 1, PhaseTimer())
    assert seen and not any(seen) and gc.isenabled()


@pytest.mark.parametrize("strategy", ["eagle:d3w2v6", "suffix:d4w2v8"])
def test_engine_steps_leave_nothing_to_collect(strategy):
    engine = Engine(tiny.model("qwen3"), None, tiny.eagle("qwen3"), strategy, EngineConfig(kernels="torch", profile=False))
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    engine.generate([[1, 2, 3]], params, 4)
    engine.add([1, 2, 3], params, 4)
    gc.collect()
    steps = 0
    with no_garbage_collection():
        while engine.has_work:
            engine.step()
            steps += 1
    assert gc.collect() < steps
