"""Attention for training a drafter that is unrolled on its own outputs.

A *path* starts at a row i of the generated text. Its step 0 is the row itself, computed from the policy's features; at step k the
path is k tokens further and reads the drafter's own output of step k - 1, as it does when drafting. At step k path i attends to
the step-0 keys of rows 0..i and to the keys of its own steps 1..k: causal attention over the rows plus k keys per row, which are
found at the same row of each step. Rows are indexed by where their path starts, so nothing has to be shifted.

Paths start at the rows that predict answer tokens. Rows of the prompt are keys only: their queries and outputs are not computed.

The causal part is computed by a fused kernel that also returns its log-sum-exp, with which it is combined with the path's own
keys into one softmax. `ReferenceCausalAttention` is the plain implementation that the fused ones are tested against.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.kernels import Ops
from paceline.kernels.reference.packed_attention import join_rotated
from paceline.kernels.upload import upload
from paceline.models.attend import AttentionShape
from paceline.models.decoder import Rope
from paceline.models.routing import Routing
from paceline.spot.packing import PackedRecords


class UnrolledAttend:
    """The `Attend` of an unrolled drafter. It is called once per unroll step, in order, and keeps the keys and values of each.
    The first step has all rows, of which those where no path starts are only keys; later steps have one row per path."""

    def __init__(self, ops: Ops, rope: Rope, packed: PackedRecords, causal: CausalAttention | None = None) -> None:
        """causal: Implementation of the causal part; None chooses the fastest one for the device and dtype."""
        self.ops, self._rope, self._packed, self._causal = ops, rope, packed, causal
        self.routing: Routing | None = None  # drafters have no experts
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, layer: AttentionShape, qkv: Tensor) -> Tensor:
        """[R, (H + 2 Hkv) D] at the first step, [T, (H + 2 Hkv) D] later -> [T, H D]."""
        heads, kv_heads, dim = layer.num_heads, layer.num_kv_heads, layer.head_dim
        step, paths = len(self._keys), self._packed.answers
        q, k, v = qkv.unflatten(-1, (-1, dim)).split((heads, kv_heads, kv_heads), dim=1)
        # Paths that ran beyond the end of their text stay at the last known position; their outputs are never read.
        positions = self._packed.positions if step == 0 else self._packed.positions[paths] + step
        cos, sin = self._rope(positions.clamp_max(len(self._rope.cos) - 1))
        q, k, v = join_rotated(q, k, v, cos, sin).split((heads, kv_heads, kv_heads), dim=1)
        q = q.index_select(0, paths) if step == 0 else q
        if self._causal is None:
            self._causal = fastest_causal_attention(qkv, self._packed.lengths, self._packed.answer_lengths)
        self._keys.append(k)
        self._values.append(v)
        (k, *own_keys), (v, *own_values) = self._keys, self._values
        return _JointSoftmax.apply(self._causal, dim**-0.5, q, k, v, *own_keys, *own_values).flatten(1)


class _JointSoftmax(torch.autograd.Function):
    """One softmax over two sets of keys: the causal ones, by a fused kernel, and the few keys of each row's own path."""

    @staticmethod
    def forward(ctx: Any, causal: CausalAttention, scale: float, q: Tensor, k: Tensor, v: Tensor, *path: Tensor) -> Tensor:
        out, lse = causal.forward(q, k, v)
        if path:
            with torch.autocast(q.device.type, enabled=False):  # as in the backward pass
                own = _PathKeys.build(q, path, scale)
                total = torch.logaddexp(lse, own.scores.logsumexp(-1).flatten(1))  # [R, H]
                weights = (own.scores - own.group_heads(total)[..., None]).exp()
                out = (out * (lse - total).exp()[..., None] + (weights @ own.values).flatten(1, 2)).to(q.dtype)
            lse = total
        ctx.causal, ctx.scale = causal, scale
        ctx.save_for_backward(q, k, v, out, lse, *path)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse, *path = ctx.saved_tensors
        grad = grad.contiguous()
        dq, dk, dv = ctx.causal.backward(grad, q, k, v, out, lse)
        if not path:
            return None, None, dq, dk, dv
        own = _PathKeys.build(q, tuple(path), ctx.scale)
        weights = (own.scores - own.group_heads(lse)[..., None]).exp()
        wide = grad.to(weights.dtype)
        # grad · (value - out)
        dweights = own.group_heads(wide) @ own.values.mT - own.group_heads((wide * out).sum(-1))[..., None]
        dscores = weights * dweights * ctx.scale
        dq = dq + (dscores @ own.keys).flatten(1, 2).to(dq.dtype)
        dkeys, dvalues = dscores.mT @ own.queries, weights.mT @ own.group_heads(wide)  # [R, Hkv, n, D]: a group shares its key
        return None, None, dq, dk, dv, *dkeys.to(k.dtype).unbind(2), *dvalues.to(v.dtype).unbind(2)


