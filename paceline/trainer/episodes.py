"""Collecting episodes: conversations of the policy with an environment, many at a time. Replies are computed by the reward pool's
workers; the engine never waits for one of them while another request can run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.config import RolloutConfig
from paceline.engine import Engine
from paceline.engine.pool import PoolStep, RequestPool
from paceline.generation import plain_prompt
from paceline.rl.loop import PhaseTimer
from paceline.tasks import Problem, RewardPool
from paceline.tasks.environment import AnyTask, EpisodeEnd, Message, Transcript, is_environment, tools_of
from paceline.tasks.pool import Graded, Pending
from paceline.tool_calls import parse_tool_calls, tool_call_format
from paceline.trainer.rollouts import OpenGroup, PromptStream, RolloutCollector, opens_thinking
from paceline.types import EpisodeRecord, FinishReason, Rollout, RolloutGroup, SamplingParams, StepResult, Strategy, Turn

logger = logging.getLogger(__name__)

_LIMITS: dict[EpisodeEnd, FinishReason] = {"turns": "length", "tokens": "length", "time": "length"}


@dataclass(slots=True, eq=False)
class _Episode:
    """An episode that has not ended."""

    group: OpenGroup
    transcript: Transcript
    began: float
    record: EpisodeRecord = field(default_factory=EpisodeRecord)
    last_turn: list[int] = field(default_factory=list)
    """Token ids of the policy's last turn."""
    before: list[int] = field(default_factory=list)
    """Token ids before the present turn, which may open its thinking."""

    def end(self, rollout: Rollout, why: EpisodeEnd | None) -> Rollout:
        """Its rollout, which has the conversation."""
        self.record.messages, self.record.end = self.transcript.messages, why
        rollout.episode = self.record
        return rollout


class _Episodes:
    """The episodes of one request pool."""

    def __init__(self) -> None:
        self.resets: dict[Pending, OpenGroup] = {}
        """Openings that are being computed, and the groups that wait for them."""
        self.replies: dict[Pending, int] = {}
        """Replies that are being computed, and the requests that wait for them."""
        self.by_request: dict[int, _Episode] = {}

    @property
    def pending(self) -> list[Pending]:
        return [*self.resets, *self.replies]

    def forget(self, groups: list[OpenGroup]) -> None:
        """The episodes of these groups were given up. What their environments still say is ignored."""
        self.by_request = {request: episode for request, episode in self.by_request.items() if episode.group not in groups}
        self.replies = {handle: request for handle, request in self.replies.items() if request in self.by_request}
        self.resets = {handle: group for handle, group in self.resets.items() if group not in groups}


