"""What a drafter is trained on: tokens and features captured while generating, bounded in bytes, in memory or in a folder.

Safe to add to from one thread while another draws.
"""

from __future__ import annotations

import random
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from paceline.spot.lengths import Entry, Pools, first_to_go
from paceline.spot.record_files import SUFFIX, num_bytes, read_entry, read_record, record_path, write_record
from paceline.types import FeatureRecord


class FeatureBuffer:
    def __init__(self, max_bytes: int, folder: Path | str | None = None, max_disk_bytes: int | None = None,
                 max_age: int | None = None, reach: int = 4, device: torch.device | str = "cpu") -> None:
        """max_bytes: of records in memory, on `device`. With a folder all are kept there, up to max_disk_bytes (None: ten times
        max_bytes), and memory holds those used last. max_age: policy versions after which a record is dropped (None: never).
        reach: from so many steps' worth of answers it draws."""
        self.max_bytes, self.max_age, self.reach, self.device = max_bytes, max_age, reach, device
        self.folder = None if folder is None else Path(folder)
        self.max_disk_bytes = 10 * max_bytes if max_disk_bytes is None else max_disk_bytes
        self.newest_step = self.newest_version = 0
        self.dropped = self.memory_bytes = self.disk_bytes = 0
        self._entries: dict[int, Entry] = {}
        self._memory: OrderedDict[int, FeatureRecord] = OrderedDict()  # used last comes last
        self._generated: dict[int, list[int]] = {}  # step → lengths of its answers, kept longer than they are
        self._pools: tuple[tuple[int, ...] | None, Pools] | None = None  # by the lengths asked for, till something changes
        self._next_key = 0
        self._lock = threading.RLock()
        self._writing: dict[int, Future[None]] = {}
        self._writer: ThreadPoolExecutor | None = None
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._writer = ThreadPoolExecutor(1, "feature-buffer")

    @classmethod
    def open(cls, folder: Path | str, max_bytes: int, max_disk_bytes: int | None = None, max_age: int | None = None,
             reach: int = 4, device: torch.device | str = "cpu") -> FeatureBuffer:
        """What a former buffer left in its folder; files that are not whole are removed."""
        buffer = cls(max_bytes, folder, max_disk_bytes, max_age, reach, device)
        assert buffer.folder is not None
        for path in buffer.folder.glob("*.tmp"):
            path.unlink()
        for path in sorted(buffer.folder.glob(f"*{SUFFIX}")):
            entry = read_entry(path)
            if entry is None:
                path.unlink()
            else:
                buffer._book(entry)
        buffer._shrink()
        return buffer

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_tokens(self) -> int:
        with self._lock:
            return sum(entry.num_tokens for entry in self._entries.values())

    def entries(self) -> list[Entry]:
        with self._lock:
            return list(self._entries.values())

    def add(self, record: FeatureRecord, step: int) -> int | None:
        """Keeps a finished answer of this step; returns its key, or None if it is too short to learn from."""
        if len(record.token_ids) < 3 or len(record.token_ids) <= record.prompt_length:
            return None
        kept = FeatureRecord(list(record.token_ids), record.features.detach().to(self.device), record.layers,
                             list(record.versions), record.prompt_length)
        with self._lock:
            entry = Entry(self._next_key, step, max(record.versions, default=0), len(record.token_ids), record.prompt_length,
                          num_bytes(kept))
            self._book(entry)
            self._remember(entry.key, kept)
            if self._writer is not None:
                assert self.folder is not None
                while self._writing and (first := next(iter(self._writing.values()))).done():
                    first.result()
                    del self._writing[next(iter(self._writing))]
                self._writing[entry.key] = self._writer.submit(write_record, self.folder, entry.key, step, kept)
            self._shrink()
            return entry.key

    def advance(self, version: int) -> None:
        """The policy is at this version now: what is too old for it goes."""
        with self._lock:
            self.newest_version = max(self.newest_version, version)
            self._shrink()

    def get(self, key: int) -> FeatureRecord | None:
        """None: it has been dropped since it was drawn."""
        with self._lock:
            if key not in self._entries:
                return None
            record = self._memory.get(key)
            if record is None:
                assert self.folder is not None
                record = read_record(self.folder, key, self.device)
                self._remember(key, record)
            self._memory.move_to_end(key)
            self._shrink()
            return record

    def draw(self, rng: random.Random, num_tokens: int, lengths: Sequence[int] | None = None) -> list[Entry]:
        """Records with at least `num_tokens` together (none if the buffer is empty). lengths: of the answers that this step
        generates, as far as known; None: those of the last step, once this one has as many its own."""
        with self._lock:
            known = None if lengths is None else tuple(lengths)
            if self._pools is None or self._pools[0] != known:
                self._pools = known, Pools.of(self._entries.values(), lengths or self.generated(), self.reach)
            return self._pools[1].draw(num_tokens, rng)

    def generated(self) -> list[int]:
        """Lengths of a whole step's answers: of the newest step, or while it has fewer than the last, of that."""
        steps = sorted(self._generated)[-2:]
        return max((self._generated[step] for step in reversed(steps)), key=len, default=[])

    def flush(self) -> None:
        """Returns when everything that was added is on disk."""
        with self._lock:
            waiting = list(self._writing.values())
        for future in waiting:
            future.result()

    def close(self) -> None:
        if self._writer is not None:
            self.flush()
            self._writer.shutdown()

    def _book(self, entry: Entry) -> None:
        self._entries[entry.key] = entry
        self._pools = None
        self.disk_bytes += 0 if self.folder is None else entry.num_bytes
        self._next_key = max(self._next_key, entry.key + 1)
        self.newest_step, self.newest_version = max(self.newest_step, entry.step), max(self.newest_version, entry.version)
        self._generated.setdefault(entry.step, []).append(entry.answer_length)
        for old in [step for step in self._generated if step < self.newest_step - 1]:
            del self._generated[old]

    def _remember(self, key: int, record: FeatureRecord) -> None:
        self._memory[key] = record
        self.memory_bytes += num_bytes(record)

    def _forget(self, key: int) -> None:
        record = self._memory.pop(key, None)
        self.memory_bytes -= 0 if record is None else num_bytes(record)

    def _shrink(self) -> None:
        """Within the budgets, without what is stale. The record used last stays in memory whatever its size."""
        if self.max_age is not None:
            for entry in [e for e in self._entries.values() if self.newest_version - e.version > self.max_age]:
                self._drop(entry)
        if self.folder is None:
            while self.memory_bytes > self.max_bytes and len(self._entries) > 1:
                self._drop(first_to_go(self._entries.values(), self.newest_step))
            return
        while self.disk_bytes > self.max_disk_bytes and len(self._entries) > 1:
            self._drop(first_to_go(self._entries.values(), self.newest_step))
        while self.memory_bytes > self.max_bytes and len(self._memory) > 1:
            key = next(iter(self._memory))
            self._written(key)
            self._forget(key)

    def _drop(self, entry: Entry) -> None:
        self.dropped += 1
        del self._entries[entry.key]
        self._pools = None
        self._forget(entry.key)
        if self.folder is not None:
            self.disk_bytes -= entry.num_bytes
            self._written(entry.key)
            record_path(self.folder, entry.key).unlink(missing_ok=True)

    def _written(self, key: int) -> None:
        """Its file is on disk; an error in writing it comes out here."""
        future = self._writing.pop(key, None)
        if future is not None:
            future.result()
