"""The engine: requests in, rollouts out. `Engine.step` selects, schedules, drafts, launches and processes one step."""

from __future__ import annotations

import logging
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from paceline.config import EngineConfig
from paceline.drafters.eagle import Eagle
from paceline.engine.build import build, check_speculation
from paceline.engine.draft_outcomes import ObservedDrafts
from paceline.engine.drafting import StepDrafts
from paceline.engine.dummy import DummySteps
from paceline.engine.failures import end_broken_requests
from paceline.engine.generate import generate_groups
from paceline.engine.graphs import GraphReport, Timestamp
from paceline.engine.logit_adjustments import LogitAdjustments
from paceline.engine.migration import Migration
from paceline.engine.outputs import NOT_A_NUMBER, InFlight, append_outputs, make_rollout, read_features
from paceline.engine.profile import engine_identity, load_or_profile
from paceline.engine.prompts import Prompt, answer_seeds, check, encode
from paceline.engine.request import Request
from paceline.engine.runner import Download, record_event
from paceline.engine.scheduler import StepPlan
from paceline.engine.stats import Counters
from paceline.engine.step_timer import StepTimer
from paceline.engine.strategy_control import StrategyControl
from paceline.engine.watchdog import Watchdog
from paceline.engine.weights import PolicyWeights, copy_drafter, drafter_mismatch, offload, prepare_linears, restore
from paceline.models.decoder import Decoder
from paceline.models.weights import load_model
from paceline.strategy import AnyStrategy, CostCurve, Selector, make_selector
from paceline.types import (
    Decision,
    DrafterName,
    EngineStats,
    FinishReason,
    Rollout,
    RolloutGroup,
    SamplingParams,
    StepOutcome,
    StepResult,
    StepView,
    Strategy,
)

logger = logging.getLogger(__name__)

_WARM_UP_PROMPTS = 128
"""Largest number of prompts in the steps of `Engine.warm_up`: more than 64 use other kernels than fewer."""


