"""How good a drafter is, on answers it was not trained on: how often its first guesses hold the token that the policy drew.

A path starts at a row of the answer and follows the true tokens, on the drafter's own outputs, as when drafting. With tau > 0
guesses are ranked as engines rank them, by log q / tau plus the noise that the policy drew with. A record does not hold that
noise, but given what was drawn its distribution is known, and it is drawn from that: any answer will do, whatever its seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.drafters.eagle import Eagle
from paceline.kernels import TorchOps
from paceline.kernels.reference.draft_rank import rank
from paceline.models.decoder import Decoder, Rope
from paceline.spot.attend import PathAttend
from paceline.spot.packing import Packed, first_fit, num_rows, pack, unroll
from paceline.types import FeatureRecord

_ELEMENTS = 2**24
"""Logits that exist at once."""


class Share(NamedTuple):
    """Of `rows` guesses."""

    covered: float
    rows: int


@dataclass(frozen=True, slots=True)
class Coverage:
    """On the path the policy took."""

    tau: float
    by_depth: dict[int, list[float]]
    """k → share of tokens among the first k guesses, at depth 1, 2, … (whether or not the path before was guessed)."""
    expected: dict[int, list[float]]
    """k → tokens per verification with a full tree of that width and depth 1, 2, …, along the answers as an engine goes: the next
    tree starts behind what was guessed of the last and one token more. (The mean over all places would be too high: what is easy
    to guess is many places, but few starts.)"""
    by_position: list[tuple[int, Share]]
    """(token of the answer from which on, first guesses at depth 1): how it decays along long answers."""
    by_quarter: list[Share]
    """First guesses at depth 1 in each quarter of the answer."""
    by_version: dict[int, Share]
    """Policy version that wrote the token → first guesses at depth 1."""

    def __str__(self) -> str:
        lines = [f"tau {self.tau:g}"]
        for k, shares in self.by_depth.items():
            lines.append(f"  top-{k} by depth " + " ".join(f"{x:.3f}" for x in shares)
                         + f"   tokens per verification {self.expected[k][-1]:.2f}")
        return "\n".join(lines)


@torch.no_grad()
def coverage(drafter: Eagle, policy: Decoder, records: Sequence[FeatureRecord], tau: float = 0.35, depth: int = 6,
             widths: Sequence[int] = (1, 2, 4), temperature: float = 1.0, max_tokens: int = 8192, seed: int = 0) -> Coverage:
    """Records as captured: final states among their layers. temperature: they were drawn at; no top-k or top-p."""
    usable = [record for record in records if len(record.token_ids) > max(2, record.prompt_length)]
    if not usable:
        raise ValueError("records: none has an answer to evaluate on")
    most = min(max(widths), policy.config.vocab_size if drafter.draft_ids is None else len(drafter.draft_ids))
    device = policy.norm.device
    drafter.gather_head(policy)
    ranks = _Ranks(drafter, policy, tau, temperature, most, torch.Generator(device).manual_seed(seed))
    rope = Rope(policy.config, max(len(r.token_ids) for r in usable) + depth, policy.norm.dtype, device)
    tally = _Tally(depth, most)
    for members in first_fit([num_rows(len(record.token_ids)) for record in usable], max_tokens):
        chosen = [usable[i] for i in members]
        packed = pack(chosen, drafter.config.feature_layers, policy.config.hidden_size, device, members)
        attend = PathAttend(ranks.ops, rope, packed.positions, packed.lengths)
        state = drafter.encode(packed.features, ranks.ops)
        outputs = unroll(drafter, policy.embed(packed.follow), state, attend, depth)
        tally.add(packed, chosen, [ranks(out, packed, k) for k, out in enumerate(outputs)])
    return tally.result(tau, [min(k, most) for k in widths])


class _Ranks:
    """The place of the true token among a path's guesses; `most` if it is behind them."""

    def __init__(self, drafter: Eagle, policy: Decoder, tau: float, temperature: float, most: int,
                 generator: torch.Generator) -> None:
        self.ops = TorchOps()
        self._drafter, self._policy, self._tau, self._temperature, self._most = drafter, policy, tau, temperature, most
        self._generator = generator

    def __call__(self, out: Tensor, packed: Packed, step: int) -> Tensor:
        """[R] int64: of paths by the row they start at."""
        found = []
        wanted, drawn = packed.wanted.roll(-step, 0), packed.drawn.roll(-step, 0)
        size = max(1, _ELEMENTS // self._policy.config.vocab_size)
        for o, w, d in zip(out.split(size), wanted.split(size), drawn.split(size), strict=True):
            logits = self._drafter.logits(o, self._policy, self.ops)
            temperature = torch.full((len(o),), self._temperature, device=o.device)
            guesses = rank(logits, self._noise(w, d, logits), temperature, self._tau, self._most).columns
            ids = self._drafter.draft_ids
            hit = (guesses if ids is None else ids[guesses]) == d[:, None]
            found.append(torch.where(hit.any(1), hit.int().argmax(1), self._most))
        return torch.cat(found)

    def _noise(self, wanted: Tensor, drawn: Tensor, like: Tensor) -> Tensor:
        if self._tau == 0:
            return like.new_zeros(())
        log_p = (self._policy.logits(wanted, self.ops).float() / self._temperature).log_softmax(-1)
        noise = posterior_noise(log_p, drawn, self._generator)
        return noise if self._drafter.draft_ids is None else noise[:, self._drafter.draft_ids]


def posterior_noise(log_p: Tensor, drawn: Tensor, generator: torch.Generator) -> Tensor:
    """Gumbel noise G [R, V] given that argmax log p + G is `drawn` [R]. The maximum is itself Gumbel distributed, whichever token
    wins; the others are Gumbels cut off there: -log(exp(-max) + exp(-x)) for free x ~ log p + Gumbel."""
    uniform = torch.rand(log_p.shape, generator=generator, device=log_p.device, dtype=log_p.dtype)
    gumbel = -(-uniform.clamp_min(torch.finfo(log_p.dtype).tiny).log()).log()
    winner = drawn[:, None]
    top = gumbel.gather(1, winner)  # independent of the rest
    cut_off = -torch.logaddexp(-top, -(log_p + gumbel)) - log_p
    return cut_off.scatter(1, winner, top - log_p.gather(1, winner))


class _Tally:
    def __init__(self, depth: int, most: int) -> None:
        self._depth, self._most = depth, most
        self._hits = torch.zeros(most + 1, depth, dtype=torch.int64)  # [k, depth]: tokens among the first k
        self._rows = torch.zeros(depth, dtype=torch.int64)
        self._reach: list[Tensor] = []  # of each answer [k, rows]: how far a path that starts there is guessed
        self._tokens: list[Tensor] = []  # [4, rows] first guess right, token of the answer, answer's length, version

    def add(self, packed: Packed, records: Sequence[FeatureRecord], ranks: Sequence[Tensor]) -> None:
        """ranks: by step, [R] by the row a path starts at."""
        left = torch.cat([torch.arange(n, 0, -1) for n in packed.lengths]).to(packed.follow.device)  # rows to the record's end
        starts = packed.positions >= packed.first
        alive = starts.expand(self._most + 1, -1)
        reach = torch.zeros(alive.shape, dtype=torch.int64, device=starts.device)
        for step, place in enumerate(ranks):
            among = place[None] < torch.arange(self._most + 1, device=place.device)[:, None]  # [k, R]
            within = starts & (left > step)
            self._hits[:, step] += (among & within).sum(1).cpu()
            self._rows[step] += int(within.sum())
            alive = alive & among & within
            reach += alive
        rows = starts.nonzero()[:, 0]
        self._reach += reach[:, rows].cpu().split(packed.record[rows].unique_consecutive(return_counts=True)[1].tolist(), dim=1)
        token = (packed.positions - packed.first)[rows]
        length = torch.tensor([len(r.token_ids) - r.prompt_length for r in records], device=rows.device)[packed.record[rows]]
        version = torch.tensor([v for r in records for v in _versions(r)], device=rows.device)
        self._tokens.append(torch.stack([(ranks[0][rows] == 0).long(), token, length, version]).cpu())

    def result(self, tau: float, widths: Sequence[int]) -> Coverage:
        share = self._hits / self._rows.clamp_min(1)
        right, token, length, version = torch.cat(self._tokens, dim=1)
        quarter = (4 * token).div(length, rounding_mode="floor").clamp_max(3)
        edges = [0, *(2**n for n in range(5, 24) if 2**n <= int(token.max()))]
        place = torch.bucketize(token, torch.tensor(edges[1:], dtype=torch.int64), right=True)
        return Coverage(
            tau, {k: share[k].tolist() for k in widths}, {k: self._walk(k) for k in widths},
            [(edges[i], s) for i, s in _shares(right, place)], [s for _, s in _shares(right, quarter)],
            dict(_shares(right, version)))


    def _walk(self, k: int) -> list[float]:
        """Tokens per verification, by depth."""
        answers = [reach[k].tolist() for reach in self._reach]
        tokens = sum(map(len, answers))
        return [tokens / sum(_verifications(answer, depth) for answer in answers) for depth in range(1, self._depth + 1)]


def _verifications(reach: list[int], depth: int) -> int:
    at = count = 0
    while at < len(reach):
        at, count = at + 1 + min(reach[at], depth), count + 1
    return count


def _versions(record: FeatureRecord) -> list[int]:
    """Of each answer token that a row predicts: a prompt of one token leaves the answer's first without one."""
    count = len(record.token_ids) - max(2, record.prompt_length)
    known = record.versions[-count:] if count else []
    return [0] * (count - len(known)) + list(known)


def _shares(right: Tensor, group: Tensor) -> Iterator[tuple[int, Share]]:
    for value in group.unique().tolist():
        chosen = right[group == value]
        yield value, Share(float(chosen.double().mean()), len(chosen))
