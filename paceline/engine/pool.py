"""The loop around `Engine.step`: requests of one consumer, run until they are finished."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar
from weakref import WeakSet

from paceline.engine.prompts import Prompt
from paceline.types import FinishReason, Rollout, SamplingParams, StepResult, Turn

if TYPE_CHECKING:
    from paceline.engine.engine import Engine

Owner = TypeVar("Owner")


class PoolStep(NamedTuple, Generic[Owner]):
    """One engine step, as the consumer of a pool sees it."""

    result: StepResult
    finished: list[tuple[Owner, Rollout]]
    """Rollouts of the pool's requests that have ended since the pool's last step, each with its owner."""
    turns: list[tuple[Owner, Turn]]
    """Turns of the pool's requests that have ended since then. These requests are paused until `resume` or `end`."""


class RequestPool(Generic[Owner]):
    """Requests that one consumer has added to an engine and that are not finished. The engine assigns the request ids; for each
    request the pool keeps an owner, which is whatever the consumer wants back with the rollout.

        with RequestPool[str](engine) as requests:
            requests.add([1, 2, 3], params, ["first", "second"])
            for step in requests.steps():
                for owner, rollout in step.finished:
                    ...                     # may add further requests

    Leaving the `with` block aborts what is not finished, whether by an exception or not. A step that raises leaves the pool as it
    is: requests that the engine has ended because of it are finished, with an error, by the next step. Rollouts of requests that
    are neither the pool's nor those of a pool `beside` it are ignored.
    """

    def __init__(self, engine: Engine, beside: RequestPool[Any] | None = None) -> None:
        """`beside`: another pool of the same engine whose requests go on while this one runs steps. What finishes in a step of
        one of the two, and turns that end in it, are returned by the other's next step."""
        self.engine = engine
        self.owners: dict[int, Owner] = {}
        """Owners of the unfinished requests by request id, in the order in which they were added."""
        self._finished: list[tuple[Owner, Rollout]] = []  # in steps of other pools
        self._turns: list[Turn] = []  # that have ended in steps of other pools
        self._pools: WeakSet[RequestPool[Any]] = WeakSet() if beside is None else beside._pools
        self._pools.add(self)

    def __enter__(self) -> RequestPool[Owner]:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def __len__(self) -> int:
        """Number of unfinished requests."""
        return len(self.owners)

    def add(self, prompt: Prompt, params: SamplingParams | None, owners: Sequence[Owner], key: str | None = None,
            seeds: Sequence[int] | None = None) -> list[int]:
        """Request one answer of a prompt for each owner, as `Engine.add` does, and return the request ids."""
        ids = self.engine.add(prompt, params, len(owners), key, seeds)
        self.owners.update(zip(ids, owners, strict=True))
        return ids

    def step(self) -> PoolStep[Owner]:
        """Run one engine step."""
        result = self.engine.step()
        if result.finished or result.paused:
            for pool in self._pools:
                pool._turns += [turn for turn in result.paused if turn.request_id in pool.owners]
                pool._finished += pool._pop(result.finished)
        return self.catch_up(result)

    def catch_up(self, result: StepResult) -> PoolStep[Owner]:
        """What has ended since the pool's last step, also in steps of other pools. `result`: the engine's newest."""
        finished, self._finished = self._finished, []
        turns, self._turns = [(self.owners[turn.request_id], turn) for turn in self._turns if turn.request_id in self.owners], []
        return PoolStep(result, finished, turns)

    @property
    def has_news(self) -> bool:
        """Whether a step of another pool has ended requests or turns of this one."""
        return bool(self._finished or self._turns)

    def steps(self) -> Iterator[PoolStep[Owner]]:
        """Run engine steps until no request is unfinished. Requests may be added between two steps."""
        while self.owners or self._finished:
            yield self.step()

    def resume(self, request_id: int, token_ids: Sequence[int]) -> bool:
        """Continue a paused request behind the tokens of a reply; see `Engine.resume`."""
        return self.engine.resume(request_id, token_ids)

    def end(self, request_id: int, reason: FinishReason | None = None) -> Rollout:
        """End a paused request and return its rollout; see `Engine.end`."""
        rollout = self.engine.end(request_id, reason)
        del self.owners[request_id]
        return rollout

    def cut(self, request_id: int, reason: FinishReason) -> Rollout | None:
        """End a request in the middle of a turn and return its rollout; None if it is not in a turn. See `Engine.cut`."""
        rollout = self.engine.cut(request_id, reason)
        if rollout is not None:
            del self.owners[request_id]
        return rollout

    def abort(self, request_ids: Iterable[int] | None = None) -> list[tuple[Owner, Rollout]]:
        """End requests (None: all) where they are, and return what they have generated with their owners. Ids of finished
        requests are ignored."""
        ids = [i for i in (self.owners if request_ids is None else request_ids) if i in self.owners]
        ended = self._pop(self.engine.abort(ids))
        for i in ids:  # a cluster drops what an aborted request has generated
            self.owners.pop(i, None)
        if request_ids is None:
            self._finished.clear()
            self._turns.clear()
        return ended

    def num_to_add(self, max_live: int) -> int:
        """Return how many requests to add so that about `max_live` are unfinished. They are added in blocks of at least an eighth
        of that: a step that prefills prompts takes longer, and one such step serves a whole block."""
        free = max_live - len(self)
        return free if free >= max(1, max_live // 8) else 0

    def _pop(self, rollouts: Iterable[Rollout]) -> list[tuple[Owner, Rollout]]:
        return [(self.owners.pop(rollout.request_id), rollout) for rollout in rollouts if rollout.request_id in self.owners]
