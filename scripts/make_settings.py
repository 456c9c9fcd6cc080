#!/usr/bin/env python3
"""Generates docs/settings*.md, the reference of all settings of a training run, from the configuration classes.

    python scripts/make_settings.py               # writes the pages
    python scripts/make_settings.py --check       # only checks that they are up to date
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from paceline.config import Config, TrainConfig  # noqa: E402
from paceline.rl.algorithms import ALGORITHMS  # noqa: E402
from paceline.spot.alarms import AlarmConfig  # noqa: E402
from paceline.spot.budget import TrainingBudgetConfig  # noqa: E402
from paceline.spot.config import SpotConfig  # noqa: E402

DOCS = ROOT / "docs"
FREE_TABLES: dict[str, type[Config]] = {"spot": SpotConfig, "drafter_budget": TrainingBudgetConfig, "drafter_alarms": AlarmConfig}
"""Tables of `TrainConfig` that are dictionaries there, and the classes that check them."""
_PAGES = {"engine": ("Settings of rollouts, engine, workers and rewards", ("rollout", "engine", "cluster", "reward")),
          "drafter": ("Settings of drafter training", tuple(FREE_TABLES))}
"""Tables that are on pages of their own: end of the page's name → its title and its tables."""
_HEAD = """# Settings

This page, and those below, are generated from the configuration classes by `python scripts/make_settings.py`; do not edit it.

Every setting of a training run: in a TOML file, as `--set KEY=VALUE` on the command line, or as an argument of `TrainConfig` in
Python. Unknown keys are errors. `paceline train --dry-run` prints all of them with their values, as a TOML file.
[Training](training.md) explains what belongs together; options of tasks are in [Tasks and rewards](tasks.md).

The defaults below are the only ones: of the command line, of files and of `TrainConfig`. `paceline train` without a file runs a
file, too, which sets what the small bundled policy and its task need, such as a higher learning rate; what it says of the task or
the policy is left out where `--set task=…` or `--set model=…` names another. `paceline init` prints that file, `paceline init
FILE` writes it, and in Python `load_config()` returns it.

More settings: [rollouts, engine, workers and rewards](settings-engine.md), [drafter training](settings-drafter.md),
[algorithms](settings-algorithms.md).
"""
_LIMITS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with an error if a page is not up to date")
    check = parser.parse_args().check
    for name, text in pages().items():
        file = DOCS / name
        if check and (not file.is_file() or file.read_text(encoding="utf-8") != text):
            raise SystemExit(f"docs/{name} is not up to date: run python scripts/make_settings.py")
        if not check:
            file.write_text(text, encoding="utf-8")


def pages() -> dict[str, str]:
    """All pages by name."""
    nested = {name: field.annotation for name, field in TrainConfig.model_fields.items() if _is_config(field.annotation)}
    tables = {name: [f"## `[{name}]`\n", f"{_first_sentences(kind)}\n", *_table(kind, f"{name}.")]
              for name, kind in {**nested, **FREE_TABLES}.items()}
    found = {end: [f"# {title}\n", *(line for name in names for line in tables.pop(name))]
             for end, (title, names) in _PAGES.items()}
    found["algorithms"] = ["# Settings of algorithms\n", "Table `[algorithm_options]`. The options depend on `algorithm`; those "
                           "of `grpo` are options of all others, too, with the defaults given there.\n"]
    for name, kind in ALGORITHMS.items():
        found["algorithms"] += [f"## `{name}`\n", f"{_first_sentences(kind)}\n", *_algorithm_table(name, kind)]
    first = [_HEAD, "## The run\n", *_table(TrainConfig, "", skip=nested), *(line for lines in tables.values() for line in lines)]
    return {"settings.md": "\n".join(first), **{f"settings-{end}.md": "\n".join(lines) for end, lines in found.items()}}


def _algorithm_table(name: str, kind: type[Config]) -> Iterator[str]:
    """All options of the first algorithm, and of the others those that are new or have another default."""
    base = ALGORITHMS["grpo"].model_fields
    same = {} if name == "grpo" else {key: None for key, field in kind.model_fields.items()
                                      if key in base and base[key].default == field.default}
    return _table(kind, "algorithm_options.", skip={**same, "max_new_tokens": None})


def _table(kind: type[Config], prefix: str, skip: Any = ()) -> Iterator[str]:
    texts = docstrings(kind)
    rows = [(f"`{prefix}{name}`", _type_name(field.annotation), _default(field), _with_limits(texts[name], field))
            for name, field in kind.model_fields.items() if name not in skip]
    if not rows:
        yield "It has no options of its own.\n"
        return
    yield "| setting | type | default | meaning |\n|---|---|---|---|"
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
    yield ""


def docstrings(kind: type[Config]) -> dict[str, str]:
    """Text below each field of a class and its base classes, by name. A field without one is an error: every setting has to be
    explained."""
    found: dict[str, str] = {}
    for base in reversed([base for base in kind.__mro__ if issubclass(base, Config) and base is not Config]):
        body = ast.parse(inspect.getsource(base).strip()).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                found[field.target.id] = " ".join(ast.literal_eval(text.value).split()).replace("None:", "Not set:")
    missing = [name for name, field in kind.model_fields.items() if name not in found and not _is_config(field.annotation)]
    if missing:
        raise ValueError(f"{kind.__name__}: {', '.join(missing)} without a docstring")
    return found


def _is_config(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Config)


def _first_sentences(kind: type[Config]) -> str:
    return " ".join((kind.__doc__ or "").split())


def _type_name(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_type_name(part) for part in arguments if part is not type(None))
    if origin is tuple:
        return "list of " + _type_name(arguments[0])
    if origin is dict or kind is dict:
        return "table"
    return {bool: "true or false", int: "integer", float: "number", str: "text"}.get(kind, getattr(kind, "__name__", str(kind)))


def _default(field: Any) -> str:
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "–"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return "`[" + ", ".join(f'"{part}"' if isinstance(part, str) else str(part) for part in value) + "]`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def _with_limits(text: str, field: Any) -> str:
    limits = [f"{sign} {value:g}" for limit in field.metadata for name, sign in _LIMITS.items()
              if (value := getattr(limit, name, None)) is not None]
    return f"{text} ({', '.join(limits)})" if limits else text


if __name__ == "__main__":
    main()
