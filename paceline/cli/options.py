"""Options that several commands have: their help texts and checks."""

from __future__ import annotations

import math

MODEL = "Hugging Face folder, hub id, GGUF file, or default, the small policy bundled with the package."
DRAFTER = "suffix, none, the folder of a learned drafter, or default, the learned drafter of the bundled policy."
DEVICE = "auto (a GPU if there is one), cpu or cuda."
THREADS = "Number of CPU threads (default: PyTorch's)."
MAX_BATCH = "Maximum number of requests that run at the same time (default: 64 on a CPU, 256 on a GPU)."
KV_MEMORY = "Memory for the KV cache in GiB (default: 2 on a CPU, 85 % of what is free on a GPU)."
SUFFIX_MEMORY = "Memory for the history of the suffix drafter in GiB (default: 0.25)."
MAX_THREADS = 1024


def complete_setting(incomplete: str) -> list[str]:
    """Shell completion of `--set`: the keys of a run's configuration that begin like this (`paceline --install-completion`)."""
    from paceline.config import TrainConfig

    return [f"{key}=" for key in TrainConfig.key_names() if key.startswith(incomplete)]


def check_positive(option: str, value: float | None) -> None:
    """Raise ValueError unless the option was left out, or is a finite number above 0."""
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"{option}: must be a finite number > 0, not {value}")
