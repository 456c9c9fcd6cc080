"""Kernels share their work among threads: two of them, whatever the machine has and the suite allows."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _two_threads() -> None:
    torch.set_num_threads(2)
