"""Who may import whom (docs/architecture.md). Reads the sources; nothing is executed."""

from __future__ import annotations

import ast
from pathlib import Path

import paceline

ROOT = Path(paceline.__file__).parent
ALLOWED = {
    "types": set(), "config": set(),
    "kernels": {"types", "config"}, "cache": {"types", "config"}, "strategy": {"types", "config"},
    "tasks": {"types", "config"}, "report": {"types", "config"},
    "models": {"types", "config", "kernels"},
    "drafters": {"types", "config", "models", "kernels"},
    "engine": {"types", "config", "cache", "kernels", "models", "drafters", "strategy"},
    "spot": {"types", "config", "drafters", "models", "kernels"},
    "rl": {"types", "config", "models", "kernels"},
}
TORCH_FREE = ["types.py", "config.py", "cache/pages.py", "engine/scheduler.py", "engine/request.py", "engine/prompts.py",
              "engine/stats.py", "engine/outputs.py", "strategy/select.py", "strategy/beg.py", "spot/pays.py", "spot/alarms.py",
              *(str(path.relative_to(ROOT)) for room in ("tasks", "report") for path in (ROOT / room).rglob("*.py"))]


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module)
    return names


def test_layers():
    for path in sorted(ROOT.rglob("*.py")):
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if room not in ALLOWED:
            continue
        ours = {name.split(".")[1] for name in imported(path) if name.startswith("paceline.")}
        assert ours <= ALLOWED[room] | {room}, f"{path.relative_to(ROOT)} imports {ours - ALLOWED[room] - {room}}"


def test_control_plane_is_free_of_torch():
    for name in TORCH_FREE:
        heavy = {found for found in imported(ROOT / name) if found.split(".")[0] in ("torch", "numba", "transformers")}
        assert not heavy, f"{name} imports {heavy}"
