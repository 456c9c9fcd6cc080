"""Small helpers of the checkpoint readers: every failure becomes one line that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ValueError(f"{file}: no such file")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not JSON ({one_line(error)})") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{file}: not a JSON object")
    return raw


def load_tokenizer(folder: Path, **options: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, **options)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder}: the tokenizer does not load ({one_line(error)})") from None


def named(file: Path, make: Any, *args: Any) -> Any:
    """make(*args), with the file put before an error."""
    try:
        return make(*args)
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{file}: {one_line(error).removeprefix(f'{file.name}: ')}") from None


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
