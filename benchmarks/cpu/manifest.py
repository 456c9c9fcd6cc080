"""What the hashes of a checkpoint's manifest cost: seconds per GiB, beside writing the same files.

    python benchmarks/cpu/manifest.py          # 4 GiB in files of 1 GiB

The files are hashed right after they were written, as in a run, so they are read from memory where they fit into it. CPU seconds
depend little on other load on the machine; the seconds that pass are those CPU seconds divided by the cores that are free.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from benchmarks.lib.figures import print_table
from benchmarks.lib.results import Report, add_result_arguments
from paceline.files import save_tensors
from paceline.manifest import digest_files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--file-mib", type=int, default=1024)
    parser.add_argument("--folder", type=Path, help="where the files are written (default: the system's temporary folder)")
    add_result_arguments(parser, "cpu/manifest")
    args = parser.parse_args()
    report = Report(args, gib=args.files * args.file_mib / 1024, seconds_per_gib={})
    with TemporaryDirectory(dir=args.folder) as folder:
        for name, step in (("write and flush", lambda: write(Path(folder), args.files, args.file_mib)),
                           ("hash, one core", lambda: on_one_core(Path(folder))),
                           ("hash", lambda: digest_files(Path(folder)))):
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            cost = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
            report.content["seconds_per_gib"][name] = {kind: spent / report.content["gib"] for kind, spent in cost.items()}
    report.save()
    rows = [(name, found["wall"], found["cpu"]) for name, found in report.content["seconds_per_gib"].items()]
    print_table("Hashes of a checkpoint's files", ("what", "s/GiB", "CPU s/GiB"), rows)
    print(report.file)


def write(folder: Path, files: int, file_mib: int) -> None:
    for number in range(files):
        save_tensors(folder / f"{number}.safetensors", {"weight": torch.full((file_mib << 18,), float(number))})


def on_one_core(folder: Path) -> None:
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mine)})  # threads that start now inherit it
    try:
        digest_files(folder)
    finally:
        os.sched_setaffinity(0, mine)


if __name__ == "__main__":
    main()
