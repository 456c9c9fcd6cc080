"""The Docker file: its instructions are well formed and name what exists; where Docker runs, the CPU image is built and used."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docker" / "Dockerfile"
KNOWN = {"FROM", "ENV", "WORKDIR", "COPY", "RUN", "USER", "EXPOSE", "ENTRYPOINT", "CMD"}


class Instruction(NamedTuple):
    """One instruction of a Docker file, its continued lines joined."""

    word: str
    arguments: str


def parse(text: str) -> list[Instruction]:
    """The instructions of a Docker file, without comments. ValueError if one is not known."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    found = [Instruction(*line.split(maxsplit=1)) for line in lines.replace("\\\n", " ").splitlines() if line.strip()]
    unknown = [each.word for each in found if each.word not in KNOWN]
    if unknown or found[0].word != "FROM":
        raise ValueError(f"{unknown or found[0].word}: not an instruction, or not expected here")
    return found


def stages(instructions: list[Instruction]) -> dict[str, list[Instruction]]:
    """The instructions of each stage, with those of the stage that it starts from."""
    found: dict[str, list[Instruction]] = {}
    for each in instructions:
        if each.word == "FROM":
            source, _, name = each.arguments.split()
            own = found[name] = list(found.get(source, []))
        own.append(each)
    return found


def only(instructions: list[Instruction], word: str) -> list[str]:
    return [each.arguments for each in instructions if each.word == word]


def is_ignored(path: str) -> bool:
    """Whether the ignore file beside the Docker file keeps a top-level path out of the build."""
    ignored = False
    for line in FILE.with_name("Dockerfile.dockerignore").read_text().split():
        if line.removeprefix("!") in ("*", path):
            ignored = not line.startswith("!")
    return ignored


@pytest.mark.parametrize("stage", ["cpu", "gpu"])
def test_the_stage_is_complete(stage):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = stages(parse(FILE.read_text()))[stage]
    image, version = re.match(r"(\w+):([\d.]+)", only(found, "FROM")[0]).groups()
    assert image == "python" and version in SpecifierSet(project["requires-python"])
    for copied in only(found, "COPY"):
        for source in copied.split()[:-1]:
            assert (ROOT / source).exists() and not is_ignored(source), source
    copied = " ".join(only(found, "COPY"))
    assert all(needed in copied for needed in ("pyproject.toml", "paceline", project["readme"], *project["license-files"]))
    [installed] = re.findall(r"pip install .*'\.\[([\w,-]+)\]'", "\n".join(only(found, "RUN")))
    assert set(installed.split(",")) <= set(project["optional-dependencies"])
    assert only(found, "USER") == ["paceline"] and "useradd" in "".join(only(found, "RUN")), "no container runs as root"
    assert json.loads(only(found, "ENTRYPOINT")[0])[0] in project["scripts"] and json.loads(only(found, "CMD")[0]) == ["--help"]
    for command in only(found, "RUN"):
        subprocess.run(["sh", "-n", "-c", command], check=True)
    order = [each.word for each in found]
    assert order.index("USER") > len(order) - order[::-1].index("RUN") - 1, "packages are installed as root"


def test_everything_else_stays_out_of_the_build():
    assert all(is_ignored(path) for path in (".git", ".venv", ".models", "runs", "tests"))


def test_mistakes_are_found():
    with pytest.raises(ValueError, match="COPPY"):
        parse("FROM a:1 AS b\nCOPPY x y")
    with pytest.raises(ValueError, match="RUN"):
        parse("RUN \\\n  x")
    assert parse("FROM a:1 AS b\n# said\nRUN x \\\n    && y")[1] == Instruction("RUN", "x      && y")


def test_the_documentation_builds_its_stages():
    lines = (ROOT / "docs/server.md").read_text().splitlines()
    commands = [shlex.split(line) for line in lines if line.startswith("    docker build")]
    targets = {words[words.index("--target") + 1] for words in commands}
    assert targets == {"cpu", "gpu"} and all((ROOT / words[words.index("--file") + 1]) == FILE for words in commands)


@pytest.mark.slow
def test_the_cpu_image_is_built_and_generates():
    if shutil.which("docker") is None or subprocess.run(["docker", "info"], capture_output=True).returncode:
        pytest.skip("no Docker daemon")
    subprocess.run(["docker", "build", "--file", str(FILE), "--target", "cpu", "--tag", "paceline:test", str(ROOT)], check=True)
    command = ["docker", "run", "--rm", "paceline:test", "generate", "--model", "default", "--prompt", "27:"]
    assert "27:" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
