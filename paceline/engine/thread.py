"""An engine in a thread of its own, for programs that wait for answers in an asyncio loop: the server, and verl's rollout server.

Everything that touches the engine happens in that thread, between two steps, in the order in which it was asked for. What the
engine generates goes back to the asyncio loop that asked for it."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from paceline.engine.engine import Engine
from paceline.engine.pool import PoolStep, RequestPool
from paceline.types import EngineStats, Rollout, SamplingParams, StepResult

logger = logging.getLogger(__name__)
T = TypeVar("T")
_MAX_FAILURES = 3
"""Number of engine steps in a row that may raise before the engine is given up."""
_PROGRESS_EVERY_S = 5.0
"""Seconds between messages about the warm-up."""


class Overloaded(Exception):
    """Too many answers are pending."""


class Unavailable(Exception):
    """The engine does not run: it is shutting down, or has failed."""


class NewTokens(NamedTuple):
    """Tokens that a step added to an answer."""

    sample: int
    """Number of the answer within its submission."""
    tokens: list[int]
    logprobs: list[float]
    """Log-probabilities (`Engine.logprobs`) that have become known: of these tokens or of earlier ones."""
    num_drafted: int
    """Number of draft tokens that the step verified for the answer."""


Event = NewTokens | Rollout
"""What happens to an answer; the rollout is the last event."""


@dataclass(eq=False)
class Submission:
    """The answers to one prompt that the engine generates for a caller."""

    on_event: Callable[[Event], None]
    """Called in the caller's asyncio loop."""
    num_pending: int
    """Number of answers that are not finished, as the asyncio loop knows."""
    streamed: bool
    name: str
    loop: asyncio.AbstractEventLoop
    request_ids: list[int] = field(default_factory=list)


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
class _Running:
    """A request of the engine that is not finished."""

    submission: Submission
    sample: int
    num_logprobs: int = 0  # reported so far


