"""The records of the feature buffer on disk: one safetensors file each, written under a temporary name and renamed, so that no
reader sees half a file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from paceline.files import DamagedFile, damaged, save_tensors
from paceline.types import FeatureRecord

RECORD_SUFFIX = ".record"
"""Suffix of the file that holds one record."""


@dataclass(frozen=True, slots=True)
class RecordInfo:
    """Metadata of one record, known without reading the record itself."""

    key: int
    """Number of the record in its buffer. Keys increase: a larger one was added later."""
    step: int
    """RL step that generated the answer."""
    version: int
    """Version of the policy that generated the last token."""
    num_tokens: int
    """Number of tokens of prompt and answer together."""
    prompt_length: int
    """Number of prompt tokens."""
    num_bytes: int
    """Size of the record in bytes."""

    @property
    def answer_length(self) -> int:
        """Number of answer tokens."""
        return self.num_tokens - self.prompt_length


def read_record(folder: Path, key: int, device: torch.device | str = "cpu") -> FeatureRecord:
    """Reads the record with this key from a buffer's folder. Raises DamagedFile if it is not a whole one."""
    path = record_path(folder, key)
    try:
        with safe_open(path, "pt") as file:
            metadata = json.loads(file.metadata()["record"])
            return FeatureRecord(file.get_tensor("token_ids").tolist(), file.get_tensor("features").to(device),
                                 tuple(metadata["layers"]), file.get_tensor("versions").tolist(), metadata["prompt_length"])
    except (SafetensorError, FileNotFoundError, KeyError, TypeError, ValueError) as error:
        raise DamagedFile(f"{damaged(path, error)}; without it the answer is generated again") from None


def read_record_info(path: Path) -> RecordInfo | None:
    """Reads a record's metadata from the file's header alone; None if the file is incomplete."""
    try:
        with safe_open(path, "pt") as file:
            metadata = json.loads((file.metadata() or {})["record"])
            tokens = file.get_slice("token_ids").get_shape()[0]
            assert "features" in file.keys()  # noqa: SIM118 (not a mapping)
            return RecordInfo(int(path.stem), metadata["step"], metadata["version"], tokens, metadata["prompt_length"],
                              path.stat().st_size)
    except (SafetensorError, KeyError, TypeError, ValueError, AssertionError, OSError):
        return None


def write_record(folder: Path, key: int, step: int, record: FeatureRecord) -> None:
    """Writes an answer of RL step `step` into a buffer's folder."""
    tensors = {"token_ids": torch.tensor(record.token_ids, dtype=torch.int64), "features": record.features.cpu().contiguous(),
               "versions": torch.tensor(record.versions, dtype=torch.int64)}
    metadata = {"step": step, "prompt_length": record.prompt_length, "layers": list(record.layers),
                "version": max(record.versions, default=0)}
    # Flushing each of thousands of small files would cost more than the few that a power failure damages; `open` skips those.
    save_tensors(record_path(folder, key), tensors, {"record": json.dumps(metadata)}, fsync=False)


def record_path(folder: Path, key: int) -> Path:
    """The file of the record with this key."""
    return folder / f"{key:09d}{RECORD_SUFFIX}"


def num_bytes(record: FeatureRecord) -> int:
    """Size of a record in memory."""
    features: torch.Tensor = record.features
    return features.numel() * features.element_size() + 8 * (len(record.token_ids) + len(record.versions))
