"""Options that several tasks share, and how options become a frozen config whose errors name the field."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import Field, ValidationError

from paceline.config import Config

C = TypeVar("C", bound=Config)


class PromptOptions(Config):
    """How a question is put to the model."""

    chat: bool = True
    """Chat messages; False: plain text."""
    system: str | None = None
    """Text of a system message (in plain text: put in front)."""
    instruction: str | None = None
    """Follows the question; None: the task's own, "": nothing."""


class DataOptions(PromptOptions):
    """Where problems come from."""

    data: str | None = None
    """A file, a folder, or a hub id such as `openai/gsm8k`; None: the folder named by PACELINE_DATA."""
    split: str = "train"
    limit: int | None = Field(None, ge=1)
    """Only the first so many problems."""


def make_config(task: str, cls: type[C], options: dict[str, Any]) -> C:
    try:
        return cls(**options)
    except ValidationError as error:
        raise ValueError("; ".join(_complaint(task, cls, one) for one in error.errors())) from None


def _complaint(task: str, cls: type[Config], error: Any) -> str:
    field = ".".join(str(part) for part in error["loc"]) or "options"
    if error["type"] == "extra_forbidden":
        return f"{task}: {field}: no such option (there are {', '.join(cls.model_fields)})"
    return f"{task}: {field}: {error['msg']}"


def make_prompt(question: str, options: PromptOptions, instruction: str) -> str | list[dict[str, str]]:
    """`instruction` is the task's own, for when the options name none."""
    wanted = instruction if options.instruction is None else options.instruction
    asked = f"{question}\n\n{wanted}" if wanted else question
    if not options.chat:
        return f"{options.system}\n\n{asked}" if options.system else asked
    system = [{"role": "system", "content": options.system}] if options.system else []
    return [*system, {"role": "user", "content": asked}]
