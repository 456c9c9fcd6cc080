"""Folders for sandboxed processes. What such a process leaves behind is removed without following its links or trusting the
modes it set."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def scratch_folder() -> Iterator[str]:
    """A new folder, removed in the end with everything in it. By then no process may write to it any more."""
    folder = tempfile.mkdtemp(prefix="paceline-")
    try:
        yield folder
    finally:
        remove(folder)


def remove(folder: str) -> None:
    """Removes a folder, including parts of it that were made unreadable. Links are removed, never followed."""
    if not os.path.isdir(folder) or os.path.islink(folder):
        return
    os.chmod(folder, 0o700)
    for path, _, _ in os.walk(folder, followlinks=False):  # each folder is made readable before it is listed in turn
        for entry in os.scandir(path):
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.path, 0o700)  # not a link, and nobody can replace it by one now
    shutil.rmtree(folder, ignore_errors=True)
