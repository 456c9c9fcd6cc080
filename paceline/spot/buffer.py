"""The feature buffer: training data of the drafter, bounded in bytes, kept in memory or in a folder.

A record holds the tokens of one answer and the hidden states that were captured while the engine generated it. The buffer draws
records so that their lengths are distributed like those of the answers of a step, although the long answers of the current step
are not finished yet: long answers of earlier steps are drawn in their place (one-step-off sampling).

One thread may add records while another one draws.
"""

from __future__ import annotations

import math
import random
import threading
import uuid
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import torch

from paceline.spot.records import RECORD_SUFFIX, RecordInfo, num_bytes, read_record, read_record_info, record_path, write_record
from paceline.types import FeatureRecord

_ID_FILE = "id"
_BEHIND = 2
"""While records wait to be written, those in the host's memory may take so many times `max_bytes`."""
MAX_AGE = 8
"""Number of policy versions after which a run no longer trains on an answer. Usually newer ones are drawn anyway; after a long
pause of training there are few."""


class FeatureBuffer:
    """Finished answers with their features, within a budget of bytes."""

    def __init__(self, max_bytes: int, folder: Path | str | None = None, max_disk_bytes: int | None = None,
                 max_age: int | None = None, reach: int = 4, device: torch.device | str = "cpu") -> None:
        """Creates an empty buffer.

        Args:
            max_bytes: Largest total size of the records in memory; on the host twice as much while the disk is behind.
            folder: Folder that all records are written to; memory then caches those used most recently. None keeps records in
                memory only.
            max_disk_bytes: Largest total size of the records in `folder`; None means ten times `max_bytes`.
            max_age: A record is dropped once the policy is more than this many versions ahead of it; None keeps all.
            reach: Records are drawn from about this many steps' worth of answers.
            device: Device that holds the records in memory.
        """
        self.max_bytes, self.max_age, self.reach, self.device = max_bytes, max_age, reach, device
        self.folder = None if folder is None else Path(folder)
        self.max_disk_bytes = 10 * max_bytes if max_disk_bytes is None else max_disk_bytes
        self.newest_step = self.newest_version = 0
        self.dropped = self.memory_bytes = self.disk_bytes = 0
        self._entries: dict[int, RecordInfo] = {}
        self._memory: OrderedDict[int, FeatureRecord] = OrderedDict()  # the most recently used one is last
        self._answer_lengths: dict[int, list[int]] = {}  # by step, for the two newest that have any; outlives dropped records
        self._pools: tuple[tuple[int, ...] | None, LengthPools] | None = None  # cached with its `lengths` until records change
        self._next_key = 0
        self._lock = threading.RLock()
        self._writing: dict[int, Future[None]] = {}
        self._writer: ThreadPoolExecutor | None = None
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._writer = ThreadPoolExecutor(1, "feature-buffer")

        self.id = self._read_id()
        """Name of the buffer, which its folder keeps. Keys of records mean something only together with it."""

    def _read_id(self) -> str:
        if self.folder is None:
            return uuid.uuid4().hex
        path = self.folder / _ID_FILE
        if not path.is_file():
            path.write_text(uuid.uuid4().hex)
        return path.read_text()

    @classmethod
    def open(cls, folder: Path | str, max_bytes: int, max_disk_bytes: int | None = None, max_age: int | None = None,
             reach: int = 4, device: torch.device | str = "cpu", last_step: int | None = None) -> FeatureBuffer:
        """Reopens the folder of an earlier buffer. Incomplete files are deleted, and so are answers of RL steps after
        `last_step`, which a resumed run generates again."""
        buffer = cls(max_bytes, folder, max_disk_bytes, max_age, reach, device)
        assert buffer.folder is not None
        for path in buffer.folder.glob("*.tmp"):
            path.unlink()
        for path in sorted(buffer.folder.glob(f"*{RECORD_SUFFIX}")):
            entry = read_record_info(path)
            if entry is not None:
                buffer._next_key = max(buffer._next_key, entry.key + 1)
            if entry is None or (last_step is not None and entry.step > last_step):
                path.unlink()
            else:
                buffer._register(entry)
        buffer._evict()
        return buffer

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all records together, prompts included."""
        with self._lock:
            return sum(entry.num_tokens for entry in self._entries.values())

    @property
    def is_full(self) -> bool:
        """Whether a new record takes the place of an old one, or will soon."""
        with self._lock:
            used, most = (self.memory_bytes, self.max_bytes) if self.folder is None else (self.disk_bytes, self.max_disk_bytes)
            return used >= 0.95 * most

    def entries(self) -> list[RecordInfo]:
        """Returns the metadata of all records, in the order in which they were added."""
        with self._lock:
            return list(self._entries.values())

    def add(self, record: FeatureRecord, step: int, is_usual: bool = True) -> int | None:
        """Adds an answer of RL step `step` and returns its key, or None if it is too short to train on. `is_usual`: whether its
        length is typical of the run's answers, by whose lengths records are drawn and dropped; that of a cut answer is not."""
        if len(record.token_ids) < 3 or len(record.token_ids) <= record.prompt_length:
            return None
        kept = FeatureRecord(list(record.token_ids), record.features.detach().to(self.device), record.layers,
                             list(record.versions), record.prompt_length)
        with self._lock:
            entry = RecordInfo(self._next_key, step, max(record.versions, default=0), len(record.token_ids), record.prompt_length,
                               num_bytes(kept))
            self._register(entry, is_usual)
            self._cache(entry.key, kept)
            if self._writer is not None:
                assert self.folder is not None
                while self._writing and (first := next(iter(self._writing.values()))).done():
                    first.result()
                    del self._writing[next(iter(self._writing))]
                self._writing[entry.key] = self._writer.submit(write_record, self.folder, entry.key, step, kept)
            self._evict()
            return entry.key

    def advance(self, version: int) -> None:
        """Tells the buffer the current policy version and drops the records that are now too old."""
        with self._lock:
            self.newest_version = max(self.newest_version, version)
            self._evict()

    def get(self, key: int) -> FeatureRecord | None:
        """Returns a record, or None if it has been dropped since it was drawn."""
        with self._lock:
            if key not in self._entries:
                return None
            record = self._memory.get(key)
            if record is None:
                assert self.folder is not None
                record = read_record(self.folder, key, self.device)
                self._cache(key, record)
            self._memory.move_to_end(key)
            self._evict()
            return record

    def draw(self, rng: random.Random, num_tokens: int, lengths: Sequence[int] | None = None) -> list[RecordInfo]:
        """Draws records of at least `num_tokens` tokens in total; none if the buffer is empty.

        Args:
            rng: Source of randomness.
            num_tokens: Number of tokens to draw.
            lengths: Answer lengths of the step being generated, whose distribution the drawn records follow. None uses the
                newest step, or the one before it while that one has more finished answers.
        """
        with self._lock:
            known = None if lengths is None else tuple(lengths)
            if self._pools is None or self._pools[0] != known:
                pools = LengthPools.build(self._entries.values(), lengths or self.recent_answer_lengths(), self.reach)
                self._pools = known, pools
            return self._pools[1].draw(num_tokens, rng)

    def recent_answer_lengths(self) -> list[int]:
        """Returns the answer lengths of the newest step, or of the one before it while that one has more finished answers."""
        steps = sorted(self._answer_lengths)[-2:]
        return max((self._answer_lengths[step] for step in reversed(steps)), key=len, default=[])

    def flush(self) -> None:
        """Waits until every record that was added is on disk, or could not be written; then raises the first error, if any."""
        with self._lock:
            waiting = list(self._writing.values())
        wait(waiting)
        for future in waiting:
            future.result()
        with self._lock:
            self._evict()

    def close(self) -> None:
        """Flushes the buffer and stops its writer thread."""
        if self._writer is not None:
            try:
                self.flush()
            finally:
                self._writer.shutdown()

    def _register(self, entry: RecordInfo, is_usual: bool = True) -> None:
        self._entries[entry.key] = entry
        self._pools = None
        self.disk_bytes += 0 if self.folder is None else entry.num_bytes
        self._next_key = max(self._next_key, entry.key + 1)
        self.newest_step, self.newest_version = max(self.newest_step, entry.step), max(self.newest_version, entry.version)
        if is_usual:
            self._answer_lengths.setdefault(entry.step, []).append(entry.answer_length)
        for old in sorted(self._answer_lengths)[:-2]:
            del self._answer_lengths[old]

    def _cache(self, key: int, record: FeatureRecord) -> None:
        self._memory[key] = record
        self.memory_bytes += num_bytes(record)

    def _uncache(self, key: int) -> None:
        record = self._memory.pop(key, None)
        self.memory_bytes -= 0 if record is None else num_bytes(record)

    def _evict(self) -> None:
        """Drops stale records, then enforces the byte budgets. The most recently used record always stays in memory."""
        if self.max_age is not None:
            while self._entries and self.newest_version - (oldest := next(iter(self._entries.values()))).version > self.max_age:
                self._drop(oldest)
        if self.folder is None:
            while self.memory_bytes > self.max_bytes and len(self._entries) > 1:
                self._drop(_eviction_candidate(self._entries.values(), self.recent_answer_lengths()))
            return
        while self.disk_bytes > self.max_disk_bytes and len(self._entries) > 1:
            self._drop(_eviction_candidate(self._entries.values(), self.recent_answer_lengths()))
        while self.memory_bytes > self.max_bytes and len(self._memory) > 1:
            key = next(iter(self._memory))
            most = _BEHIND * self.max_bytes if torch.device(self.device).type == "cpu" else self.max_bytes
            if self.memory_bytes <= most and not self._is_written(key):
                break  # the disk is behind, and whoever adds records should not wait for it
            self._await_write(key)
            self._uncache(key)

    def _drop(self, entry: RecordInfo) -> None:
        self.dropped += 1
        del self._entries[entry.key]
        self._pools = None
        self._uncache(entry.key)
        if self.folder is not None:
            self.disk_bytes -= entry.num_bytes
            self._await_write(entry.key)
            record_path(self.folder, entry.key).unlink(missing_ok=True)

    def _is_written(self, key: int) -> bool:
        return key not in self._writing or self._writing[key].done()

    def _await_write(self, key: int) -> None:
        """Waits until the record's file is on disk. Raises the error of writing it, if there was one."""
        future = self._writing.pop(key, None)
        if future is not None:
            future.result()


