"""Offline evaluation of a drafter: how often the token that the policy sampled is among the drafter's first k candidates.

A path starts at a row of the answer and follows the generated tokens on the drafter's own outputs, as when drafting. With tau > 0
candidates are ranked as engines rank them, by log q / tau plus the noise that the policy sampled with. A record does not contain
that noise, but its distribution given the sampled token is known, and the evaluation draws from it, so answers of any seed can be
used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.drafters.eagle import Eagle
from paceline.kernels import TorchOps
from paceline.kernels.reference.drafting import rank_tokens
from paceline.models.decoder import Decoder, Rope
from paceline.packing import first_fit_decreasing
from paceline.spot.attention import UnrolledAttend
from paceline.spot.packing import PackedRecords, num_rows, pack, stretches, unroll
from paceline.types import FeatureRecord

_MAX_LOGITS = 2**24
"""Number of logits that are held at once."""


class Share(NamedTuple):
    """Share of rows whose token was the drafter's first candidate."""

    covered: float
    rows: int


@dataclass(frozen=True, slots=True)
class Coverage:
    """Top-k coverage of a drafter along the answers that the policy generated."""

    tau: float
    """Temperature of the ranking."""
    by_depth: dict[int, list[float]]
    """For each k, the share of tokens among the first k candidates at depth 1, 2, ..., whether or not the path before them was
    covered."""
    accept_length: dict[int, list[float]]
    """For each k, the mean number of tokens per verification, bonus token included, with a full tree of width k and depth 1, 2,
    .... It follows the answers as an engine does: the next tree starts after the accepted tokens and the bonus token. (The mean
    over all positions would be too high, because easy tokens are many positions but few tree roots.)"""
    verifications: dict[int, list[int]]
    """For each k, the number of verifications of each answer, or of each of its parts, at the largest depth."""
    by_position: list[tuple[int, Share]]
    """Coverage of the first candidate at depth 1 by position in the answer, as (first position of the bin, share)."""
    by_quarter: list[Share]
    """Coverage of the first candidate at depth 1 in each quarter of the answer."""
    by_version: dict[int, Share]
    """Coverage of the first candidate at depth 1 by the policy version that sampled the token."""

    def __str__(self) -> str:
        lines = [f"tau {self.tau:g}"]
        for k, shares in self.by_depth.items():
            lines.append(f"  top-{k} by depth " + " ".join(f"{x:.3f}" for x in shares)
                         + f"   tokens per verification {self.accept_length[k][-1]:.2f}")
        return "\n".join(lines)


@torch.no_grad()
def coverage(drafter: Eagle, policy: Decoder, records: Sequence[FeatureRecord], tau: float = 0.35, depth: int = 6,
             widths: Sequence[int] = (1, 2, 4), temperature: float = 1.0, max_tokens: int = 8192, seed: int = 0) -> Coverage:
    """Evaluates a drafter on captured answers.

    Args:
        drafter: The drafter to evaluate.
        policy: The policy that generated the answers.
        records: Captured answers, with the final hidden state among their layers.
        tau: Temperature of the ranking, as in the engine.
        depth: Number of unroll steps.
        widths: Values of k.
        temperature: Temperature that the answers were sampled at, without top-k or top-p.
        max_tokens: Number of tokens of one forward pass.
        seed: Seed of the noise.
    """
    usable = [record for record in records if len(record.token_ids) > max(2, record.prompt_length)]
    if not usable:
        raise ValueError("records: none has an answer to evaluate on")
    most = min(max(widths), drafter.draft_vocab_size)
    device = policy.norm.device
    drafter.gather_head(policy)
    ranks = _Ranks(drafter, policy, tau, temperature, most, torch.Generator(device).manual_seed(seed))
    rope = Rope(drafter.config.model, max(len(r.token_ids) for r in usable) + depth, policy.norm.dtype, device)
    counts = _Counts(depth, most)
    parts = [_Part(part.of(record), part.start - record.prompt_length, len(record.token_ids) - record.prompt_length)
             for record in usable for part in stretches(len(record.token_ids), record.prompt_length, drafter.config.window)]
    for members in first_fit_decreasing([num_rows(len(part.record.token_ids)) for part in parts], max_tokens):
        chosen = [parts[i] for i in members]
        packed = pack([part.record for part in chosen], drafter.config.feature_layers, policy.config.hidden_size, device)
        attend = UnrolledAttend(ranks.ops, rope, packed)
        state = drafter.encode(packed.features, ranks.ops)
        ranks.begin(packed)
        outputs = unroll(drafter, policy.embed(packed.next_tokens), state, attend, packed.answers, depth)
        counts.add(packed, chosen, [ranks(out, packed, k) for k, out in enumerate(outputs)])
    return counts.result(tau, [min(k, most) for k in widths])


