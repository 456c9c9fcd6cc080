"""The part of the sandbox that Python enforces, by an audit hook. It stops code that is careless or curious, but not code
written to get around it, against which CPython promises nothing; that is what `cage.py` is for."""

from __future__ import annotations

import os
import sys
from typing import Any

_REFUSED = ("socket.", "subprocess.", "ctypes.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.kill",
            "signal.pthread_kill", "pty.", "gc.get_", "sqlite3.connect", "syslog.", "code.__new__", "resource.setrlimit",
            "resource.prlimit")
_CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown",
            "os.utime", "os.setxattr", "os.removexattr", "shutil.")
_LOOKS = ("os.listdir", "os.scandir", "os.chdir", "os.walk", "glob.")
_MODULES = ("ctypes", "_ctypes", "_posixsubprocess", "_testcapi", "_xxsubinterpreters", "_interpreters")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _refuse(*_: Any) -> None:
    raise PermissionError("sandbox: processes are refused")


def install(folder: str, readable: tuple[str, ...] = ()) -> None:
    """From here on Python refuses network and processes, writing outside `folder`, and reading anything but `folder`, Python's
    own library and the folders in `readable`."""
    import _posixsubprocess

    vars(_posixsubprocess)["fork_exec"] = _refuse  # raises no audit event of its own
    for name in ("ctypes", "_ctypes", "cage"):
        sys.modules.pop(name, None)
    home = os.path.realpath(folder)
    library = tuple(os.path.realpath(path) for path in {sys.prefix, sys.base_prefix, os.path.dirname(os.__file__), *readable})
    devices = ("/dev/null", "/dev/urandom", "/dev/random")

    def within(path: Any, roots: tuple[str, ...]) -> bool:
        if isinstance(path, int):
            return True  # a descriptor it was given, or opened before
        real = os.path.realpath(os.fsdecode(path)) if path is not None else os.getcwd()
        return any(real == root or real.startswith(root.rstrip("/") + "/") for root in roots)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = args
            writes = bool((flags or 0) & _WRITING) or (isinstance(mode, str) and any(sign in mode for sign in "wax+"))
            if not within(path, (home, "/dev/null") if writes else (home, *library, *devices)):
                raise PermissionError(f"sandbox: {path!r} is outside the working folder")
        elif event.startswith(_REFUSED):
            raise PermissionError(f"sandbox: {event} is refused")
        elif event.startswith(_CHANGES):
            if not all(within(path, (home,)) for path in args if isinstance(path, str | bytes)):
                raise PermissionError(f"sandbox: {event} outside the working folder is refused")
        elif event.startswith(_LOOKS):
            if not within(args[0], (home, *library)):
                raise PermissionError(f"sandbox: {event} outside the working folder is refused")
        elif event == "import" and args[0] in _MODULES:
            raise ImportError(f"sandbox: {args[0]} is refused")

    sys.addaudithook(hook)
