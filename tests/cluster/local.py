"""Clusters of tiny float64 engines in this process."""

from __future__ import annotations

import random
from collections import deque
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
from cluster.local_runtime import LocalRuntime
from safetensors.torch import save
from tiny import eagle, model

from paceline import Engine, Rollout, SamplingParams, Strategy
from paceline.cluster.coordinator import Coordinator
from paceline.cluster.messages import to_payload
from paceline.cluster.policy import decide
from paceline.cluster.types import Action, ClusterView, Migrate, PolicyConfig, WorkerState
from paceline.cluster.worker import Send, Worker
from paceline.config import EngineConfig
from paceline.engine.migration import RequestState
from paceline.engine.prompts import derive_seed
from paceline.models.decoder import Decoder
from paceline.models.state_dict import export_state

PROMPTS = [[5, 9, 9, 2, 40, 17, 3, 3, 8], [1], [7, 7, 7, 30, 12], [11, 12, 13]]
GROUP = 3
PARAMS = SamplingParams(max_new_tokens=32, seed=3)
EAGER = PolicyConfig(min_gain=0.0)
"""Moves requests for any gain."""


def make_engine(strategy: str = "off", seed: int = 0, **options: Any) -> Engine:
    """An engine with a policy and a drafter of its own, which may be updated."""
    source = model("llama", seed)
    policy = Decoder.random(source.config, 0, dtype=source.norm.dtype)
    policy.load_state_dict(source.state_dict())
    sizes = {"page_size": 4, "kv_tokens": 400, "max_batch": 5, **options}
    return Engine(policy, None, deepcopy(eagle("llama")), Strategy.parse(strategy), EngineConfig(**sizes))


@dataclass(frozen=True)
class TinySpec:
    """Makes a worker in another process, with a tiny engine whose policy is not the published one."""

    strategy: str = "off"

    def build(self, worker_id: int, send: Send) -> Worker:
        return Worker(worker_id, make_engine(self.strategy, seed=7), send)


def weights(seed: int = 0) -> Any:
    """The policy as it is published."""
    return to_payload(save({name: t.contiguous() for name, t in export_state(model("llama", seed)).items()}))


def make_cluster(num_workers: int, config: PolicyConfig | None = None, strategy: str = "off", steps_per_poll: int = 2,
                 max_batch: int = 5, decide: Any = decide) -> Coordinator:
    """A coordinator of workers that start with other weights than the published ones (version 0)."""
    runtime = LocalRuntime(num_workers, lambda w, send: Worker(w, make_engine(strategy, seed=7, max_batch=max_batch), send),
                           steps_per_poll)
    coordinator = Coordinator(runtime, config, interval_s=0.0, decide=decide)
    coordinator.publish_policy(weights(), 0)
    return coordinator


def decide_by_known_times(view: ClusterView, config: PolicyConfig | None = None) -> list[Action]:
    """The scheduling policy with step times that do not depend on the machine: twice as many requests take twice as long."""
    return decide(replace(view, token_s=1e-3 * np.arange(len(view.token_s)), move_pause_s=0.0, move_token_s=0.0,
                          workers=tuple(replace(worker, slowdown=1.0) for worker in view.workers)), config)


def submit(coordinator: Coordinator, params: SamplingParams = PARAMS) -> list[int]:
    ids = []
    for number, prompt in enumerate(PROMPTS):
        states = [RequestState(prompt, replace(params, seed=derive_seed(params.seed, prompt, sample)), 0, sample)
                  for sample in range(GROUP)]
        ids += coordinator.submit(states, str(number))
    return ids


@cache
def reference(seed: int = 0) -> dict[int, Rollout]:
    """Return the rollouts that a single engine generates for the same prompts, by seed."""
    engine = make_engine(seed=seed)
    return {rollout.seed: rollout for group in engine.generate(PROMPTS, PARAMS, GROUP) for rollout in group.rollouts}


