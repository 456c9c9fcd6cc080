"""The manifest of a checkpoint: the step that it was written at, and size and hash of each of its files. It shows that a file has
changed, is missing, or comes from another checkpoint. It does not protect against somebody who also changes the manifest."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from paceline.files import DamagedFile, atomic_write, damaged, read_json

MANIFEST_FILE, STATE_FILE = "manifest.json", "state.json"
HAS_MANIFEST = "has_manifest"
"""Key of `state.json`, which every checkpoint has: so a lost manifest is noticed. Earlier versions wrote neither."""
_BLOCK_BYTES, _READ_BYTES = 32 << 20, 1 << 20
_MAX_THREADS = 16


class FileDigest(NamedTuple):
    """What a file was when the checkpoint was written."""

    num_bytes: int
    hash: str
    """BLAKE2b of the BLAKE2b hashes of the file's blocks of 32 MiB, which threads compute side by side."""


def digest_files(folder: Path, names: Sequence[str] | None = None) -> dict[str, FileDigest]:
    """The digests of files by their names relative to `folder`; of all of them if no names are given. Hidden files do not count.
    DamagedFile if one cannot be read."""
    sizes = {name: (folder / name).stat().st_size for name in sorted(_files(folder) if names is None else names)}
    blocks = [(folder / name, start) for name, size in sizes.items() for start in range(0, size, _BLOCK_BYTES)]
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
        hashes = threads.map(_hash_block, blocks)
        return {name: FileDigest(size, _hash(b"".join(next(hashes) for _ in range(0, size, _BLOCK_BYTES))).hex())
                for name, size in sizes.items()}


def hash_buffers(buffers: Mapping[str, memoryview]) -> str:
    """One hash of buffers and their names, made from hashes of blocks as that of a file is."""
    blocks = [buffer[start : start + _BLOCK_BYTES] for buffer in buffers.values()
              for start in range(0, len(buffer), _BLOCK_BYTES)]
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
        hashes = threads.map(_hash, blocks)
        found = [[name, len(buffer), _hash(b"".join(next(hashes) for _ in range(0, len(buffer), _BLOCK_BYTES))).hex()]
                 for name, buffer in buffers.items()]
    return _hash(json.dumps(sorted(found)).encode()).hex()


def write_manifest(checkpoint: Path, step: int, known: Mapping[str, FileDigest]) -> None:
    """Writes the manifest of a checkpoint whose other files are complete. `known`: digests that need not be computed again."""
    digests = {**known, **digest_files(checkpoint, [name for name in _files(checkpoint) if name not in known])}
    files = {name: digest._asdict() for name, digest in sorted(digests.items())}
    atomic_write(checkpoint / MANIFEST_FILE, json.dumps({"step": step, "files": files}, indent=2) + "\n")


def check_checkpoint(checkpoint: Path, parts: Sequence[str] | None = None) -> bool:
    """Raises a DamagedFile that names the file if a file of a checkpoint is missing, was added, or has changed. Returns False if
    an earlier version wrote the checkpoint, without a manifest.

    `parts`: files and subfolders whose hashes are compared, besides that of `state.json`; None: all. Names and sizes of all files
    are compared anyway.
    """
    if not (checkpoint / MANIFEST_FILE).is_file() and not read_json(checkpoint / STATE_FILE).get(HAS_MANIFEST):
        return False
    expected = _read_manifest(checkpoint)
    found = set(_files(checkpoint))
    for name in sorted(expected.keys() - found):
        raise DamagedFile(damaged(checkpoint / name, FileNotFoundError()))
    for name in sorted(found - expected.keys()):
        raise DamagedFile(f"{checkpoint / name}: not a file of this checkpoint ({MANIFEST_FILE} does not list it)")
    for name, digest in expected.items():
        if (checkpoint / name).stat().st_size != digest.num_bytes:
            raise DamagedFile(_changed(checkpoint / name))
    for name, digest in digest_files(checkpoint, [name for name in expected if _is_in(name, parts)]).items():
        if digest != expected[name]:
            raise DamagedFile(_changed(checkpoint / name))
    return True


def check_part(folder: Path) -> None:
    """Raises a DamagedFile as `check_checkpoint` does if `folder` is a subfolder of a checkpoint, such as its policy. Other
    folders are not looked at."""
    folder = folder if folder.name and folder.parent.name else folder.absolute()
    checkpoint = folder.parent
    marks = [(checkpoint / name).is_file() for name in (MANIFEST_FILE, STATE_FILE)]
    if all(marks) or (any(marks) and _step_in(checkpoint) is not None):
        check_checkpoint(checkpoint, [folder.name])


def _files(folder: Path) -> Iterator[str]:
    """Names of all files below a folder, relative to it, but for the manifest and hidden ones, which nothing loads."""
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            found = (Path(place) / name).relative_to(folder).as_posix()
            if not name.startswith(".") and found != MANIFEST_FILE:
                yield found


def _read_manifest(checkpoint: Path) -> dict[str, FileDigest]:
    path = checkpoint / MANIFEST_FILE
    raw = read_json(path)
    step, files, named = raw.get("step"), raw.get("files"), _step_in(checkpoint)
    try:
        digests = {name: FileDigest(**digest) for name, digest in files.items()}  # type: ignore[union-attr]
    except (AttributeError, TypeError):
        raise DamagedFile(damaged(path, "not a manifest")) from None
    if named is not None and step != named:
        raise DamagedFile(damaged(path, f"it is the manifest of step {step}"))
    return digests


def _step_in(checkpoint: Path) -> int | None:
    """The step in the name of a checkpoint's folder; None if it has another name."""
    match = re.fullmatch(r"step-(\d+)(\.damaged)?", checkpoint.name)
    return None if match is None else int(match[1])


def _is_in(name: str, parts: Sequence[str] | None) -> bool:
    return parts is None or any(name == part or name.startswith(f"{part}/") for part in (*parts, STATE_FILE))


def _changed(path: Path) -> str:
    return damaged(path, "it has changed since the checkpoint was written, or belongs to another checkpoint")


def _hash(content: bytes | memoryview) -> bytes:
    return blake2b(content, digest_size=32).digest()


def _hash_block(block: tuple[Path, int]) -> bytes:
    """The hash of one block of a file, read in pieces that fit into a core's cache."""
    path, start = block
    hashed, piece = blake2b(digest_size=32), bytearray(_READ_BYTES)
    view = memoryview(piece)
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            left = _BLOCK_BYTES
            while left and (count := file.readinto(view[: min(left, _READ_BYTES)])):
                hashed.update(view[:count])
                left -= count
    except OSError as error:  # such as a disk that cannot read it any more
        raise DamagedFile(damaged(path, error.strerror or error)) from None
    return hashed.digest()