class BufferLimits(NamedTuple):
    """Sizes of a run's feature buffer in bytes."""

    memory: int
    disk: int = 0
    """Largest total size of records on disk; 0: they are kept in memory only."""


def open_buffer(folder: Path, limits: BufferLimits, last_step: int) -> FeatureBuffer:
    """Opens a run's feature buffer, with the records that an earlier process has left up to RL step `last_step`."""
    if not limits.disk:
        return FeatureBuffer(limits.memory, max_age=MAX_AGE)
    return FeatureBuffer.open(folder, limits.memory, limits.disk, MAX_AGE, last_step=last_step)


def _eviction_candidate(entries: Iterable[RecordInfo], lengths: Sequence[int]) -> RecordInfo:
    """Returns the record to drop first: the oldest of the length bin that holds the most records for the answers of a step that
    it stands for. `lengths` are the answer lengths of such a step. So a buffer that is smaller than a step still holds answers of
    all lengths, and long answers of the previous step stay until long ones of the newest step have finished."""
    bins: dict[int, list[RecordInfo]] = {}
    for entry in entries:
        bins.setdefault(length_bin(entry.answer_length), []).append(entry)
    generated = Counter(map(length_bin, lengths))

    def surplus(b: int) -> tuple[float, int, int]:
        """The last record of a bin goes after all others; among bins that have one each, the oldest record goes first."""
        return (len(bins[b]) - 1) / max(0.5, generated[b]), -min(entry.step for entry in bins[b]), -b

    return min(bins[max(bins, key=surplus)], key=lambda entry: (entry.step, entry.key))


