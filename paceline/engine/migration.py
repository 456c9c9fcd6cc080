"""Migration: a request leaves one engine and continues on another, token for token.

A request moves in two stages. Its full pages (keys and values of policy and drafter, captured features) are copied while it
keeps generating; then it pauses, and only the last pages and its tokens follow:

    pages = source.migration.export_pages(request_id)          # it keeps generating
    reservation = target.migration.reserve(pages)              # None: no room
    state = source.migration.export_request(request_id, version, pages.num_tokens)
    request_id = target.migration.import_request(state, version, reservation)

A state without pages is prefilled by the engine that imports it: a new request, one whose worker died, or one that finds no room
for its pages. Tokens are the same in every case, because they depend only on weights, prompt, seed and sampling parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from paceline.engine.command import ExportPages, ImportPages
from paceline.engine.executor import Executor
from paceline.engine.planner import Planner
from paceline.engine.request import Request, Status, has_begun_turn, loss_mask
from paceline.types import FinishReason, Rollout, SamplingParams

logger = logging.getLogger(__name__)

SharedTensor = tuple[Callable[..., Tensor], tuple[Any, ...]]
"""How another process on the same GPU opens a tensor (CUDA IPC). The memory stays allocated until it has dropped the tensor."""


@dataclass(frozen=True, slots=True)
class KvPages:
    """Everything that an engine stores for consecutive tokens of a request, as bytes that travel without conversion."""

    num_tokens: int
    arrays: Sequence[np.ndarray | SharedTensor]
    """One array of bytes per tensor of the store; or, between processes on the same GPU, handles of the tensors themselves."""
    num_drafted: int = 0
    """Number of leading tokens of the request that the learned drafter had processed when they were copied."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes that travel."""
        return sum(array.nbytes for array in self.arrays if isinstance(array, np.ndarray))


@dataclass(slots=True)
class RequestState:
    """A request between two engines."""

    prompt_ids: list[int]
    params: SamplingParams
    """Sampling parameters, with the request's own seed."""
    group: int
    """Number of the prompt: requests of one group share its prefill."""
    sample: int
    output_ids: list[int] = field(default_factory=list)
    """Tokens of the answer so far."""
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kv: KvPages | None = None
    """Stored tensors of its last tokens, those of the pages that were sent before left out; None if it must be prefilled."""
    version: int = 0
    """Version of the policy that it was generated with last."""
    stale: bool = False
    """Whether part of its KV cache was computed with earlier weights."""
    drafter_lag: int = 0
    """Upper bound on the tokens at the end that the learned drafter has not processed."""
    replies: list[tuple[int, int]] = field(default_factory=list)
    """First token and end of every reply, counted from the beginning of the prompt."""
    paused: FinishReason | None = None
    """Why its last turn ended, if the request is paused."""

    def append_reply(self, token_ids: Sequence[int], version: int) -> None:
        """Append the tokens of a reply. `version`: the policy's."""
        first, count = len(self.prompt_ids) + len(self.output_ids), len(token_ids)
        self.replies.append((first, first + count))
        self.output_ids += token_ids
        for values in (self.logprobs, self.raw_logprobs if self.params.raw_logprobs else []):
            values += [0.0] * count
        self.versions += [version] * count
        self.paused = None

    @property
    def has_begun_turn(self) -> bool:
        """Whether the present turn has a token that is known."""
        return has_begun_turn(len(self.prompt_ids), len(self.prompt_ids) + len(self.output_ids), self.replies)

    def rollout(self, request_id: int, reason: FinishReason, text: str = "", error: str | None = None) -> Rollout:
        """The rollout of the request if it ends here."""
        num_tokens = len(self.prompt_ids) + len(self.output_ids)
        return Rollout(request_id, self.sample, self.prompt_ids, self.output_ids, self.logprobs, text, reason, self.versions,
                       self.params.seed, self.raw_logprobs if self.params.raw_logprobs else None,
                       loss_mask(len(self.prompt_ids), num_tokens, self.replies), error)


@dataclass(frozen=True, slots=True)
class Reservation:
    """Pages of the target that already hold a request's first tokens."""

    pages: list[int]
    num_tokens: int
    num_drafted: int
    """Number of leading tokens that the learned drafter had processed when the pages were copied."""


