"""The base of all configuration records, and the errors that say in one line which keys are wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from paceline.names import suggest

_SHOWN = 80
"""Number of characters of a wrong value that an error message shows."""


class ConfigProblem(NamedTuple):
    """One key that is wrong, and why."""

    key: str
    """The key, with dots between the tables that it is in; empty if the configuration as a whole is wrong."""
    message: str
    is_unknown: bool = False
    """Whether there is no such key."""

    def __str__(self) -> str:
        return f"{self.key}: {self.message}" if self.key else self.message

    def within(self, table: str) -> ConfigProblem:
        """Return this problem with its key prefixed by the name of the table that contains it."""
        return self._replace(key=f"{table}.{self.key}" if self.key else table)


class ConfigError(ValueError):
    """A configuration that is not valid. The message is one line that names the wrong keys."""

    def __init__(self, problems: Sequence[ConfigProblem]) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = tuple(problems)

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[ConfigProblem, ...]]]:
        return ConfigError, (self.problems,)  # an exception is otherwise pickled as its message


class Config(BaseModel):
    """Base of all configuration records: frozen, unknown keys are errors, and numbers are finite. A truth value is not a
    number. What is wrong is a `ConfigError`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            known, found = list(self.key_names()), [problem for one in error.errors() for problem in _problems(one)]
            raise ConfigError([_with_suggestion(problem, known) for problem in found]) from None

    @classmethod
    def key_names(cls) -> Iterator[str]:
        """All keys, those of records within this one as `table.key`."""
        for name, field in cls.model_fields.items():
            yield name
            if isinstance(field.annotation, type) and issubclass(field.annotation, Config):
                yield from (f"{name}.{key}" for key in field.annotation.key_names())

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth_values(cls, value: Any, info: ValidationInfo) -> Any:
        field = None if info.field_name is None else cls.model_fields.get(info.field_name)
        values = value if isinstance(value, list | tuple) else (value,)
        if field is not None and any(isinstance(one, bool) for one in values) and _has_numbers(field.annotation):
            raise ValueError("must be a number")
        return value


def _has_numbers(annotation: Any) -> bool:
    """Whether a value of this type is a number or consists of numbers."""
    return annotation in (int, float) or any(map(_has_numbers, get_args(annotation)))


_WANTED = {
    "greater_than": "> {gt:g}", "greater_than_equal": ">= {ge:g}", "less_than": "< {lt:g}", "less_than_equal": "<= {le:g}",
    "finite_number": "a finite number", "int_parsing": "an integer", "int_type": "an integer",
    "int_from_float": "an integer", "int_parsing_size": "a smaller integer", "float_parsing": "a number",
    "float_type": "a number", "bool_parsing": "true or false", "bool_type": "true or false", "string_type": "a string",
    "dict_type": "a table", "model_type": "a table", "model_attributes_type": "a table", "tuple_type": "a list",
    "list_type": "a list", "too_long": "a list of {max_length}", "too_short": "a list of {min_length}"}
"""What was wanted, by the type of pydantic's error record."""


def _problems(error: Any) -> list[ConfigProblem]:
    """The problems in one of pydantic's error records."""
    key, kind, context = ".".join(str(part) for part in error["loc"]), error["type"], error.get("ctx", {})
    inner = context.get("error")
    if isinstance(inner, ConfigError):  # of a record within this one
        return [problem.within(key) for problem in inner.problems]
    if kind == "extra_forbidden":
        return [ConfigProblem(key, "no such key", is_unknown=True)]
    if kind == "missing":
        return [ConfigProblem(key, "is required")]
    if kind == "literal_error":
        choices = context["expected"].replace("'", "").replace(" or ", ", ")
        near = suggest(str(error["input"]), choices.split(", ")) if isinstance(error["input"], str) else ""
        return [ConfigProblem(key, f"{_shown(error['input'])} is not one of {choices}{near}")]
    if kind != "value_error":
        wanted = _WANTED[kind].format(**context) if kind in _WANTED else "of another type"
        return [ConfigProblem(key, f"must be {wanted}, not {_shown(error['input'])}")]
    return [ConfigProblem(key, f"{inner} (given: {_shown(error['input'])})" if key else str(inner))]


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN else text[:_SHOWN] + " …"


def _with_suggestion(problem: ConfigProblem, known: list[str]) -> ConfigProblem:
    return problem._replace(message=f"no such key{suggest(problem.key, known)}") if problem.is_unknown else problem
