"""One-step-off sampling: which records to train on so that their lengths are distributed like those generated, although the long
answers of this step are not finished yet; and which to let go first. Plain numbers, no torch.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


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
    record is stood in for by the nearest that has some."""
    found: dict[int, list[Entry]] = {}
    for entry in sorted(entries, key=lambda e: (-e.step, -e.key)):
        found.setdefault(length_bin(entry.answer_length), []).append(entry)
    counts = Counter(map(length_bin, lengths))
    chosen = {}
    for wanted, count in sorted(counts.items()):
        nearest = min(found, key=lambda b: (abs(b - wanted), -b))
        chosen[wanted] = found[nearest][: max(1, reach * count)]
    return chosen


def draw(entries: Sequence[Entry], lengths: Sequence[int], reach: int, num_tokens: int, rng: random.Random) -> list[Entry]:
    """Records with at least `num_tokens` together, a bin as often as it was generated; within it none twice before all once."""
    if not entries:
        return []
    available = pools(entries, lengths, reach)
    counts = Counter(map(length_bin, lengths))
    bins = sorted(available)
    left: dict[int, list[Entry]] = {b: [] for b in bins}
    drawn: list[Entry] = []
    total = 0
    while total < num_tokens:
        (b,) = rng.choices(bins, [counts[b] for b in bins])
        if not left[b]:
            left[b] = rng.sample(available[b], len(available[b]))
        drawn.append(left[b].pop())
        total += drawn[-1].num_tokens
    return drawn


def first_to_go(entries: Iterable[Entry], newest_step: int) -> Entry:
    """Of older steps the oldest; of the last step the shortest, for this step writes short answers first and the last step's long
    ones must stand in; then this step's first."""

    def order(entry: Entry) -> tuple[int, int, int]:
        last = entry.step == newest_step - 1
        return (entry.step, entry.answer_length if last else 0, entry.key)

    return min(entries, key=order)
