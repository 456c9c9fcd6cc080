"""An engine in a thread of its own, for programs that await answers on an event loop."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from paceline.engine import Engine
from paceline.types import Rollout, SamplingParams, StepResult

logger = logging.getLogger(__name__)
T = TypeVar("T")

_MAX_FAILURES = 3
"""Number of engine steps that may fail one after the other before all requests are given up."""


class Answer(NamedTuple):
    """A finished answer."""

    rollout: Rollout
    num_verifications: int
    """Number of engine steps in which it got tokens."""
    num_drafted: int
    """Number of draft tokens that were verified for it."""

    @property
    def num_accepted(self) -> int:
        """Number of its tokens that were draft tokens: in every verification one token is the policy's own."""
        return len(self.rollout.token_ids) - self.num_verifications

    @property
    def accept_length(self) -> float:
        """Mean number of tokens per verification, the policy's own token included."""
        return len(self.rollout.token_ids) / max(1, self.num_verifications)


@dataclass(slots=True)
class _Waiting:
    """A request that is not finished."""

    name: str
    future: Future[Answer]
    num_verifications: int = 0
    num_drafted: int = 0


class EngineThread:
    """Runs an engine in a thread. Everything that touches the engine happens in that thread, between two steps, in the order in
    which it was asked for."""

    def __init__(self, engine: Engine) -> None:
        """The engine belongs to the thread from now on."""
        self._engine = engine
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._waiting: dict[int, _Waiting] = {}
        self._paused = self._closed = False
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        self._thread.start()

    # -- called on the event loop

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, name: str = "") -> Answer:
        """Generate one answer, with the seed in `params`. ValueError if the prompt cannot be served. If the caller is cancelled,
        so is the request. `name`: what `abort` knows the request by."""
        future: Future[Answer] = Future()

        def add() -> None:
            if future.cancelled():
                return
            try:
                [request] = self._engine.add(list(prompt_ids), params, seeds=[params.seed])
            except ValueError as error:
                future.set_exception(error)
                return
            self._waiting[request] = _Waiting(name, future)

        self._jobs.put(add)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._jobs.put(lambda: self._engine.abort(self._drop(future)))
            raise

    async def call(self, work: Callable[[Engine], T]) -> T:
        """Call `work` with the engine, between two steps, and return what it returns."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work(self._engine))
            except BaseException as error:  # belongs to the caller
                future.set_exception(error)

        self._jobs.put(run)
        return await asyncio.wrap_future(future)

    async def abort(self, name: str | None = None) -> list[str]:
        """End the requests with this name (None: all), as they are. Return the names of those that were ended."""
        def end(engine: Engine) -> list[str]:
            found = {request: one.name for request, one in self._waiting.items() if name is None or one.name == name}
            for rollout in engine.abort(found):
                self._finish(rollout)
            return list(found.values())

        return await self.call(end)

    async def sleep(self, weights: bool) -> None:
        """Free the engine's memory, as `Engine.sleep` does. Requests wait until `wake`."""
        def do(engine: Engine) -> None:
            engine.sleep(weights=weights)
            self._paused = True

        await self.call(do)

    async def wake(self) -> None:
        """Allocate the engine's memory again and go on with the requests."""
        def do(engine: Engine) -> None:
            engine.wake()
            self._paused = False

        await self.call(do)

    def close(self) -> None:
        """End the thread. Requests that wait are cancelled."""
        def end() -> None:
            self._closed = True

        self._jobs.put(end)
        self._thread.join()
        for one in self._waiting.values():
            one.future.cancel()

    # -- in the thread

    def _run(self) -> None:
        while not self._closed:
            idle = self._paused or not self._engine.has_work
            try:
                self._jobs.get(block=idle)()
            except queue.Empty:
                self._step()

    def _step(self) -> None:
        try:
            result = self._engine.step()
        except Exception as error:  # the engine has ended what was running, and its next step returns that
            logger.exception("an engine step failed")
            self._failures += 1
            if self._failures >= _MAX_FAILURES:
                self._give_up(error)
            return
        self._failures = 0
        self._take(result)

    def _take(self, result: StepResult) -> None:
        for request in result.tokens:
            if request in self._waiting:
                self._waiting[request].num_verifications += 1
                self._waiting[request].num_drafted += result.drafted_by_request.get(request, 0)
        for rollout in result.finished:
            self._finish(rollout)

    def _finish(self, rollout: Rollout) -> None:
        one = self._waiting.pop(rollout.request_id, None)
        if one is None or not one.future.set_running_or_notify_cancel():
            return
        if rollout.finish_reason == "error":
            one.future.set_exception(RuntimeError(rollout.error))
        else:
            one.future.set_result(Answer(rollout, one.num_verifications, one.num_drafted))

    def _give_up(self, error: Exception) -> None:
        failed, self._waiting, self._failures = self._waiting, {}, 0
        self._engine.abort(failed)
        for one in failed.values():
            if one.future.set_running_or_notify_cancel():
                one.future.set_exception(error)

    def _drop(self, future: Future[Any]) -> list[int]:
        found = [request for request, one in self._waiting.items() if one.future is future]
        for request in found:
            del self._waiting[request]
        return found