class EpisodeCollector(RolloutCollector):
    """A `RolloutCollector` for environments. Each answer is an episode."""

    def __init__(self, engine: Engine, baseline: Engine | None, prompts: PromptStream, pool: RewardPool, rollout: RolloutConfig,
                 seed: int, on_engine_step: Callable[[Engine, StepResult, int, int], None]) -> None:
        super().__init__(engine, baseline, prompts, pool, rollout, seed, on_engine_step)
        self.params = replace(self.params, pauses=True, max_turn_tokens=rollout.max_turn_tokens or 0)
        self._max_turns, self._timeout_s = rollout.max_turns, rollout.episode_timeout_s
        tools, template = tools_of(pool.task), engine.tokenizer and engine.tokenizer.chat_template
        self._format = (tool_call_format(template) or "hermes") if tools else None
        if tools:
            self.chat_template_kwargs = {"tools": [tool.schema for tool in tools], **self.chat_template_kwargs}
        self._episodes: dict[RequestPool[OpenGroup], _Episodes] = {}

    def answers_ahead(self, stopped: Callable[[], bool]) -> Iterator[Rollout]:
        """None: an answer without an environment is not what the policy will write."""
        return iter(())

    def _generate(self, requests: RequestPool[OpenGroup], *arguments: Any) -> list[OpenGroup]:
        episodes = self._episodes.setdefault(requests, _Episodes())
        try:
            groups = super()._generate(requests, *arguments)
        except BaseException:
            del self._episodes[requests]
            raise
        if not requests and not episodes.resets:
            del self._episodes[requests]
        return groups

    def _drop_stale(self, max_staleness: int) -> list[OpenGroup]:
        dropped = super()._drop_stale(max_staleness)
        episodes = self._episodes.get(self._requests)
        if dropped and episodes is not None:
            episodes.forget(dropped)
        return dropped

    def _submit(self, requests: RequestPool[OpenGroup], problem: Problem, number: int) -> OpenGroup:
        """Ask for a problem's opening. Its requests are added when it is there."""
        group = OpenGroup(problem, number, RolloutGroup([], key=problem.id, prompt=problem.prompt), self.group_size)
        self._episodes[requests].resets[self.pool.act("reset", Transcript(problem))] = group
        return group

    def _step(self, requests: RequestPool[OpenGroup]) -> PoolStep[OpenGroup]:
        """Take note of what the environments have done, then run one engine step; if no request can run, wait for the
        environments."""
        episodes, engine = self._episodes[requests], requests.engine
        ended: list[tuple[OpenGroup, Rollout]] = []
        if episodes.resets or episodes.replies:
            self._read_environments(requests, episodes, ended, waits=not (engine.has_work or requests.has_news))
        self._end_overdue(requests, episodes, ended)
        step = requests.step() if engine.has_work else requests.catch_up(StepResult.nothing(Strategy.OFF))
        for _, turn in step.turns:
            self._end_turn(requests, episodes, turn, ended)
        for group, rollout in step.finished:
            ended.append((group, self._finished(episodes.by_request.pop(rollout.request_id), rollout, "tokens")))
        return PoolStep(step.result, ended, [])

    def _read_environments(self, requests: RequestPool[OpenGroup], episodes: _Episodes,
                           ended: list[tuple[OpenGroup, Rollout]], waits: bool) -> None:
        pending = episodes.pending
        if waits and self.on_idle is not None and requests is self._requests:
            self.on_idle(lambda: self.pool.has_news(pending))
        self.pool.poll(pending, waits)
        for handle, group in list(episodes.resets.items()):
            if handle.graded is not None:
                del episodes.resets[handle]
                self._begin(requests, episodes, group, handle.graded)
        for handle, request in list(episodes.replies.items()):
            if handle.graded is not None:
                del episodes.replies[handle]
                self._take_reply(requests, episodes, request, handle.graded, ended)

    def _begin(self, requests: RequestPool[OpenGroup], episodes: _Episodes, group: OpenGroup, found: Graded) -> None:
        """Request the answers of a group whose opening is there."""
        problem, messages = group.problem, found.messages or []
        try:
            if found.error is not None:
                raise ValueError(f"environment: {found.error}")
            prompt_ids = requests.engine.encode(plain_prompt(requests.engine, messages), self.chat_template_kwargs)
            ids = requests.add(prompt_ids, self.params, [group] * self.group_size, f"{group.number}/{problem.id}")
        except ValueError as error:
            group.num_left = 0
            if requests is self._requests:
                self.refused.append(f"{problem.id}: {error}")
            return
        group.group.prompt = messages
        for request in ids:
            episodes.by_request[request] = _Episode(group, Transcript(problem, messages), time.monotonic(), before=prompt_ids)

    def _end_turn(self, requests: RequestPool[OpenGroup], episodes: _Episodes, turn: Turn,
                  ended: list[tuple[OpenGroup, Rollout]]) -> None:
        """A turn has ended: ask the environment for its reply, unless a limit was reached."""
        episode = episodes.by_request[turn.request_id]
        self._add_turn(episode, turn.token_ids)
        late = self._is_overdue(episode)
        if late or episode.record.num_turns == self._max_turns:
            self._end(requests, episodes, turn.request_id, "time" if late else "turns", ended)
        else:
            episodes.replies[self.pool.act("reply", episode.transcript)] = turn.request_id

    def _add_turn(self, episode: _Episode, token_ids: list[int]) -> None:
        """Add the policy's turn to the conversation."""
        tokenizer = self.engine.tokenizer
        has_end = bool(token_ids) and token_ids[-1] in self._stop_ids
        text = "" if tokenizer is None else tokenizer.decode(token_ids[:-1] if has_end else token_ids, skip_special_tokens=False)
        if opens_thinking(episode.before, tokenizer):
            text = "<think>" + text
        message: Message = {"role": "assistant", "content": text}
        if self._format is not None:
            message["content"], calls = parse_tool_calls(text, self._format)
            if calls:
                message["tool_calls"] = [{"type": "function", "function": {"name": name, "arguments": dict(arguments)}}
                                         for name, arguments in calls]
            episode.record.num_tool_calls += len(calls)
        episode.last_turn = token_ids
        episode.record.num_turns += 1
        episode.transcript = replace(episode.transcript, messages=[*episode.transcript.messages, message])

    @property
    def _stop_ids(self) -> frozenset[int]:
        return self.engine.stop_ids(self.params)

    def _take_reply(self, requests: RequestPool[OpenGroup], episodes: _Episodes, request: int, found: Graded,
                    ended: list[tuple[OpenGroup, Rollout]]) -> None:
        """Continue an episode behind the environment's reply, or end it."""
        episode = episodes.by_request.get(request)
        if episode is None:  # a cluster gave it up meanwhile
            return
        episode.record.environment_s += found.seconds
        if found.error is not None:
            episode.record.error = f"environment: {found.error}"
        if found.error is not None or found.messages is None:
            self._end(requests, episodes, request, None if found.error is not None else "environment", ended)
            return
        shown = [{name: value for name, value in message.items() if name != "error"} for message in found.messages]
        episode.record.num_tool_errors += sum(bool(message.get("error")) for message in found.messages)
        if self._is_overdue(episode):
            self._end(requests, episodes, request, "time", ended)
            return
        try:
            ids = requests.engine.encode_reply(shown, episode.last_turn, self._stop_ids, self.chat_template_kwargs)
            has_room = requests.resume(request, ids)
        except ValueError as error:
            episode.record.error = str(error)
            self._end(requests, episodes, request, None, ended)
            return
        if not has_room:
            self._end(requests, episodes, request, "tokens", ended)
            return
        episode.before = ids
        episode.transcript = replace(episode.transcript, messages=[*episode.transcript.messages, *found.messages])

    def _end(self, requests: RequestPool[OpenGroup], episodes: _Episodes, request: int, why: EpisodeEnd | None,
             ended: list[tuple[OpenGroup, Rollout]]) -> None:
        episode = episodes.by_request.pop(request)
        reason = None if why is None else _LIMITS.get(why)
        ended.append((episode.group, episode.end(requests.end(request, reason), why)))

    def _is_overdue(self, episode: _Episode) -> bool:
        return self._timeout_s is not None and time.monotonic() - episode.began > self._timeout_s

    def _end_overdue(self, requests: RequestPool[OpenGroup], episodes: _Episodes,
                     ended: list[tuple[OpenGroup, Rollout]]) -> None:
        """End the turns of episodes whose time is over. Those that wait for a reply end when it is there."""
        overdue = [(request, episode) for request, episode in episodes.by_request.items() if self._is_overdue(episode)]
        for request, episode in overdue:
            rollout = requests.cut(request, "length")
            if rollout is not None:
                del episodes.by_request[request]
                ended.append((episode.group, self._finished(episode, rollout, "time")))

    def _finished(self, episode: _Episode, rollout: Rollout, why: EpisodeEnd) -> Rollout:
        """An episode that has ended within a turn, because there is no room for a further token or its time is over."""
        if rollout.finish_reason == "length":
            start = len(rollout.token_ids)
            mask = rollout.loss_mask or [1] * start
            while start and mask[start - 1]:
                start -= 1
            self._add_turn(episode, rollout.token_ids[start:])
        return episode.end(rollout, why)

    def _grade(self, problem: Problem, rollout: Rollout) -> Any:
        """Ask the environment for an episode's reward."""
        record = rollout.episode
        assert record is not None
        if record.error is not None:
            return self.pool.failed(problem, record.error)
        return self.pool.submit_episode(Transcript(problem, record.messages, record.end))


