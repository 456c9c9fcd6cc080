"""What a checkpoint costs the trainer: blocking, written behind, and written behind with only what is trained."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from paceline.spot.checkpoint import Snapshot, SpotCheckpoints, snapshot
from paceline.spot.trainer import SpotTrainer


class Stalls(NamedTuple):
    """Milliseconds that training stands still for one checkpoint."""

    blocking: float  # everything a naive one holds, the policy's embedding and head too
    asynchronous: float  # likewise, written behind
    selective: float  # and only what is trained
    selective_bytes: int


def measure_stalls(trainer: SpotTrainer, folder: Path | str, repeats: int = 5) -> Stalls:
    """Medians. The first of each kind makes the buffers and does not count."""
    selective = snapshot(trainer)
    tensors = dict(selective.tensors)
    for name, value in (("policy.embed", trainer.policy.embed.weight), ("policy.head", trainer.policy.head.weight)):
        tensors[name] = value.detach().clone()  # they may be one tensor
    full = Snapshot(tensors, selective.known)
    checkpoints = SpotCheckpoints(Path(folder) / "stalls")
    found: dict[str, list[float]] = {"blocking": [], "full": [], "selective": []}
    for _ in range(repeats + 1):
        found["blocking"].append(checkpoints.save_blocking(full))
        for name, what in (("full", full), ("selective", selective)):
            found[name].append(checkpoints.save(what))
            checkpoints.wait()
    checkpoints.close()
    middle = {name: sorted(values[1:])[repeats // 2] for name, values in found.items()}
    size = sum(t.numel() * t.element_size() for t in selective.tensors.values())
    return Stalls(middle["blocking"], middle["full"], middle["selective"], size)
