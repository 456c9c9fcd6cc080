"""Generates docs/results.md from the result files of the benchmarks.

    python benchmarks/lib/make_results.py               # writes docs/results.md
    python benchmarks/lib/make_results.py --check       # only checks that it is up to date

`benchmarks/results/{cpu,gpu,cluster}` holds the newest result of each claim, one table each, and
`benchmarks/results/gpu_check.json` the last GPU check, of which the page says whether the sources have changed since. Results of
older revisions, of trees with uncommitted changes and of variants are in `benchmarks/results/older` and get one row each.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.lib.result_tables import Content, make_table
from benchmarks.lib.results import RESULTS, ROOT, UNKNOWN
from benchmarks.lib.sources import FOLDERS, sources_hash

PAGE = ROOT / "docs" / "results.md"
_HEAD = """# Results

This page is generated from `benchmarks/results` by `python benchmarks/lib/make_results.py`; do not edit it.
Each table is of one run of one revision, which its caption names with the command of that revision (benchmarks may have been
renamed since). `n×` means n times as fast. [benchmarks/README.md](../benchmarks/README.md) says how to repeat the measurements.
"""
_TITLES = {"cpu": "CPU", "gpu": "GPU", "cluster": "Several workers"}
_OLDER = """## Older revisions and variants

These files were measured on the revision in their row, some in trees with uncommitted changes ("+ changes"), or are variants of
a table above. They say nothing about the present code.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with an error if the page is not up to date")
    text, check = page(), parser.parse_args().check
    if check and (not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text):
        raise SystemExit("docs/results.md is not up to date: run python benchmarks/lib/make_results.py")
    if not check:
        PAGE.write_text(text, encoding="utf-8")


def page(results: Path = RESULTS) -> str:
    """The whole page, from all result files below `results`."""
    parts = [_HEAD]
    for folder in _TITLES:
        files = [*results.glob(f"{folder}_*.json"), *sorted((results / folder).glob("*.json"))]
        if files:
            parts.append(f"## {_TITLES[folder]}\n")
            parts += [section(file, results) for file in files]
    older = sorted((results / "older").rglob("*.json"))
    if older:
        rows = [older_row(file, results) for file in older]
        parts.append(_OLDER + "\n" + "\n".join(markdown(("claim", "result", "revision", "file"), rows)) + "\n")
    return "\n".join(parts)


def section(file: Path, results: Path) -> str:
    """One result file as a titled table with its sentence and caption."""
    content = load(file)
    table = make_table(content)
    note = [f"{content['note']}\n"] if "note" in content else []
    more = [] if table.more is None else [f"{table.more.title}. {table.more.sentence}\n",
                                          *markdown(table.more.columns, table.more.rows), ""]
    return "\n".join([f"### {table.title}\n", table.sentence + "\n", *markdown(table.columns, table.rows), "", *more,
                      f"*Revision {revision(content)}, {content['date'][:10]}, {hardware(content)};* `{content['command']}` "
                      f"([{file.name}]({_link(file, results)}))\n", *note, *stale_note(content)])


def stale_note(content: Content) -> list[str]:
    """A line where the sources that the figures depend on are not those that were measured; empty if they are, or if the result
    does not name them."""
    if content.get("sources") in (None, sources_hash()):
        return []
    return [f"**Sources have changed since:** `paceline/{{{','.join(FOLDERS)}}}` are not those that were measured.\n"]


def older_row(file: Path, results: Path) -> Sequence[str]:
    content = load(file)
    table = make_table(content)
    result = f"{table.sentence} {content.get('note', '')}".strip()
    return table.title, result, revision(content), f"[{file.stem}]({_link(file, results)})"


def load(file: Path) -> Content:
    """A result file. A ValueError names a file whose revision is unknown: such figures are not published."""
    content: Content = json.loads(file.read_text(encoding="utf-8"))
    if content.get("revision", UNKNOWN) == UNKNOWN:
        raise ValueError(f"{file}: revision is unknown")
    return content


def revision(content: Content) -> str:
    return content["revision"] + (" + changes" if content["dirty"] else "")


def hardware(content: Content) -> str:
    machine = content["machine"]
    processor = machine.get("gpu") or machine.get("cpu") or f"{machine['arch']} CPU"
    threads = content.get("threads") or content.get("settings", {}).get("threads")
    threads = "" if threads is None or "gpu" in machine else f", {threads} thread{'s' if threads > 1 else ''}"
    return f"{processor}{threads}, torch {machine['torch']}"


def markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """A table in Markdown."""
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(str(cell) for cell in row)} |"


def _link(file: Path, results: Path) -> str:
    return f"../benchmarks/results/{file.relative_to(results).as_posix()}"


if __name__ == "__main__":
    main()
