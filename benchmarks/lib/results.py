"""Result files: the figures of a run, with everything needed to judge them and to repeat the run.

Every result file begins with the benchmark's name, the command line, the revision of the code, whether its tree was dirty, the
date and the machine. A benchmark refuses to start in a dirty tree, or in one whose revision is unknown, unless `--allow-dirty`
is given; the file then says so. The standard library is enough to import this module.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SMOKE_RESULTS = ROOT / "build" / "benchmarks"
"""Default folder of smoke runs (`--tiny`, `--quick`), whose figures mean nothing."""
UNKNOWN = "unknown"
_FIGURES_DEPEND_ON = ("paceline", "benchmarks", "configs", "pyproject.toml", ":(exclude)benchmarks/results",
                      ":(exclude)benchmarks/README.md")
_PACKAGES = ("torch", "numba", "triton", "transformers")


def add_result_arguments(parser: argparse.ArgumentParser, benchmark: str) -> None:
    """Adds `--out`, `--revision` and `--allow-dirty`. `benchmark` is "cpu/NAME" or "gpu/NAME", or a bare "NAME" for a
    benchmark whose folder follows from the device it runs on."""
    parser.set_defaults(benchmark=benchmark)
    parser.add_argument("--out", type=Path, help="result file (default: below benchmarks/results; smoke runs: build/benchmarks)")
    parser.add_argument("--revision", default=os.environ.get("PACELINE_REVISION"),
                        help="revision of this code where the tree is a copy without .git (default: PACELINE_REVISION)")
    parser.add_argument("--allow-dirty", action="store_true", help="run in a tree with uncommitted changes; the result says so")


class Revision(NamedTuple):
    name: str
    """Short hash of the commit, or `UNKNOWN`."""
    dirty: bool | None
    """Whether files that the figures depend on differ from the commit; None where the tree is a copy without .git."""


def tree_revision(given: str | None = None, root: Path = ROOT) -> Revision:
    """Revision of the tree at `root`: git's, or `given`, which may end in "-dirty", where `root` is not a git checkout."""
    top = _git(root, "rev-parse", "--show-toplevel")
    if top and Path(top).resolve() == root.resolve():
        changes = _git(root, "status", "--porcelain", "--", *_FIGURES_DEPEND_ON)
        return Revision(_git(root, "rev-parse", "--short=7", "HEAD") or UNKNOWN, bool(changes))
    if given:
        return Revision(given.removesuffix("-dirty"), True if given.endswith("-dirty") else None)
    return Revision(UNKNOWN, None)


def checked_revision(given: str | None, allow_dirty: bool, root: Path = ROOT) -> Revision:
    """Revision of a tree that may be measured. SystemExit says why it may not."""
    found = tree_revision(given, root)
    if not allow_dirty and found.dirty:
        raise SystemExit("the tree has uncommitted changes: commit them, or pass --allow-dirty")
    if not allow_dirty and found.name == UNKNOWN:
        raise SystemExit("this tree is not a git checkout: pass --revision (or PACELINE_REVISION), or --allow-dirty")
    return found


class Report:
    """Result file of one run. `content` holds plain JSON values; `save` replaces the file as a whole, so a run that is stopped
    loses nothing that was saved before."""

    def __init__(self, args: argparse.Namespace, device: Any = "cpu", variant: str = "", **content: Any) -> None:
        """args: parsed by a parser with `add_result_arguments`. device: what the run uses, as torch names it. variant: a suffix
        of the default file name, for benchmarks with several settings."""
        on_gpu = str(device).startswith("cuda")
        name = args.benchmark if "/" in args.benchmark else f"{'gpu' if on_gpu else 'cpu'}/{args.benchmark}"
        smoke = getattr(args, "tiny", False) or getattr(args, "quick", False)
        folder = SMOKE_RESULTS if smoke else RESULTS
        self.file: Path = args.out or folder / f"{name}{'-' if variant else ''}{variant}.json"
        revision = checked_revision(args.revision, args.allow_dirty)
        self.content: dict[str, Any] = {
            "benchmark": name, "command": command_line(), "revision": revision.name, "dirty": revision.dirty,
            "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "machine": machine(on_gpu), **content}

    def save(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.file.with_suffix(".json.new")
        fresh.write_text(json.dumps(_plain(self.content), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        fresh.replace(self.file)


def command_line() -> str:
    """The command as anyone would type it in the repository root."""
    script = Path(sys.argv[0]).resolve()
    shown = script.relative_to(ROOT) if script.is_relative_to(ROOT) else Path(script.name)
    return " ".join(["python", str(shown), *sys.argv[1:]])


def machine(with_gpu: bool = False) -> dict[str, Any]:
    """Hardware and versions. The GPU is named only where the run uses one."""
    found: dict[str, Any] = {"arch": platform.machine(), "cpu": _cpu_model(), "cores": os.cpu_count(),
                             "load_average": os.getloadavg(), **package_versions()}
    if with_gpu:
        import torch

        found |= {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    return found


def package_versions(packages: Sequence[str] = _PACKAGES) -> dict[str, str]:
    """Versions of Python and of those packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def peer_versions(python: str, packages: Sequence[str]) -> dict[str, str]:
    """`package_versions` of another interpreter."""
    code = "import json, sys\nfrom benchmarks.lib import results\nprint(json.dumps(results.package_versions(sys.argv[1:])))"
    done = subprocess.run([python, "-c", code, *packages], check=True, capture_output=True, text=True, cwd=ROOT)
    return json.loads(done.stdout)


def _git(root: Path, *arguments: str) -> str:
    """What git prints, or nothing where git or the repository is missing."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu_model() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _plain(value: Any) -> Any:
    """JSON values with six digits, in which no folder of this machine is named."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str | Path):
        return re.sub(r"(?<![\w.])/(?:[\w.@+~-]+/)+", "", str(value))
    return float(f"{value:.6g}") if isinstance(value, float) else value
