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
        for rollout in collector.answers_ahead(cursor, 4, lambda: stopped is not None and stopped(found)):
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


def a_collector(engine: Engine, pool: RewardPool, epochs: int | None = None, on_step=lambda *_: None) -> RolloutCollector:
    config = RolloutConfig(group_size=3, max_new_tokens=6)
    return RolloutCollector(engine, None, PromptStream(Graded(), 0, epochs), pool, config, 0, on_step)


def test_groups_that_are_carried_over_finish_in_the_next_step_with_the_same_answers():
    """Three slots, so that one group after the other is generated; the policy does not change."""
    engine, task, progress = Engine(tiny.model(), chat_tokenizer(), "none", "off", EngineConfig(max_batch=3)), Graded(), []
    with RewardPool(task, 0, 1.0) as pool:
        wanted = {group.key: [r.token_ids for r in group.rollouts] for group in a_collector(engine, pool, 1)(0, 5, PhaseTimer())}
        partial = a_collector(engine, pool, 1, lambda _engine, _result, done, total: progress.append((done, total)))
        partial.max_open = 2
        first = partial(0, 4, PhaseTimer())
        assert len(first) == 2 and len(partial.open_groups) == 2 and progress[-1] == (6, 12)
        second = partial(2, 4, PhaseTimer())
        assert [len(group.rollouts) for group in second] == [3, 3, 3], "one is new, and the end of the prompts finishes all"
        assert not partial.open_groups and not engine.scheduler.has_work and progress[-1] == (9, 9)
        with pytest.raises(OutOfPrompts):
            partial(5, 4, PhaseTimer())
    assert {group.key: [r.token_ids for r in group.rollouts] for group in first + second} == wanted
    assert all(rollout.reward is not None for group in first + second for rollout in group.rollouts)


@pytest.mark.parametrize("max_open", [0, 1])
def test_whatever_interrupts_collecting_leaves_no_request_behind(max_open):
    engine, steps = Engine(tiny.model(), chat_tokenizer(), "none", "off", EngineConfig(max_batch=3)), iter(range(100))

    def interrupt(*_: object) -> None:
        if next(steps) == 3:
            raise KeyboardInterrupt

    with RewardPool(Graded(), 0, 1.0) as pool:
        collector = a_collector(engine, pool, on_step=interrupt)
        collector.max_open = max_open
        with pytest.raises(KeyboardInterrupt):
            collector(0, 3, PhaseTimer())
        assert not collector.open_groups and not engine.scheduler.has_work
        assert len(collector(0, 2, PhaseTimer())) == 2 - max_open


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
