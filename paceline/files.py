"""Writing files so that readers, and the next start after a crash, never see half a file; reading them so that a damaged one is
named."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

MAX_LEVELS = 64
"""Settings are nested less deeply."""
TOO_DEEP = f"nested more than {MAX_LEVELS} levels deep"

_NAME = r"""(?:(?<![\w-])[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
_DEEP_KEY = re.compile(rf"(?:{_NAME}[ \t]*+\.[ \t]*+){{{MAX_LEVELS}}}")
"""A dotted key of TOML with so many names. Reading one takes memory and time by the square of their number."""


class DamagedFile(ValueError):
    """A file is missing, incomplete or not what it should be. The message names it."""


def atomic_write(path: Path | str, content: str | bytes | Callable[[Path], object], *, fsync: bool = True,
                 concurrent: bool = False) -> None:
    """Replaces the file at `path` by a complete new one, or raises and leaves the old file as it was.

    The content goes to a temporary file in the same folder, which is flushed to disk and then renamed over `path`. Text is
    encoded as UTF-8. A callable receives the temporary path and writes the file itself.

    `fsync=False` skips the flush to disk: the file is still complete after the process is killed, but not necessarily after a
    power failure. `concurrent=True` is for files that several processes may replace at the same time: the temporary name then
    contains the process id. Without it the name is fixed, so that a killed process leaves at most one temporary file behind.
    """
    path = Path(path)
    owner = f".{os.getpid()}" if concurrent else ""
    temporary = path.with_name(f".{path.name}{owner}.tmp")
    try:
        if callable(content):
            with os_errors():
                content(temporary)
        else:
            temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        if fsync:
            flush_to_disk(temporary)
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(f"{path}: {error.strerror or error}") from None
        raise


def flush_to_disk(path: Path) -> None:
    """Returns when a file's content is on disk and no longer only in the system's memory."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def os_errors() -> Iterator[None]:
    """Turns errors of input and output that libraries written in Rust (safetensors, tokenizers) report by exceptions of their own
    into the OSError that they are, such as `No space left on device`."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # their types have nothing in common but the text
        code = re.search(r"\(os error (\d+)\)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1]))) from None


def save_tensors(path: Path | str, tensors: Mapping[str, Any], metadata: dict[str, str] | None = None, *,
                 fsync: bool = True) -> None:
    """Writes PyTorch tensors to a safetensors file by `atomic_write`."""
    from safetensors.torch import save_file

    atomic_write(path, lambda temporary: save_file(dict(tensors), temporary, metadata), fsync=fsync)


def load_tensors(path: Path | str) -> dict[str, Any]:
    """The PyTorch tensors of a safetensors file. DamagedFile if it is not a whole one."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (FileNotFoundError, SafetensorError) as error:
        raise DamagedFile(damaged(path, error)) from None


def read_json(path: Path | str) -> dict[str, Any]:
    """The JSON object in a file. DamagedFile if there is none."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, RecursionError) as error:
        raise DamagedFile(damaged(path, error)) from None
    if not isinstance(found, dict):
        raise DamagedFile(damaged(path, "not a JSON object"))
    return found


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text. TOMLDecodeError if it is none, RecursionError if it is nested too deeply."""
    if _DEEP_KEY.search(text):
        raise RecursionError(TOO_DEEP)
    return tomllib.loads(text)


def require_shallow(value: object, what: str) -> None:
    """ValueError, which begins with `what`, if tables and lists are nested more than MAX_LEVELS deep: whoever walks through them
    recursively would run out of stack."""
    level, inner = 0, [value]
    while inner := [item for each in inner if isinstance(each, dict | list)
                    for item in (each.values() if isinstance(each, dict) else each)]:
        level += 1
        if level > MAX_LEVELS:
            raise ValueError(f"{what}: {TOO_DEEP}")


def damaged(path: Path | str, why: object) -> str:
    """One line about a damaged file."""
    said = "it is missing" if isinstance(why, FileNotFoundError) else " ".join(str(why).split())[:200]
    return f"{path}: damaged ({said})"


def write_all(file: FileIO | BinaryIO, data: bytes) -> None:
    """Write all of the data: an unbuffered file may take less at a time."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def one_line(error: object, most: int = 300) -> str:
    """The message of an error on one line of at most so many characters."""
    return " ".join(str(error).split())[:most]