class Engine:
    """Generates rollouts with continuous batching and speculative decoding. Tokens depend only on weights, prompt, seed and
    sampling parameters, never on the drafter, the strategy or the batch."""

    def __init__(self, model: Decoder, tokenizer: Any = None, drafter: str | Path | Eagle | None = "suffix",
                 strategy: AnyStrategy = "auto", config: EngineConfig | None = None) -> None:
        self.model, self.tokenizer, self.config = model, tokenizer, config or EngineConfig()
        self.version = self.drafter_version = 0
        self.reports_features = True
        """Whether rollouts come with the features of `EngineConfig.capture`, if there are any: reading them takes time."""
        self._control = StrategyControl(strategy)
        self._counters, self._ids, self._groups = Counters(), count(), count()
        self._requests: dict[int, Request] = {}
        self._in_flight: InFlight | None = None
        self._results: deque[StepResult] = deque()
        """Results that `step` has not returned yet."""
        self._asleep, self._may_profile = False, self.config.profile
        self._weights = PolicyWeights(model)
        self._eos = frozenset(model.config.eos_token_ids)
        parts = build(model, drafter, self.config)
        (self.ops, self.scheduler, self.store, self.state, self.graphs, self.batches, self.runner, self.drafting,
         self._feature_columns, self._pipelined) = parts
        self._watchdog = Watchdog(self.scheduler)
        self._timer = StepTimer(self.graphs, self.drafting.eagle is not None)
        self.dummy_steps = DummySteps(self.runner, self.batches, self.drafting, self.scheduler)
        self.migration = Migration(self._requests, self.scheduler, self.store, self.state, self.drafting,
                                   lambda: next(self._ids), self._stop_ids, self._drain)
        self._prepare_weights()
        self.drafter_mismatch: str | None = None
        if self.drafting.eagle is not None:
            self._check_drafter_origin(self.drafting.eagle.module)

    @classmethod
    def load(cls, source: str | Path, device: str = "auto", dtype: str = "auto", drafter: str | Path | Eagle | None = "suffix",
             strategy: AnyStrategy = "auto", **options: Any) -> Engine:
        """Load a policy and make an engine for it. `source`: a Hugging Face folder, a hub id, a GGUF file, or "default" for the
        bundled policy. `device`: "auto" is a GPU if there is one. `drafter`: "suffix", "none", or the folder of a learned
        drafter (the suffix drafter is then available, too). `options`: fields of EngineConfig. What is wrong with any of them
        is a ValueError of one line, before the weights are loaded."""
        config = EngineConfig(**options)
        check_speculation(drafter, strategy)
        model, tokenizer = load_model(source, device, dtype)
        return cls(model, tokenizer, drafter, strategy, config)

    # -- the step

    def step(self, strategy: Strategy | None = None) -> StepResult:
        """Run one forward pass of the policy over all requests that are ready, and return the outputs of a completed step. On
        a GPU that is the step before the one just launched, unless the suffix drafter needs the outputs before the launch.
        `strategy` overrides the engine's selector for this step."""
        if self._results:
            return self._results.popleft()
        if self._asleep:
            raise RuntimeError("step: the engine is asleep; call wake() first")
        self._weights.require_complete()
        self._timer.resume()
        decision = self._select() if strategy is None else Decision(strategy)
        self.drafting.check(decision.strategy)
        self._guarded(partial(self._advance, decision))
        self._watchdog.observe(progress=any(result.tokens for result in self._results) or not self.scheduler.has_work)
        return self._results.popleft() if self._results else StepResult.nothing(self._counters.steps, decision.strategy)

    def _advance(self, decision: Decision) -> None:
        """Plan, draft and launch a step, and process the outputs of a completed one."""
        launched = None
        if decision.strategy.drafter in ("suffix", "both"):  # the suffix drafter drafts from the generated text
            self._process()
        with torch.inference_mode():
            began = self.graphs.now()
            plan = self.scheduler.schedule(decision)
            if plan:
                started = record_event(self.state.device)
                self.runner.prepare(plan, self.scheduler.running)
                drafted = self.drafting.draft(plan)
                launched = self._launch(plan, drafted, began, started)
        if not self._results:
            self._process()
        self._in_flight = launched
        if not self._results and not self._pipelined:
            self._process()
        if launched is None and not self._results and self.scheduler.waiting and self.scheduler.pages.num_held == 0:
            self._refuse(self.scheduler.waiting[0])

    def _select(self) -> Decision:
        """Ask the selector about the next step."""
        if self._control.needs_profile:
            self._profile_if_possible()
        return self._control.select(self.scheduler, self.drafting.available)

    def _launch(self, plan: StepPlan, drafted: StepDrafts, began: Timestamp, started: torch.cuda.Event | None) -> InFlight:
        """Lay out the planned step and queue it on the device, without waiting for it."""
        batch = self.batches.build(plan, drafted)
        observed = ObservedDrafts.start(plan, batch) if self._control.observes(plan.decision) else None
        adjustments = LogitAdjustments.of(plan.decode, batch.num_nodes, self.model.config.vocab_size, self.state.device)
        output = self.runner.run(batch, any(request.params.raw_logprobs for request in plan.decode), adjustments=adjustments)
        context = sum([request.num_computed for request in plan.decode]) / max(1, len(plan.decode))
        self.drafting.on_launch(plan, batch.most_accepted)
        self.scheduler.on_launch(plan, batch.most_accepted)
        sampled = None
        if output is not None:  # without draft tokens every request gets one token
            counts = output.num_drawn if batch.max_depth else None
            sampled = Download.start(output.tokens, output.logprobs, output.raw_logprobs, counts, started=started)
        return InFlight(plan, batch, sampled, self.version, began, observed, context, self._timer.launched(began))

    def _process(self) -> None:
        """Read the outputs of the step in flight, if there is one, append its tokens to their requests, and queue its result."""
        step, self._in_flight = self._in_flight, None
        if step is None:
            return
        self._timer.wait_for(step, self._pipelined)
        tokens, ended, accepted = append_outputs(step, self.scheduler.max_length, self.tokenizer)
        self.scheduler.on_complete(step.plan, step.batch.most_accepted)
        self.drafting.on_complete(step.plan.decode, step.batch.most_accepted, tokens, self._timer.came_late)
        drafts = None if step.observed is None or step.sampled is None else step.observed.result(step.sampled)
        timed = self._timer.processed(step)
        finished = [self._rollout(request, reason) for request, reason in ended]
        for request, _ in ended:
            self.drafting.finish(request)
            self.scheduler.finish(request)
        result = StepResult(
            step=self._counters.steps, strategy=step.plan.strategy, num_requests=len(tokens),
            num_rows=step.batch.num_rows + step.plan.num_prefill_rows, num_prefill_rows=step.plan.num_prefill_rows,
            drafted=sum(step.batch.num_nodes), accepted=accepted, tokens=tokens, finished=finished,
            ms=timed.ms, drafts=drafts,
            drafted_by_request={request.id: nodes for request, nodes in
                                zip(step.plan.decode, step.batch.num_nodes, strict=False) if nodes})
        self._results.append(result)
        for rollout in finished:
            del self._requests[rollout.request_id]
        num_tokens = sum(map(len, tokens.values()))
        self._counters.record(result, num_tokens)
        self._control.record(StepOutcome(
            step.plan.decision, result.num_requests, result.num_prefill_rows, num_tokens, timed.ms if timed.is_usual else 0.0,
            result.num_rows, step.context, timed.host_ms, drafts), finished)

    def _rollout(self, request: Request, reason: FinishReason) -> Rollout:
        """Return the rollout of a request that ends."""
        request.finish_reason = reason
        layers = self.config.capture if self.reports_features else ()
        features = read_features(request, self.store, layers, self._feature_columns)
        return make_rollout(request, reason, self.tokenizer, features)

    def _finish(self, request: Request, reason: FinishReason) -> Rollout:
        """End a request: return its rollout and free its slot and pages."""
        rollout = self._rollout(request, reason)
        self.drafting.finish(request)
        self.scheduler.finish(request)
        del self._requests[request.id]
        self._watchdog.observe(progress=True)
        return rollout

    def _drain(self) -> None:
        """Wait for the step in flight; its result is returned by the next call of `step`."""
        self._watchdog.observe(progress=True)  # what the caller interrupts does not stall by itself
        self._timer.resume()
        self._guarded(self._process)

    # -- requests that cannot go on

    def _guarded(self, work: Callable[[], None]) -> None:
        """Call `work`. Whatever it raises, KeyboardInterrupt included, ends all running requests with an error, which the next
        call of `step` returns. Requests that wait are not touched, and the engine can be used further."""
        try:
            work()
        except BaseException as error:
            self._in_flight = None
            self._queue_finished(end_broken_requests(self._requests, self._results, self.scheduler, self.drafting, error,
                                                     self.migration.reserved_pages))
            raise

    def _refuse(self, request: Request) -> None:
        """End a request that was not admitted although it could have had all pages."""
        pages, length = self.scheduler.pages, len(request.tokens)
        request.error = (f"request {request.id}: its {length} tokens need {pages.pages_for(length)} pages of the KV cache, which "
                         f"has {pages.num_pages}")
        self._queue_finished([self._finish(request, "error")])

    def _queue_finished(self, rollouts: list[Rollout]) -> None:
        """Queue rollouts of requests that did not end by a token, for the next call of `step`."""
        if rollouts:
            self._results.append(replace(StepResult.nothing(self._counters.steps, Strategy.OFF), finished=rollouts))

    # -- requests

    def add(self, prompt: Prompt, params: SamplingParams | None = None, n: int = 1, key: str | None = None,
            seeds: Sequence[int] | None = None) -> list[int]:
        """Queue n answers of one prompt and return their request ids. Each answer's seed is derived from `params.seed`, the
        key (or the prompt) and the number of the answer, unless `seeds` gives the seeds."""
        params = params or SamplingParams()
        prompt_ids = self.encode(prompt)
        check(prompt_ids, params, n, self.tokenizer, self.model.config.vocab_size, self.scheduler.max_length)
        own_seeds = answer_seeds(params, prompt_ids, n, key, seeds)
        stop_ids, group = self._stop_ids(params), next(self._groups)
        requests = [Request(next(self._ids), group, sample, prompt_ids, replace(params, seed=seed), stop_ids)
                    for sample, seed in enumerate(own_seeds)]
        for request in requests:
            self._requests[request.id] = request
            self.scheduler.add(request)
        return [request.id for request in requests]

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        return frozenset({NOT_A_NUMBER, *params.stop_token_ids}) | (frozenset() if params.ignore_eos else self._eos)

    def encode(self, prompt: Prompt, chat_template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
        """Return the token ids of a prompt given as text, chat messages or token ids. `chat_template_kwargs`: variables that the
        chat template reads, such as `enable_thinking`."""
        return encode(prompt, self.tokenizer, chat_template_kwargs)

    def generate(self, prompts: Iterable[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None, n: int = 1,
                 keys: Sequence[str] | None = None, on_step: Callable[[StepResult], None] | None = None,
                 strategy: AnyStrategy | None = None) -> list[RolloutGroup]:
        """Generate n answers of every prompt. A prompt that cannot be served gives rollouts with an error message; the others
        finish. `strategy` overrides the engine's own for this call."""
        if strategy is not None:
            own, self.select = self.select, self.selector(strategy)
            try:
                return self.generate(prompts, params, n, keys, on_step)
            finally:
                self.select = own
        return generate_groups(self, [prompts] if isinstance(prompts, str) else list(prompts), params, n, keys, on_step)

    def abort(self, request_ids: Iterable[int]) -> list[Rollout]:
        """End requests where they are and return what they have generated. Ids of finished requests are ignored."""
        found = [self._requests[i] for i in request_ids if i in self._requests]
        return [self._finish(request, "abort") for request in found]

    def raw_logprobs(self, request_id: int, start: int = 0) -> list[float]:
        """Return the raw log-probabilities (`SamplingParams.raw_logprobs`) of a request's tokens from number `start` on; empty if
        there are none, or the request is finished."""
        request = self._requests.get(request_id)
        return [] if request is None else request.raw_logprobs[start:]

    @property
    def has_work(self) -> bool:
        """Whether there is a request, a step in flight or a result that `step` has not returned yet."""
        return self.scheduler.has_work or self._in_flight is not None or bool(self._results)

    # -- strategy selection, profiling, warm-up

    @property
    def select(self) -> Selector:
        """The selector that `step` asks for strategies."""
        return self._control.current

    @select.setter
    def select(self, selector: Selector | Callable[[StepView], Strategy]) -> None:
        self._control.current = make_selector(selector)

    def selector(self, strategy: AnyStrategy) -> Selector:
        """Return the selector for a strategy. A name always gives the same selector, with all that it has learned on this
        engine."""
        return self._control.selector(strategy)

    def distrust(self, drafter: DrafterName | None) -> None:
        """Hide a drafter from the selectors until it is replaced by `update_drafter`; None makes all drafters visible again. A
        strategy that names the drafter explicitly still uses it."""
        self._control.distrusted = drafter

    @property
    def costs(self) -> CostCurve:
        """The cost curve: predicted step times by size. `profile` measures it."""
        return self._control.costs

    def profile(self, seconds: float = 2.0, folder: Path | None = None) -> CostCurve:
        """Measure what steps cost, in about so many seconds (without captures), or read what an earlier start measured.
        Selectors that predict step times start from this cost curve; without it they start from a guess and learn from their
        steps."""
        eagle = self.drafting.eagle
        identity = engine_identity(self.model, None if eagle is None else eagle.module, self.ops.name, self.config,
                                   self.scheduler.max_batch, self.scheduler.max_rows)
        self._control.set_costs(load_or_profile(self.dummy_steps, identity, seconds, folder))
        return self.costs

    def _profile_if_possible(self) -> None:
        if self.costs.profiled or not (self._may_profile and self.drafting.available):
            return
        try:
            self.profile()
        except Exception:  # such as too little memory
            self._may_profile = False
            logger.warning("step times could not be measured; strategies are selected by a guess until steps tell", exc_info=True)

    def warm_up(self, max_requests: int | None = None, seconds: float = float("inf"),
                on_progress: Callable[[int, int], None] = lambda done, total: None) -> GraphReport:
        """Do all of `warming_up`. `seconds`: no further part is begun after that time, which begins when the engine has been
        profiled. `on_progress` is called with the number of parts done, and of all."""
        self._profile_if_possible()
        began = time.perf_counter()
        for done, total in self.warming_up(max_requests):
            on_progress(done, total)
            if time.perf_counter() - began > seconds:
                break
        return self.graph_report()

    def warming_up(self, max_requests: int | None = None) -> Iterator[tuple[int, int]]:
        """Profile the engine if it has a drafter, capture all graphs that `auto` may need for so many requests (None: for a full
        batch), and run steps with prompts, so that no later step has to wait for a capture or a compilation. Every iteration
        does one part and yields the number of parts done, and of all. Between two of them the engine may be used."""
        requests = min(max_requests or self.scheduler.max_batch, self.scheduler.max_batch)
        prompts = min(requests, _WARM_UP_PROMPTS if self.state.device.type == "cuda" else 2)
        parts: list[Callable[[], object]] = [self._profile_if_possible, *self.dummy_steps.captures(requests),
                                             partial(self._run_prompts, prompts)]
        if self.drafting.suffix is not None:
            parts.insert(0, self.drafting.suffix.warm_up)
        for done, run in enumerate(parts, 1):
            run()
            yield done, len(parts)

    def _run_prompts(self, num_requests: int) -> None:
        """Generate a few tokens for so many short prompts, unless there are requests. Selectors and statistics do not learn of
        it."""
        if self.has_work:
            return
        own, scheduler = (self._control, self._counters), self.scheduler
        counts = scheduler.num_preemptions, scheduler.num_cached_tokens
        strategy = Strategy("eagle" if self.dummy_steps.has_learned_drafter else "suffix", 1, 1, 1)
        self._control, self._counters = StrategyControl(strategy if self.drafting.available else Strategy.OFF), Counters()
        try:
            self.generate([[0] * 4], SamplingParams(max_new_tokens=8), num_requests)
            self._drain()
            self._results.clear()
        finally:
            self._control, self._counters = own
            scheduler.num_preemptions, scheduler.num_cached_tokens = counts

    def capture_graphs(self, strategies: Iterable[Strategy], batches: Sequence[int], exact: bool = False) -> GraphReport:
        """Capture the graphs that these strategies need at these batch sizes. `exact`: without padding to row sizes."""
        self.dummy_steps.capture(strategies, batches, padded=not exact)
        return self.graph_report()

    def graph_report(self) -> GraphReport:
        """Return the number, memory and capture time of CUDA graphs; all zero where none are captured."""
        return self.graphs.report()

    # -- weights and memory

    def update_weights(self, state: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], version: int | None = None) -> None:
        """Replace the policy's weights in place, from the next step on. Cached prefixes are dropped. Running requests keep the
        keys and values that they have, or are prefilled again (`EngineConfig.on_update`).

        A mapping or a list is checked completely before anything is copied: if it is refused, nothing has changed. Any other
        iterable is copied tensor by tensor. If it fails on the way, the engine does not run until a later update succeeds."""
        self._weights.replace(state, lambda: self._on_new_weights(self.version + 1 if version is None else version))

    def _on_new_weights(self, version: int) -> None:
        self._prepare_weights()
        self.version = version
        if self.drafting.eagle is not None and not self._asleep:  # otherwise `wake` does it
            self.drafting.eagle.policy_changed()
        if self.config.on_update == "recompute":
            self._drain()
            self.scheduler.preempt_all()
        self.scheduler.drop_prefixes()

    def update_drafter(self, drafter: Eagle, version: int) -> None:
        """Replace the learned drafter's weights in place, from the next step on. `version`: version of the policy that the
        drafter was trained for. Tokens do not depend on the drafter, so running requests continue. The policy's weights are
        not touched."""
        if self.drafting.eagle is None:
            raise ValueError("update_drafter: the engine was loaded without a learned drafter")
        if version > self.version:
            raise ValueError(f"update_drafter: version {version} is newer than the policy's, {self.version}")
        own = self.drafting.eagle.module
        copy_drafter(drafter, into=own)
        self._prepare_weights()
        if not self._asleep:  # otherwise `wake` does it
            self.drafting.eagle.policy_changed()  # it may have another reduced vocabulary
        own.policy_fingerprint, self.drafter_version = drafter.policy_fingerprint, version
        self._control.drafter_replaced()
        self._check_drafter_origin(own)

    def _check_drafter_origin(self, drafter: Eagle) -> None:
        """Warn once if the drafter was trained for other weights of this shape. That is allowed: they may be an older version
        of the same policy."""
        before = self.drafter_mismatch
        self.drafter_mismatch = drafter_mismatch(drafter, self.drafter_version, self.model, self.version)
        if self.drafter_mismatch is not None and before is None:
            warnings.warn(self.drafter_mismatch, stacklevel=3)

    def sleep(self, weights: bool | Literal["discard"] = False, keep: Collection[str] = ()) -> None:
        """Free the device's memory for others: KV cache, features and graphs, and with `weights` also the weights of policy
        and drafter, which are offloaded to the host and may be updated there. Requests stay: after `wake` they are prefilled
        with what they have and continue with the same tokens.

        With "discard" nothing is copied to the host for the policy: its weights are lost, and `update_weights` has to follow
        `wake`. `keep`: names of the policy's parameters that are not discarded, because somebody else uses their memory."""
        if not self._asleep:
            self._drain()
            self.scheduler.preempt_all()
            self.scheduler.drop_prefixes()
            self.runner.release_cache()
            self._asleep = True
        if weights:
            if weights == "discard":
                self._weights.discard(keep)
            offload(self._modules()[1:] if weights == "discard" else self._modules())
            if self.drafting.eagle is not None:
                self.drafting.eagle.module.policy_changed()  # also frees the rows that it gathered from the policy's head
        if self.state.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Allocate the memory again that `sleep` freed, and bring offloaded weights back to the device."""
        if not self._asleep:
            return
        restore(self._modules(), self.state.device)
        self._weights.allocate()
        self.runner.allocate_cache()
        if self.drafting.eagle is not None:
            self.drafting.eagle.policy_changed()
        self._asleep = False

    def _prepare_weights(self) -> None:
        if self.config.pack_weights or self.state.device.type != "cpu":  # only CPU kernels keep a copy
            prepare_linears(self._modules(), self.ops)

    def _modules(self) -> list[nn.Module]:
        learned = self.drafting.eagle
        return [self.model] if learned is None else [self.model, learned.module]

    # -- statistics

    def stats(self) -> EngineStats:
        """Return figures since the engine started, or since `reset_stats`."""
        return self._counters.stats(self.scheduler, self.version)

    def reset_stats(self) -> None:
        self._counters = Counters()
        self.scheduler.num_preemptions = self.scheduler.num_cached_tokens = 0