class _Part(NamedTuple):
    """A part of a record as a record of its own, its place in the answer, and the answer's length."""

    record: FeatureRecord
    offset: int
    answer_length: int


class _Ranks:
    """Computes the rank of the sampled token among a path's candidates; `most` if it is not among the first `most`."""

    def __init__(self, drafter: Eagle, policy: Decoder, tau: float, temperature: float, most: int,
                 generator: torch.Generator) -> None:
        self.ops = TorchOps()
        self._drafter, self._policy, self._tau, self._temperature, self._most = drafter, policy, tau, temperature, most
        self._generator, self._size = generator, max(1, _MAX_LOGITS // policy.config.vocab_size)
        ids = drafter.draft_ids
        self._ids = torch.arange(policy.config.vocab_size, device=generator.device) if ids is None else ids
        self._head = None if ids is None or tau == 0 else policy.head.weight[ids]
        self._norm = self._chance = torch.empty(0)  # [rows] the policy's normaliser, and log p of the token that it sampled

    def begin(self, packed: PackedRecords) -> None:
        """Computes once what all unroll steps need of the policy's distributions."""
        answers = packed.answers
        self._norm, self._chance = torch.zeros(2, len(packed.targets), device=answers.device)
        if self._tau == 0:
            return
        for rows in answers.split(self._size):
            logits = self._policy.logits(packed.targets[rows], self.ops).float() / self._temperature
            self._norm[rows] = norm = logits.logsumexp(-1)
            self._chance[rows] = logits.gather(1, packed.sampled_tokens[rows][:, None])[:, 0] - norm

    def __call__(self, out: Tensor, packed: PackedRecords, step: int) -> Tensor:
        """Returns the ranks [T] int64 of the paths at an unroll step."""
        found = []
        places = ((torch.arange(len(packed.targets), device=out.device) + step) % len(packed.targets))[packed.answers]
        for o, at in zip(out.split(self._size), places.split(self._size), strict=True):
            logits, is_sampled = self._drafter.logits(o, self._policy, self.ops), self._ids == packed.sampled_tokens[at][:, None]
            temperature = torch.full((len(o),), self._temperature, device=o.device)
            noise = self._noise(packed.targets[at], at, is_sampled, logits)
            hit = is_sampled.gather(1, rank_tokens(logits, noise, temperature, self._tau, self._most).columns)
            found.append(torch.where(hit.any(1), hit.int().argmax(1), self._most))
        return torch.cat(found)

    def _noise(self, targets: Tensor, places: Tensor, is_sampled: Tensor, like: Tensor) -> Tensor:
        if self._tau == 0:
            return like.new_zeros(())
        log_p = self._policy.logits(targets, self.ops, self._head).float() / self._temperature - self._norm[places][:, None]
        return posterior_noise(log_p, self._chance[places], is_sampled, self._generator)


def posterior_noise(log_p: Tensor, chance: Tensor, is_sampled: Tensor, generator: torch.Generator) -> Tensor:
    """Draws Gumbel noise G [R, C] of tokens with these log p, conditional on the sampled token being the argmax of log p + G over
    all tokens. `chance` [R]: log p of the sampled token. `is_sampled` [R, C]: whether a column is this token.

    The maximum of log p + G is itself Gumbel distributed, whichever token attains it; the other values are Gumbels truncated at
    it: -log(exp(-max) + exp(-x)) for an unconditional x ~ log p + Gumbel. This is a draw from a distribution, not the noise of a
    seed that `paceline.kernels.noise` defines.
    """
    rows, columns = log_p.shape
    uniform = torch.rand(rows, 1 + columns, generator=generator, device=log_p.device, dtype=log_p.dtype)
    gumbel = -(-uniform.clamp_min(torch.finfo(log_p.dtype).tiny).log()).log()
    top, others = gumbel[:, :1], gumbel[:, 1:]
    truncated = -torch.logaddexp(-top, -(log_p + others)) - log_p
    return torch.where(is_sampled, top - chance[:, None], truncated)


class _Counts:
    """Accumulates the ranks of sampled tokens over micro-batches."""

    def __init__(self, depth: int, most: int) -> None:
        self._depth, self._most = depth, most
        self._hits = torch.zeros(most + 1, depth, dtype=torch.int64)  # [k, depth]: tokens among the first k candidates
        self._rows = torch.zeros(depth, dtype=torch.int64)
        self._reach: list[Tensor] = []  # per answer [k, rows]: number of covered tokens of the path that starts at each row
        self._tokens: list[Tensor] = []  # [4, rows]: first candidate correct, position in the answer, answer length, version

    def add(self, packed: PackedRecords, parts: Sequence[_Part], ranks: Sequence[Tensor]) -> None:
        """Adds one micro-batch. ranks: For each unroll step [T], by path."""
        # Number of rows from the start of a path to the end of its record.
        left = torch.cat([torch.arange(n, 0, -1) for n in packed.answer_lengths]).to(packed.answers.device)
        alive = torch.ones(self._most + 1, len(left), dtype=torch.bool, device=left.device)
        reach = torch.zeros(alive.shape, dtype=torch.int64, device=left.device)
        for step, place in enumerate(ranks):
            among = place[None] < torch.arange(self._most + 1, device=place.device)[:, None]  # [k, T]
            within = left > step
            self._hits[:, step] += (among & within).sum(1).cpu()
            self._rows[step] += int(within.sum())
            alive = alive & among & within
            reach += alive
        rows = packed.answers
        self._reach += reach.cpu().split(list(packed.answer_lengths), dim=1)
        offset, length = torch.tensor([part[1:] for part in parts], device=rows.device)[packed.record[rows]].T
        token = (packed.positions - packed.first)[rows] + offset
        version = torch.tensor([v for part in parts for v in _versions(part.record)], device=rows.device)
        self._tokens.append(torch.stack([(ranks[0] == 0).long(), token, length, version]).cpu())

    def result(self, tau: float, widths: Sequence[int]) -> Coverage:
        share = self._hits / self._rows.clamp_min(1)
        right, token, length, version = torch.cat(self._tokens, dim=1)
        quarter = (4 * token).div(length, rounding_mode="floor").clamp_max(3)
        edges = [0, *(2**n for n in range(5, 24) if 2**n <= int(token.max()))]
        place = torch.bucketize(token, torch.tensor(edges[1:], dtype=torch.int64), right=True)
        return Coverage(
            tau, {k: share[k].tolist() for k in widths}, {k: self._accept_length(k) for k in widths},
            {k: [_verifications(reach[k].tolist(), self._depth) for reach in self._reach] for k in widths},
            [(edges[i], s) for i, s in _shares(right, place)], [s for _, s in _shares(right, quarter)],
            dict(_shares(right, version)))

    def _accept_length(self, k: int) -> list[float]:
        """Returns the number of tokens per verification at width k, by depth."""
        answers = [reach[k].tolist() for reach in self._reach]
        tokens = sum(map(len, answers))
        return [tokens / sum(_verifications(answer, depth) for answer in answers) for depth in range(1, self._depth + 1)]


def _verifications(reach: list[int], depth: int) -> int:
    """Returns the number of verification steps that generate one answer."""
    at = count = 0
    while at < len(reach):
        at, count = at + 1 + min(reach[at], depth), count + 1
    return count


def _versions(record: FeatureRecord) -> list[int]:
    """Returns the policy version of each answer token that a row predicts. No row predicts the first token after a prompt of one
    token."""
    count = len(record.token_ids) - max(2, record.prompt_length)
    known = record.versions[-count:] if count else []
    return [0] * (count - len(known)) + list(known)


def _shares(right: Tensor, group: Tensor) -> Iterator[tuple[int, Share]]:
    """Yields the share of correct rows of each group, in ascending order of the group's number."""
    for value in group.unique().tolist():
        chosen = right[group == value]
        yield value, Share(float(chosen.double().mean()), len(chosen))
