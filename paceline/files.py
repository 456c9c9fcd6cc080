"""Writing files so that readers, and the next start after a crash, never see half a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def atomic_write(path: Path | str, content: str | bytes | Callable[[Path], object], *, fsync: bool = True,
                 concurrent: bool = False) -> None:
    """Replaces the file at `path` by a complete new one, or raises and leaves the old file as it was.

    The content goes to a temporary file in the same folder, which is flushed to disk and then renamed over `path`. Text is
    encoded as UTF-8. A callable receives the temporary path and writes the file itself (`safetensors.torch.save_file`, for
    example).

    `fsync=False` skips the flush to disk: the file is still complete after the process is killed, but not necessarily after a
    power failure. `concurrent=True` is for files that several processes may replace at the same time: the temporary name then
    contains the process id. Without it the name is fixed, so that a killed process leaves at most one temporary file behind.
    """
    path = Path(path)
    owner = f".{os.getpid()}" if concurrent else ""
    temporary = path.with_name(f".{path.name}{owner}.tmp")
    try:
        if callable(content):
            content(temporary)
        else:
            temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        if fsync:
            _flush_to_disk(temporary)
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(f"{path}: {error.strerror or error}") from None
        raise


def _flush_to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