# -- one-step-off sampling


def length_bin(length: int) -> int:
    """Returns the bin of an answer length. Bins are half octaves: lengths in one bin differ by less than a factor of 1.41."""
    return int(2 * math.log2(max(1, length)))


class LengthPools(NamedTuple):
    """Records to draw from, grouped by the length bin of the answers they stand for."""

    entries: dict[int, list[RecordInfo]]
    """Records of each bin."""
    counts: Counter[int]
    """Number of generated answers in each bin: bins are drawn in this proportion."""

    @classmethod
    def build(cls, entries: Iterable[RecordInfo], lengths: Sequence[int], reach: int) -> LengthPools:
        """Chooses for each bin of `lengths` its newest records, up to `reach` times the number of answers in the bin.

        A bin that the newest step has already filled thus holds mostly records of that step; one whose answers are still being
        generated holds records of earlier steps. A bin without any record uses those of the nearest bin that has some.
        """
        found: dict[int, list[RecordInfo]] = {}
        for entry in sorted(entries, key=lambda e: (-e.step, -e.key)):
            found.setdefault(length_bin(entry.answer_length), []).append(entry)
        counts = Counter(map(length_bin, lengths))
        chosen = {}
        for wanted, count in sorted(counts.items()) if found else ():
            nearest = min(found, key=lambda b: (abs(b - wanted), -b))
            chosen[wanted] = found[nearest][: max(1, reach * count)]
        return cls(chosen, counts)

    def draw(self, num_tokens: int, rng: random.Random) -> list[RecordInfo]:
        """Draws records of at least `num_tokens` tokens in total. Within a bin no record repeats before all have been drawn."""
        bins = sorted(self.entries)
        shuffled = {b: _shuffle_forever(self.entries[b], rng) for b in bins}
        drawn: list[RecordInfo] = []
        total = 0
        while bins and total < num_tokens:
            (b,) = rng.choices(bins, [self.counts[b] for b in bins])
            drawn.append(next(shuffled[b]))
            total += drawn[-1].num_tokens
        return drawn


def _shuffle_forever(entries: list[RecordInfo], rng: random.Random) -> Iterator[RecordInfo]:
    """Yields the entries in random order, again and again. The shuffle is lazy: it costs only as much as is consumed."""
    while True:
        moved: dict[int, int] = {}  # sparse Fisher-Yates: the index that stands at a place, where it is not the place itself
        for i in range(len(entries)):
            j = rng.randrange(i, len(entries))
            yield entries[moved.get(j, j)]
            moved[j] = moved.get(i, i)