def run(coordinator: Coordinator, ids: list[int], rounds: int = 600) -> dict[int, Rollout]:
    """Run to the end. Rollouts by id; none comes twice."""
    found: dict[int, Rollout] = {}
    for _ in range(rounds):
        for request, rollout in coordinator.step():
            assert request not in found, "a rollout came twice"
            found[request] = rollout
        if len(found) == len(ids):
            return found
    raise AssertionError(f"{len(ids) - len(found)} of {len(ids)} requests are lost")


def assert_same(found: dict[int, Rollout], seed: int = 0) -> None:
    """The rollouts are those of one engine."""
    expected = reference(seed)
    assert {rollout.seed for rollout in found.values()} == expected.keys()
    for rollout in found.values():
        assert rollout.token_ids == expected[rollout.seed].token_ids
        assert max(abs(a - b) for a, b in zip(rollout.logprobs, expected[rollout.seed].logprobs, strict=True)) < 1e-12
        assert rollout.finish_reason == expected[rollout.seed].finish_reason


class ChaoticRuntime(LocalRuntime):
    """Workers run in any order, messages and reports are late (those of one sender to one receiver stay in order), and workers
    die between any two of these events."""

    def __init__(self, num_workers: int, make_worker: Any, seed: int, deaths: int) -> None:
        self.random, self._deaths_left = random.Random(seed), deaths
        self._channels: dict[tuple[Any, int], deque[tuple[Any, Any]]] = {}
        self._late: dict[int, deque[Any]] = {}
        super().__init__(num_workers, lambda w, _: make_worker(w, partial(self._from_worker, w)))

    def _from_worker(self, sender: int, target: int, message: Any) -> None:
        self._channels.setdefault((sender, target), deque()).append((message, None))

    def post(self, worker: int, message: Any, payload: Any = None) -> None:
        self._channels.setdefault(("coordinator", worker), deque()).append((message, payload))

    def start(self, worker: int) -> None:
        """What was sent to the dead process is lost; what it sent to others may still arrive."""
        for channel in [channel for channel in self._channels if channel[1] == worker]:
            del self._channels[channel]
        self._late[worker] = deque()
        super().start(worker)

    def poll(self, timeout_s: float) -> list[Any]:
        for _ in range(self.random.randint(1, 8)):
            self._something()
        news = list(self._lost)
        self._lost.clear()
        for worker, late in self._late.items():
            if worker in self.workers and late and self.random.random() < 0.7:
                news += [late.popleft() for _ in range(self.random.randint(1, len(late)))]
        return news

    def _something(self) -> None:
        """One event: a worker's step, a delivery, a report, or a death."""
        worker = self.random.choice(list(self.workers) or [0])
        kind = self.random.random()
        if worker not in self.workers:
            return
        if kind < 0.45:
            self.workers[worker].step()
        elif kind < 0.7:
            self._late[worker].append(self.workers[worker].report())
        elif kind < 0.98:
            channel = self.random.choice([c for c in self._channels if self._channels[c]] or [None])
            if channel is not None and channel[1] in self.workers:
                self.workers[channel[1]].post(*self._channels[channel].popleft())
        elif self._deaths_left:
            self._deaths_left -= 1
            self.kill(worker)


def restless(seed: int) -> Any:
    """A scheduling policy that also moves requests about for no reason."""
    chance = random.Random(seed)

    def decide_restlessly(view: ClusterView, config: PolicyConfig) -> list[Action]:
        actions = decide(view, config)
        able = [w.id for w in view.workers if w.state is not WorkerState.DOWN and w.policy_version >= view.policy_version]
        busy = {action.request for action in actions if isinstance(action, Migrate)}
        for request, worker, target in zip(view.requests.id, view.requests.worker, view.requests.target, strict=True):
            others = [w for w in able if w != worker]
            if worker >= 0 and target < 0 and int(request) not in busy and others and chance.random() < 0.3:
                actions.append(Migrate(int(request), int(worker), chance.choice(others)))
        return actions

    return decide_restlessly
