"""One-step-off sampling: which records to train on so that their lengths are distributed like those generated, although the long
answers of this step are not finished yet; and which to let go first. Plain numbers, no torch.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known of a record without reading it."""

    key: int
    """Counts up: a larger one was added later."""
    step: int
    version: int
    """Of the policy that wrote its last token."""
    num_tokens: int
    prompt_length: int
    num_bytes: int

    @property
    def answer_length(self) -> int:
        return self.num_tokens - self.prompt_length


def length_bin(length: int) -> int:
    """Half octaves: lengths within a factor of 1.41 count as alike."""
    return int(2 * math.log2(max(1, length)))


def pools(entries: Iterable[Entry], lengths: Sequence[int], reach: int) -> dict[int, list[Entry]]:
    """Bin → what stands in for its answers: the newest, up to `reach` times as many as were generated. So a bin this step has
    filled holds mostly this step's, and one whose answers are still being written those of the steps before. A bin without any
    record is stood in for by the nearest that has some; without records there is none."""
    found: dict[int, list[Entry]] = {}
    for entry in sorted(entries, key=lambda e: (-e.step, -e.key)):
        found.setdefault(length_bin(entry.answer_length), []).append(entry)
    counts = Counter(map(length_bin, lengths))
    chosen = {}
    for wanted, count in sorted(counts.items()) if found else ():
        nearest = min(found, key=lambda b: (abs(b - wanted), -b))
        chosen[wanted] = found[nearest][: max(1, reach * count)]
    return chosen


class Pools(NamedTuple):
    """What there is to draw from, and how often a bin is."""

    entries: dict[int, list[Entry]]
    counts: Counter[int]

    @classmethod
    def of(cls, entries: Iterable[Entry], lengths: Sequence[int], reach: int) -> Pools:
        return cls(pools(entries, lengths, reach), Counter(map(length_bin, lengths)))

    def draw(self, num_tokens: int, rng: random.Random) -> list[Entry]:
        """Records with at least `num_tokens` together, a bin as often as it was generated; in it none twice before all once."""
        bins = sorted(self.entries)
        shuffled = {b: _shuffled(self.entries[b], rng) for b in bins}
        drawn: list[Entry] = []
        total = 0
        while bins and total < num_tokens:
            (b,) = rng.choices(bins, [self.counts[b] for b in bins])
            drawn.append(next(shuffled[b]))
            total += drawn[-1].num_tokens
        return drawn


def _shuffled(entries: list[Entry], rng: random.Random) -> Iterator[Entry]:
    """Round and round, each time in another order; only as much is shuffled as is asked for."""
    while True:
        moved: dict[int, int] = {}  # what stands where, apart from where it began
        for i in range(len(entries)):
            j = rng.randrange(i, len(entries))
            yield entries[moved.get(j, j)]
            moved[j] = moved.get(i, i)


def first_to_go(entries: Iterable[Entry], newest_step: int) -> Entry:
    """Of older steps the oldest; of the last step the shortest, for this step writes short answers first and the last step's long
    ones must stand in; then this step's first."""

    def order(entry: Entry) -> tuple[int, int, int]:
        last = entry.step == newest_step - 1
        return (entry.step, entry.answer_length if last else 0, entry.key)

    return min(entries, key=order)
