#!/usr/bin/env python3
"""Install Paceline into a virtual environment and compile its CPU kernels.

    python3 scripts/set_up.py .venv               # what training needs, on several workers too
    python3 scripts/set_up.py .venv --extra dev   # and what the tests need

PyTorch and numba are installed first; the kernels are then compiled while pip installs the other packages. What is being done is
shown meanwhile: on one line of a terminal, otherwise on a new line every few seconds. pip's own output is in set-up.log in the
folder of the environment.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
import tomllib
import urllib.request
import venv
from collections import deque
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Package index of PyTorch's builds without CUDA, which are a tenth of the size."""
FIRST = ("torch", "numba", "numpy")
"""Dependencies that the compilation of the kernels needs."""
TRAINING = "cluster"
"""Optional dependencies that are installed for training: those of several workers, so that they are one setting away."""
COMPILE = """
import torch
from paceline.kernels.cpu.compiler import compile_all
compile_all(torch.float32, lambda done, total: print(f"{done} of {total}", flush=True))
"""
_TERMINAL_EVERY_S, _LINE_EVERY_S = 0.3, 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the virtual environment; it is created if it does not exist")
    parser.add_argument("--extra", help="optional dependencies from pyproject.toml to install as well")
    options = parser.parse_args()
    with Progress() as progress:
        environment = Environment(options.folder, progress)
        if options.extra:
            environment.install(["--editable", f"{ROOT}[{options.extra}]"], f"packages of [{options.extra}]")
            environment.compile_bytecode()
            return
        environment.install([*cpu_index(progress), *first_requirements()], "PyTorch and numba")
        compilation = Compilation(environment.python, progress)
        environment.install(["--editable", f"{ROOT}[{TRAINING}]"], "other packages")
        compilation.wait()


def first_requirements() -> list[str]:
    """The requirements of pyproject.toml that are installed first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [line for line in project["dependencies"] if re.split(r"[^\w.-]", line, maxsplit=1)[0].lower() in FIRST]


def cpu_index(progress: Progress) -> list[str]:
    """Options of pip that get the build of PyTorch without CUDA, on a Linux machine without an NVIDIA driver."""
    configured = any(os.environ.get(f"PIP_{name}") for name in ("INDEX_URL", "EXTRA_INDEX_URL", "FIND_LINKS", "NO_INDEX"))
    if platform.system() != "Linux" or shutil.which("nvidia-smi") or configured:
        return []
    try:
        urllib.request.urlopen(f"{CPU_INDEX}/torch/", timeout=4).close()
    except OSError:  # pip would try it for every package
        return []
    progress.say(f"no NVIDIA driver: PyTorch's CPU build, from {CPU_INDEX}")
    return ["--extra-index-url", CPU_INDEX]


def what_pip_does(line: str) -> str | None:
    """What a line of pip's output says, in a few words; None if it says nothing of interest."""
    if built := re.match(r"\s*((?:Installing build|Preparing|Building) \w+)", line):
        return built[1].lower()
    found = re.match(r"\s*(Downloading|Collecting|Using cached|Processing) (\S+)(?: .*(\([\d.]+ \w+\)))?", line)
    if found is None:
        return None
    doing, file, size = found.groups()
    return " ".join(filter(None, ("downloading" if doing == "Downloading" else "resolving", file.rpartition("/")[2], size)))


