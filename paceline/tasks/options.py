"""Options that several tasks share, and the conversion of options to a frozen config whose errors name the field."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import Field

from paceline.config import Config, ConfigError, ConfigProblem

C = TypeVar("C", bound=Config)


class PromptOptions(Config):
    """Options for turning a question into a prompt."""

    chat: bool = True
    """Prompts are chat messages; if False, plain text."""
    system: str | None = None
    """Text of the system message; in a plain-text prompt it comes first."""
    instruction: str | None = None
    """Text that follows the question. None means the task's own instruction, "" means none."""


class DataOptions(PromptOptions):
    """Options of tasks that read a data set."""

    data: str | None = None
    """A file, a folder, or a hub id such as `openai/gsm8k`. None means the folder named by the environment variable
    PACELINE_DATA."""
    split: str = "train"
    """Which split of the data set to read."""
    limit: int | None = Field(None, ge=1)
    """Number of problems to read, from the first on; None means all."""


def make_config(task: str, cls: type[C], options: dict[str, Any]) -> C:
    """A config of class `cls`. ValueError names the task and the option that is wrong."""
    try:
        return cls(**options)
    except ConfigError as error:
        raise ValueError("; ".join(_complaint(task, cls, problem) for problem in error.problems)) from None


def _complaint(task: str, cls: type[Config], problem: ConfigProblem) -> str:
    if problem.is_unknown:
        return f"{task}: {problem.key}: no such option (there are {', '.join(cls.model_fields)})"
    return f"{task}: {problem.key or 'options'}: {problem.message}"


def make_prompt(question: str, options: PromptOptions, instruction: str) -> str | list[dict[str, str]]:
    """The prompt for a question. `instruction` is the task's own; it is used if the options give none."""
    wanted = instruction if options.instruction is None else options.instruction
    asked = f"{question}\n\n{wanted}" if wanted else question
    if not options.chat:
        return f"{options.system}\n\n{asked}" if options.system else asked
    system = [{"role": "system", "content": options.system}] if options.system else []
    return [*system, {"role": "user", "content": asked}]
