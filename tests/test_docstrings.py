"""The examples in docstrings run, but for those that train a model of the reader's."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import paceline

ROOT = Path(paceline.__file__).parent
NEED_A_MODEL = {"paceline.trainer.trainer", "paceline.integrations.trl"}
MODULES = {".".join(("paceline", *path.relative_to(ROOT).with_suffix("").parts)) for path in ROOT.rglob("*.py")
           if ">>> " in path.read_text(encoding="utf-8")}


@pytest.mark.parametrize("module", sorted(MODULES - NEED_A_MODEL))
def test_examples_in_docstrings_run(module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = doctest.testmod(importlib.import_module(module), verbose=False)
    assert found.attempted and not found.failed


def test_the_other_modules_have_examples():
    assert NEED_A_MODEL <= MODULES