class Environment:
    """A virtual environment."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        self.folder, self.python, self._progress = folder, folder / "bin" / "python", progress
        if not self.python.exists():
            progress.show("pip", f"creating {folder}")
            venv.create(folder, with_pip=True)

    def install(self, what: list[str], name: str) -> None:
        """Runs pip, and ends the program if it fails. Modules are compiled to bytecode when they are first imported, which few
        of them ever are, so pip does not do it."""
        command = [str(self.python), "-m", "pip", "install", "--no-compile", "--progress-bar", "off", *what]
        self._progress.show("pip", f"{name}: asking the package index")
        began = time.monotonic()
        with (self.folder / "set-up.log").open("a") as log:
            num_new = self._run(command, name, log)
        self._progress.say(f"{name}: {num_new} installed in {time.monotonic() - began:.0f} s")
        self._progress.show("pip", "")

    def compile_bytecode(self) -> None:
        """Compiles all modules to bytecode: tests start hundreds of processes, none of which keeps what it compiles where
        PYTHONDONTWRITEBYTECODE is set. Modules that do not compile, such as templates, are left out."""
        began = time.monotonic()
        self._progress.show("bytecode", "compiling bytecode")
        packages = sysconfig.get_path("purelib", "venv", {"base": str(self.folder)})
        subprocess.run([self.python, "-m", "compileall", "-q", "-j", "0", packages], check=False, stdout=subprocess.DEVNULL)
        self._progress.show("bytecode", "")
        self._progress.say(f"bytecode: compiled in {time.monotonic() - began:.0f} s")

    def _run(self, command: list[str], name: str, log: IO[str]) -> int:
        """Number of packages that pip has installed."""
        progress, before, num_new, last = self._progress, self._num_packages(), 0, deque[str](maxlen=20)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              env=os.environ | {"PYTHONUNBUFFERED": "1"}) as pip:
            assert pip.stdout is not None
            for line in pip.stdout:
                log.write(line)
                last.append(line)
                if line.startswith("Installing collected packages:"):
                    num_new = line.count(",") + 1
                    progress.show("pip", lambda total=num_new: f"{name}: {self._num_packages() - before} of {total} installed")
                elif doing := what_pip_does(line):
                    progress.show("pip", f"{name}: {doing}")
        if pip.returncode:
            progress.show("pip", "")
            sys.exit("".join(last) + f"pip failed; its whole output is in {log.name}")
        return num_new

    def _num_packages(self) -> int:
        return sum(1 for _ in self.folder.glob("lib/python*/site-packages/*.dist-info"))


class Compilation:
    """Compiles the CPU kernels for float32 in a process of its own."""

    def __init__(self, python: Path, progress: Progress) -> None:
        self._progress, self._began = progress, time.monotonic()
        self._process = subprocess.Popen([str(python), "-c", COMPILE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                         cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._progress.show("kernels", f"CPU kernels: {line.strip()} compiled")

    def wait(self) -> None:
        """Waits for the end. What could not be compiled now is compiled at its first use."""
        _, errors = self._process.communicate()
        self._progress.show("kernels", "")
        took = f"compiled in {time.monotonic() - self._began:.0f} s"
        self._progress.say(f"CPU kernels: {f'not compiled yet ({errors.strip()[-300:]})' if self._process.returncode else took}")


class Progress:
    """What is being done at the moment, on stderr."""

    def __init__(self) -> None:
        self._parts: dict[str, object] = {}
        self._began, self._lock, self._ended = time.monotonic(), threading.Lock(), threading.Event()
        self._is_terminal = sys.stderr.isatty()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self._print("")

    def show(self, part: str, text: object) -> None:
        """What this part of the work is doing: a text, or a function that returns it; an empty text when it has ended."""
        self._parts[part] = text

    def say(self, line: str) -> None:
        """Prints a line that stays."""
        self._print(f"{self._clock()}  {line}\n")

    def _run(self) -> None:
        while not self._ended.wait(_TERMINAL_EVERY_S if self._is_terminal else _LINE_EVERY_S):
            parts = [text() if callable(text) else text for text in list(self._parts.values())]
            line = f"{self._clock()}  {' | '.join(str(part) for part in parts if part)}"
            width = shutil.get_terminal_size().columns - 1
            self._print(line[:width] if self._is_terminal else f"{line}\n")

    def _clock(self) -> str:
        minutes, seconds = divmod(round(time.monotonic() - self._began), 60)
        return f"set-up {minutes}:{seconds:02d}"

    def _print(self, text: str) -> None:
        with self._lock:
            print(("\r\x1b[K" if self._is_terminal else "") + text, end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
