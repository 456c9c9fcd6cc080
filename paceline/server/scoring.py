"""Log-probabilities of given tokens and of the most likely alternatives to them: `echo`, `prompt_logprobs`, `top_logprobs`.

The engine reports the log-probability of what it samples. For all else the tokens go through the policy once more, piece by piece
between the engine's steps, so that a long text holds nobody up. Their keys and values are kept beside the engine's KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.engine import Engine
from paceline.engine.thread import EngineThread, Unavailable
from paceline.kernels import Ops
from paceline.kernels.reference.packed_attention import join_rotated, masked_attention
from paceline.models.attend import Angles, AttentionShape
from paceline.server.errors import GenerationFailed

_ROWS = 256
"""Number of tokens that are processed between two steps of the engine."""


class TokenScore(NamedTuple):
    """What the policy thinks of one token, in the plain softmax at temperature 1."""

    logprob: float
    rank: int
    """1 for the most likely token."""
    top: list[tuple[int, float]]
    """The most likely tokens and their log-probabilities, most likely first."""


async def score(thread: EngineThread, tokens: Sequence[int], start: int, num_top: int) -> list[TokenScore]:
    """Return the scores of the tokens from number `start` (at least 1) on."""
    scoring = _Scoring(tokens, start, num_top)
    try:
        while not await thread.call(scoring.advance):
            pass
    except RuntimeError as error:  # most likely there is not enough memory
        raise GenerationFailed(f"scoring {len(tokens)} tokens failed: {error}") from None
    return scoring.scores


class _Scoring:
    """The scores of one text, as far as they are known."""

    def __init__(self, tokens: Sequence[int], start: int, num_top: int) -> None:
        self._tokens, self._start, self._num_top = tokens, start, num_top
        self._version = -1
        self._begin()

    def _begin(self) -> None:
        self.scores: list[TokenScore] = []
        self._done = 0  # number of tokens that have been processed
        self._attend: _GrowingAttend | None = None

    @torch.inference_mode()
    def advance(self, engine: Engine) -> bool:
        """Process the next piece. Returns whether it was the last one."""
        if engine.executor.is_asleep:
            raise Unavailable("the engine is asleep")
        if engine.executor.ranks is not None:
            raise ValueError("log-probabilities of given tokens are not computed by an engine that is split over ranks")
        if engine.version != self._version:  # new weights: all is computed with the same ones
            self._version = engine.version
            self._begin()
        num_rows = len(self._tokens) - 1
        if num_rows < self._start:
            return True
        runner = engine.executor.runner
        self._attend = self._attend or _GrowingAttend(runner.ops, num_rows)
        begin, end = self._done, min(num_rows, self._done + _ROWS)
        ids = torch.tensor(self._tokens[begin : end + 1], device=engine.device)
        positions = torch.arange(begin, end, device=engine.device)
        self._attend.place(begin, end, (runner.rope(positions), *runner.rope.others_at(positions)))
        hidden = engine.model(ids[:-1], self._attend).final
        first = max(0, self._start - 1 - begin)
        if first < end - begin:
            self._add(engine.model.logits(hidden[first:], runner.ops), ids[1 + first :])
        self._done = end
        return end == num_rows

    def _add(self, logits: Tensor, following: Tensor) -> None:
        """Take note of the scores of tokens [R], which follow where the logits [R, V] are."""
        logprobs = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(dim=1)
        own = logprobs.gather(1, following[:, None])
        ranks = (logprobs > own).sum(dim=1) + 1
        top = logprobs.topk(min(self._num_top, logprobs.shape[1]), dim=1)
        self.scores += [TokenScore(value, rank, list(zip(which, values, strict=True))) for value, rank, which, values
                        in zip(own[:, 0].tolist(), ranks.tolist(), top.indices.tolist(), top.values.tolist(), strict=True)]


class _GrowingAttend:
    """Causal attention over one text that comes in pieces."""

    def __init__(self, ops: Ops, num_rows: int) -> None:
        self.ops, self.routing, self._num_rows = ops, None, num_rows
        self._kept: dict[int, Tensor] = {}  # keys and values [2, rows, Hkv, D] of every layer

    def place(self, begin: int, end: int, angles: tuple[Angles, ...]) -> None:
        """The next rows are those from `begin` to `end`; angles are theirs, of each of the model's rotary embeddings."""
        self._begin, self._end, self._angles = begin, end, angles
        self._mask = torch.ones(end - begin, end, dtype=torch.bool, device=angles[0][0].device).tril(begin)

    def __call__(self, layer: AttentionShape, qkv: Tensor) -> Tensor:
        sizes = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        q, k, v = qkv.unflatten(-1, (-1, layer.head_dim)).split(sizes, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self.ops.rms_norm(q, layer.q_norm, layer.eps), self.ops.rms_norm(k, layer.k_norm, layer.eps)
        q, k, v = join_rotated(q, k, v, *self._angles[layer.rope_index]).split(sizes, dim=1)
        kept = self._kept.get(layer.index)
        if kept is None:
            kept = self._kept[layer.index] = k.new_empty(2, self._num_rows, *k.shape[1:])
        kept[0, self._begin : self._end], kept[1, self._begin : self._end] = k, v
        keys, values = kept[:, : self._end].transpose(1, 2)
        return masked_attention(q.transpose(0, 1), keys, values, self._mask, layer.scale, layer.form).transpose(0, 1).flatten(1)
