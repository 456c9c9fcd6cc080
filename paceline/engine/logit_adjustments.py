"""Penalties, logit bias, allowed tokens, minimum lengths and masks: what a request's sampling parameters change in the
policy's logits before sampling.

The logits of a row are changed by the text before it: the tokens in the KV cache, and the draft tokens on the path to the row. So
the row of an accepted draft token is changed exactly as the same position is without speculation. Everything is computed on the
device from what is stored there, in plain torch for all kernel backends; but for the masks of grammars and bad words, which the
host computes (`token_masks.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.engine.command import LogitEdits, Penalties
from paceline.kernels import DecodeRows, DraftTree, SlotTensors
from paceline.kernels.records import cache_index
from paceline.kernels.upload import upload

_CHUNK_ROWS = 256
"""Number of rows whose token counts over the whole vocabulary exist at the same time."""


class _Penalties(NamedTuple):
    """`command.Penalties` on the device."""

    rows: Tensor
    owner: Tensor
    slots: Tensor
    prompt_length: Tensor
    num_fed: Tensor
    weights: Tensor
    longest: int


class LogitAdjustments:
    """The edits of one step, on the device."""

    def __init__(self, edits: LogitEdits, device: torch.device,
                 masks: Callable[[], tuple[np.ndarray, np.ndarray]] | None) -> None:
        """`masks` returns the rows [K] that have a mask, and the masks [K, ceil(V / 8)] uint8. It is called when the forward pass
        is queued: computing them takes the host a while."""
        self._masks, self._device = masks, device
        self._penalties = None if edits.penalties is None else _uploaded(edits.penalties, device)
        self._bias_at, self._bias, self._stops, allowed = (upload(array, device) for array in edits[1:5])
        self._allowed = allowed if edits.allowed.size else None

    def apply(self, logits: Tensor, rows: DecodeRows, tree: DraftTree, depth: int, state: SlotTensors, stored: Tensor) -> Tensor:
        """Return the adjusted logits [L, V] of a step whose trees have at most this depth. `stored` [T]: the token at every
        cache index."""
        logits = logits.clone() if logits.dtype in (torch.float32, torch.float64) else logits.float()
        if self._penalties is not None:
            self._penalise(logits, self._penalties, rows, tree, depth, state, stored)
        row, token = self._bias_at
        logits.index_put_((row, token), self._bias.to(logits.dtype), accumulate=True)
        row, token, before = self._stops
        banned = rows.sampling.position[row] < before
        logits.index_put_((row, token), torch.where(banned, -torch.inf, logits[row, token]))
        if self._allowed is not None:
            row, token = self._allowed
            banned = torch.zeros_like(logits, dtype=torch.bool)
            banned |= torch.zeros(len(logits), dtype=torch.bool, device=logits.device).index_fill_(0, row, True)[:, None]
            banned[row, token] = False
            logits.masked_fill_(banned, -torch.inf)
        if self._masks is not None:
            _mask(logits, *(upload(array, self._device) for array in self._masks()))
        return logits

    def _penalise(self, logits: Tensor, found: _Penalties, rows: DecodeRows, tree: DraftTree, depth: int, state: SlotTensors,
                  stored: Tensor) -> None:
        prompt, output = _counts(found, state, stored, logits.shape[1])
        drafted = (tree.depths > 0) & (tree.forced[tree.request] == 0)
        for row, owner in zip(found.rows.split(_CHUNK_ROWS), found.owner.split(_CHUNK_ROWS), strict=True):
            count, node = output[owner], row if tree.sampled is None else tree.sampled[row]
            for _ in range(depth):  # the draft tokens from the row up to the root, which is its own parent
                count.scatter_add_(1, rows.tokens[node][:, None], drafted[node].to(count.dtype)[:, None])
                node = tree.parents[node]
            repetition, frequency, presence = found.weights[:, owner, None].to(logits.dtype)
            old = logits[row]
            seen = (count > 0) | prompt[owner]
            new = torch.where(seen, torch.where(old > 0, old / repetition, old * repetition), old)
            logits[row] = new - frequency * count - presence * (count > 0)


def _mask(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Forbid the tokens whose bits are not set, in these rows."""
    bit = torch.arange(8, dtype=torch.uint8, device=logits.device)
    for row, packed in zip(rows.split(_CHUNK_ROWS), masks.split(_CHUNK_ROWS), strict=True):
        allowed = (packed[:, :, None] >> bit & 1).bool().flatten(1)[:, : logits.shape[1]]
        logits[row] = logits[row].masked_fill(~allowed, -torch.inf)


def _uploaded(found: Penalties, device: torch.device) -> _Penalties:
    rows, owner, slots, prompt_length, num_fed, weights = (upload(array, device) for array in found[:-1])
    return _Penalties(rows, owner, slots, prompt_length, num_fed, weights, found.longest)


def _counts(found: _Penalties, state: SlotTensors, stored: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """For each request, which tokens are in its prompt [N, V] bool, and how often each is in its answer so far [N, V] int32. The
    committed tokens that this step feeds are stored right behind the context."""
    place = torch.arange(min(found.longest, state.page_table.shape[1] * state.page_size), device=stored.device)
    known = place < (state.context[found.slots] + found.num_fed)[:, None]  # [N, L]
    tokens = stored[cache_index(state, found.slots[:, None], torch.where(known, place, 0))]
    in_prompt = place < found.prompt_length[:, None]
    empty = torch.zeros(len(found.slots), vocabulary, dtype=torch.int32, device=stored.device)
    prompt = empty.scatter_add(1, tokens, (known & in_prompt).int()) > 0
    return prompt, empty.scatter_add(1, tokens, (known & ~in_prompt).int())
