"""Structured outputs: the form that an answer has to have, by vLLM's names. Nothing here needs the grammar library; see
`paceline.engine.grammar` for what does."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

GrammarKind = Literal["json", "regex", "choice", "grammar"]


class Grammar(NamedTuple):
    """A grammar as text: a JSON schema, a regular expression, a JSON list of strings, or a grammar in Lark's syntax or in EBNF
    (GBNF)."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """The form of an answer. Exactly one field is given."""

    json: str | Mapping[str, object] | None = None
    """A JSON schema."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """A regular expression that the whole answer matches."""
    choice: tuple[str, ...] = ()
    """The possible answers."""
    grammar: str | None = None
    """A grammar in Lark's syntax or in EBNF (GBNF)."""

    def __post_init__(self) -> None:
        given = [field.name for field in fields(self) if getattr(self, field.name) not in (None, False, ())]
        if len(given) != 1:
            raise ValueError(f"structured_outputs: exactly one of {', '.join(field.name for field in fields(self))} is needed, "
                             f"not {', '.join(given) or 'none'}")
        if isinstance(self.json, Mapping):
            object.__setattr__(self, "json", json.dumps(self.json, ensure_ascii=False))
        choice = (self.choice,) if isinstance(self.choice, str) else self.choice
        if not isinstance(choice, Iterable) or not all(isinstance(text, str) and text for text in choice):
            raise ValueError("structured_outputs: choice is not a list of non-empty strings")
        object.__setattr__(self, "choice", tuple(choice))
        if not isinstance(self.json_object, bool):
            raise ValueError("structured_outputs: json_object is not True or False")
        for name in ("json", "regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise ValueError(f"structured_outputs: {name} is not a string")

    @classmethod
    def of(cls, value: object) -> StructuredOutputs | None:
        """Return what is given as a mapping, too. ValueError if a key is not one of the fields."""
        if value is None or isinstance(value, StructuredOutputs):
            return value
        if not isinstance(value, Mapping):
            raise ValueError("structured_outputs: neither a StructuredOutputs nor a mapping")
        known = {field.name for field in fields(cls)}
        wrong = [str(name) for name in value if name not in known]
        if wrong:
            raise ValueError(f"structured_outputs: {wrong[0]} is not one of {', '.join(sorted(known))}")
        return cls(**{name: entry for name, entry in value.items() if entry is not None})

    def as_grammar(self) -> Grammar:
        """Return the form as one kind of grammar and its text."""
        if self.json_object:
            return Grammar("json", '{"type": "object"}')
        if self.choice:
            return Grammar("choice", json.dumps(list(self.choice), ensure_ascii=False))
        if isinstance(self.json, str):
            return Grammar("json", self.json)
        if self.regex is not None:
            return Grammar("regex", self.regex)
        assert self.grammar is not None
        return Grammar("grammar", self.grammar)
