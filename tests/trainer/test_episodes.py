"""Collecting episodes and training on them: limits, failures, the contract, resuming, and what the run folder says."""

from __future__ import annotations

import json
import time

import pytest
import tiny
from e2e.toy import make_folder, run, settings
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as given_settings
from hypothesis import strategies as st
from tasks.talkers import Echo, Late
from transformers import PreTrainedTokenizerFast

from paceline import Engine, SamplingParams
from paceline.config import EngineConfig, RolloutConfig
from paceline.rl.loop import PhaseTimer
from paceline.tasks import Problem, RewardPool, Tool, Transcript, UsesTools, make_task
from paceline.trainer import Trainer, load_config
from paceline.trainer.episodes import EpisodeCollector, make_collector, run_episodes
from paceline.trainer.rollouts import PromptStream, RolloutCollector
from paceline.types import Rollout

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}A{% endif %}"


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_folder(folder)
    found = PreTrainedTokenizerFast.from_pretrained(folder / "model")
    found.chat_template = TEMPLATE
    return found


def collect(tokens, task=None, engine=None, workers: int = 0, count: int = 4,
            **options) -> tuple[list[Rollout], EpisodeCollector]:
    task, engine = task or Echo(), engine or Engine(tiny.model(), tokens, "none", "off")
    config = RolloutConfig(**{"group_size": 3, "max_new_tokens": 90, "max_turn_tokens": 7, "max_turns": 5, **options})
    with RewardPool(task, workers, 20.0) as pool:
        collector = make_collector(engine, None, PromptStream(task, 0, None), pool, config, 3, lambda *_: None)
        collector.begin_step()
        groups = collector(0, count, PhaseTimer())
    assert engine.stats().free_pages == engine.stats().total_pages and not engine.planner.requests
    return [rollout for group in groups for rollout in group.rollouts], collector


def sampled(rollout: Rollout) -> list[int]:
    mask = rollout.loss_mask or [1] * len(rollout.token_ids)
    return [token for token, is_sampled in zip(rollout.token_ids, mask, strict=True) if is_sampled]


def turns(rollout: Rollout) -> list[str]:
    return [message["content"] for message in rollout.episode.messages if message["role"] == "assistant"]


def test_an_episode_is_a_conversation_with_a_mask(tokens):
    rollouts, collector = collect(tokens)
    assert isinstance(collector, EpisodeCollector) and len(rollouts) == 12
    assert {rollout.episode.end for rollout in rollouts} >= {"environment", "turns"}
    for rollout in rollouts:
        record, mask = rollout.episode, rollout.loss_mask or [1] * len(rollout.token_ids)
        assert record.num_turns == len(turns(rollout)) <= 5 and record.messages[0]["role"] == "user"
        assert tokens.decode(sampled(rollout)) == "".join(turns(rollout))
        assert all((logprob != 0) == is_sampled for logprob, is_sampled in zip(rollout.logprobs, map(bool, mask), strict=True))
        written = "".join(message["content"] + "A" * (message["role"] == "user") for message in record.messages)
        assert tokens.decode(rollout.prompt_ids + rollout.token_ids) == written, "token ids in, token ids out"
        assert rollout.reward == pytest.approx(Echo().reward(Transcript(Echo()[0], record.messages, record.end)))
        assert rollout.finish_reason == "length"  # of the last turn: this model has no end of text


def test_limits_end_episodes(tokens):
    rollouts, _ = collect(tokens, max_new_tokens=20)
    assert any(rollout.episode.end == "tokens" for rollout in rollouts) and max(len(r.token_ids) for r in rollouts) <= 20
    assert all(tokens.decode(sampled(rollout)) == "".join(turns(rollout)) for rollout in rollouts)
    rollouts, _ = collect(tokens, max_turns=1)
    assert {rollout.episode.num_turns for rollout in rollouts} == {1} and all(rollout.reward is not None for rollout in rollouts)


def test_an_episode_whose_time_is_over_ends_in_the_middle_of_a_turn(tokens):
    engine = Engine(tiny.model(), tokens, "none", "off", EngineConfig(max_batch=4))
    rollouts, _ = collect(tokens, engine=engine, episode_timeout_s=1e-9, max_turn_tokens=80)
    assert {rollout.episode.end for rollout in rollouts} == {"time"} and all(rollout.reward is not None for rollout in rollouts)
    assert {rollout.finish_reason for rollout in rollouts} == {"length"}
    assert all(0 < len(rollout.token_ids) < 8 and rollout.episode.num_turns == 1 for rollout in rollouts)
    assert all(tokens.decode(rollout.token_ids) == turns(rollout)[0] for rollout in rollouts)
    engine, clock = Engine(tiny.model(), tokens, "none", "off"), iter(range(10**6))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.trainer.episodes.time.monotonic", lambda: next(clock))
        rollouts, _ = collect(tokens, engine=engine, episode_timeout_s=300.0)
    late = [rollout for rollout in rollouts if rollout.episode.end == "time"]
    assert any(rollout.episode.num_turns > 1 and rollout.loss_mask[-1] for rollout in late), "also after a reply"
    assert all(tokens.decode(sampled(rollout)) == "".join(turns(rollout)) for rollout in rollouts)