class Migration:
    """Exports requests from one engine and imports them into it. Must be called between two steps of the engine."""

    def __init__(self, planner: Planner, executor: Executor, drain: Callable[[], None]) -> None:
        """`drain`: waits for the step in flight."""
        self._planner, self._executor, self._drain = planner, executor, drain
        self._requests, self._scheduler, self._drafting = planner.requests, planner.scheduler, planner.drafting
        self._page_size = planner.scheduler.pages.page_size
        self.reserved_pages: set[int] = set()
        """Pages that hold the beginnings of requests that have not followed yet."""

    # -- leaving

    def export_pages(self, request_id: int, shares_gpu: bool = False) -> KvPages | None:
        """Copy what a request's full pages hold. `shares_gpu`: the target is another process on the same GPU, so that nothing has
        to pass through the host. Later steps do not change them, except that a learned drafter may process tokens
        that it has missed; the target's drafter does the same. None if there is no full page, or the request has finished."""
        self._drain()
        request = self._requests.get(request_id)
        if request is None or request.status is not Status.DECODE:
            return None
        num_pages = request.num_computed // self._page_size
        drafted = request.num_computed - self._drafting.lag(request)
        if not num_pages:
            return None
        return self._copy(request.pages[:num_pages], num_pages * self._page_size, drafted, shares_gpu)

    def export_request(self, request_id: int, version: int, num_sent: int = 0, shares_gpu: bool = False) -> RequestState | None:
        """Take a request out of the engine. `version`: the policy's. `num_sent`: number of leading tokens that `export_pages`
        copied before. `shares_gpu`: as there. None if the request has finished."""
        self._drain()
        request = self._requests.get(request_id)
        if request is None:
            return None
        found = RequestState(request.prompt_ids, request.params, request.group, request.sample, request.output_ids,
                             request.logprobs, request.raw_logprobs, request.versions, version=version, stale=request.stale,
                             replies=request.replies)
        if request.status is Status.PAUSED:
            found.paused = request.finish_reason
        if request.status is Status.DECODE or (request.status is Status.PAUSED and request.pages):
            first = num_sent // self._page_size
            found.kv = self._copy(request.pages[first:], request.num_computed - num_sent, 0, shares_gpu)
            found.drafter_lag = self._drafting.lag(request)
        self._planner.finish(request)
        return found

    # -- arriving

    def reserve(self, pages: KvPages) -> Reservation | None:
        """Store the first pages of a request that will follow. None if there is no room for them, or they are lost."""
        allocator = self._scheduler.pages
        wanted = allocator.pages_for(pages.num_tokens)
        if not self._scheduler.has_slot or wanted + len(self._scheduler.running) + 1 > allocator.num_available:
            return None
        tensors = self._open(pages)
        if tensors is None:
            return None
        allocated = allocator.allocate(wanted)
        assert allocated is not None
        self._executor.execute(ImportPages(allocated, tensors))
        self.reserved_pages.update(allocated)
        return Reservation(allocated, pages.num_tokens, pages.num_drafted)

    def release(self, reservation: Reservation) -> None:
        """The request will not follow."""
        self.reserved_pages.difference_update(reservation.pages)
        self._scheduler.pages.release(reservation.pages)

    def import_request(self, state: RequestState, version: int, reservation: Reservation | None = None) -> int:
        """Continue a request here and return its new id. With its stored tensors and room for them it is in the next step;
        otherwise it is prefilled like a new request. `version`: version of this engine's policy."""
        request = Request(self._planner.new_id(), state.group, state.sample, state.prompt_ids, state.params,
                          self._planner.stop_ids(state.params), logprobs=list(state.logprobs),
                          raw_logprobs=list(state.raw_logprobs), versions=list(state.versions), replies=list(state.replies))
        request.tokens += state.output_ids
        request.limit_turn()
        self._planner.register(request)
        is_placed = state.kv is not None and state.version == version and self._place(request, state, reservation)
        if not is_placed and reservation is not None:
            self.release(reservation)
        if state.paused is not None:
            request.finish_reason = state.paused
            self._scheduler.hold(request)
        elif not is_placed:
            self._scheduler.add(request)
        return request.id

    def _place(self, request: Request, state: RequestState, reservation: Reservation | None) -> bool:
        """Give the request a slot and pages, and store its tensors. Returns False, without a change, if there is no room or the
        tensors are lost."""
        assert state.kv is not None
        tensors = self._open(state.kv) if state.kv.num_tokens else []
        allocator = self._scheduler.pages
        held = [] if reservation is None else reservation.pages
        num_computed = len(request.tokens) - 1
        assert state.kv.num_tokens + (0 if reservation is None else reservation.num_tokens) == num_computed
        if tensors is None or not (self._scheduler.has_slot or state.paused):
            return False
        pages = allocator.allocate(allocator.pages_for(len(request.tokens)) - len(held))
        if pages is None:
            return False
        if tensors:
            self._executor.execute(ImportPages(pages, tensors))
        self.reserved_pages.difference_update(held)
        request.pages, request.num_computed, request.stale = held + pages, num_computed, state.stale
        if state.paused is None:
            self._scheduler.adopt(request)
        lag = state.drafter_lag
        if reservation is not None and reservation.num_drafted < reservation.num_tokens:
            lag = max(lag, num_computed - reservation.num_drafted)
        self._drafting.adopt(request, lag)
        return True

    # -- turns

    def turn(self, request_id: int) -> tuple[int, FinishReason] | None:
        """Position in the answer of the first token of a paused request's last turn, and why the turn ended; None if the request
        is not paused."""
        request = self._requests.get(request_id)
        if request is None or request.status is not Status.PAUSED or request.finish_reason is None:
            return None
        return request.turn_start - len(request.prompt_ids), request.finish_reason

    # -- following requests

    def outputs(self, request_id: int, start: int) -> tuple[list[int], list[float], list[float], list[int]] | None:
        """Tokens, log-probabilities, raw log-probabilities and versions of a request's answer from position `start` on; None if
        the request has ended. May be called while a step is running: a token counts once all of its values are there."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        end = min(len(request.versions), len(request.logprobs))
        if request.params.raw_logprobs:
            end = min(end, len(request.raw_logprobs))
        raw = request.raw_logprobs[start:end]
        first = len(request.prompt_ids)
        return request.tokens[first + start : first + end], request.logprobs[start:end], raw, request.versions[start:end]

    def num_outputs(self, request_id: int) -> int | None:
        """Number of tokens that `outputs` would return from the start on; None if the request has ended."""
        request = self._requests.get(request_id)
        return None if request is None else min(len(request.versions), len(request.logprobs))

    def is_running(self, request_id: int) -> bool:
        """Whether a request has a slot and needs no prefill."""
        request = self._requests.get(request_id)
        return request is not None and request.status is Status.DECODE

    # -- tensors and bytes

    def _copy(self, pages: list[int], num_tokens: int, num_drafted: int, shares_gpu: bool) -> KvPages:
        shares_gpu &= self._executor.ranks is None  # other ranks send theirs through the host
        tensors = self._executor.execute(ExportPages(pages, num_tokens, shares_gpu))
        if shares_gpu:
            return KvPages(num_tokens, [reduce_tensor(tensor) for tensor in tensors], num_drafted)
        return KvPages(num_tokens, [tensor.contiguous().view(torch.uint8).numpy() for tensor in tensors], num_drafted)

    def _open(self, pages: KvPages) -> list[Tensor] | None:
        """The tensors; None if they were in the memory of another process that has died."""
        try:
            return [_opened(array, dtype) for array, dtype in zip(pages.arrays, self._executor.stored_dtypes, strict=True)]
        except (RuntimeError, OSError) as error:  # of CUDA IPC, and of shared memory
            if all(isinstance(array, np.ndarray) for array in pages.arrays):
                raise
            logger.warning("pages of a migrated request are lost: %s", error)
            return None


def _opened(array: np.ndarray | SharedTensor, dtype: torch.dtype) -> Tensor:
    if isinstance(array, np.ndarray):
        return torch.from_numpy(np.require(array, requirements="W")).view(dtype)
    rebuild, arguments = array
    return rebuild(*arguments)
