"""What the documentation says works: links, commands, settings, file names and Python code. Nothing is trained or generated."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from paceline.cli.app import app
from paceline.trainer.config_files import load_config

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md", ROOT / "examples/README.md",
         *sorted((ROOT / "docs").glob("*.md"))]
WRITTEN = [page for page in PAGES if not page.name.startswith("results")]  # those are generated from results of benchmarks
IMAGINED = {"paceline/tasks/sums.py", "mine.py", "file.py"}
"""Files that examples tell the reader to write."""

_FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def python_blocks(text: str) -> list[str]:
    blocks = []
    for language, code in _FENCE.findall(text):
        indent = len(code) - len(code.lstrip(" "))
        if language == "python":
            blocks.append(re.sub(rf"^ {{1,{indent}}}", "", code, flags=re.MULTILINE) if indent else code)
    return blocks


def command_lines(text: str) -> list[list[str]]:
    """The words of every command in an indented block, without environment variables and comments."""
    indented = "\n".join(line[4:] for line in _FENCE.sub("", text).splitlines() if line.startswith("    "))
    command = re.compile(r"^(?:\w+=\S+ )*(?:\.venv/bin/)?((?:paceline|python|make) .*)$", re.MULTILINE)
    return [shlex.split(line, comments=True) for line in command.findall(re.sub(r"\\\n\s*", "", indented))]


def inline_commands(text: str) -> list[list[str]]:
    """The words of every `paceline …` within a sentence, which may leave required options out."""
    return [code.split() for code in re.findall(r"`(paceline\s[^`]*)`", _FENCE.sub("", text))]


def find_command(words: list[str]) -> tuple[Any, list[str]]:
    """The command that the words after `paceline` name, and its arguments."""
    command = get_command(app)
    while hasattr(command, "commands") and words:
        assert words[0] in command.commands, f"there is no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    return command, words


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def test_pages_are_short():
    for page in [*PAGES, ROOT / "CHANGELOG.md"]:
        words = sum(any(map(str.isalpha, word)) for word in page.read_text(encoding="utf-8").split())
        assert words <= (800 if page == README else 1500), f"{name(page)}: {words} words"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_point_to_files_and_headings(page):
    for target in _LINK.findall(page.read_text(encoding="utf-8")):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists() and file.is_relative_to(ROOT), f"{name(page)}: {target} does not exist"
        assert not anchor or anchor in anchors(file), f"{name(page)}: {target}: there is no such heading"


@pytest.mark.parametrize("page", WRITTEN, ids=name)
def test_commands_are_understood(page, monkeypatch):
    """Every printed command parses, and every `train` has valid settings."""
    monkeypatch.chdir(ROOT)
    text = page.read_text(encoding="utf-8")
    for words in command_lines(text):
        if words[0] == "paceline":
            command, arguments = find_command(words[1:])
            given = command.make_context(command.name, arguments).params
            if words[1] == "train" and given["resume"] is None:
                load_config(given["config"], given["changes"] or [])
    for words in inline_commands(text):
        command, arguments = find_command(words[1:])
        known = {option for parameter in command.params for option in parameter.opts}
        unknown = {word for word in arguments if word.startswith("--")} - known
        assert not unknown, f"{' '.join(words)}: {unknown}"


def test_commands_are_found():
    text = README.read_text(encoding="utf-8")
    assert ["paceline", "train", "--dry-run"] in command_lines(text) and len(command_lines(text)) >= 7
    assert command_lines("    A=1 .venv/bin/paceline train \\\n    --set a=1  # comment\n") == [
        ["paceline", "train", "--set", "a=1"]]
    assert inline_commands("see `paceline drafter\neval --tau`") == [["paceline", "drafter", "eval", "--tau"]]
    with pytest.raises(AssertionError, match="sing"):
        find_command(["drafter", "sing"])


@pytest.mark.parametrize("page", WRITTEN, ids=name)
def test_scripts_and_targets_exist(page):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for words in command_lines(page.read_text(encoding="utf-8")):
        if words[0] == "make":
            assert set(words[1:]) <= targets, words
        elif words[0] == "python" and words[1].endswith(".py"):
            assert (ROOT / words[1]).is_file(), words


@pytest.mark.parametrize("page", WRITTEN, ids=name)
def test_files_that_are_named_exist(page):
    """Paths of Python files are given from the repository's root, from the package, or from the benchmarks."""
    for path in re.findall(r"`([\w/.-]+/[\w.-]+\.py)\b", page.read_text(encoding="utf-8")):
        assert path in IMAGINED or any((base / path).is_file() for base in (
            ROOT, ROOT / "paceline", ROOT / "benchmarks", ROOT / "paceline/kernels")), f"{name(page)}: {path}"


@pytest.mark.parametrize("page", WRITTEN, ids=name)
def test_python_code_compiles(page):
    for number, code in enumerate(python_blocks(page.read_text(encoding="utf-8"))):
        compile(code, f"{name(page)}, block {number}", "exec")


def test_the_reference_of_settings_is_up_to_date():
    spec = importlib.util.spec_from_file_location("make_settings", ROOT / "scripts/make_settings.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    pages = script.pages()
    for page, text in pages.items():
        assert (script.DOCS / page).read_text(encoding="utf-8") == text, "run make settings"
    for key in ("rollout.max_new_tokens", "spot.form", "drafter_budget.trial_share", "algorithm_options.clip_high"):
        assert sum(f"| `{key}` |" in text for text in pages.values()) == 1


def test_python_blocks_are_found():
    assert len(python_blocks(README.read_text(encoding="utf-8"))) == 1
    assert len(python_blocks((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))) == 4
