"""Which package may import which (docs/architecture.md). The sources are parsed; nothing is executed."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import paceline

ROOT = Path(paceline.__file__).parent
LEAVES = {"names", "extras", "sampling", "types", "config", "config_base", "files", "manifest", "optim", "packing", "bundled",
          "jit_cache", "garbage", "tool_calls", "structured_outputs", "chat_template"}
BELOW_ENGINE = LEAVES | {"cache", "kernels", "models", "drafters", "strategy"}
BELOW_TRAINER = BELOW_ENGINE | {"engine", "generation", "spot", "rl", "tasks", "report"}
ALLOWED = {
    "__main__": {"cli"}, "names": set(), "types": {"sampling"}, "sampling": {"names", "structured_outputs"},
    "structured_outputs": set(), "config": {"names", "config_base"}, "config_base": {"names"}, "files": set(),
    "manifest": {"files"}, "extras": set(), "optim": {"config", "extras"}, "packing": set(), "bundled": set(), "jit_cache": set(),
    "garbage": set(), "tool_calls": set(), "chat_template": set(),
    "kernels": LEAVES, "cache": LEAVES, "strategy": LEAVES, "tasks": LEAVES, "report": LEAVES,
    "models": LEAVES | {"kernels"},
    "drafters": LEAVES | {"models", "kernels"},
    "engine": BELOW_ENGINE,
    "spot": LEAVES | {"drafters", "models", "kernels"},
    "rl": LEAVES | {"models", "kernels"},
    "generation": BELOW_ENGINE | {"engine", "tasks"},
    "bench": BELOW_ENGINE | {"engine", "tasks", "generation"},
    "trainer": BELOW_TRAINER,
    "cluster": BELOW_TRAINER | {"trainer"},
    "sim": LEAVES | {"strategy", "cluster"},
    "export": BELOW_TRAINER,
    "server": BELOW_ENGINE | {"engine"},
    "integrations": BELOW_TRAINER | {"trainer"},
    "cli": BELOW_TRAINER | {"trainer", "bench", "cluster", "sim", "export", "server"},
}
ONLY = {"cluster/policy.py": {"paceline.cluster.types"}, "cluster/types.py": set(), "cluster/lengths.py": set(),
        "sim/": {"paceline.types", "paceline.strategy", "paceline.cluster.policy", "paceline.cluster.types",
                 "paceline.cluster.lengths", "paceline.sim"}}
"""Files and folders that import nothing else of Paceline."""
TORCH_FREE = ["names.py", "sampling.py", "types.py", "config.py", "config_base.py", "files.py", "manifest.py", "bundled.py",
              "tool_calls.py", "structured_outputs.py", "chat_template.py",
              "cache/pages.py",
              "engine/scheduler.py", "engine/request.py", "engine/prompts.py", "engine/stats.py", "engine/outputs.py",
              "engine/planner.py", "engine/command.py", "engine/grammar.py",
              "engine/token_masks.py", "engine/drafting.py", "engine/draft_outcomes.py",
              "engine/strategy_control.py",
              "strategy/selector.py", "strategy/beg.py", "spot/budget.py",
              "spot/alarms.py", "generation/jobs.py", "generation/output.py", "trainer/config_files.py", "trainer/run_folder.py",
              "cli/app.py", "cli/deploy.py", "cli/drafter_commands.py", "cli/__init__.py",
              "cluster/types.py", "cluster/policy.py", "cluster/lengths.py",
              *(str(path.relative_to(ROOT)) for package in ("tasks", "report") for path in (ROOT / package).rglob("*.py"))]
PRINTING = {"typer", "rich"}


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module)
            if node.module == "paceline":  # from paceline import engine
                names |= {f"paceline.{alias.name}" for alias in node.names if not alias.name.startswith("_")}
    return names


def test_layers():
    for path in sorted(ROOT.rglob("*.py")):
        package = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if package == "__init__":
            continue
        assert package in ALLOWED, f"{package}: a package without rules; add them here and to docs/architecture.md"
        ours = {name.split(".")[1] for name in imported(path) if name.startswith("paceline.")}
        assert ours <= ALLOWED[package] | {package}, f"{path.relative_to(ROOT)} imports {ours - ALLOWED[package] - {package}}"


def test_the_scheduling_policy_and_the_simulator_stand_alone():
    for start, allowed in ONLY.items():
        for path in sorted(ROOT.rglob("*.py")):
            if path.relative_to(ROOT).as_posix().startswith(start):
                ours = {name for name in imported(path) if name.startswith("paceline.")}
                outside = {name for name in ours if not any(name == ok or name.startswith(ok + ".") for ok in allowed)}
                assert not outside, f"{path.relative_to(ROOT)} imports {outside}"


def test_control_plane_is_free_of_torch():
    for name in TORCH_FREE:
        heavy = {found for found in imported(ROOT / name) if found.split(".")[0] in ("torch", "numba", "transformers")}
        assert not heavy, f"{name} imports {heavy}"


def test_nothing_that_the_planner_uses_knows_torch():
    """All files that the planner imports, and those that they import. The suffix drafter's compiled code is an end of the walk:
    it takes the sampling noise from the CPU kernels, whose package has torch."""
    ends, found = {"paceline.drafters.suffix"}, {"paceline.engine.planner", "paceline.engine.watchdog"}
    todo = sorted(found)
    while todo:
        path = ROOT / f"{todo.pop().removeprefix('paceline.').replace('.', '/')}.py"
        names = imported(path if path.is_file() else path.with_suffix("") / "__init__.py")
        heavy = {name for name in names if name.split(".")[0] in ("torch", "numba", "transformers")}
        assert not heavy, f"{path.relative_to(ROOT)} imports {heavy}"
        new = {name for name in names if name.startswith("paceline.")} - ends - found
        found, todo = found | new, todo + sorted(new)
    assert {f"paceline.engine.{name}" for name in ("command", "drafting", "scheduler", "outputs", "failures")} <= found
    assert {"paceline.strategy", "paceline.strategy.cost", "paceline.cache.pages"} <= found
    assert not found & {f"paceline.{name}" for name in ("engine", "engine.executor", "engine.runner", "models", "kernels")}


def test_only_the_command_line_and_views_of_a_run_print():
    """A library that an embedding program calls writes to logging and to callbacks, not to its terminal."""
    for path in sorted(ROOT.rglob("*.py")):
        package = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if package == "cli":
            continue
        terminal = {name for name in imported(path) if name.split(".")[0] in PRINTING}
        assert not terminal or package == "report", f"{path.relative_to(ROOT)} imports {terminal}"
        if package not in ("trainer", "generation", "bench", "rl") or path.name == "progress.py":
            continue
        calls = {node.func.id for node in ast.walk(ast.parse(path.read_text()))
                 if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        assert not calls & {"print", "exit", "input"}, f"{path.relative_to(ROOT)} calls {calls & {'print', 'exit', 'input'}}"


def test_test_files_have_names_of_their_own():
    """pytest imports them by their bare names: of two files with one name, one is not run."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("*.py") if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []
