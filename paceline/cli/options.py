"""Options that several commands have: their types with help texts, and their checks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from paceline.types import SamplingParams

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}
DEFAULT_PARAMS = SamplingParams()
MODEL = "Hugging Face folder, hub id, GGUF file, or default, the small policy bundled with the package."
Model = Annotated[str, typer.Option(help=MODEL)]
Drafter = Annotated[str, typer.Option(
    help="suffix, none, the folder or hub id of a learned drafter, or default, that of the bundled policy.")]
Device = Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu or cuda.")]
Dtype = Annotated[str, typer.Option(help="auto, float64, float32, bfloat16 or float16.")]
Threads = Annotated[int | None, typer.Option(min=1, max=1024, help="Number of CPU threads (default: PyTorch's).")]
MaxBatch = Annotated[int | None, typer.Option(
    min=1, help="Maximum number of requests that run at the same time (default: 64 on a CPU, 256 on a GPU).")]
KvMemory = Annotated[float | None, typer.Option(
    help="Memory for the KV cache in GiB (default: 2 on a CPU, 85 % of what is free on a GPU).")]
TensorParallel = Annotated[int | None, typer.Option(
    min=1, help="Number of processes that the policy is split over, each on a GPU of its own (default: 1).")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")]


def complete_setting(incomplete: str) -> list[str]:
    """Shell completion of `--set`: the keys of a run's configuration that begin like this (`paceline --install-completion`)."""
    from paceline.config import TrainConfig

    return [f"{key}=" for key in TrainConfig.key_names() if key.startswith(incomplete)]


def check_positive(option: str, value: float | None) -> None:
    """Raise ValueError unless the option was left out, or is a finite number above 0."""
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"{option}: must be a finite number > 0, not {value}")


def check_outputs(*files: Path | None) -> None:
    """Files that are written at the end: nobody should wait for a result that cannot be kept."""
    for file in files:
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            raise ValueError(f"{file}: " + ("is a folder, not a file" if file.is_dir() else f"there is no folder {file.parent}"))


def numbers(name: str, text: str, kind: type[int] | type[float], low: float, high: float) -> list[float]:
    """The numbers of an option that takes several, separated by commas."""
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name} {text}: not a comma-separated list of numbers") from None
    if not all(low <= value <= high for value in found):
        raise ValueError(f"{name} {text}: not all in {low:g}..{high:g}")
    return list(found)
