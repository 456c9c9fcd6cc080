"""Kernels share their work among threads: two of them, whatever the machine has and the suite allows."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
