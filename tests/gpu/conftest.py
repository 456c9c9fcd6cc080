"""Every test in this folder has the marker `gpu` and is skipped where there is no CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

LONGEST = ("test_gpu_cluster_processes", "one_request_alone", "have_the_engines_bits", "gives_the_tokens_of_a_cpu")
"""Parts of the names of tests that take a minute or more where kernels have to be compiled: they begin first, so that several
processes finish at about the same time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: next((i for i, name in enumerate(LONGEST) if name in item.nodeid), len(LONGEST)))
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(skip)