def test_failures_of_the_environment_cost_their_episode_only(tokens):
    task = Echo()
    task.fails = "reply"
    rollouts, collector = collect(tokens, task, count=6)
    failed = [rollout for rollout in rollouts if rollout.episode.error]
    assert 0 < len(failed) < len(rollouts)
    assert all(rollout.reward is None and rollout.episode.error == "environment: RuntimeError: no reply" for rollout in failed)
    assert all(rollout.reward is not None for rollout in rollouts if rollout not in failed)
    assert len(collector.grading.examples) == len(failed)
    task.fails = PromptStream(task, 0, None).take(0, 1)[0].id
    rollouts, collector = collect(tokens, task)
    assert len(rollouts) == 9 and collector.refused == [f"{task.fails}: environment: RuntimeError: no opening"]


SHAPES = given(strategy=st.sampled_from(["off", "suffix:d4w2v8", "eagle:d3w2v6"]), max_batch=st.integers(1, 12),
               kv_tokens=st.sampled_from([200, 4096]), page_size=st.integers(1, 16), late=st.booleans())


@given_settings(max_examples=6, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@SHAPES
def test_episodes_depend_on_the_seed_alone(tokens, strategy, max_batch, kv_tokens, page_size, late):
    check_episodes(tokens, strategy, max_batch, kv_tokens, page_size, late)


@pytest.mark.slow
@given_settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@SHAPES
def test_episodes_depend_on_the_seed_alone_thoroughly(tokens, strategy, max_batch, kv_tokens, page_size, late):
    check_episodes(tokens, strategy, max_batch, kv_tokens, page_size, late)


def check_episodes(tokens, strategy, max_batch, kv_tokens, page_size, late) -> None:
    """float64: speculation, batch, pre-emption, and when the environment answers change no token. Workers are another matter:
    tests/cluster/test_cluster_turns.py."""
    config = EngineConfig(max_batch=max_batch, kv_tokens=kv_tokens, page_size=page_size)
    drafter = tiny.eagle() if strategy.startswith("eagle") else "suffix"
    rollouts, _ = collect(tokens, Late() if late else None, Engine(tiny.model(), tokens, drafter, strategy, config),
                          workers=2 if late else 0)
    expected, _ = collect(tokens)
    assert [(r.token_ids, r.loss_mask, r.reward, r.finish_reason) for r in rollouts] == [
        (r.token_ids, r.loss_mask, r.reward, r.finish_reason) for r in expected]


def test_the_engine_goes_on_while_an_environment_answers(tokens):
    """Steps are made while replies are computed, and none is made in vain once all requests wait for them."""
    engine = Engine(tiny.model(), tokens, "none", "off")
    rollouts, _ = collect(tokens, Late(), engine, workers=2, count=6)
    total = sum(sum(rollout.loss_mask or [1] * len(rollout.token_ids)) for rollout in rollouts)
    assert engine.stats().steps < total and sum(rollout.episode.environment_s for rollout in rollouts) > 0.05


@pytest.mark.slow
def test_the_drafter_is_trained_while_all_wait_for_the_environment(tokens):
    """Only then, and until the first reply: what is called then is told when there is one."""
    engine, calls = Engine(tiny.model(), tokens, "none", "off"), []
    config = RolloutConfig(group_size=3, max_new_tokens=90, max_turn_tokens=7, max_turns=5)

    def on_idle(has_reply) -> None:
        assert not engine.has_work
        number = 0
        while not has_reply():
            number += 1
            time.sleep(0.002)
        calls.append(number)

    with RewardPool(Late(), 2, 20.0) as pool:
        collector = make_collector(engine, None, PromptStream(Late(), 0, None), pool, config, 3, lambda *_: None)
        collector.on_idle = on_idle
        collector.begin_step()
        groups = collector(0, 2, PhaseTimer())
    assert sum(calls) > 0 and all(rollout.reward is not None for group in groups for rollout in group.rollouts)


@pytest.mark.slow
def test_a_run_trains_its_drafter_in_idle_time(tmp_path):
    make_folder(tmp_path)
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    arguments = settings(tmp_path, "run", **{
        "task": "collatz", "steps": 3, "rollout.max_turn_tokens": 7, "rollout.max_new_tokens": 60, "reward.workers": 1,
        "drafter": "learned", "strategy": "eagle:d2w2v3", "spot.form": "eagle"})
    config = load_config(None, [value for value in arguments[3::2] if not value.startswith("task_options")])
    Trainer(config, task=Late()).run()
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(record.get("drafter/idle_seconds", 0.0) for record in metrics) > 0


class Shout(UsesTools):
    """The policy may call a tool, in the only format that a test can make it speak: one that is sampled for it."""

    name = "shout"

    def __init__(self) -> None:
        self.tools = (Tool.of(shout),)

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Problem:
        return Problem(str(index), "abc", None)

    def reset(self, problem: Problem) -> list[dict]:
        return [{"role": "user", "content": problem.prompt}]

    def reward(self, transcript: Transcript) -> float:
        return float(len(transcript.messages))


def shout(text: str) -> str:
    """Write a text in capital letters."""
    if not text:
        raise ValueError("there is no text")
    return text.upper()


def test_calls_of_tools_are_parsed_made_and_counted(tokens, monkeypatch):
    seen, script = [], iter(["{}", '<tool_call>{"name": "shout", "arguments": {"text": "hi"}}</tool_call>',
                             'and <tool_call>{"name": "shout", "arguments": {"text": ""}}</tool_call>', "done"])
    encode = tokens.apply_chat_template

    def template(messages, **variables):
        seen.append(variables.get("tools"))
        return encode(messages, **variables)

    monkeypatch.setattr(tokens, "apply_chat_template", template)
    next(script)
    decode = tokens.decode
    monkeypatch.setattr(tokens, "decode", lambda ids, **options: next(script) if len(ids) == 7 else decode(ids, **options))
    rollouts, _ = collect(tokens, Shout(), count=1, group_size=1, max_new_tokens=200)
    monkeypatch.undo()
    record = rollouts[0].episode
    assert [message["role"] for message in record.messages] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert record.messages[2] == {"role": "tool", "name": "shout", "content": "HI"}
    assert record.messages[3]["content"] == "and" and "there is no text" in record.messages[4]["content"]
    assert (record.num_turns, record.num_tool_calls, record.num_tool_errors, record.end) == (3, 2, 1, "environment")
    assert seen[0] == [Shout().tools[0].schema]


def test_run_episodes_without_training(tokens):
    groups = run_episodes(Engine(tiny.model(), tokens), Echo(), 3, SamplingParams(max_new_tokens=30), n=2, workers=0)
    assert [len(group.rollouts) for group in groups] == [2, 2, 2]
    assert all(rollout.reward is not None and rollout.episode for group in groups for rollout in group.rollouts)


def test_a_task_stays_on_the_path_of_one_turn(tokens):
    engine = Engine(tiny.model(), tokens)
    with RewardPool(make_task("collatz"), 0, 1.0) as pool:
        collector = make_collector(engine, None, PromptStream(pool.task, 0, None), pool, RolloutConfig(), 0, lambda *_: None)
    assert type(collector) is RolloutCollector and not collector.params.pauses


def words(path, out: str, **changes) -> list[str]:
    (path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    arguments = settings(path, out, **{"task": "words", "rollout.max_turn_tokens": 2, "rollout.max_new_tokens": 40, **changes})
    values = [value for value in arguments[2:] if value != "--set" and not value.startswith("task_options")]
    options = {"alphabet": "abc", "length": 2, "guesses": 3, "instructions": False}
    values += [f"task_options.{key}={json.dumps(value)}" for key, value in options.items()]
    return [*arguments[:2], *(part for value in values for part in ("--set", value))]


def rows(path, step: int) -> list[dict]:
    return [json.loads(line) for line in (path / f"rollouts-{step:06d}.jsonl").read_text().splitlines()]


def test_a_run_is_resumed_token_for_token(tmp_path):
    make_folder(tmp_path)
    held_out = {"evaluation.every": 5, "evaluation.problems": 2}
    assert run(words(tmp_path, "whole", compare_off=True, **held_out)) == 0
    assert run(words(tmp_path, "cut", steps=2, **held_out)) == 0
    assert run(["train", "--resume", str(tmp_path / "cut"), "--set", "steps=5"]) == 0
    for step in (3, 4, 5):
        whole, cut = rows(tmp_path / "whole", step), rows(tmp_path / "cut", step)
        assert [(row["token_ids"], row.get("loss_mask"), row["messages"]) for row in whole] == [
            (row["token_ids"], row.get("loss_mask"), row["messages"]) for row in cut]
    metrics = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert all(record["compare/differing"] == 0 and record["compare/rollouts"] == 12 for record in metrics)
    assert all(1 <= record["episode/turns"] <= 3 and record["episode/errors"] == 0 for record in metrics)
    assert "eval/reward" in metrics[-1] and all(record["logprob_difference/max"] < 1e-6 for record in metrics)


def test_a_small_policy_learns_to_guess_words(tmp_path):
    """From random letters: a policy that begins at random learns to answer with letters of the game, in seconds."""
    make_folder(tmp_path)
    assert run(words(tmp_path, "run", steps=36, dtype="float32", checkpoint_every=100, **{
        "rollout.prompts": 8, "rollout.group_size": 8, "optimizer.lr": 0.003, "engine.max_batch": 64})) == 0
    rewards = [json.loads(line)["reward/mean"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(rewards[-6:]) / 6 > sum(rewards[:6]) / 6 + 0.1, rewards
