"""numba's on-disk cache, made safe: what was damaged or cannot be written never stops a run.

numba trusts the files in its cache. Truncated or altered ones end in unpickling errors, or crash the process when their machine
code is run. So every file that this package's functions leave there is listed with its checksum in a manifest beside it; files
that are not listed or that differ are deleted, and their functions are compiled anew.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit
from numba.core.caching import FunctionCache

logger = logging.getLogger(__name__)

_MANIFEST = "paceline-jit.json"
_checked: set[Path] = set()
_checksums: dict[tuple[Path, int, int], str] = {}


def compile_cached(compiler: Callable[..., Any], signature: str, function: Callable[..., Any]) -> Any:
    """`compiler(signature, cache=True)(function)`, or without the cache where that cannot be used."""
    try:
        folder = _checked_folder(function)
        compiled = compiler(signature, cache=folder is not None)(function)
        if folder is not None:
            _write_manifest(folder)
        return compiled
    except Exception as error:  # numba lets any error of unpickling, linking or the file system through
        logger.warning("numba's cache could not be used for %s (%s: %s); compiling without it", function.__qualname__,
                       type(error).__name__, error)
        return compiler(signature)(function)


def cached_njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit(cache=True, **options)` behind the same checks."""
    def decorate(function: Callable[..., Any]) -> Any:
        return njit(cache=_checked_folder(function) is not None, **options)(function)

    return decorate


def _checked_folder(function: Callable[..., Any]) -> Path | None:
    """The folder in which numba caches this function, without damaged files; None where no folder is writable."""
    try:
        folder = Path(FunctionCache(function).cache_path)
    except RuntimeError as error:
        logger.info("compiled code is not kept on disk: %s", error)
        return None
    if folder not in _checked:
        _checked.add(folder)
        _drop_damaged(folder)
        atexit.register(_write_manifest, folder)  # functions of `cached_njit` are compiled at their first call
    return folder


def _files(folder: Path) -> list[Path]:
    """What numba has written there: indices and compiled code."""
    return [path for path in folder.glob("*.nb[ic]") if path.is_file()]


def _checksum(path: Path) -> str:
    """Return the checksum of a cached file. The file is read again only when its size or modification time has changed."""
    stat = path.stat()
    key = (path, stat.st_mtime_ns, stat.st_size)
    if key not in _checksums:
        _checksums[key] = hashlib.sha256(path.read_bytes()).hexdigest()
    return _checksums[key]


def _drop_damaged(folder: Path) -> None:
    try:
        listed = json.loads((folder / _MANIFEST).read_text())
        assert isinstance(listed, dict)
    except (OSError, ValueError, AssertionError):
        listed = {}
    for path in _files(folder):
        try:
            if listed.get(path.name) != _checksum(path):
                path.unlink()
        except OSError as error:
            logger.warning("%s: could not be checked or removed: %s", path, error)


def _write_manifest(folder: Path) -> None:
    try:
        temporary = folder / f"{_MANIFEST}.{os.getpid()}"
        temporary.write_text(json.dumps({path.name: _checksum(path) for path in _files(folder)}))
        temporary.replace(folder / _MANIFEST)
    except OSError:  # a read-only folder keeps what it has
        pass
