"""What is wrong with a command line, in the words of all other errors. Knows typer's exceptions by their names, because the
modules that they are in differ between versions."""

from __future__ import annotations

import re
from typing import Any

from paceline.names import suggest

_WANTED = (
    (r"valid (?:int|integer)", "must be an integer"), (r"valid (?:float|number)", "must be a number"),
    (r"greater than or equal to (\S+)|x>=([^\s.<]+(?:\.\d+)?)", "must be at least {}"),
    (r"less than or equal to (\S+)|x<=([^\s.]+(?:\.\d+)?)", "must be at most {}"),
)
"""Parts of typer's messages about values, and ours."""


def usage_message(error: Any) -> str:
    """One line about a command line that cannot be parsed."""
    context = getattr(error, "ctx", None)
    command = getattr(error, "cmd", None) or getattr(context, "command", None)
    path = getattr(context, "command_path", None) or "paceline"
    return f"{_complaint(error, command)} ({path} -h shows what there is)"


def _complaint(error: Any, command: Any) -> str:
    kind, said, parameter = type(error).__name__, error.format_message(), getattr(error, "param", None)
    if kind == "NoSuchOption":
        known = [name for each in getattr(command, "params", ()) for name in each.opts]
        return f"{error.option_name}: no such option{_as_setting(error.option_name, known) or suggest(error.option_name, known)}"
    if kind == "MissingParameter" and parameter is not None:
        return f"{_name(parameter)} is required. {getattr(parameter, 'help', None) or ''}".rstrip(". ") + "."
    if kind == "BadParameter" and parameter is not None:
        return f"{_name(parameter)}: {_wanted(error.message)}"
    if kind == "BadOptionUsage":
        return f"{error.option_name}: " + ("it takes no value" if "not take" in said else "a value is required")
    unknown = re.match(r"No such command '([^']*)'", said)
    if unknown:
        return f"{unknown[1]}: no such command{suggest(unknown[1], getattr(command, 'commands', ()))}"
    extra = re.search(r"unexpected extra argument\S* \((.*)\)", said)
    return f"{extra[1]}: not expected here" if extra else said


def _as_setting(option: str, known: list[str]) -> str:
    """How `--steps` of a command with `--set` is written, if it is a setting of training."""
    if "--set" not in known or "--resume" not in known:
        return ""
    from paceline.config import TrainConfig

    keys = list(TrainConfig.key_names())
    name = option.lstrip("-").replace("-", "_")
    found = name if name in keys else suggest(name, keys).removeprefix("; it is called ").partition(" here")[0]
    found = found if found in keys else next((key for key in keys if key.endswith(f".{name}")), "")
    return f"; settings are given with --set: --set {found}=VALUE" if found else ""


def _name(parameter: Any) -> str:
    return max(parameter.opts, key=len) if parameter.param_type_name == "option" else parameter.name.upper()


def _wanted(said: str) -> str:
    for pattern, ours in _WANTED:
        found = re.search(pattern, said)
        if found:
            return ours.format(*(group for group in found.groups() if group is not None))
    return said.removeprefix("Input should be ")
