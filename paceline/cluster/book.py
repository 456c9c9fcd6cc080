"""The coordinator's book of requests: where each one is, and the tokens it has. What a dead worker was doing is started again
from here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.cluster.lengths import LengthModel
from paceline.cluster.reports import NewTokens, Outputs, Progress
from paceline.cluster.types import NOWHERE, RequestTable
from paceline.engine.migration import RequestState
from paceline.types import FinishReason

Ints = NDArray[np.int64]
_COLUMNS = ("worker", "target", "group", "sample", "prompt", "generated", "limit", "assignment", "crashes", "paused")
_GENERATED, _ASSIGNMENT, _PAUSED = _COLUMNS.index("generated"), _COLUMNS.index("assignment"), _COLUMNS.index("paused")
_TRIM = 1024
"""Finished requests are forgotten in batches of at least this size."""
_SUSPECT = 2
"""A request is suspect of killing workers once so many have died that had it."""


class RequestBook:
    """All requests of a batch. Ids count up; the book is emptied when all requests of the batch are finished."""

    def __init__(self, lengths: LengthModel) -> None:
        self.lengths = lengths
        self._first = 0  # id of row 0
        self._clear()

    def _clear(self) -> None:
        self._states: list[RequestState] = []
        self._new: dict[int, list[tuple[NewTokens, int]]] = {}  # row → tokens that are not in its state yet
        self._columns = np.zeros((len(_COLUMNS), 0), np.int64)
        self._submitted, self._done = np.zeros(0), np.zeros(0, bool)
        self._left: Ints = np.zeros(0, np.int64)  # rows that are not finished

    def __len__(self) -> int:
        """Number of unfinished requests."""
        return len(self._left)

    def add(self, states: Sequence[RequestState], key: str, now: float) -> list[int]:
        """Add the answers of one prompt and return their ids. `key`: recognizes the prompt when the run comes to it again."""
        if not len(self) and self._states:
            self._first += len(self._states)
            self._clear()
            self.lengths.end_batch()
        self._trim()
        group, first = self.lengths.begin([key]), len(self._states)
        for state in states:
            state.group = group
        new = np.array([(NOWHERE, NOWHERE, group, state.sample, len(state.prompt_ids), len(state.output_ids),
                         state.params.max_new_tokens, 0, 0, 0) for state in states]).T
        rows = np.arange(first, first + len(states))
        self._states += states
        self._columns = np.concatenate([self._columns, new], axis=1)
        self._submitted = np.append(self._submitted, np.full(len(states), now))
        self._done = np.append(self._done, np.zeros(len(states), bool))
        self._left = np.append(self._left, rows)
        return (self._first + rows).tolist()

    def _trim(self) -> None:
        """Forget the first requests, if they are finished: where answers are carried over, the book is never empty."""
        done = int(self._left[0]) if len(self._left) else 0
        if done >= _TRIM:
            self._first, self._left = self._first + done, self._left - done
            self._states, self._columns = self._states[done:], self._columns[:, done:]
            self._submitted, self._done = self._submitted[done:], self._done[done:]
            self._new = {row - done: new for row, new in self._new.items()}

    def table(self, now: float) -> RequestTable:
        """The unfinished requests that do not wait for an environment, as the scheduling policy sees them."""
        rows = self._left[self._columns[_PAUSED, self._left] == 0]
        worker, target, group, sample, prompt, generated, limit, _, crashes, _ = self._columns[:, rows]
        remaining = self.lengths.remaining(group, generated, limit - generated)
        probe = (sample == 0) & ~self.lengths.is_known(group)
        return RequestTable(self._first + rows, worker, target, group, probe, prompt + generated, remaining,
                            now - self._submitted[rows], crashes >= _SUSPECT)

    @property
    def paused_remaining(self) -> float:
        """Expected number of tokens that the longest of the paused requests still has to generate; 0 if there is none."""
        rows = self._left[self._columns[_PAUSED, self._left] != 0]
        generated, limit, group = (self._columns[_COLUMNS.index(name), rows] for name in ("generated", "limit", "group"))
        return float(self.lengths.remaining(group, generated, limit - generated).max(initial=0.0)) if len(rows) else 0.0

    @property
    def has_paused(self) -> bool:
        """Whether a request waits for an environment."""
        return bool(self._columns[_PAUSED, self._left].any())

    def progress(self) -> list[tuple[int, int, int]]:
        """Id, number of tokens and worker of every unfinished request. May be called from another thread: a request that is just
        being added or forgotten may be missing."""
        first, columns, left = self._first, self._columns, self._left
        rows = left[left < columns.shape[1]]
        return list(zip((first + rows).tolist(), columns[_GENERATED, rows].tolist(), columns[0, rows].tolist(), strict=True))

    @property
    def num_generated(self) -> int:
        """Number of tokens that the unfinished requests have."""
        return int(self._columns[_GENERATED, self._left].sum())

    # -- one request

    def is_open(self, request: int) -> bool:
        """Whether the request is known and not finished."""
        row = request - self._first
        return 0 <= row < len(self._states) and not self._done[row]

    def state(self, request: int) -> RequestState:
        """The request with the tokens that are known of it, to be started on any worker."""
        row = request - self._first
        state = self._states[row]
        for new, i in self._new.pop(row, ()):
            _append(state, int(new.start[i]), new.outputs()[i])
        return state

    def worker(self, request: int) -> int:
        return self._get("worker", request)

    def target(self, request: int) -> int:
        return self._get("target", request)

    def assignment(self, request: int) -> int:
        return self._get("assignment", request)

    def is_paused(self, request: int) -> bool:
        return bool(self._get("paused", request))

    def pause(self, request: int, start: int, turn: Outputs, reason: FinishReason) -> bool:
        """A turn of the request has ended; it began at position `start` of the answer. Returns whether this is news: what comes
        after the turn may be known already."""
        state = self.state(request)
        _append(state, start, turn)
        if self.is_paused(request) or len(state.output_ids) != start + len(turn[0]):
            return False
        state.paused = reason
        self._set(request, paused=1, generated=len(state.output_ids))
        return True

    def resume(self, request: int, token_ids: Sequence[int], version: int) -> None:
        """A paused request goes on behind the tokens of a reply. `version`: the policy's."""
        state = self.state(request)
        state.append_reply(token_ids, version)
        self._set(request, paused=0, generated=len(state.output_ids))

    def assign(self, request: int, worker: int, assignment: int) -> None:
        """Record that the request is on a worker now."""
        self._set(request, worker=worker, target=NOWHERE, assignment=assignment)

    def set_target(self, request: int, target: int) -> None:
        self._set(request, target=target)

    def restart(self, request: int, lost: int) -> int:
        """Return the request to the queue, with the tokens that are known, because the worker `lost` was lost. An assignment that
        may have begun without a report is outdated. Returns how many workers were lost that had the request."""
        crashes = self._get("crashes", request) + (self.worker(request) == lost)
        self._set(request, worker=NOWHERE, target=NOWHERE, assignment=self.assignment(request) + 2, crashes=crashes,
                  generated=len(self.state(request).output_ids))
        return crashes

    def update_progress(self, progress: Progress) -> list[tuple[int, int]]:
        """Record how far requests are. Returns request and assignment of each line that is not about a present assignment."""
        rows = progress.request - self._first
        known = (rows >= 0) & (rows < len(self._states))
        row = np.where(known, rows, 0)
        current = known
        if len(self._states):
            current = known & ~self._done[row] & (self._columns[_ASSIGNMENT, row] == progress.assignment)
        self._columns[_GENERATED, rows[current]] = progress.generated[current]
        return list(zip(progress.request[~current].tolist(), progress.assignment[~current].tolist(), strict=True))

    def extend(self, new: NewTokens) -> None:
        """Keep new tokens until a request has to start elsewhere. Those of finished requests and earlier assignments are
        dropped."""
        for i, (request, assignment) in enumerate(zip(new.request.tolist(), new.assignment.tolist(), strict=True)):
            if self.is_open(request) and self.assignment(request) == assignment:
                self._new.setdefault(request - self._first, []).append((new, i))

    def finish(self, request: int, num_tokens: int) -> None:
        """The request is finished, with so many tokens."""
        row = request - self._first
        self._done[row] = True
        self._new.pop(row, None)
        self._left = self._left[self._left != row]
        self.lengths.observe(self._get("group", request), num_tokens)

    # -- several requests

    def on_worker(self, worker: int) -> list[int]:
        """Ids of the unfinished requests that are on a worker or on their way to it."""
        columns = self._columns[:, self._left]
        return (self._first + self._left[(columns[0] == worker) | (columns[1] == worker)]).tolist()

    def sibling_workers(self, request: int) -> Iterable[int]:
        """Workers that have unfinished answers to the same prompt."""
        columns = self._columns[:, self._left]
        mine = (columns[2] == self._get("group", request)) & (columns[0] != NOWHERE)
        return set(columns[0, mine].tolist())

    def _get(self, name: str, request: int) -> int:
        return int(self._columns[_COLUMNS.index(name), request - self._first])

    def _set(self, request: int, **values: int) -> None:
        for name, value in values.items():
            self._columns[_COLUMNS.index(name), request - self._first] = value


def _append(state: RequestState, start: int, outputs: Outputs) -> None:
    """Append tokens that begin at position `start`; those that are known already are skipped. If an earlier report was lost,
    later tokens cannot be appended."""
    known = len(state.output_ids) - start
    if known >= 0:
        ids, logprobs, raw, versions = (np.asarray(each)[known:].tolist() for each in outputs)
        state.output_ids += ids
        state.logprobs += logprobs
        state.raw_logprobs += raw
        state.versions += versions