def make_collector(engine: Engine, baseline: Engine | None, prompts: PromptStream, pool: RewardPool, rollout: RolloutConfig,
                   seed: int, on_engine_step: Callable[[Engine, StepResult, int, int], None]) -> RolloutCollector:
    """The collector for a pool's task: for one with several turns, an `EpisodeCollector`."""
    kind = EpisodeCollector if is_environment(pool.task) else RolloutCollector
    return kind(engine, baseline, prompts, pool, rollout, seed, on_engine_step)


def run_episodes(engine: Engine, environment: AnyTask, problems: int, params: SamplingParams | None = None, *, n: int = 1,
                 max_turns: int = 16, workers: int = 1, timeout_s: float = 10.0) -> list[RolloutGroup]:
    """Generate `n` graded episodes of each of so many problems of an environment, without training, and return one group per
    problem. They are those of a run whose seed is `params.seed`. `workers`: number of processes that the environment runs in;
    0: in this one. `timeout_s`: limit of one call of the environment."""
    params = params or SamplingParams()
    rollout = RolloutConfig(group_size=n, max_turns=max_turns, max_new_tokens=params.max_new_tokens)
    with RewardPool(environment, workers, timeout_s, retries=1) as pool:
        collector = make_collector(engine, None, PromptStream(environment, params.seed, 1), pool, rollout, params.seed,
                                   lambda *_: None)
        collector.params = replace(params, pauses=collector.params.pauses)
        groups = collector(0, problems, PhaseTimer())
    for line in collector.refused:
        logger.warning("left out: %s", line)
    return groups
