"""The thread that runs the engine. Everything that changes the engine happens there; requests and cancellations reach it through
a queue, and what it generates goes back to the asyncio loop of the server."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from paceline.engine import Engine
from paceline.types import EngineStats, Rollout, SamplingParams, StepResult

logger = logging.getLogger(__name__)
_MAX_FAILURES = 3
"""Number of steps in a row that may raise before the server gives up."""


class Overloaded(Exception):
    """Too many answers are pending."""


class Unavailable(Exception):
    """The engine does not run: it is shutting down, or has failed."""


class NewTokens(NamedTuple):
    """Tokens that a step added to an answer."""

    sample: int
    tokens: list[int]
    logprobs: list[float]
    """Log-probabilities (`SamplingParams.raw_logprobs`) that have become known: of these tokens or of earlier ones."""


Event = NewTokens | Rollout
"""What happens to an answer; the rollout is the last one."""


@dataclass(eq=False)
class Submission:
    """The answers of one prompt that the engine generates for the server."""

    on_event: Callable[[Event], None]
    """Called in the asyncio loop."""
    num_pending: int
    """Number of answers that are not finished, as the asyncio loop knows."""
    streamed: bool
    request_ids: list[int] = field(default_factory=list)


class EngineLoop:
    """Runs an engine in a thread of its own. All methods are called from the asyncio loop."""

    def __init__(self, engine: Engine, max_pending: int) -> None:
        self._engine, self._max_pending = engine, max_pending
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._owners: dict[int, tuple[Submission, int]] = {}  # by request id: submission, number of the answer
        self._num_logprobs: dict[int, int] = {}  # number of log-probabilities that have been reported, by request id
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        self._stopping, self._num_failures, self._given_up = False, 0, False
        self.num_pending = 0
        """Number of answers that wait or are generated."""
        self.problem: str | None = None
        """Why no requests are accepted; None if they are."""
        self.stats: EngineStats = engine.stats()
        """The engine's figures after its last step."""

    def start(self) -> None:
        """Start the thread. Must be called in the asyncio loop that receives the answers."""
        self._asyncio = asyncio.get_running_loop()
        self._thread.start()

    async def submit(self, prompt_ids: Sequence[int], params: SamplingParams, n: int, streamed: bool,
                     on_event: Callable[[Event], None]) -> Submission:
        """Queue n answers of a prompt. `streamed`: report tokens as they come, not only finished answers. ValueError if the
        engine does not accept the request."""
        if self.problem is not None:
            raise Unavailable(self.problem)
        if self.num_pending + n > self._max_pending:
            raise Overloaded(f"{self.num_pending} answers are pending, and no more than {self._max_pending} may be")
        submission, accepted = Submission(on_event, n, streamed), self._asyncio.create_future()
        self.num_pending += n
        self._commands.put(partial(self._add, submission, list(prompt_ids), params, n, accepted))
        try:
            await asyncio.shield(accepted)
        except BaseException:
            self.cancel(submission)
            raise
        return submission

    def cancel(self, submission: Submission) -> None:
        """Drop the answers of a submission that are not finished."""
        if submission.num_pending:
            self.num_pending -= submission.num_pending
            submission.num_pending = 0
            self._commands.put(partial(self._abort, submission))

    async def stop(self) -> None:
        """Drop all requests and end the thread."""
        self.problem = "the server is shutting down"
        self._commands.put(self._stop)
        await asyncio.to_thread(self._thread.join)

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
        while not self._stopping:
            self._take_commands()
            if self._busy:
                self._step()
        self._engine.abort(list(self._owners))

    @property
    def _busy(self) -> bool:
        return self._engine.has_work and not self._stopping and not self._given_up

    def _take_commands(self) -> None:
        """Execute what the asyncio loop asked for. Wait for it if the engine has nothing to do."""
        try:
            while not self._stopping:
                self._commands.get(block=not self._busy)()
        except queue.Empty:
            pass

    def _stop(self) -> None:
        self._stopping = True

    def _add(self, submission: Submission, prompt_ids: list[int], params: SamplingParams, n: int,
             accepted: asyncio.Future[None]) -> None:
        try:
            if self.problem is not None:
                raise Unavailable(self.problem)
            submission.request_ids = self._engine.add(prompt_ids, params, n)
        except (ValueError, Unavailable) as error:
            self._answer(accepted, error)
            return
        self._owners |= {request: (submission, sample) for sample, request in enumerate(submission.request_ids)}
        self._answer(accepted, None)

    def _answer(self, accepted: asyncio.Future[None], error: Exception | None) -> None:
        def settle() -> None:
            if not accepted.done():
                accepted.set_result(None) if error is None else accepted.set_exception(error)

        self._asyncio.call_soon_threadsafe(settle)

    def _abort(self, submission: Submission) -> None:
        self._engine.abort(submission.request_ids)
        for request in submission.request_ids:
            self._owners.pop(request, None)
            self._num_logprobs.pop(request, None)

    def _step(self) -> None:
        try:
            result = self._engine.step()
            self._num_failures = 0
        except Exception as error:  # whatever it is: the engine has ended the requests that it concerns, the others go on
            self._num_failures += 1
            logger.exception("a step failed")
            if self._num_failures >= _MAX_FAILURES:
                self._give_up(error)
            return
        self.stats = self._engine.stats()
        self._deliver(result)

    def _deliver(self, result: StepResult) -> None:
        events: list[tuple[Submission, Event]] = []
        finished = {rollout.request_id: rollout for rollout in result.finished}
        for request, tokens in result.tokens.items():
            submission, sample = self._owners.get(request, (None, 0))
            if submission is not None and submission.streamed:
                logprobs = self._engine.raw_logprobs(request, self._num_logprobs.get(request, 0))
                self._num_logprobs[request] = self._num_logprobs.get(request, 0) + len(logprobs)
                events.append((submission, NewTokens(sample, tokens, logprobs)))
        for request, rollout in finished.items():
            submission, _ = self._owners.pop(request, (None, 0))
            self._num_logprobs.pop(request, None)
            if submission is not None:
                events.append((submission, rollout))
        if events:
            self._asyncio.call_soon_threadsafe(self._receive, events)

    def _give_up(self, error: Exception) -> None:
        """The engine fails again and again: end all requests, and accept no others."""
        self._given_up = True
        self.problem = f"the engine has failed: {type(error).__name__}: {error}"
        events: list[tuple[Submission, Event]] = []
        for request, (submission, sample) in self._owners.items():
            events.append((submission, Rollout(request, sample, [], [], [], "", "error", [], error=self.problem)))
        self._engine.abort(list(self._owners))
        self._owners.clear()
        self._asyncio.call_soon_threadsafe(self._receive, events)
