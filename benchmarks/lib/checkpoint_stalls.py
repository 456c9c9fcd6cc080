"""How long a checkpoint stops drafter training: blocking, asynchronous, and asynchronous with only the trained parameters."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import save_file

from paceline.spot.checkpoint import Snapshot, SpotCheckpoints, snapshot
from paceline.spot.trainer import SpotTrainer


class Stalls(NamedTuple):
    """Milliseconds that training stands still for one checkpoint."""

    blocking: float
    """A blocking checkpoint of everything, including the policy's embedding and head."""
    asynchronous: float
    """A checkpoint of everything, including the policy's embedding and head, that is written in the background."""
    selective: float
    """Only the trained parameters and their optimizer state, written in the background."""
    selective_bytes: int
    """Size of the selective checkpoint."""


def measure_stalls(trainer: SpotTrainer, folder: Path | str, repeats: int = 5) -> Stalls:
    """Medians of `repeats` checkpoints of each kind. The first one allocates the buffers and does not count."""
    selective = snapshot(trainer)
    tensors = dict(selective.tensors)
    for name, value in (("policy.embed", trainer.policy.embed.weight), ("policy.head", trainer.policy.head.weight)):
        tensors[name] = value.detach().clone()  # they may be one tensor
    full = Snapshot(tensors, selective.metadata)
    checkpoints = SpotCheckpoints(Path(folder) / "stalls")
    found: dict[str, list[float]] = {"blocking": [], "full": [], "selective": []}
    for _ in range(repeats + 1):
        found["blocking"].append(_save_blocking(full, checkpoints.folder / "blocking.safetensors"))
        for name, what in (("full", full), ("selective", selective)):
            found[name].append(checkpoints.save(what))
            checkpoints.wait()
    checkpoints.close()
    middle = {name: sorted(values[1:])[repeats // 2] for name, values in found.items()}
    size = sum(t.numel() * t.element_size() for t in selective.tensors.values())
    return Stalls(middle["blocking"], middle["full"], middle["selective"], size)


def _save_blocking(found: Snapshot, path: Path) -> float:
    """Milliseconds of writing a snapshot in the training thread."""
    began = time.perf_counter()
    save_file({name: t.cpu().contiguous() for name, t in found.tensors.items()}, path)
    return 1e3 * (time.perf_counter() - began)
