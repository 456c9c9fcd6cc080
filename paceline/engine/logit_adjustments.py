"""Penalties, logit bias and minimum lengths: what a request's sampling parameters change in the policy's logits before sampling.

The logits of a row are changed by the text before it: the tokens in the KV cache, and the draft tokens on the path to the row. So
the row of an accepted draft token is changed exactly as the same position is without speculation. Everything is computed on the
device from what is stored there, in plain torch for all kernel backends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.engine.request import Request
from paceline.kernels import DecodeRows, DraftTree, SlotTensors
from paceline.kernels.base import cache_index
from paceline.kernels.upload import upload

_CHUNK_ROWS = 256
"""Number of rows whose token counts over the whole vocabulary exist at the same time."""


class Penalties(NamedTuple):
    """The rows of N requests that penalise tokens which they have already seen."""

    rows: Tensor  # [R'] int64 rows of the step
    owner: Tensor  # [R'] int64 index among the N requests
    slots: Tensor  # [N] int64
    prompt_length: Tensor  # [N] int64
    longest: int
    """Upper bound on the number of tokens of a request."""
    weights: Tensor  # [3, N] float64: repetition, frequency and presence penalty


class LogitAdjustments(NamedTuple):
    """What one step changes in its logits."""

    penalties: Penalties | None
    bias: tuple[Tensor, Tensor, Tensor]
    """Rows [K], token ids [K] and values [K] of all logit biases."""
    stops: tuple[Tensor, Tensor, Tensor]
    """Rows [S] and token ids [S] that must not be sampled at positions before [S]."""

    @classmethod
    def of(cls, requests: Sequence[Request], num_nodes: Sequence[int], vocabulary: int,
           device: torch.device) -> LogitAdjustments | None:
        """The adjustments of a step's decode requests, which have a row each and one for every draft token; None if there are
        none. `vocabulary`: number of tokens that have logits."""
        if not any(request.adjusts_logits for request in requests):
            return None
        first = np.concatenate([[0], np.cumsum(np.array(num_nodes, np.int64) + 1)])
        rows = {request.id: range(first[i], first[i + 1]) for i, request in enumerate(requests) if request.adjusts_logits}
        chosen = [request for request in requests if request.adjusts_logits]
        bias = [(row, *pair) for request in chosen for row in rows[request.id] for pair in request.params.logit_bias]
        stops = [(row, token, len(request.prompt_ids) + request.params.min_tokens) for request in chosen
                 if len(request.tokens) < len(request.prompt_ids) + request.params.min_tokens
                 for row in rows[request.id] for token in sorted(request.stop_ids) if 0 <= token < vocabulary]
        columns = upload(np.array(stops, np.int64).reshape(-1, 3).T.copy(), device)
        where = upload(np.array([entry[:2] for entry in bias], np.int64).reshape(-1, 2).T.copy(), device)
        values = upload(np.array([entry[2] for entry in bias], np.float64), device)
        penalised = [request for request in chosen if request.params.has_penalties]
        return cls(_penalties(penalised, rows, device) if penalised else None, (where[0], where[1], values),
                   (columns[0], columns[1], columns[2]))

    def apply(self, logits: Tensor, rows: DecodeRows, tree: DraftTree, depth: int, state: SlotTensors, stored: Tensor) -> Tensor:
        """The adjusted logits [R, V] of a step whose trees have at most this depth. `stored` [T]: the token at every cache
        index."""
        logits = logits.clone() if logits.dtype in (torch.float32, torch.float64) else logits.float()
        if self.penalties is not None:
            self._penalise(logits, self.penalties, rows, tree, depth, state, stored)
        row, token, value = self.bias
        logits.index_put_((row, token), value.to(logits.dtype), accumulate=True)
        row, token, before = self.stops
        banned = rows.sampling.position[row] < before
        logits.index_put_((row, token), torch.where(banned, -torch.inf, logits[row, token]))
        return logits

    def _penalise(self, logits: Tensor, found: Penalties, rows: DecodeRows, tree: DraftTree, depth: int, state: SlotTensors,
                  stored: Tensor) -> None:
        vocabulary = logits.shape[1]
        prompt, output = _counts(found, state, stored, vocabulary)
        for row, owner in zip(found.rows.split(_CHUNK_ROWS), found.owner.split(_CHUNK_ROWS), strict=True):
            count, node = output[owner], row
            for _ in range(depth):  # the draft tokens from the row up to the root, which is its own parent
                inside = tree.depths[node] > 0
                count.scatter_add_(1, rows.tokens[node][:, None], inside.to(count.dtype)[:, None])
                node = tree.parents[node]
            repetition, frequency, presence = found.weights[:, owner, None].to(logits.dtype)
            old = logits[row]
            seen = (count > 0) | prompt[owner]
            new = torch.where(seen, torch.where(old > 0, old / repetition, old * repetition), old)
            logits[row] = new - frequency * count - presence * (count > 0)


def _penalties(requests: list[Request], rows: dict[int, range], device: torch.device) -> Penalties:
    owned = np.array([(row, i) for i, request in enumerate(requests) for row in rows[request.id]], np.int64).T.copy()
    slots = np.array([(request.slot, len(request.prompt_ids)) for request in requests], np.int64).T.copy()
    weights = np.array([(request.params.repetition_penalty, request.params.frequency_penalty, request.params.presence_penalty)
                        for request in requests]).T.copy()
    row, owner = upload(owned, device)
    slot, prompt_length = upload(slots, device)
    longest = max(len(request.tokens) + request.num_in_flight for request in requests)
    return Penalties(row, owner, slot, prompt_length, longest, upload(weights, device))


def _counts(found: Penalties, state: SlotTensors, stored: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """For each request, which tokens are in its prompt [N, V] bool, and how often each is in its answer so far [N, V] int32. The
    last token, which this step feeds, is stored right behind the context."""
    place = torch.arange(min(found.longest, state.page_table.shape[1] * state.page_size), device=stored.device)
    known = place <= state.context[found.slots][:, None]  # [N, L]
    tokens = stored[cache_index(state, found.slots[:, None], torch.where(known, place, 0))]
    in_prompt = place < found.prompt_length[:, None]
    empty = torch.zeros(len(found.slots), vocabulary, dtype=torch.int32, device=stored.device)
    prompt = empty.scatter_add(1, tokens, (known & in_prompt).int()) > 0
    return prompt, empty.scatter_add(1, tokens, (known & ~in_prompt).int())
