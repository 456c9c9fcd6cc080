"""Records side by side in one list of rows, none of which sees another; and the drafter unrolled over them.

Row i of a record combines the policy's features at i with the token at i + 1 and predicts the token at i + 2; the policy's own
state that predicts it is its final one at i + 1. A record of N tokens has N - 2 such rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.drafters.eagle import Eagle
from paceline.kernels.upload import upload
from paceline.models.attend import Attend
from paceline.types import FeatureRecord


class Packed(NamedTuple):
    """R rows of whole records."""

    features: Tensor  # [R, F] what the drafter reads
    wanted: Tensor  # [R, H] the policy's final state at i + 1
    follow: Tensor  # [R] int64 the token at i + 1
    drawn: Tensor  # [R] int64 the token at i + 2: what the policy drew
    positions: Tensor  # [R] int64 i
    first: Tensor  # [R] int64 the row i of its record that predicts the answer's first token
    answers: Tensor  # [T] int64 the rows that predict tokens of answers
    lengths: tuple[int, ...]  # rows of each record
    members: tuple[int, ...]  # which records, by their place in the list that was packed

    @property
    def record(self) -> Tensor:
        """[R] int64: which of `lengths` a row belongs to."""
        sizes = torch.tensor(self.lengths, device=self.follow.device)
        return torch.arange(len(self.lengths), device=sizes.device).repeat_interleave(sizes, output_size=len(self.follow))


def num_rows(num_tokens: int) -> int:
    return max(0, num_tokens - 2)


def answer_rows(num_tokens: int, prompt_length: int, step: int) -> int:
    """Rows of a record that a path of `step` own outputs, begun within the answer, can reach."""
    return max(0, num_tokens - 2 - max(0, prompt_length - 2) - step)


def first_fit(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Longest first into the first bin with room: few bins, and always the same ones. A larger one goes alone."""
    bins: list[tuple[int, list[int]]] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        place = next((b for b, (used, _) in enumerate(bins) if used + sizes[i] <= most), None)
        if place is None:
            bins.append((sizes[i], [i]))
        else:
            bins[place] = (bins[place][0] + sizes[i], [*bins[place][1], i])
    return [sorted(members) for _, members in bins]


def columns_of(record: FeatureRecord, layers: tuple[int, ...], hidden: int) -> list[slice]:
    """Where these layers' states lie in the record's features."""
    missing = [layer for layer in layers if layer not in record.layers]
    if missing:
        raise ValueError(f"features: layer {missing[0]} was not captured, only {record.layers}; training a drafter needs the "
                         "layers it reads and the final state (-1)")
    starts = [record.layers.index(layer) * hidden for layer in layers]
    return [slice(start, start + hidden) for start in starts]


def cut(record: FeatureRecord, most: int) -> FeatureRecord:
    """The record's first `most` tokens."""
    if len(record.token_ids) <= most:
        return record
    kept = max(0, most - record.prompt_length)
    return FeatureRecord(record.token_ids[:most], record.features[: most - 1], record.layers, record.versions[:kept],
                         record.prompt_length)


def pack(records: Sequence[FeatureRecord], layers: tuple[int, ...], hidden: int, device: torch.device | str = "cpu",
         members: Sequence[int] | None = None) -> Packed:
    """One micro-batch of these records, in this order; each has at least three tokens. `layers`: what the drafter reads."""
    features, wanted = [], []
    for record in records:
        (final,) = columns_of(record, (-1,), hidden)
        read = columns_of(record, layers, hidden)
        stored = record.features.to(device, non_blocking=True)  # one transfer a record
        features.append(stored[:-1, read[0]] if len(read) == 1 else torch.cat([stored[:-1, part] for part in read], dim=-1))
        wanted.append(stored[1:, final])
    tokens = [np.array(record.token_ids, np.int64) for record in records]
    lengths = [num_rows(len(each)) for each in tokens]
    positions = np.concatenate([np.arange(n) for n in lengths])
    first = np.repeat([max(0, record.prompt_length - 2) for record in records], lengths)
    numbers = (np.concatenate([each[1:-1] for each in tokens]), np.concatenate([each[2:] for each in tokens]), positions, first,
               np.flatnonzero(positions >= first))
    follow, drawn, place, start, answers = upload(np.concatenate(numbers), torch.device(device)).split([len(n) for n in numbers])
    return Packed(torch.cat(features), torch.cat(wanted), follow, drawn, place, start, answers, tuple(lengths),
                  tuple(range(len(records)) if members is None else members))


def unroll(module: Eagle, embedded: Tensor, state: Tensor, attend: Attend, steps: int) -> list[Tensor]:
    """The drafter's outputs [R, H] at steps 0..steps-1 of the paths that start at each row and follow the true tokens.

    embedded [R, H]: of each row's `follow`; state [R, H]: the encoded features. At step k row r stands k tokens further, so it
    takes the embedding of row r + k (another record's behind the end of its own: paths that nobody reads)."""
    found: list[Tensor] = []
    for k in range(steps):
        state = module(embedded.roll(-k, 0), state, attend)
        found.append(state)
    return found


class Aligned(NamedTuple):
    """Paths brought to the rows they predict for. T rows of the answers."""

    rows: Tensor  # [T] int64 rows of the micro-batch
    own: Tensor  # [J, T, H] the output at step k of the path that predicts this row's token
    valid: Tensor  # [J, T] bool: that path began within the answer


def align(outputs: Sequence[Tensor], packed: Packed) -> Aligned:
    """At step k it is the path that started k rows before."""
    rows = packed.answers
    depth = packed.positions[rows] - packed.first[rows]
    steps = torch.arange(len(outputs), device=rows.device)[:, None]
    own = torch.stack([out[(rows - k).clamp_min(0)] for k, out in enumerate(outputs)])
    return Aligned(rows, own, depth[None] >= steps)
