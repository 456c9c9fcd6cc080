"""First-fit-decreasing bin packing, which puts sequences of different lengths into micro-batches of bounded size."""

from __future__ import annotations

from collections.abc import Sequence


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Assigns items to bins, the largest item first, each into the first bin with room for it.

    Returns the item indices of each bin, in ascending order. An item larger than `capacity` gets a bin of its own. The result
    depends on the arguments alone, so a resumed run packs the same micro-batches.
    """
    bins: list[list[int]] = []
    used: list[int] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        place = next((b for b, total in enumerate(used) if total + sizes[i] <= capacity), None)
        if place is None:
            bins.append([i])
            used.append(sizes[i])
        else:
            bins[place].append(i)
            used[place] += sizes[i]
    return [sorted(members) for members in bins]
