"""The output file of offline generation: rollouts are appended line by line, and a later run with the same settings continues it.

`out.jsonl.meta.json`, next to `out.jsonl`, holds everything that the tokens depend on; strategy, drafter and batch size are
not part of it. A killed run leaves at most one incomplete line, the last, which the next run removes. Damaged lines further up
are reported and removed; their rollouts are generated again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from paceline.files import atomic_write, write_all
from paceline.generation.jobs import Job
from paceline.types import Rollout

_DONE = ("stop", "length")


class RolloutFile:
    """A file of rollouts, open for appending and locked. `done` maps the (id as text, sample) of rollouts that an earlier run
    finished to the hash of their prompt."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.done: dict[tuple[str, int], str] = {}
        self.damaged: list[int] = []
        """Numbers of lines that were damaged and have been removed."""
        is_new = not path.exists()
        self._file = _open_locked(path)
        self._resumable = path.is_file()  # /dev/stdout and pipes are not
        self._is_new = is_new and self._resumable
        try:
            if self._resumable:
                self._resume(settings)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> RolloutFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        is_empty = self._is_new and not self.path.stat().st_size
        self._file.close()
        if is_empty:  # nothing was generated: leave no trace
            for file in (self.path, _meta(self.path)):
                file.unlink(missing_ok=True)

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one record as a complete line, or raises an OSError and appends nothing."""
        left = memoryview((json.dumps(record, ensure_ascii=False) + "\n").encode())
        end = self._file.seek(0, os.SEEK_END) if self._resumable else 0
        try:
            while left:
                left = left[self._file.write(left) :]
        except BaseException as error:
            with contextlib.suppress(OSError):
                self._file.truncate(end)
            if isinstance(error, OSError):
                raise OSError(f"{self.path}: {error.strerror or error}; what was finished before is kept") from None
            raise

    def _resume(self, settings: Mapping[str, Any]) -> None:
        """Writes the settings of a new file. For an existing file, compares them, reads the finished rollouts, and removes an
        incomplete line, damaged lines and failed rollouts."""
        meta = _meta(self.path)
        if self.path.stat().st_size == 0:
            atomic_write(meta, json.dumps(settings, indent=2) + "\n")
            return
        _require_same(self.path, meta, settings)
        end, failed = self._read()
        self._file.truncate(end)
        if failed or self.damaged:
            self._drop(failed | set(self.damaged))

    def _read(self) -> tuple[int, set[int]]:
        """Fills `done` and `damaged`. Returns the offset at which the last complete line ends, and the numbers of lines with
        failed rollouts."""
        end, failed = 0, set()
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    break
                end += len(line)
                record = _parse(line)
                if record is None:
                    self.damaged.append(number)
                    continue
                try:
                    key, finished = (str(record["id"]), int(record["sample"])), record["finish_reason"] in _DONE
                    prompt_hash = str(record["prompt_hash"])
                except (ValueError, TypeError, KeyError):
                    raise ValueError(f"{self.path}:{number}: not a rollout of this command; choose another output file") from None
                if finished:
                    self.done[key] = prompt_hash
                else:
                    failed.add(number)
        if self.damaged and not self.done and not failed:
            raise ValueError(f"{self.path}:{self.damaged[0]}: damaged, and no line is a rollout; choose another output file")
        return end, failed

    def _drop(self, numbers: set[int]) -> None:
        """Replaces the file by one without these lines. The new file is locked before it gets its name, so no other run can
        open it."""
        scratch = self.path.with_name(f".{self.path.name}.new")
        scratch.unlink(missing_ok=True)
        fresh = _open_locked(scratch)
        try:
            with self.path.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if number not in numbers:
                        write_all(fresh, line)
            os.replace(scratch, self.path)
        except BaseException as error:
            fresh.close()
            scratch.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise OSError(f"{self.path}: {error.strerror or error}; it is as it was before") from None
            raise
        self._file.close()
        self._file = fresh


def _meta(path: Path) -> Path:
    return Path(f"{path}.meta.json")


def to_record(job: Job, sample: int, rollout: Rollout) -> dict[str, Any]:
    """The JSON object that is written for one rollout. It has the prompt as the input has it: a text, messages or token ids."""
    record: dict[str, Any] = {
        "id": job.id, "sample": sample, _prompt_key(job): job.prompt, "text": rollout.text, "token_ids": rollout.token_ids,
        "logprobs": rollout.logprobs, "finish_reason": rollout.finish_reason, "seed": rollout.seed,
        "prompt_tokens": len(rollout.prompt_ids),
        "prompt_hash": job.prompt_hash}
    if rollout.raw_logprobs is not None:
        record["raw_logprobs"] = rollout.raw_logprobs
    if rollout.error is not None:
        record["error"] = rollout.error
    return record


def _prompt_key(job: Job) -> str:
    return "prompt" if isinstance(job.prompt, str) else "messages" if isinstance(job.prompt[0], dict) else "prompt_ids"


def _parse(line: bytes) -> Any:
    """The JSON value in a line; None if it is damaged, for example by a block that was never written."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _open_locked(path: Path) -> BinaryIO:
    """Opens a file for unbuffered appending. A regular file is locked: only one run may write to it at a time."""
    if path.is_dir():
        raise ValueError(f"{path}: is a folder, not an output file")
    try:
        file = path.open("ab", buffering=0)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    if path.is_file():
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise ValueError(f"{path}: another run is writing to it") from None
    return file  # type: ignore[return-value]


def _require_same(path: Path, meta: Path, settings: Mapping[str, Any]) -> None:
    try:
        before = json.loads(meta.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{path}: exists, but {meta.name}, which holds its settings, does not; "
                         "choose another output file") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{meta}: not JSON; choose another output file") from None
    now = json.loads(json.dumps(settings))
    changed = [name for name in now if not isinstance(before, dict) or before.get(name) != now[name]]
    if changed:
        was = ", ".join(f"{name} {before.get(name) if isinstance(before, dict) else None!r}, now {now[name]!r}"
                        for name in changed)
        raise ValueError(f"{path}: was made with other settings ({was}); choose another output file or the same settings")
