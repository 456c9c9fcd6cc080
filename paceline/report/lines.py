"""Files that only grow: whole pieces or none, one writer at a time, replaced at once. Knows nothing of what is in them."""

from __future__ import annotations

import contextlib
import fcntl
import os
from io import FileIO
from pathlib import Path


class GrowingFile:
    """Open for appending. Unbuffered: what `append` has returned from survives a kill -9 of the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _open_locked(path)

    def append(self, data: bytes) -> None:
        """All of it, or an OSError and nothing."""
        end = self._file.seek(0, os.SEEK_END)
        try:
            _write_all(self._file, data)
        except BaseException as error:
            with contextlib.suppress(OSError):
                self._file.truncate(end)
            if isinstance(error, OSError):
                raise _named(self.path, error, "; what was written before is kept") from None
            raise

    def replace(self, data: bytes) -> None:
        """This content instead of the old one, which stays if anything fails."""
        scratch = self.path.with_name(f".{self.path.name}.new")
        scratch.unlink(missing_ok=True)
        fresh = _open_locked(scratch)  # locked before anyone can see it under its name
        try:
            _write_all(fresh, data)
            os.fsync(fresh.fileno())
            os.replace(scratch, self.path)
        except BaseException as error:
            fresh.close()
            scratch.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise _named(self.path, error, "; it is as it was before") from None
            raise
        self._file.close()
        self._file = fresh

    def close(self) -> None:
        self._file.close()


def _open_locked(path: Path) -> FileIO:
    try:
        file = FileIO(path, "a+")
    except OSError as error:
        raise _named(path, error) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(f"{path}: another run is writing to it") from None
    except OSError:
        pass  # a file system without locks
    return file


def _write_all(file: FileIO, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _named(path: Path, error: OSError, consequence: str = "") -> OSError:
    return OSError(f"{path}: {error.strerror or error}{consequence}")
