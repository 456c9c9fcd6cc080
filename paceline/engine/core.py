"""The engine's core: its step. The planner decides what to do, the executor does it on the device, and the planner appends what
came out. On a GPU a step is launched before the outputs of the one before it are read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from paceline.config import EngineConfig
from paceline.drafters.eagle_drafter import EagleDrafter
from paceline.engine.command import ReadFeatures
from paceline.engine.drafting import Drafting
from paceline.engine.executor import Executor
from paceline.engine.migration import Migration
from paceline.engine.outputs import feature_record, make_rollout
from paceline.engine.planner import Planner
from paceline.engine.request import Request, Status
from paceline.engine.scheduler import Scheduler
from paceline.engine.stats import Counters
from paceline.engine.step_timer import InFlight, StepTimer
from paceline.engine.strategy_control import StrategyControl
from paceline.engine.watchdog import Watchdog
from paceline.types import Decision, FinishReason, Rollout, StepOutcome, StepResult, Strategy


class EngineCore:
    """Runs steps, and ends requests that cannot go on."""

    def __init__(self, planner: Planner, executor: Executor, tokenizer: Any, config: EngineConfig) -> None:
        self.planner, self.executor, self.tokenizer, self.config = planner, executor, tokenizer, config
        self.version = 0
        """Version of the policy."""
        self.reports_features = True
        """Whether rollouts come with the features of `EngineConfig.capture`, if there are any: reading them takes time."""
        self.migration = Migration(planner, executor, self._drain)
        self._counters = Counters()
        self._in_flight: InFlight | None = None
        self._results: deque[StepResult] = deque()
        """Results that `step` has not returned yet."""
        self._watchdog, self._timer = Watchdog(self.scheduler), StepTimer(executor.graphs)

    @property
    def scheduler(self) -> Scheduler:
        """The planner's scheduler: waiting and running requests, and pages."""
        return self.planner.scheduler

    @property
    def drafting(self) -> Drafting:
        """The planner's part of drafting: the suffix drafter."""
        return self.planner.drafting

    @property
    def eagle(self) -> EagleDrafter | None:
        """The learned drafter, if there is one."""
        return self.executor.eagle

    @property
    def device(self) -> torch.device:
        """The device that the engine runs on."""
        return self.executor.device

    @property
    def _control(self) -> StrategyControl:
        return self.planner.control

    @property
    def has_work(self) -> bool:
        """Whether there is a request that is not paused, a step in flight or a result that `step` has not returned yet."""
        return self.scheduler.has_work or self._in_flight is not None or bool(self._results)

    # -- the step

    def step(self, strategy: Strategy | None = None) -> StepResult:
        """Run one forward pass of the policy over all requests that are ready, and return the outputs of a completed step. On
        a GPU that is the step before the one just launched, unless the suffix drafter needs the outputs before the launch.
        `strategy` overrides the engine's selector for this step."""
        if self._results:
            return self._results.popleft()
        self.executor.require_weights()
        self._timer.resume()
        decision = self._select() if strategy is None else Decision(strategy)
        self.drafting.check(decision.strategy)
        self._guarded(partial(self._advance, decision))
        self._watchdog.observe(progress=any(result.tokens for result in self._results) or not self.scheduler.has_work)
        return self._results.popleft() if self._results else StepResult.nothing(decision.strategy)

    def _advance(self, decision: Decision) -> None:
        """Plan and launch a step, and process the outputs of a completed one."""
        launched = None
        if decision.strategy.drafter == "suffix" or self.planner.needs_outputs:  # both go on from the generated text
            self._process()
        began = self.executor.graphs.now()
        step = self.planner.plan(decision, self.version)
        self._timer.planned(began)
        if step is not None:
            launched = InFlight(step, self.executor.execute(step.command), began, self._timer.launched(began))
        if not self._results:
            self._process()
        self._in_flight = launched
        if not self._results and not self.planner.pipelined:
            self._process()
        if launched is None and not self._results and self.scheduler.waiting and self.scheduler.pages.num_held == 0:
            self._refuse(self.scheduler.waiting[0])

    def _select(self) -> Decision:
        """Ask the selector about the next step."""
        return self.planner.select()

    def _process(self) -> None:
        """Read the outputs of the step in flight, if there is one, append its tokens to their requests, and queue its result."""
        launched, self._in_flight = self._in_flight, None
        if launched is None:
            return
        step, pending = launched.step, launched.pending
        self._timer.wait_for(launched, self.planner.pipelined)
        (tokens, ended, accepted), drafts = self.planner.complete(step, pending.read(), self._timer.came_late)
        timed = self._timer.processed(launched)
        paused = [self.planner.pause(*pair) for pair in ended if self.planner.may_pause(*pair)]
        ended = [pair for pair in ended if pair[0].status is not Status.PAUSED]
        finished = [self._rollout(request, reason) for request, reason in ended]
        num_forced_rows = step.command.num_forced_rows
        result = StepResult(
            strategy=step.plan.strategy, num_requests=len(tokens), num_rows=pending.num_rows, num_prefill_rows=num_forced_rows,
            drafted=sum(step.num_nodes), accepted=accepted, tokens=tokens, finished=finished, ms=timed.ms, drafts=drafts,
            paused=paused,
            drafted_by_request={request.id: nodes for request, nodes in zip(step.plan.decode, step.num_nodes, strict=True)
                                if nodes})
        self._results.append(result)  # before any of them is forgotten: what raises now loses no rollout
        for request, _ in ended:
            self.planner.finish(request)
        num_tokens = sum(map(len, tokens.values()))
        self._counters.record(result, num_tokens)
        num_rows = step.num_decode_rows if num_forced_rows else pending.num_rows
        self._control.record(StepOutcome(
            step.plan.decision, result.num_requests, num_forced_rows, num_tokens, timed.ms if timed.is_usual else 0.0,
            num_rows, step.context, timed.host_ms, drafts,
            self._control.last_progress(self.scheduler, step.plan.decode, tokens)), finished)

    def _rollout(self, request: Request, reason: FinishReason) -> Rollout:
        """Return the rollout of a request that ends."""
        request.finish_reason, features = reason, None
        if self.config.capture and self.reports_features and request.pages:
            stored = self.executor.execute(ReadFeatures(request.pages, request.num_computed))
            features = None if stored is None else feature_record(request, stored, self.config.capture)
        return make_rollout(request, reason, self.tokenizer, features)

    def _abort(self, request: Request, reason: FinishReason = "abort") -> Rollout:
        """End a request where it is: return its rollout and free its slot and pages."""
        rollout = self._rollout(request, reason)
        self.planner.finish(request)
        self._watchdog.observe(progress=True)
        return rollout

    def _drain(self) -> None:
        """Wait for the step in flight; its result is returned by the next call of `step`."""
        self._watchdog.observe(progress=True)  # what the caller interrupts does not stall by itself
        self._timer.resume()
        self._guarded(self._process)

    @contextmanager
    def unrecorded(self, strategy: Strategy) -> Iterator[None]:
        """Within it steps use this strategy, and selectors and statistics do not learn of them."""
        own, scheduler = (self.planner.control, self._counters), self.scheduler
        counts = scheduler.num_preemptions, scheduler.num_cached_tokens
        self.planner.control, self._counters = StrategyControl(strategy), Counters()
        try:
            yield
            self._drain()
            self._results.clear()
        finally:
            self.planner.control, self._counters = own
            scheduler.num_preemptions, scheduler.num_cached_tokens = counts

    # -- requests that cannot go on

    def _guarded(self, work: Callable[[], None]) -> None:
        """Call `work`. Whatever it raises, KeyboardInterrupt included, ends all running requests with an error, which the next
        call of `step` returns. Requests that wait are not touched, and the engine can be used further."""
        try:
            work()
        except BaseException as error:
            self._in_flight = None
            self._queue_finished(self.planner.end_broken(self._results, error, self.migration.reserved_pages))
            raise

    def _refuse(self, request: Request) -> None:
        """End a request that was not admitted although it could have had all pages."""
        pages, length = self.scheduler.pages, len(request.tokens)
        request.error = (f"request {request.id}: its {length} tokens need {pages.pages_for(length)} pages of the KV cache, which "
                         f"has {pages.num_pages}")
        self._queue_finished([self._rollout(request, "error")])
        self.planner.finish(request)
        self._watchdog.observe(progress=True)

    def _queue_finished(self, rollouts: list[Rollout]) -> None:
        """Queue rollouts of requests that did not end by a token, for the next call of `step`."""
        if rollouts:
            self._results.append(replace(StepResult.nothing(Strategy.OFF), finished=rollouts))
