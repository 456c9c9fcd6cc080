"""The part of the sandbox that Python enforces, by an audit hook. It says clearly what is refused, stops code that is careless or
curious, and is the only guard where the kernel offers none. It is not a boundary: CPython promises nothing against code written
to get around a hook; that is what `cage.py` is for.

Whatever the hook uses, it holds in the defaults of its parameters: values that cannot change and functions of the interpreter
itself. No module, builtin or closure that other code could replace plays a part, and nothing refers to the hook but the
interpreter.
"""

from __future__ import annotations

import os
import posix
import sys
from typing import Any


def install(folder: str, readable: tuple[str, ...]) -> None:
    """From here on Python refuses network and processes, writing outside `folder`, and reading anything but `folder` and what is
    under the paths in `readable`."""
    import _posixsubprocess

    vars(_posixsubprocess)["fork_exec"] = None  # raises no audit event of its own
    home = os.path.realpath(folder)
    library = tuple(os.path.realpath(path) for path in readable)
    sys.addaudithook(_make_hook((home, "/dev/null"), (home, *library)))
    for name in ("ctypes", "_ctypes", "cage", "guard", "landlock", "rootfs", "syscalls"):
        sys.modules.pop(name, None)


def _make_hook(writable: tuple[str, ...], readable: tuple[str, ...]) -> Any:
    def hook(
        event: str, args: tuple[Any, ...], *, writable: Any = writable, readable: Any = readable,
        refused: tuple[str, ...] = (
            "socket.", "subprocess.", "ctypes.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.kill",
            "signal.pthread_kill", "pty.", "gc.get_", "sqlite3.connect", "syslog.", "code.__new__", "resource.setrlimit",
            "resource.prlimit", "sys.addaudithook", "sys.settrace", "sys.setprofile", "sys.monitoring", "sys._current_"),
        changes: tuple[str, ...] = (
            "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown",
            "os.utime", "os.setxattr", "os.removexattr", "shutil."),
        looks: tuple[str, ...] = ("os.listdir", "os.scandir", "os.chdir", "os.walk", "glob."),
        modules: tuple[str, ...] = ("ctypes", "_ctypes", "_posixsubprocess", "_testcapi", "_testinternalcapi",
                                    "_xxsubinterpreters", "_interpreters"),
        write_flags: int = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND,
        type: Any = type, str: Any = str, bytes: Any = bytes, int: Any = int, tuple: Any = tuple,
        PermissionError: Any = PermissionError, ImportError: Any = ImportError, OSError: Any = OSError,
        ValueError: Any = ValueError, fspath: Any = posix.fspath, readlink: Any = posix.readlink, getcwd: Any = posix.getcwd,
    ) -> None:
        roots = readable
        if event == "open":
            paths: tuple[Any, ...] = args[:1]
            mode, flags = args[1], args[2]
            if (flags or 0) & write_flags or (type(mode) is str and ("w" in mode or "a" in mode or "x" in mode or "+" in mode)):
                roots = writable
        elif event.startswith(refused):
            raise PermissionError("sandbox: " + event + " is refused")
        elif event.startswith(changes):
            paths, roots = args, writable
        elif event.startswith(looks):
            paths = args[:1]
        elif event == "import" and args[0] in modules:
            raise ImportError("sandbox: " + args[0] + " is refused")
        else:
            return
        for path in paths:
            if type(path) is int or type(path) is tuple:
                continue  # a descriptor it was given or opened before, a mode, or times
            if path is None:
                path = "."
            if type(path) is not str and type(path) is not bytes:
                path = fspath(path)
            text = path if type(path) is str else path.decode("utf-8", "surrogateescape") if type(path) is bytes else "/"
            todo, real, num_links = [text] if text.startswith("/") else [text, getcwd()], "", 0
            while todo:  # resolves links as the kernel does
                first, _, rest = todo.pop().partition("/")
                if rest:
                    todo.append(rest)
                if first == "..":
                    real = real.rpartition("/")[0]
                elif first and first != ".":
                    try:
                        link = readlink(real + "/" + first)
                    except (OSError, ValueError):  # no link, or no valid path at all
                        real += "/" + first
                    else:
                        num_links += 1
                        real = "" if link.startswith("/") else real
                        todo.append(link if num_links < 40 else "/")
            for root in roots:
                if real == root or real.startswith(root.rstrip("/") + "/"):
                    break
            else:
                raise PermissionError("sandbox: " + event + " outside the working folder is refused: " + text)

    return hook
