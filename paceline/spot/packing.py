"""Packing records into micro-batches, and unrolling the drafter over them.

The records of a micro-batch are concatenated into one list of rows; attention keeps them apart. Row i of a record combines the
policy's features at position i with the token at i + 1 and predicts the token at i + 2. Its target is the policy's final hidden
state at i + 1, which predicts the same token. A record of N tokens has N - 2 such rows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.drafters.eagle import Eagle, feature_columns
from paceline.kernels.upload import upload
from paceline.models.attend import Attend
from paceline.types import FeatureRecord


class PackedRecords(NamedTuple):
    """The R rows of one micro-batch of whole records."""

    features: Tensor  # [R, F] input of the drafter: the policy's features at i
    targets: Tensor  # [R, H] the policy's final hidden state at i + 1
    next_tokens: Tensor  # [R] int64 the token at i + 1, the drafter's other input
    sampled_tokens: Tensor  # [R] int64 the token at i + 2, which the policy sampled and the row predicts
    positions: Tensor  # [R] int64 i
    first: Tensor  # [R] int64 the row of the same record that predicts the first token of the answer
    answers: Tensor  # [T] int64 the rows that predict answer tokens, which are the last rows of each record; paths start there
    lengths: tuple[int, ...]  # number of rows of each record
    answer_lengths: tuple[int, ...]  # number of its rows that predict answer tokens

    @property
    def record(self) -> Tensor:
        """[R] int64: index of each row's record."""
        sizes = torch.tensor(self.lengths, device=self.next_tokens.device)
        return torch.arange(len(self.lengths), device=sizes.device).repeat_interleave(sizes, output_size=len(self.next_tokens))


def num_rows(num_tokens: int) -> int:
    """Returns the number of rows of a record with this many tokens."""
    return max(0, num_tokens - 2)


def answer_rows(num_tokens: int, prompt_length: int, step: int) -> int:
    """Returns the number of rows of a record that are predicted at unroll step `step` by a path starting within the answer."""
    return max(0, num_tokens - 2 - max(0, prompt_length - 2) - step)


class Stretch(NamedTuple):
    """A part of a record: its tokens first..end, of which those before `start` only serve as context."""

    first: int
    start: int
    end: int

    def of(self, record: FeatureRecord) -> FeatureRecord:
        """Returns the part as a record of its own."""
        if self == (0, record.prompt_length, len(record.token_ids)):
            return record
        versions = record.versions[self.start - record.prompt_length : max(0, self.end - record.prompt_length)]
        return FeatureRecord(record.token_ids[self.first : self.end], record.features[self.first : self.end - 1], record.layers,
                             versions, self.start - self.first)


def stretches(num_tokens: int, prompt_length: int, window: int | None) -> list[Stretch]:
    """Divides a record into parts that a drafter with this window is trained and measured on. A part has at most `window` tokens
    of the answer and as many before them, so its draft tokens attend to between one and two windows, or to all there is; a record
    that is no longer than a part stays whole."""
    if window is None or num_tokens <= 2 * window:
        return [Stretch(0, prompt_length, num_tokens)]
    count = max(1, -(-(num_tokens - prompt_length) // window))
    bounds = [prompt_length + (num_tokens - prompt_length) * i // count for i in range(count + 1)]
    return [Stretch(max(0, start - window), start, end) for start, end in pairwise(bounds)]


def random_stretch(record: FeatureRecord, num_tokens: int, window: int | None, rng: random.Random) -> Stretch:
    """Chooses a random part of at most `num_tokens` answer tokens, with the `window` tokens before them as context."""
    spare = max(0, len(record.token_ids) - record.prompt_length - num_tokens)
    start = record.prompt_length + rng.randint(0, spare)
    end = len(record.token_ids) if not spare else start + num_tokens
    return Stretch(0 if window is None else max(0, start - window), start, end)


def pack(records: Sequence[FeatureRecord], layers: tuple[int, ...], hidden: int,
         device: torch.device | str = "cpu") -> PackedRecords:
    """Packs records into one micro-batch, in this order. Each has at least three tokens. layers: Layers whose hidden states the
    drafter reads."""
    features, targets = [], []
    for record in records:
        (final,) = feature_columns(record.layers, (-1,), hidden)
        read = feature_columns(record.layers, layers, hidden)
        stored = record.features.to(device, non_blocking=True)  # one transfer per record
        features.append(stored[:-1, read[0]] if len(read) == 1 else torch.cat([stored[:-1, part] for part in read], dim=-1))
        targets.append(stored[1:, final])
    tokens = [np.array(record.token_ids, np.int64) for record in records]
    lengths = [num_rows(len(each)) for each in tokens]
    positions = np.concatenate([np.arange(n) for n in lengths])
    prompts = [min(n, max(0, record.prompt_length - 2)) for n, record in zip(lengths, records, strict=True)]
    first = np.repeat(prompts, lengths)
    columns = (np.concatenate([each[1:-1] for each in tokens]), np.concatenate([each[2:] for each in tokens]), positions, first,
               np.flatnonzero(positions >= first))
    next_tokens, sampled, place, start, answers = upload(np.concatenate(columns), torch.device(device)).split(
        [len(column) for column in columns])
    return PackedRecords(torch.cat(features), torch.cat(targets), next_tokens, sampled, place, start, answers, tuple(lengths),
                         tuple(n - prompt for n, prompt in zip(lengths, prompts, strict=True)))


def unroll(module: Eagle, embedded: Tensor, state: Tensor, attend: Attend, paths: Tensor, steps: int) -> list[Tensor]:
    """Returns the drafter's outputs [T, H] at unroll steps 0..steps-1 of the paths that start at the rows `paths` and follow the
    text. The other rows only serve as keys.

    embedded [R, H]: Embedding of each row's `next_tokens`. state [R, H]: The encoded features. paths [T]: Rows. At step k a path
    that started at row r is k tokens further, so it takes the embedding of row r + k. Behind the end of its own record that is
    another record's, but the outputs of such paths are never read.
    """
    found = [module(embedded, state, attend, paths)]
    for k in range(1, steps):
        found.append(module(embedded.roll(-k, 0)[paths], found[-1], attend))
    return found


class AlignedOutputs(NamedTuple):
    """Outputs of all unroll steps, indexed by the T answer rows whose token they predict."""

    rows: Tensor  # [T] int64 rows of the micro-batch
    outputs: Tensor  # [J, T, H] output at step k of the path that predicts the row's token
    valid: Tensor  # [J, T] bool: whether that path starts within the answer


def align(outputs: Sequence[Tensor], packed: PackedRecords) -> AlignedOutputs:
    """Aligns outputs indexed by path with the rows they predict: at step k the path started k rows earlier."""
    rows = packed.answers
    offset = packed.positions[rows] - packed.first[rows]
    place, steps = (torch.arange(count, device=rows.device) for count in (len(rows), len(outputs)))
    # Not by indexing, whose gradient sorts the rows on a GPU.
    aligned = torch.stack([out.index_select(0, (place - k).clamp_min(0)) for k, out in enumerate(outputs)])
    return AlignedOutputs(rows, aligned, offset[None] >= steps[:, None])
