"""A cluster with the interface of an engine: requests in, rollouts out, whichever worker generates them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from safetensors.torch import save
from torch import Tensor

from paceline.cluster.coordinator import Coordinator
from paceline.cluster.figures import WorkerFigures
from paceline.cluster.messages import DistrustDrafter, to_payload
from paceline.cluster.reports import StepSums
from paceline.engine.migration import RequestState
from paceline.engine.outputs import stop_ids
from paceline.engine.prompts import Prompt, check, check_reply, derive_seed, encode
from paceline.engine.replies import encode_reply
from paceline.models.config import ModelConfig
from paceline.types import DrafterName, EngineStats, FinishReason, Rollout, SamplingParams, StepResult, Strategy, WorkersLost

_START_S = 600.0
"""Seconds that the first worker may take to start."""


class _Scheduler(NamedTuple):
    """What callers read of `Engine.scheduler`."""

    max_batch: int


class ClusterEngine:
    """Generates on the workers of a coordinator. Its methods are those of `Engine` of the same names."""

    selector = None
    """Each worker's engine has a selector of its own."""

    def __init__(self, coordinator: Coordinator, tokenizer: Any, shape: ModelConfig, is_baseline: bool = False) -> None:
        """`shape`: the policy's. `is_baseline`: generate with the workers' second engines, which do not speculate."""
        self._is_baseline, self._eos = is_baseline, frozenset(shape.eos_token_ids)
        self.coordinator, self.tokenizer, self._vocab_size = coordinator, tokenizer, shape.vocab_size
        self.version, self._seconds = 0, 0.0
        self.drafter_version = 0
        """Version of the policy that the workers' drafter was trained for."""
        self.drafter_mismatch: str | None = None
        """Why that drafter does not fit the policy; None if it does."""

    @property
    def scheduler(self) -> _Scheduler:
        return _Scheduler(self.coordinator.max_batch)

    def add_figures(self, figures: WorkerFigures) -> None:
        """Take over what a worker reports about its engine."""
        self.drafter_version = max(self.drafter_version, figures.drafter_version)
        self.drafter_mismatch = "a worker's drafter was trained for another policy" if figures.is_mismatched else None

    def distrust(self, drafter: DrafterName | None) -> None:
        """Hide the learned drafter from the selectors of all workers until there is a new one."""
        assert drafter == "eagle", "nothing else is ever distrusted"
        self.coordinator.broadcast(DistrustDrafter())

    def wait_until_ready(self) -> None:
        """Wait for the first worker."""
        began = time.perf_counter()
        while not self.coordinator.max_length:
            self.coordinator.step()
            if time.perf_counter() - began > _START_S:
                raise WorkersLost(f"no worker has started within {_START_S:.0f} s")

    def encode(self, prompt: Prompt, chat_template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
        return encode(prompt, self.tokenizer, chat_template_kwargs)

    def add(self, prompt: Prompt, params: SamplingParams | None = None, n: int = 1, key: str | None = None,
            seeds: Sequence[int] | None = None) -> list[int]:
        """Queue n answers of one prompt and return their request ids. Seeds are derived as in `Engine.add`."""
        params = params or SamplingParams()
        prompt_ids = self.encode(prompt)
        self.wait_until_ready()
        check(prompt_ids, params, n, self.tokenizer, self._vocab_size, self.coordinator.max_length)
        if seeds is None:
            seeds = [derive_seed(params.seed, prompt_ids if key is None else key, sample) for sample in range(n)]
        self.coordinator.use_baseline(self._is_baseline)
        states = [RequestState(prompt_ids, replace(params, seed=seed), 0, sample) for sample, seed in enumerate(seeds)]
        return self.coordinator.submit(states, hashlib.blake2b(repr(prompt_ids).encode(), digest_size=12).hexdigest())

    def step(self) -> StepResult:
        """One round of the coordinator. The result has the rollouts and turns that ended in it; tokens are not listed."""
        began = time.perf_counter()
        finished = [replace(rollout, request_id=request) for request, rollout in self.coordinator.step()]
        seconds = time.perf_counter() - began
        self._seconds += seconds
        return StepResult(Strategy.OFF, 0, 0, 0, 0, 0, {}, finished, 1e3 * seconds,
                          paused=self.coordinator.placement.take_turns())

    def stop_ids(self, params: SamplingParams) -> frozenset[int]:
        return stop_ids(params, self._eos)

    def encode_reply(self, messages: Sequence[Mapping[str, Any]], turn_ids: Sequence[int], stop_ids: Collection[int] = (),
                     chat_template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
        return encode_reply(messages, turn_ids, self.tokenizer, self._eos.union(stop_ids), chat_template_kwargs)

    def resume(self, request_id: int, token_ids: Sequence[int]) -> bool:
        return self.coordinator.resume(request_id, check_reply(token_ids, self._vocab_size), self.version)

    def end(self, request_id: int, reason: FinishReason | None = None) -> Rollout:
        rollout = self.coordinator.end(request_id, reason)
        rollout.text = self.tokenizer.decode(rollout.token_ids, skip_special_tokens=True)
        return rollout

    def cut(self, request_id: int, reason: FinishReason) -> Rollout | None:
        """End a request in the middle of a turn. Tokens that its worker has not reported yet are dropped."""
        return self.end(request_id, reason) if self.coordinator.placement.can_cut(request_id) else None

    @property
    def has_work(self) -> bool:
        return len(self.coordinator.book) > 0

    def abort(self, request_ids: Iterable[int]) -> list[Rollout]:
        """Give requests up. What they have generated is dropped."""
        self.coordinator.cancel(list(request_ids))
        return []

    def update_weights(self, state: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], version: int | None = None) -> None:
        """Publish new policy weights; every worker has them before it generates again."""
        named = dict(state.items() if isinstance(state, Mapping) else state)
        self.version = self.version + 1 if version is None else version
        payload = save({name: tensor.detach().cpu().contiguous() for name, tensor in named.items()})
        self.coordinator.publish_policy(to_payload(payload), self.version)

    def stats(self) -> EngineStats:
        """Sums over all workers since `reset_stats`. Pages are not reported."""
        sums, table = self.coordinator.sums, self.coordinator.book.table(0.0)
        found, running = sums.counters, int((table.worker >= 0).sum())
        return EngineStats(found.steps, found.prompt_tokens, 0, found.generated_tokens, found.drafted, found.accepted,
                           found.verifications, sums.preemptions, self._seconds, dict(found.strategy_steps), running,
                           len(table) - running, 0, 0, self.version)

    def reset_stats(self) -> None:
        self.coordinator.sums, self._seconds = StepSums(), 0.0

    def close(self) -> None:
        self.coordinator.close()
