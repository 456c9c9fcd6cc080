"""Feature records on disk: one safetensors file each, whole or not there."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from paceline.files import atomic_write
from paceline.spot.lengths import Entry
from paceline.types import FeatureRecord

SUFFIX = ".record"


def record_path(folder: Path, key: int) -> Path:
    return folder / f"{key:09d}{SUFFIX}"


def write_record(folder: Path, key: int, step: int, record: FeatureRecord) -> None:
    tensors = {"token_ids": torch.tensor(record.token_ids, dtype=torch.int64), "features": record.features.cpu().contiguous(),
               "versions": torch.tensor(record.versions, dtype=torch.int64)}
    known = {"step": step, "prompt_length": record.prompt_length, "layers": list(record.layers),
             "version": max(record.versions, default=0)}
    # Thousands of small files: flushing each would cost more than losing those that power failures tear; `read_entry` skips them.
    atomic_write(record_path(folder, key), lambda path: save_file(tensors, path, {"record": json.dumps(known)}), fsync=False)


def read_record(folder: Path, key: int, device: torch.device | str = "cpu") -> FeatureRecord:
    with safe_open(record_path(folder, key), "pt") as file:
        known = json.loads(file.metadata()["record"])
        return FeatureRecord(file.get_tensor("token_ids").tolist(), file.get_tensor("features").to(device),
                             tuple(known["layers"]), file.get_tensor("versions").tolist(), known["prompt_length"])


def read_entry(path: Path) -> Entry | None:
    """From the file's head alone; None if it is torn."""
    try:
        with safe_open(path, "pt") as file:
            known = json.loads((file.metadata() or {})["record"])
            tokens = file.get_slice("token_ids").get_shape()[0]
            assert "features" in file.keys()  # noqa: SIM118 (no mapping)
            return Entry(int(path.stem), known["step"], known["version"], tokens, known["prompt_length"], path.stat().st_size)
    except (SafetensorError, KeyError, ValueError, OSError):
        return None


def num_bytes(record: FeatureRecord) -> int:
    features: torch.Tensor = record.features
    return features.numel() * features.element_size() + 8 * (len(record.token_ids) + len(record.versions))
