"""A run's configuration in files: reading a TOML file or the run folder's `config.json`, then overrides in the form KEY=VALUE;
and writing either."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

from paceline.bundled import default_train_config
from paceline.config import Config, ConfigError, ConfigProblem, TrainConfig
from paceline.files import MAX_LEVELS, TOO_DEEP, DamagedFile, parse_toml, read_json, require_shallow
from paceline.trainer.run_folder import CONFIG_FILE, is_unused

_SETTINGS_OF = {"task": ("task_options", "evaluation", "rollout.shuffle", "engine.suffix_scope"),
                "model": ("optimizer.lr", "engine.kv_tokens")}
"""Settings of the bundled file that are about its task, or about its model."""
_SHOWN = 60
"""Number of characters of an override that an error message shows."""


def load_config(file: Path | str | None = None, overrides: Sequence[str] = ()) -> TrainConfig:
    """The configuration in a TOML file, with all defaults filled in. Unknown keys are errors. Without a file it is that of
    `paceline train` without one, which `paceline init` prints.

    An override looks like `optimizer.lr=1e-5`. Its value is parsed as TOML and taken as plain text if that fails.
    """
    path = Path(file) if file is not None else default_train_config()
    try:
        raw = parse_toml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except RecursionError:
        raise ValueError(f"{path}: {TOO_DEEP}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    require_shallow(raw, str(path))
    if file is None:
        _leave_out_of_default(raw, overrides)
    return _validated(raw, overrides, "" if file is None else str(path))


def _leave_out_of_default(raw: dict[str, Any], overrides: Sequence[str]) -> None:
    """Remove what the bundled file says about its own task or model where another one is named: options, held-out problems and
    the order of problems are the task's, the learning rate and the size of the KV cache are the small policy's."""
    named: dict[str, Any] = {}
    for override in overrides:
        apply_override(named, override)
    for name, keys in _SETTINGS_OF.items():
        if named.get(name, raw[name]) != raw[name]:
            for key in keys:
                table, _, inner = key.partition(".")
                (raw[table] if inner else raw).pop(inner or table)


def load_run_config(folder: Path | str, overrides: Sequence[str] = ()) -> TrainConfig:
    """The configuration that the run in `folder` was started with, with overrides applied."""
    path = Path(folder) / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{folder}: there is no {CONFIG_FILE}; is it a run folder?")
    try:
        raw = read_json(path)
    except DamagedFile as error:
        raise ValueError(f"{error}; restore it, or train on from the policy in {folder}/checkpoints as the model of a new run "
                         "(--set model=…/policy)") from None
    # A run folder lists every key, so its former names were not chosen by the user: no warning.
    return _validated(raw, overrides, str(path))


def dump_config(config: TrainConfig) -> str:
    """The configuration as JSON, as it is written to `config.json`."""
    return config.model_dump_json(indent=2) + "\n"


def dump_toml(config: TrainConfig) -> str:
    """The configuration, with all defaults, as TOML that `load_config` reads. Settings without a value are comments."""
    lines, tables = [], []
    for name, value in config.model_dump(mode="json").items():
        if isinstance(value, dict) and value:
            tables += ["", f"[{_toml_key(name)}]", *_toml_lines(value)]
        else:
            lines += _toml_lines({name: value})
    return "\n".join([*lines, *tables]) + "\n"


def _toml_lines(table: Mapping[str, Any]) -> list[str]:
    return [f"# {name} is not set" if value is None else f"{_toml_key(name)} = {_toml_value(value)}"
            for name, value in table.items()]


def _toml_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml_value(name)


def _toml_value(value: Any) -> str:
    if isinstance(value, str):  # JSON's escapes are also TOML's
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, Mapping):
        found = [f"{_toml_key(name)} = {_toml_value(inner)}" for name, inner in value.items() if inner is not None]
        return f"{{{', '.join(found)}}}"
    return repr(value)


def unused_folder(out: str) -> str:
    """`out`, or the first of `out-2`, `out-3`, … in which no step of a run was done and no run is under way."""
    names = chain([out], (f"{out}-{number}" for number in count(2)))
    return next(name for name in names if is_unused(Path(name)))


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Sets one key of the nested tables `raw` from a text such as `optimizer.lr=1e-5`."""
    key, equals, text = override.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise ValueError(f"--set {override}: expected KEY=VALUE, like optimizer.lr=1e-5")
    if len(names) > MAX_LEVELS:
        raise ValueError(f"--set {override[:_SHOWN]} …: {TOO_DEEP}")
    table = raw
    for name in names[:-1]:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ValueError(f"--set {override}: {name} is not a table")
    try:
        table[names[-1]] = parse_toml(f"value = {text}")["value"]
    except RecursionError:
        raise ValueError(f"--set {override[:_SHOWN]} …: {TOO_DEEP}") from None
    except tomllib.TOMLDecodeError:
        table[names[-1]] = text.strip()
    require_shallow(table[names[-1]], f"--set {override[:_SHOWN]} …")


def check_drafter_settings(config: TrainConfig) -> None:
    """Raises a ConfigError if `spot`, `drafter_budget` or `drafter_alarms` contain what is not a setting, whether or not this run
    trains a drafter."""
    if not (config.spot or config.drafter_budget or config.drafter_alarms):
        return
    from paceline.spot.alarms import AlarmConfig  # imports torch, which takes time
    from paceline.spot.budget import TrainingBudgetConfig
    from paceline.spot.config import SpotConfig

    tables: dict[str, type[Config]] = {"spot": SpotConfig, "drafter_budget": TrainingBudgetConfig, "drafter_alarms": AlarmConfig}
    for name, kind in tables.items():
        try:
            kind(**getattr(config, name))
        except ConfigError as error:
            raise ConfigError([problem.within(name) for problem in error.problems]) from None


def with_source(error: ConfigError, overrides: Sequence[str], file: str = "") -> ValueError:
    """The error as one line that says where each wrong setting comes from: `--set KEY=VALUE` if it was overridden, otherwise the
    file."""
    return ValueError("; ".join(_with_source(problem, overrides, file) for problem in error.problems))


def _with_source(problem: ConfigProblem, overrides: Sequence[str], file: str) -> str:
    for override in reversed(overrides):
        key = override.partition("=")[0].strip()
        if problem.key == key:
            return f"--set {override}: {problem.message}"
        if problem.key and (f"{problem.key}.".startswith(f"{key}.") or f"{key}.".startswith(f"{problem.key}.")):
            return f"--set {override}: {problem}"
    return f"{file}: {problem}" if file else str(problem)


def _validated(raw: Mapping[str, Any], overrides: Sequence[str], source: str) -> TrainConfig:
    try:
        content = dict(raw)
        for override in overrides:
            apply_override(content, override)
        config = TrainConfig(**content)
        check_drafter_settings(config)
        return config
    except ConfigError as error:
        raise with_source(error, overrides, source) from None
