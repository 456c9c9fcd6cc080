"""The engine as programs use it: requests in, rollouts out. Start reading at `EngineCore.step`."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from paceline.config import EngineConfig
from paceline.drafters.eagle import Eagle
from paceline.engine.build import build, check_speculation, has_learned_drafter
from paceline.engine.command import LoadDrafter, LoadWeights, Sleep, Wake
from paceline.engine.core import EngineCore
from paceline.engine.dummy import DummySteps
from paceline.engine.generate import generate_groups, generate_unrecorded
from paceline.engine.graphs import GraphReport
from paceline.engine.profile import engine_identity, load_or_profile, read_learned, write_learned
from paceline.engine.prompts import Prompt, check_reply, encode
from paceline.engine.ranks import Ranks
from paceline.engine.replies import encode_reply
from paceline.engine.request import Status
from paceline.engine.split import check_split, decoder_maker, split_policy, start_ranks
from paceline.engine.stats import Counters
from paceline.engine.weights import drafter_mismatch
from paceline.models.decoder import Decoder
from paceline.models.weights import check_model, load_model, resolve_device
from paceline.strategy import AnyStrategy, CostCurve, Selector, make_selector
from paceline.types import (
    Decision,
    DrafterName,
    EngineStats,
    FinishReason,
    Rollout,
    RolloutGroup,
    SamplingParams,
    StepResult,
    StepView,
    Strategy,
)

logger = logging.getLogger(__name__)


class Engine(EngineCore):
    """Generates rollouts with continuous batching and speculative decoding. Tokens depend only on weights, prompt, seed and
    sampling parameters, never on the drafter, the strategy or the batch."""

    def __init__(self, model: Decoder, tokenizer: Any = None, drafter: str | Path | Eagle | None = "suffix",
                 strategy: AnyStrategy = "auto", config: EngineConfig | None = None, ranks: Ranks | None = None,
                 source: str | None = None) -> None:
        """`ranks`, `source`: see `load`, which reads a split policy part by part. A whole policy is split here if the
        configuration says so."""
        config, whole = config or EngineConfig(), model
        if config.num_shares > 1 and whole.parts is None:
            check_split(whole.config, config)
            ranks = ranks or start_ranks(config, whole.norm.device)
            model = split_policy(whole, config, ranks, has_learned_drafter(drafter))
        super().__init__(*build(model, tokenizer, drafter, strategy, config, ranks, source), tokenizer, config)
        self.model, self.drafter_version = model, 0
        self._may_profile = config.profile
        if ranks is not None and whole.parts is None:
            self.executor.execute(LoadWeights(dict(whole.named_parameters())))
        self.dummy_steps = DummySteps(self.executor, self.scheduler, bool(self.drafting.available))
        self.drafter_mismatch: str | None = None
        if self.eagle is not None:
            self._check_drafter_origin(self.eagle.module)

    @classmethod
    def load(cls, source: str | Path, device: str = "auto", dtype: str = "auto", drafter: str | Path | Eagle | None = "suffix",
             strategy: AnyStrategy = "auto", **options: Any) -> Engine:
        """Load a policy and make an engine for it. `source`: a Hugging Face folder, a hub id, a GGUF file, or "default" for the
        bundled policy. `device`: "auto" is a GPU if there is one. `drafter`: "suffix", "none", the folder or hub id of
        a learned drafter (the suffix drafter is then available, too), or "default" for the learned drafter of the bundled policy.
        `options`: fields of EngineConfig. What is wrong with any of them is a ValueError of one line, before the weights are
        loaded."""
        config = EngineConfig(**options)
        check_speculation(drafter, strategy)
        if config.num_shares == 1:
            return cls(*load_model(source, device, dtype), drafter, strategy, config)
        check_split(check_model(source), config)
        ranks = start_ranks(config, torch.device(resolve_device(device)))
        try:
            make = decoder_maker(config, ranks, has_learned_drafter(drafter))
            return cls(*load_model(source, device, dtype, make=make), drafter, strategy, config, ranks, str(source))
        except BaseException:
            if ranks is not None:
                ranks.close()
            raise

    def close(self) -> None:
        """End the other ranks of a tensor parallel engine, which cannot be used afterwards. They end with this process, too."""
        if self.executor.ranks is not None:
            self.executor.ranks.close()

    # -- requests

    def add(self, prompt: Prompt, params: SamplingParams | None = None, n: int = 1, key: str | None = None,
            seeds: Sequence[int] | None = None) -> list[int]:
        """Queue n answers of one prompt and return their request ids. Each answer's seed is derived from `params.seed`, the
        key (or the prompt) and the number of the answer, unless `seeds` gives the seeds."""
        return self.planner.add(self.encode(prompt), params or SamplingParams(), n, key, seeds)

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
            own, self.selector = self.selector, self.selector_of(strategy)
            try:
                return self.generate(prompts, params, n, keys, on_step)
            finally:
                self.selector = own
        return generate_groups(self, [prompts] if isinstance(prompts, str) else list(prompts), params, n, keys, on_step)

    def abort(self, request_ids: Iterable[int]) -> list[Rollout]:
        """End requests where they are and return what they have generated. Ids of finished requests are ignored."""
        found = [self.planner.requests[i] for i in request_ids if i in self.planner.requests]
        return [self._abort(request) for request in found]

    def encode_reply(self, messages: Sequence[Mapping[str, Any]], turn_ids: Sequence[int], stop_ids: Collection[int] = (),
                     chat_template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
        """Return the token ids that continue a conversation behind a turn (`Turn.token_ids`): the reply's messages as the chat
        template formats them, and the beginning of the next turn. No earlier token is encoded again. `stop_ids`: token ids beside
        the model's own that end a turn."""
        if self.tokenizer is None:
            raise ValueError("reply: the model came without a tokenizer; pass token ids to resume")
        return encode_reply(messages, turn_ids, self.tokenizer, {*self.planner.eos, *stop_ids}, chat_template_kwargs)

    def stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """Return the token ids that end an answer, or a turn of it."""
        return self.planner.stop_ids(params)

    def resume(self, request_id: int, token_ids: Sequence[int]) -> bool:
        """Continue a paused request (`SamplingParams.pauses`) behind these tokens, such as an environment's reply. Its next
        tokens are sampled as if all tokens so far had been its prompt. Return False, without a change, if they leave no room
        for a further token (`SamplingParams.max_new_tokens`, or the context)."""
        request = self.planner.paused(request_id)
        return self.planner.resume(request, check_reply(token_ids, self.model.config.vocab_size), self.version)

    def end(self, request_id: int, reason: FinishReason | None = None) -> Rollout:
        """End a paused request and return its rollout. `reason`: its finish reason; None: why its last turn ended."""
        request = self.planner.paused(request_id)
        return self._abort(request, reason or request.finish_reason or "stop")

    def cut(self, request_id: int, reason: FinishReason) -> Rollout | None:
        """End a request in the middle of a turn and return its rollout. None, without a change, if it is not in a turn that has a
        token."""
        request = self.planner.requests.get(request_id)
        if request is None or request.status is Status.PAUSED or not request.has_begun_turn:
            return None
        return self._abort(request, reason)

    def logprobs(self, request_id: int, start: int = 0) -> list[float]:
        """Return the log-probabilities of a request's tokens from number `start` on: the raw ones if it asked for them
        (`SamplingParams.raw_logprobs`), otherwise those of the distribution that was sampled from. Empty if the request is
        finished."""
        request = self.planner.requests.get(request_id)
        if request is None:
            return []
        return (request.raw_logprobs if request.params.raw_logprobs else request.logprobs)[start:]

    # -- strategy selection, profiling, warm-up

    def _select(self) -> Decision:
        if self._control.needs_profile:
            self._profile_if_possible()
        return super()._select()

    @property
    def selector(self) -> Selector:
        """The selector that `step` asks for strategies."""
        return self._control.current

    @selector.setter
    def selector(self, selector: Selector | Callable[[StepView], Strategy]) -> None:
        self._control.current = make_selector(selector)

    def selector_of(self, strategy: AnyStrategy) -> Selector:
        """Return the selector for a strategy. A name always gives the same selector, with all that it has learned on this
        engine."""
        return self._control.selector_of(strategy)

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
        costs = load_or_profile(self.dummy_steps, self._identity, seconds, folder)
        costs.waits_for_host = not self.planner.pipelined
        self._control.set_costs(costs)
        self.dummy_steps.load_kernels()
        if self.drafting.suffix is not None:  # its first step, which loads compiled code, would be taken for an expensive one
            self.drafting.suffix.warm_up()
        learned = None if self._control.has_learned else read_learned(self._identity, folder)
        if learned is not None:
            self.restore_selection(learned)
        return self.costs

    @property
    def _identity(self) -> list[Any]:
        eagle = self.eagle
        return engine_identity(self.model, None if eagle is None else eagle.module, self.executor.ops.name, self.config,
                               self.scheduler.max_batch, self.scheduler.max_rows)

    def selection_state(self) -> dict[str, Any] | None:
        """Return what `auto` has learned about drafters and step times, as plain numbers for `restore_selection`; None with
        other strategies."""
        return self._control.state()

    def restore_selection(self, state: dict[str, Any]) -> None:
        """Let `auto` begin with what it learned in an earlier run. Whether that still holds is found out by measuring."""
        self._control.restore(state)

    def remember_selection(self, folder: Path | None = None) -> None:
        """Write what `auto` has learned beside the cached cost curve: the next start of such an engine on this machine begins
        with it (`profile`)."""
        state = self.selection_state()
        if state is not None and self.costs.profiled:
            write_learned(self._identity, state, folder)

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
        parts: list[Callable[[], object]] = [self._profile_if_possible, *self.dummy_steps.captures(requests),
                                             partial(generate_unrecorded, self, requests)]
        if self.drafting.suffix is not None:
            parts.insert(0, self.drafting.suffix.warm_up)
        for done, run in enumerate(parts, 1):
            run()
            yield done, len(parts)

    def graph_report(self) -> GraphReport:
        """Return the number, memory and capture time of CUDA graphs; all zero where none are captured."""
        return self.executor.graphs.report()

    # -- weights and memory

    def update_weights(self, state: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], version: int | None = None) -> None:
        """Replace the policy's weights in place, from the next step on. Cached prefixes are dropped. Running requests keep the
        keys and values that they have, or are prefilled again (`EngineConfig.on_update`).

        A mapping or a list is checked completely before anything is copied: if it is refused, nothing has changed. Any other
        iterable is copied tensor by tensor. If it fails on the way, the engine does not run until a later update succeeds."""
        self.executor.execute(LoadWeights(state))
        try:
            self.version = self.version + 1 if version is None else version
            self.drop_cache(running=self.config.on_update == "recompute")
        except BaseException as error:  # between new weights and the end of cached prefixes no step may run
            self.executor.reject_weights(error)
            raise

    def drop_cache(self, running: bool = False) -> None:
        """Drop cached prefixes, and with `running` also the keys and values of running requests, which are prefilled again."""
        if running:
            self._drain()
            self.scheduler.preempt_all()
        self.scheduler.drop_prefixes()

    def update_drafter(self, drafter: Eagle, version: int) -> None:
        """Replace the learned drafter's weights in place, from the next step on. `version`: version of the policy that the
        drafter was trained for. Tokens do not depend on the drafter, so running requests continue. The policy's weights are
        not touched."""
        if self.eagle is None:
            raise ValueError("update_drafter: the engine was loaded without a learned drafter")
        if version > self.version:
            raise ValueError(f"update_drafter: version {version} is newer than the policy's, {self.version}")
        self.executor.execute(LoadDrafter(drafter))
        own = self.eagle.module
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
        if not self.executor.is_asleep:
            self.drop_cache(running=True)
        self.executor.execute(Sleep(weights, keep))

    def wake(self) -> None:
        """Allocate the memory again that `sleep` freed, and bring offloaded weights back to the device."""
        self.executor.execute(Wake())

    # -- statistics

    def stats(self) -> EngineStats:
        """Return figures since the engine started, or since `reset_stats`."""
        return self._counters.stats(self.scheduler, self.version)

    def reset_stats(self) -> None:
        self._counters = Counters()
        self.scheduler.num_preemptions = self.scheduler.num_cached_tokens = 0
