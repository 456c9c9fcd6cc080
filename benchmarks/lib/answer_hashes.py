"""Hashes of generated answers, by which the sides of a benchmark are compared that do not run in the same process."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

_DIGITS = 8


def answer_hashes(answers: Iterable[Sequence[int]]) -> str:
    """The hashes of answers, given as token ids, one after the other."""
    found = (hashlib.blake2b(" ".join(map(str, tokens)).encode(), digest_size=_DIGITS // 2) for tokens in answers)
    return "".join(each.hexdigest() for each in found)


def split_hashes(hashes: str) -> list[str]:
    """The hash of each answer."""
    return [hashes[i : i + _DIGITS] for i in range(0, len(hashes), _DIGITS)]
