"""The engine: requests in, rollouts out. `step` is the whole story; everything else feeds it or reads it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.config import EngineConfig
from paceline.drafters.eagle import Eagle
from paceline.engine.booking import InFlight, book
from paceline.engine.build import build, columns_of
from paceline.engine.choosing import Choosing
from paceline.engine.finish import NOT_A_NUMBER, final_text
from paceline.engine.graphs import GraphReport, Moment
from paceline.engine.park import park, unpark
from paceline.engine.profile import load_or_profile
from paceline.engine.prompts import Prompt, check, encode
from paceline.engine.request import Request
from paceline.engine.seeds import derive_seed
from paceline.engine.stats import Counters
from paceline.engine.transfer import Download
from paceline.engine.watch import Look
from paceline.models.decoder import Decoder, Linear
from paceline.models.names import load_state
from paceline.models.weights import load_model
from paceline.strategy import CostCurve, Selector, compile_loops, drafts_at
from paceline.types import (
    DrafterName,
    EngineStats,
    FeatureRecord,
    FinishReason,
    Rollout,
    RolloutGroup,
    SamplingParams,
    StepOutcome,
    StepResult,
    Strategy,
)


class Engine:
    def __init__(self, model: Decoder, tokenizer: Any = None, drafter: str | Path | Eagle | None = "suffix",
                 strategy: str | Strategy | Selector = "auto", config: EngineConfig | None = None) -> None:
        self.model, self.tokenizer, self.config = model, tokenizer, config or EngineConfig()
        self._choosing = Choosing(strategy)
        self.version = self.drafter_version = 0
        self._counters, self._ids, self._groups = Counters(), count(), count()
        self._requests: dict[int, Request] = {}
        self._in_flight: InFlight | None = None
        self._drained: list[StepResult] = []
        self._booked = Moment(0.0)
        self._asleep = False
        self._eos = frozenset(model.config.eos_token_ids)
        parts = build(model, drafter, self.config)
        self.ops, self.scheduler, self.store, self.state, self.runner, self.drafting, self._pipelined = parts
        self._prepare_weights()
        self.drafter_mismatch: str | None = None
        if self.drafting.eagle is not None:
            self._check_origin(self.drafting.eagle.module)

    @classmethod
    def load(cls, source: str | Path, device: str = "cpu", dtype: str = "auto", drafter: str | Path | Eagle | None = "suffix",
             strategy: str | Strategy | Selector = "auto", **options: Any) -> Engine:
        """`source`: a Hugging Face folder, a hub id or a GGUF file; `drafter`: "suffix", "none", or a learned drafter's
        folder (the suffix drafter stays beside it); `options`: fields of EngineConfig."""
        config = EngineConfig(**options)
        model, tokenizer = load_model(source, device, dtype)
        return cls(model, tokenizer, drafter, strategy, config)

    def step(self, strategy: Strategy | None = None) -> StepResult:
        """One pass of the policy over all that is ready: choose (unless told), plan, draft, launch, book. On a GPU what is booked
        is the step before the one just launched, unless the suffix drafter must know first how that one ended."""
        if self._drained:
            return self._drained.pop(0)
        if self._asleep:
            raise RuntimeError("step: the engine is asleep; call wake() first")
        if strategy is None:
            strategy = self._select()
        if any(s.drafter not in ("none", *self.drafting.available) for s in (strategy, strategy.aside or strategy)):
            raise ValueError(f"strategy {strategy}: the engine was loaded without that drafter")
        result = self._book_in_flight() if strategy.drafter in ("suffix", "both") else None
        launched = self._launch(strategy)
        if result is None:
            result = self._book_in_flight()
        self._in_flight = launched
        if result is None and not self._pipelined:
            result = self._book_in_flight()
        return result or StepResult.nothing(self._counters.steps, strategy)

    @torch.inference_mode()
    def _launch(self, strategy: Strategy) -> InFlight | None:
        """Queue the next step on the device; None: nothing can be done before what is in flight has been read."""
        began = Moment.now(self.runner.graphs)
        plan = self.scheduler.schedule(strategy)
        if not plan:
            return None
        if strategy.tau is not None:
            self.drafting.set_tau(strategy.tau)
        context = sum([request.num_computed for request in plan.decode]) / max(1, len(plan.decode))
        for request in plan.admitted:
            self.drafting.begin(request)
        self.state.admit(plan.admitted)
        self.state.set_pages(self.scheduler.running)
        self.runner.copy_pages(plan.copies)
        drafted = self.drafting.draft(plan)
        look = Look.start(plan, drafted) if self._choosing.is_watched(strategy, len(plan.decode)) else None
        want_raw = any(request.params.raw_logprobs for request in plan.decode)
        output = self.runner.run(plan, drafted, want_raw)
        self.drafting.prefilled(plan.prefill)
        self.scheduler.commit(plan, drafted.most_accepted)
        drawn = None
        if output is not None:  # without trees everybody draws one
            counts = output.num_drawn if drafted.max_depth else None
            drawn = Download.start(output.tokens, output.logprobs, output.raw_logprobs, counts)
        self._choosing.aside(strategy, plan.decode, self.drafting)
        return InFlight(plan, drafted, drawn, self.version, began, look, context, time.perf_counter() - began.at)

    def add(self, prompt: Prompt, params: SamplingParams | None = None, n: int = 1, key: str | None = None,
            seeds: Sequence[int] | None = None) -> list[int]:
        """Queues n answers of one prompt and returns their request ids. Each answer's seed derives from (params.seed, key or
        prompt, its number) unless `seeds` gives them."""
        params = params or SamplingParams()
        prompt_ids = self.encode(prompt)
        check(prompt_ids, params, n, self.tokenizer, self.model.config.vocab_size, self.scheduler.max_length)
        if seeds is None:
            seeds = [derive_seed(params.seed, prompt_ids if key is None else key, sample) for sample in range(n)]
        stop_ids = frozenset({NOT_A_NUMBER, *params.stop_token_ids}) | (frozenset() if params.ignore_eos else self._eos)
        group = next(self._groups)
        requests = [Request(next(self._ids), group, sample, prompt_ids, replace(params, seed=seed), stop_ids)
                    for sample, seed in enumerate(seeds)]
        for request in requests:
            self._requests[request.id] = request
            self.scheduler.add(request)
        return [request.id for request in requests]

    def generate(self, prompts: Iterable[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None, n: int = 1,
                 keys: Sequence[str] | None = None, on_step: Callable[[StepResult], None] | None = None,
                 strategy: str | Strategy | Selector | None = None) -> list[RolloutGroup]:
        """All answers of all prompts. A prompt that cannot be served gives rollouts that say why; the others finish.
        `strategy` overrides the engine's own for this call."""
        if strategy is not None:
            own, self.select = self.select, self.selector(strategy)
            try:
                return self.generate(prompts, params, n, keys, on_step)
            finally:
                self.select = own
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts) or (keys is not None and len(keys) != len(prompts)):
            raise ValueError(f"generate: {len(prompts)} prompts, but {len(each)} params and {len(keys or prompts)} keys")
        groups, owner = [], {}
        for index, prompt in enumerate(prompts):
            try:
                ids = self.add(prompt, each[index], n, None if keys is None else keys[index])
            except ValueError as error:
                failed = [_failed(sample, str(error)) for sample in range(n)]
                groups.append(RolloutGroup([], failed))
                continue
            groups.append(RolloutGroup(self._requests[ids[0]].prompt_ids))
            owner.update(dict.fromkeys(ids, index))
        self._run_until_done(owner, groups, on_step)
        return groups

    def abort(self, request_ids: Iterable[int]) -> list[Rollout]:
        """Ends them where they are; returns what they have. Ids that are already finished are passed over."""
        found = [self._requests[i] for i in request_ids if i in self._requests]
        return [self._finish(request, "abort") for request in found]

    def update_weights(self, state: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], version: int | None = None) -> None:
        """New policy weights, in place, from the next step on. Cached prefixes are dropped; requests in flight go on with
        the keys and values they have, or prefill again (`EngineConfig.on_update`)."""
        load_state(self.model, state)
        self._prepare_weights()
        self.version = self.version + 1 if version is None else version
        if self.drafting.eagle is not None and not self._asleep:  # `wake` does it
            self.drafting.eagle.policy_changed()
        if self.config.on_update == "recompute":
            self._drain()
            self.scheduler.preempt_all()
        self.scheduler.drop_prefixes()

    def sleep(self, weights: bool = False) -> None:
        """Gives the device's memory to others: cache, features and graphs go, and with `weights` those of policy and drafter to
        the host, where they may be updated. Requests stay: after `wake` they prefill what they have and go on with the same
        tokens."""
        if not self._asleep:
            self._drain()
            self.scheduler.preempt_all()
            self.scheduler.drop_prefixes()
            self.runner.release()
            self.store.release()
            self._asleep = True
        if weights:
            park(self._modules())
            if self.drafting.eagle is not None:
                self.drafting.eagle.module.policy_changed()  # what it has gathered of the head goes, too
        if self.state.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Takes the memory back."""
        if not self._asleep:
            return
        unpark(self._modules(), self.state.device)
        self.store.allocate()
        self.runner.bind()
        if self.drafting.eagle is not None:
            self.drafting.eagle.policy_changed()
        self._asleep = False

    def _select(self) -> Strategy:
        self._profile_once()
        return self._choosing.strategy(self.scheduler, self.drafting.available)

    @property
    def select(self) -> Selector:
        """Whom `step` asks."""
        return self._choosing.select

    @select.setter
    def select(self, selector: Selector) -> None:
        self._choosing.select = selector

    def selector(self, strategy: str | Strategy | Selector) -> Selector:
        """By name always the same one, with what it has learned on this engine."""
        return self._choosing.selector(strategy)

    @property
    def costs(self) -> CostCurve:
        """What steps cost; `profile` measures it."""
        return self._choosing.costs

    def profile(self, seconds: float = 2.0, folder: Path | None = None) -> CostCurve:
        """Measures what steps cost, in about so many seconds (captures apart), or reads what an earlier start measured. Selectors
        that predict start from that; without it they start from a guess and learn from their steps."""
        compile_loops()
        self._choosing.use(load_or_profile(self, seconds, folder))
        return self.costs

    def _profile_once(self) -> None:
        """If the selector wants to know, and nobody has told it yet."""
        if self._choosing.wants_profile and self.config.profile and self.drafting.available:
            self.profile()

    @torch.inference_mode()
    def rehearse(self, batch: int, strategy: Strategy, exact: bool = False) -> None:
        """A step of so many requests that are nobody's, verification only. exact: unpadded."""
        drafted = self.drafting.rehearse(batch, strategy, exact)
        self.runner.run_rows(drafted.inputs, drafted.max_depth, at_once=True)

    @torch.inference_mode()
    def capture_graphs(self, strategies: Iterable[Strategy], batches: Sequence[int], exact: bool = False) -> GraphReport:
        """Capture what these strategies will need at these numbers of requests, before it is needed. exact: unpadded."""
        for strategy in strategies:
            for batch in batches:
                if self.runner.graphs is not None:
                    self.drafting.rehearse_drafting(batch, strategy)
                    self.rehearse(batch, strategy, exact)
        return self.graph_report()

    @torch.inference_mode()
    def warm_up(self) -> GraphReport:
        """Profiles, where the selector wants it, and captures whatever it may ask for, so that no step waits for it later. Two
        seconds, on a GPU some more."""
        self._profile_once()
        if self.runner.graphs is not None:
            for rows in self.drafting.row_sizes:
                if rows <= self.scheduler.max_batch:
                    self.rehearse(rows, Strategy.OFF)
            for rows in self.drafting.tree_sizes[1:]:
                self.rehearse(rows // 2, Strategy("eagle", 1, 1, 1))
            for requests in self.drafting.tree_sizes if self.drafting.eagle is not None else ():
                for strategy in drafts_at(requests) if requests <= self.scheduler.max_batch else ():
                    self.drafting.rehearse_drafting(requests, strategy)
        return self.graph_report()

    def graph_report(self) -> GraphReport:
        """What captured graphs cost so far; nothing where none are."""
        return GraphReport() if self.runner.graphs is None else self.runner.graphs.report()

    def update_drafter(self, drafter: Eagle, version: int) -> None:
        """New weights for the learned drafter, in place, from the next step on; `version`: of the policy that they follow. Tokens
        do not depend on it, so requests in flight go on. The policy's tensors are not touched."""
        if self.drafting.eagle is None:
            raise ValueError("update_drafter: the engine was loaded without a learned drafter")
        own = self.drafting.eagle.module
        if drafter.config != own.config or not _same(drafter.draft_ids, own.draft_ids):
            raise ValueError("update_drafter: this drafter is of another form or for another policy")
        if version > self.version:
            raise ValueError(f"update_drafter: version {version} is newer than the policy's, {self.version}")
        with torch.no_grad():
            for mine, new in zip(own.parameters(), drafter.parameters(), strict=True):
                mine.copy_(new)
        self._prepare_weights()
        own.policy_fingerprint, self.drafter_version = drafter.policy_fingerprint, version
        self._choosing.drafter_replaced()
        self._check_origin(own)

    def distrust(self, drafter: DrafterName | None) -> None:
        """Selectors do without this drafter until a new one comes with `update_drafter`; None: they may use all again. A strategy
        that names it outright still does."""
        self._choosing.distrusted = drafter

    def _check_origin(self, drafter: Eagle) -> None:
        """A drafter for other weights of this shape is legal, an older policy of the same run's say; but it is said."""
        known = drafter.policy_fingerprint
        said, self.drafter_mismatch = self.drafter_mismatch, None if known is None else known.mismatch(self.model)
        if self.drafter_mismatch is None and self.drafter_version < self.version:
            self.drafter_mismatch = f"the drafter follows policy version {self.drafter_version}, the policy is at {self.version}"
        if self.drafter_mismatch is not None and said is None:
            warnings.warn(self.drafter_mismatch, stacklevel=3)

    def stats(self) -> EngineStats:
        c, scheduler = self._counters, self.scheduler
        return EngineStats(
            steps=c.steps, prompt_tokens=c.prompt_tokens, cached_prompt_tokens=scheduler.num_cached_tokens,
            generated_tokens=c.generated_tokens, drafted=c.drafted, accepted=c.accepted, verifications=c.verifications,
            preemptions=scheduler.num_preemptions, seconds=c.seconds, strategy_steps=dict(c.strategy_steps),
            num_running=len(scheduler.running), num_waiting=len(scheduler.waiting),
            free_pages=scheduler.pages.num_available, total_pages=scheduler.pages.num_pages, version=self.version)

    def reset_stats(self) -> None:
        self._counters = Counters()
        self.scheduler.num_preemptions = self.scheduler.num_cached_tokens = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._in_flight is not None or bool(self._drained)

    def _drain(self) -> None:
        """Wait for what is in flight; what it finished comes out with the next step."""
        result = self._book_in_flight()
        if result is not None:
            self._drained.append(result)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt given as text, chat messages or ids."""
        return encode(prompt, self.tokenizer)

    def _book_in_flight(self) -> StepResult | None:
        """What the step in flight drew, appended to its requests."""
        step, self._in_flight = self._in_flight, None
        if step is None:
            return None
        if step.drawn is not None:
            step.drawn.wait()
        there = time.perf_counter()
        tokens, ended, accepted = book(step, self.scheduler.max_length, self.tokenizer)
        self.scheduler.landed(step.plan, step.drafted.most_accepted)
        self.drafting.extend(step.plan.decode, step.drafted.most_accepted, tokens)
        finished = [self._finish(request, reason) for request, reason in ended]
        watched, expected = (None, 0.0) if step.look is None or step.drawn is None else step.look.result(step.drawn)
        since, now = max(step.began, self._booked), Moment.now(self.runner.graphs)
        spent = now.at - since.at - (now.capture_seconds - since.capture_seconds)
        result = StepResult(
            step=self._counters.steps, strategy=step.plan.strategy, num_requests=len(tokens),
            num_rows=step.drafted.num_rows + step.plan.num_prefill_rows, num_prefill_rows=step.plan.num_prefill_rows,
            drafted=sum(step.drafted.num_nodes), accepted=accepted, tokens=tokens, finished=finished,
            ms=max(0.0, spent) * 1e3, watched=watched, expected=expected)
        self._booked = now
        num_tokens = sum(map(len, tokens.values()))
        self._counters.record(result, num_tokens)
        regular = now.num_irregular == since.num_irregular
        host_ms = 1e3 * (step.launch_seconds + now.at - there) if self._pipelined else 0.0
        self._choosing.record(StepOutcome(
            result.step, result.strategy, result.num_requests, result.num_prefill_rows, num_tokens, result.ms if regular else 0.0,
            result.num_rows, step.context, host_ms, step.plan.crowded), watched)
        return result

    def _finish(self, request: Request, reason: FinishReason) -> Rollout:
        request.finish_reason = reason
        rollout = Rollout(
            request_id=request.id, sample=request.sample, prompt_ids=request.prompt_ids, token_ids=request.output_ids,
            logprobs=request.logprobs, text=final_text(request, self.tokenizer), finish_reason=reason,
            versions=request.versions, seed=request.params.seed, error=request.error, features=self._features(request),
            raw_logprobs=request.raw_logprobs if request.params.raw_logprobs else None,
            num_preemptions=request.num_preemptions)
        self.drafting.end(request)
        self.scheduler.finish(request)
        del self._requests[request.id]
        return rollout

    def _features(self, request: Request) -> FeatureRecord | None:
        """Hidden states of every token that was fed, as captured on the way."""
        wanted = self.config.capture
        if not wanted or self.store.features is None or request.slot < 0:
            return None
        stored = self.store.features[self.store.slots(request.pages, request.num_computed)]
        columns = columns_of(self.runner.capture, wanted, self.model.config.hidden_size)
        return FeatureRecord(request.tokens[: request.num_computed + 1], stored[:, columns.to(stored.device)], wanted,
                             request.versions, len(request.prompt_ids))

    def _run_until_done(self, owner: dict[int, int], groups: list[RolloutGroup],
                        on_step: Callable[[StepResult], None] | None) -> None:
        """Steps until every owned request is finished; on any way out the rest is aborted, so nothing leaks."""
        left = set(owner)
        try:
            while left:
                result = self.step()
                for rollout in result.finished:
                    if rollout.request_id in left:
                        left.remove(rollout.request_id)
                        groups[owner[rollout.request_id]].rollouts.append(rollout)
                if on_step is not None:
                    on_step(result)
        finally:
            self.abort(left)
        for group in groups:
            group.rollouts.sort(key=lambda rollout: rollout.sample)

    def _prepare_weights(self) -> None:
        if self.config.pack_weights:
            modules = [module for part in self._modules() for module in part.modules()]
            self.ops.prepare([module.weight for module in modules if isinstance(module, Linear)])

    def _modules(self) -> list[nn.Module]:
        learned = self.drafting.eagle
        return [self.model] if learned is None else [self.model, learned.module]


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return (a is None and b is None) or (a is not None and b is not None and torch.equal(a.to(b.device), b))


def _failed(sample: int, error: str) -> Rollout:
    return Rollout(request_id=-1, sample=sample, prompt_ids=[], token_ids=[], logprobs=[], text="", finish_reason="error",
                   versions=[], error=error)