class _PathKeys(NamedTuple):
    """Keys of each row's own path and the scores of its queries, in float32 at least; G query heads share one of Hkv."""

    queries: Tensor  # [R, Hkv, G, D]
    keys: Tensor  # [R, Hkv, n, D]
    values: Tensor  # [R, Hkv, n, D]
    scores: Tensor  # [R, Hkv, G, n]

    @classmethod
    def build(cls, q: Tensor, path: tuple[Tensor, ...], scale: float) -> _PathKeys:
        """path: The n keys of each row, then its n values, each [R, Hkv, D]."""
        wide, half = torch.promote_types(torch.float32, q.dtype), len(path) // 2
        keys, values = (torch.stack(part, dim=2).to(wide) for part in (path[:half], path[half:]))
        queries = q.to(wide).unflatten(1, (keys.shape[1], -1))
        return cls(queries, keys, values, queries @ keys.mT * scale)

    def group_heads(self, x: Tensor) -> Tensor:
        """[R, H, ...] -> [R, Hkv, G, ...]."""
        return x.unflatten(1, self.queries.shape[1:3])


# -- causal attention of packed sequences, with its log-sum-exp


class CausalAttention(Protocol):
    """Causal attention of packed sequences that can be one part of a larger softmax. The queries of a sequence belong to its last
    rows; each sees the keys up to its own row."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """q [T, H, D], k and v [R, Hkv, D] -> output [T, H, D] and log-sum-exp of the scores [T, H]."""
        ...

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of q, k and v for attention weights exp(q k - lse). If `out` and `lse` are those of a larger
        softmax, they are the share of these keys in its gradients."""
        ...


def fastest_causal_attention(rows: Tensor, lengths: tuple[int, ...], queries: tuple[int, ...]) -> CausalAttention:
    """Returns the fastest implementation for the device and dtype of `rows`. lengths: Number of rows of each sequence. queries:
    Number of its last rows that are queries."""
    if rows.device.type == "cpu":
        return CpuCausalAttention(lengths, queries)
    if rows.device.type == "cuda" and rows.dtype in (torch.bfloat16, torch.float16):
        return CudaCausalAttention(lengths, queries, rows.device)
    return ReferenceCausalAttention(lengths, queries)


class ReferenceCausalAttention:
    """Plain torch implementation for any device and dtype."""

    def __init__(self, lengths: tuple[int, ...], queries: tuple[int, ...]) -> None:
        self._lengths, self._queries = lengths, queries

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = [], []
        for a, b, c in _sequences(self._queries, (q,), self._lengths, (k, v)):
            scores = self._scores(a, b)
            lse.append(scores.logsumexp(-1))
            out.append(torch.einsum("hnm,mhd->nhd", scores.softmax(-1), _repeat_kv(c, a)))
        return torch.cat(out), torch.cat([x.T for x in lse])

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found: list[tuple[Tensor, ...]] = []
        for g, a, o, n, b, c in _sequences(self._queries, (grad, q, out, lse), self._lengths, (k, v)):
            weights = (self._scores(a, b) - n.T[..., None]).exp()
            dweights = torch.einsum("nhd,mhd->hnm", g, _repeat_kv(c, a))
            dscores = weights * (dweights - (g * o).sum(-1).T[..., None]) * a.shape[-1] ** -0.5
            dk, dv = torch.einsum("hnm,nhd->mhd", dscores, a), torch.einsum("hnm,nhd->mhd", weights, g)
            found.append((torch.einsum("hnm,mhd->nhd", dscores, _repeat_kv(b, a)), _sum_groups(dk, b.shape[1]),
                          _sum_groups(dv, b.shape[1])))
        dq, dk, dv = (torch.cat(part) for part in zip(*found, strict=True))
        return dq, dk, dv

    @staticmethod
    def _scores(q: Tensor, k: Tensor) -> Tensor:
        scores = torch.einsum("nhd,mhd->hnm", q, _repeat_kv(k, q)) * q.shape[-1] ** -0.5
        later = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(1 + len(k) - len(q))
        return scores.masked_fill(later, -torch.inf)


_SHORT = 63
"""Sequences of up to so many rows are all padded to the same length on a CPU: calls take longer than their arithmetic."""


