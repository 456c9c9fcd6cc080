"""Append-only files that survive crashes and full disks. Files that are replaced as a whole are written by `paceline.files`."""

from __future__ import annotations

import contextlib
import fcntl
import os
from io import FileIO
from pathlib import Path

from paceline.files import write_all


class AppendOnlyFile:
    """A file opened for appending and locked against a second writer.

    Writes are not buffered: data for which `append` has returned survives a `kill -9` of the process.
    """

    def __init__(self, path: Path) -> None:
        """Opens or creates the file; raises a ValueError if another process is writing to it."""
        self.path = path
        self._file = _open_locked(path)

    def append(self, data: bytes) -> None:
        """Appends all of the data, or raises an OSError and leaves the file as it was."""
        end = self._file.seek(0, os.SEEK_END)
        try:
            write_all(self._file, data)
        except BaseException as error:
            with contextlib.suppress(OSError):
                self._file.truncate(end)
            if isinstance(error, OSError):
                raise _with_path(self.path, error, "; what was written before is kept") from None
            raise

    def replace(self, data: bytes) -> None:
        """Replaces the whole content atomically. If anything fails, the old content stays."""
        scratch = self.path.with_name(f".{self.path.name}.new")
        scratch.unlink(missing_ok=True)
        fresh = _open_locked(scratch)  # locked before it becomes visible under its final name
        try:
            write_all(fresh, data)
            os.fsync(fresh.fileno())
            os.replace(scratch, self.path)
        except BaseException as error:
            fresh.close()
            scratch.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise _with_path(self.path, error, "; it is as it was before") from None
            raise
        self._file.close()
        self._file = fresh

    def close(self) -> None:
        """Closes the file and releases its lock."""
        self._file.close()


def _open_locked(path: Path) -> FileIO:
    try:
        file = FileIO(path, "a+")
    except OSError as error:
        raise _with_path(path, error) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(f"{path}: another run is writing to it") from None
    except OSError:
        pass  # some file systems do not support locks
    return file


def _with_path(path: Path, error: OSError, consequence: str = "") -> OSError:
    """An OSError whose message names the file."""
    return OSError(f"{path}: {error.strerror or error}{consequence}")
