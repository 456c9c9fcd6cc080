"""A rollout's own seed: from what was asked, never from its place in a file, a batch or a cluster."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def derive_seed(seed: int, key: str | Sequence[int], sample: int) -> int:
    """64 bits from (seed, id or prompt, number of the sample)."""
    text = key if isinstance(key, str) else ",".join(map(str, key))
    kind = "id" if isinstance(key, str) else "prompt"
    digest = hashlib.blake2b(f"{seed}|{kind}|{sample}|{text}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
