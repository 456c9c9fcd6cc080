#!/usr/bin/env python3
"""Make README's first picture, docs/images/live-page.png: a still of the live page of the default run. Needs Chromium.

    python scripts/make_live_picture.py

The run is followed for a few steps through its live page; the picture is of the moment at which few answers are left and the most
draft tokens have been accepted.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WIDTH, HEIGHT = 1240, 960


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="number of training steps that are followed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "live-page.png")
    options = parser.parse_args()
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
    if browser is None:
        sys.exit("no Chromium found")
    with tempfile.TemporaryDirectory() as scratch:
        page = Path(scratch) / "page.html"
        page.write_text(best_moment(Path(scratch), options.steps, options.threads), encoding="utf-8")
        subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=3000",
                        "--blink-settings=preferredColorScheme=1", f"--window-size={WIDTH},{HEIGHT}",
                        f"--screenshot={options.out.resolve()}", page.as_uri()], check=True, stderr=subprocess.DEVNULL)
    print(options.out)


def best_moment(folder: Path, steps: int, threads: int) -> str:
    """The page, as HTML that asks for nothing, at the moment described above."""
    changes = (f"steps={steps}", f"threads={threads}", f"out={folder / 'run'}", "compare_off=false")
    command = [sys.executable, "-m", "paceline.cli", "train", *(word for change in changes for word in ("--set", change))]
    best, page, most = "", "", -1.0
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=folder) as run:
        assert run.stderr is not None
        url = next(found[1] for line in run.stderr if (found := re.search(r"live page: (http\S+)", line)))
        while run.poll() is None:
            try:
                fragment = read(f"{url}now")
                if (worth := value_of(fragment)) > most:
                    best, page, most = fragment, read(url), worth
            except OSError:  # not there yet, or over
                pass
            time.sleep(0.05)
    if not best:
        sys.exit("the page has shown no rollouts")
    page = page[: page.rindex("<script>")]  # without the script that asks the server for news
    page = re.sub(r'<meta http-equiv="Content-Security-Policy".*?>', "", page, flags=re.DOTALL)
    return page.replace('<div id="now"></div>', f'<div id="now">{best}</div>') + (
        '<script>drawCharts(document.getElementById("now"))</script></body></html>')


def value_of(fragment: str) -> float:
    """How much a moment shows; -1 if nothing."""
    answers = re.search(r"(\d+) running, (\d+) finished", fragment)
    accepted = re.search(r"draft tokens accepted</span><b>([\d,]+)", fragment)
    if answers is None or accepted is None or ": generating" not in fragment or not 2 <= int(answers[1]) <= 12:
        return -1.0
    return float(accepted[1].replace(",", ""))


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read().decode()


if __name__ == "__main__":
    main()
