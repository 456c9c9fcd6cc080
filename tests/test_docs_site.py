"""The documentation site builds without a warning: every page is in its navigation, and no link is dead."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
for package in ("mkdocs", "material", "mkdocstrings"):
    pytest.importorskip(package, reason="needs `pip install '.[docs]'`")


def test_the_site_builds(tmp_path):
    built = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)], cwd=ROOT,
                           env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    home, reference = ((tmp_path / page).read_text(encoding="utf-8") for page in ("index.html", "api/index.html"))
    assert 'href="contract/"' in home and 'src="images/live-page.png"' in home
    assert 'id="paceline.engine.Engine.generate"' in reference