class EngineThread:
    """Runs an engine in a thread. Its methods are called in an asyncio loop, but for `start` and `close`, which any thread may
    call."""

    def __init__(self, engine: Engine, max_pending: int | None = None, warm_up: bool = False,
                 on_step: Callable[[StepResult], object] = lambda result: None) -> None:
        """The engine belongs to the thread from `start` to `close`. `max_pending`: largest number of answers that wait or are
        generated. None: no limit. `warm_up`: warm the engine up, part by part, while there is no request. `on_step`: called in
        the engine's thread with the result of every engine step."""
        self._engine, self._max_pending, self._on_step = engine, max_pending, on_step
        self._warming_up = engine.warming_up() if warm_up else None
        self.is_warm = not warm_up
        """Whether the warm-up is complete, or none was asked for."""
        self._warm_up_shown = time.perf_counter()
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._requests = RequestPool[_Running](engine)
        self._paused = self._asleep = self._closed = False
        self._num_failures = 0
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        self.num_pending = 0
        """Number of answers that wait or are generated."""
        self.problem: str | None = None
        """Why no requests are accepted; None if they are."""
        self.stats: EngineStats = engine.stats()
        """The engine's figures when something last happened to a request."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self, timeout_s: float | None = None) -> None:
        """End the thread. Answers that are not finished end with an error. `timeout_s`: largest number of seconds to wait for a
        step that has begun."""
        self.problem = self.problem or "the engine is shutting down"
        self._jobs.put(self._close)
        self._thread.join(timeout_s)

    async def submit(self, prompt_ids: Sequence[int], params: SamplingParams, on_event: Callable[[Event], None], n: int = 1, *,
                     streamed: bool = False, name: str = "", seeds: Sequence[int] | None = None) -> Submission:
        """Queue n answers to a prompt, and return when the engine has accepted them.

        Args:
            prompt_ids: The prompt.
            params: Sampling parameters.
            on_event: Called with what happens to the answers, in this asyncio loop.
            n: Number of answers.
            streamed: Whether new tokens are reported after every step, or only finished answers.
            name: What `abort` knows the answers by.
            seeds: Seed of each answer. None: derived from the seed in `params`.

        Raises ValueError if the engine does not accept the request, `Overloaded` or `Unavailable`.
        """
        if self._max_pending is not None and self.num_pending + n > self._max_pending:
            raise Overloaded(f"{self.num_pending} answers are pending, and no more than {self._max_pending} may be")
        submission = Submission(on_event, n, streamed, name, asyncio.get_running_loop())

        def add(engine: Engine) -> None:
            if self.problem is not None:
                raise Unavailable(self.problem)
            owners = [_Running(submission, sample) for sample in range(n)]
            submission.request_ids = self._requests.add(list(prompt_ids), params, owners, seeds=seeds)

        self.num_pending += n
        try:
            await self.call(add)
        except BaseException:
            self.cancel(submission)
            raise
        return submission

    def cancel(self, submission: Submission) -> None:
        """Drop the answers of a submission that are not finished."""
        if submission.num_pending:
            self.num_pending -= submission.num_pending
            submission.num_pending = 0
            self._jobs.put(lambda: self._abort(submission.request_ids))

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, name: str = "") -> Answer:
        """Generate one answer, with the seed in `params`. ValueError if the prompt cannot be served, RuntimeError if the answer
        ends with an error. If the caller is cancelled, so is the request. `name`: what `abort` knows the request by."""
        finished: asyncio.Future[Rollout] = asyncio.get_running_loop().create_future()
        drafted: list[int] = []  # of each verification

        def on_event(event: Event) -> None:
            if isinstance(event, NewTokens):
                drafted.append(event.num_drafted)
            elif not finished.done():
                finished.set_result(event)

        submission = await self.submit(prompt_ids, params, on_event, streamed=True, name=name, seeds=[params.seed])
        try:
            rollout = await finished
        finally:
            self.cancel(submission)
        if rollout.finish_reason == "error":
            raise RuntimeError(rollout.error)
        return Answer(rollout, len(drafted), sum(drafted))

    async def call(self, work: Callable[[Engine], T]) -> T:
        """Call `work` with the engine, between two steps, and return what it returns."""
        if self._closed:
            raise Unavailable(self.problem)
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work(self._engine))
            except BaseException as error:  # belongs to the caller
                future.set_exception(error)

        self._jobs.put(run)
        return await asyncio.wrap_future(future)

    async def abort(self, name: str | None = None) -> list[str]:
        """End the answers with this name (None: all), as they are. Return the names of those that were ended."""
        def end(engine: Engine) -> list[str]:
            found = {request: one.submission.name for request, one in self._requests.owners.items()
                     if name is None or one.submission.name == name}
            self._abort(found)
            return list(found.values())

        return await self.call(end)

    async def sleep(self, weights: bool) -> None:
        """Free the engine's memory, as `Engine.sleep` does. Requests wait until `wake`."""
        def do(engine: Engine) -> None:
            engine.sleep(weights=weights)
            self._asleep = True

        await self.call(do)

    async def wake(self) -> None:
        """Allocate the engine's memory again and go on with the requests."""
        def do(engine: Engine) -> None:
            engine.wake()
            self._asleep = False

        await self.call(do)

    async def pause(self) -> None:
        """Run no engine step until `resume`. Requests keep what they have; new ones are accepted and wait."""
        await self._set_paused(True)

    async def resume(self) -> None:
        """Go on with the requests after `pause`."""
        await self._set_paused(False)

    async def _set_paused(self, paused: bool) -> None:
        def do(engine: Engine) -> None:
            self._paused = paused

        await self.call(do)

    # In the asyncio loop, called by the engine's thread

    def _receive(self, events: list[tuple[Submission, Event]]) -> None:
        for submission, event in events:
            if submission.num_pending == 0:  # cancelled meanwhile
                continue
            if isinstance(event, Rollout):
                submission.num_pending -= 1
                self.num_pending -= 1
            submission.on_event(event)

    # In the engine's thread

    def _run(self) -> None:
        while not self._closed:
            stopped, has_work = self._paused or self._asleep or self.problem is not None, self._engine.has_work
            try:
                job = self._jobs.get(block=stopped or (not has_work and self._warming_up is None))
            except queue.Empty:
                if has_work:
                    self._step()
                else:
                    self._continue_warm_up()
            else:
                job()
        with suppress(queue.Empty):  # calls that came after the end
            while True:
                self._jobs.get(block=False)()

    def _close(self) -> None:
        self._closed = True
        self._end_all()

    def _step(self) -> None:
        try:
            step = self._requests.step()
        except Exception as error:  # whatever it is: the engine has ended the requests that it concerns, the others go on
            logger.exception("an engine step failed")
            self._num_failures += 1
            if self._num_failures >= _MAX_FAILURES:
                self.problem = f"the engine has failed: {type(error).__name__}: {error}"
                self._end_all()
            return
        self._num_failures = 0
        self._on_step(step.result)
        self._send(self._new_tokens(step) + _ended(step.finished))

    def _continue_warm_up(self) -> None:
        """Do one more part of the warm-up. If it fails, requests are served without it."""
        assert self._warming_up is not None
        try:
            done, total = next(self._warming_up)
        except StopIteration:
            logger.info("the engine is warmed up", extra={"is_notice": True})
            self._warming_up, self.is_warm = None, True
        except Exception:
            logger.exception("the warm-up failed; what it left out is done when a request needs it")
            self._warming_up = None
        else:
            if time.perf_counter() - self._warm_up_shown > _PROGRESS_EVERY_S:
                self._warm_up_shown = time.perf_counter()
                logger.info("warm-up: %d of %d", done, total, extra={"is_progress": True})

    def _abort(self, request_ids: Iterable[int]) -> None:
        self._send(_ended(self._requests.abort(request_ids)))

    def _end_all(self) -> None:
        """Accept no more requests, and end all that there are with an error."""
        errors = [(one, Rollout(request, one.sample, [], [], [], "", "error", [], error=self.problem))
                  for request, one in self._requests.owners.items()]
        self._requests.abort()
        self._send(_ended(errors))

    def _new_tokens(self, step: PoolStep[_Running]) -> list[tuple[Submission, Event]]:
        events: list[tuple[Submission, Event]] = []
        ended = {rollout.request_id: one for one, rollout in step.finished}
        for request, tokens in step.result.tokens.items():
            one = ended.get(request) or self._requests.owners.get(request)
            if one is not None and one.submission.streamed:
                logprobs = self._engine.logprobs(request, one.num_logprobs)
                one.num_logprobs += len(logprobs)
                drafted = step.result.drafted_by_request.get(request, 0)
                events.append((one.submission, NewTokens(one.sample, tokens, logprobs, drafted)))
        return events

    def _send(self, events: list[tuple[Submission, Event]]) -> None:
        """Hand events to the asyncio loops that wait for them, all of one loop at once."""
        self.stats = self._engine.stats()
        for loop in {submission.loop for submission, _ in events}:
            own = [event for event in events if event[0].loop is loop]
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._receive, own)


def _ended(rollouts: Iterable[tuple[_Running, Rollout]]) -> list[tuple[Submission, Event]]:
    return [(one.submission, rollout) for one, rollout in rollouts]