class CpuCausalAttention:
    """torch's fused CPU kernel, called once for all sequences of similar length: most are short, and a call for each would take
    longer than its arithmetic. The kernel takes as many queries as keys, so there are queries of zeros for the first rows;
    the MLP, which they do without, costs far more."""

    def __init__(self, lengths: tuple[int, ...], queries: tuple[int, ...]) -> None:
        similar: dict[int, list[int]] = {}
        for sequence, length in enumerate(lengths):
            similar.setdefault(max(_SHORT, length).bit_length(), []).append(sequence)
        self._batches = [_PaddedBatch.of(members, lengths, queries) for members in similar.values()]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = _repeat_kv(k, q), _repeat_kv(v, q)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.promote_types(torch.float32, q.dtype))
        for batch in self._batches:
            found, norm = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                batch.pad_queries(q), batch.pad_keys(k), batch.pad_keys(v), 0.0, True)
            out.index_copy_(0, batch.queries.rows, batch.queries.of(found))
            lse.index_copy_(0, batch.queries.rows, batch.queries.of(norm))
        return out, lse

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        kv_heads, k, v = k.shape[1], _repeat_kv(k, q), _repeat_kv(v, q)
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        for batch in self._batches:
            padded = [batch.pad_queries(x) for x in (grad, q, out, lse)]
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                padded[0], padded[1], batch.pad_keys(k), batch.pad_keys(v), padded[2], padded[3].contiguous(), 0.0, True)
            for gradient, part, place in zip((dq, dk, dv), found, (batch.queries, batch.keys, batch.keys), strict=True):
                gradient.index_copy_(0, place.rows, place.of(part))
        return dq, _sum_groups(dk, kv_heads), _sum_groups(dv, kv_heads)


class _Places(NamedTuple):
    """Where some rows are in a batch of padded sequences."""

    rows: Tensor  # [n] int64 rows of the packed sequences
    places: Tensor  # [n] int64 their places in the batch, whose sequences follow each other

    def of(self, padded: Tensor) -> Tensor:
        """[B, H, L, ...] -> [n, H, ...]."""
        return padded.transpose(1, 2).flatten(0, 1).index_select(0, self.places)


class _PaddedBatch(NamedTuple):
    """Sequences that are padded at their ends, where causal attention of the others' rows does not see it."""

    size: int  # B
    length: int  # L
    keys: _Places
    queries: _Places

    @classmethod
    def of(cls, members: list[int], lengths: tuple[int, ...], queries: tuple[int, ...]) -> _PaddedBatch:
        """members: Numbers of its sequences. lengths, queries: Of all sequences, as for `fastest_causal_attention`."""
        length = max(lengths[i] for i in members)
        ends = np.cumsum(lengths), np.cumsum(queries)

        def places(counts: tuple[int, ...], end: NDArray[np.int64]) -> _Places:
            """The last `counts` rows of each sequence, which end at row `end`."""
            rows = np.concatenate([np.arange(end[i] - counts[i], end[i]) for i in members])
            found = [b * length + np.arange(lengths[i] - counts[i], lengths[i]) for b, i in enumerate(members)]
            return _Places(torch.from_numpy(rows), torch.from_numpy(np.concatenate(found)))

        return cls(len(members), length, places(lengths, ends[0]), places(queries, ends[1]))

    def pad_queries(self, x: Tensor) -> Tensor:
        """[T, H, ...] -> [B, H, L, ...] with zeros where there is no query."""
        return self._pad(x, self.queries)

    def pad_keys(self, x: Tensor) -> Tensor:
        """[R, H, D] -> [B, H, L, D] with zeros where there is no key."""
        return self._pad(x, self.keys)

    def _pad(self, x: Tensor, which: _Places) -> Tensor:
        padded = x.new_zeros(self.size * self.length, *x.shape[1:])
        padded.index_copy_(0, which.places, x.index_select(0, which.rows))
        return padded.unflatten(0, (self.size, self.length)).transpose(1, 2)


class CudaCausalAttention:
    """FlashAttention over all sequences at once, in half precision only. With fewer queries than keys it aligns the last query
    with the last key."""

    def __init__(self, lengths: tuple[int, ...], queries: tuple[int, ...], device: torch.device) -> None:
        ends = upload(np.cumsum([[0, *queries], [0, *lengths]], axis=1, dtype=np.int32).ravel(), device)
        self._bounds = (*ends.chunk(2), max(queries), max(lengths))  # of queries and keys; largest number of each
        self._rng_state: tuple[Tensor, Tensor] | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, *rng_state, _ = torch.ops.aten._flash_attention_forward(q, k, v, *self._bounds, 0.0, True, False)
        self._rng_state = (rng_state[0], rng_state[1])  # unused without dropout, but the backward pass takes it
        return out, lse.T  # [T, H]

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert self._rng_state is not None, "backward() before forward()"
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, lse.T.contiguous(), *self._bounds, 0.0, True, *self._rng_state)
        return dq, dk, dv


def _sequences(queries: tuple[int, ...], by_query: tuple[Tensor, ...], lengths: tuple[int, ...],
               by_key: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
    """Yields the parts of tensors by query and of tensors by key that belong to each sequence."""
    return zip(*(x.split(queries) for x in by_query), *(x.split(lengths) for x in by_key), strict=True)


def _repeat_kv(x: Tensor, q: Tensor) -> Tensor:
    """[n, Hkv, D] -> [n, H, D]: repeats each key or value for the query heads of its group."""
    return x if q.shape[1] == x.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _sum_groups(x: Tensor, kv_heads: int) -> Tensor:
    """[n, H, D] -> [n, Hkv, D]: sums the gradients of the query heads that share a key."""
    return x.unflatten(1, (kv_heads, -1)).sum(2)
