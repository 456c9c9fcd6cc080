"""What tests of kernels share."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _two_threads() -> None:
    """Kernels share their work among threads: two of them, whatever the machine has and the suite allows."""
    torch.set_num_threads(2)


@pytest.fixture
def triton_device() -> Iterator[None]:
    """Tensors are made, from the same seed, on the device that Triton's kernels run on."""
    from interpreted import DEVICE

    torch.manual_seed(0)
    torch.set_default_device(DEVICE)
    yield
    torch.set_default_device("cpu")


@pytest.fixture
def ops(triton_device):  # type: ignore[no-untyped-def]
    """Triton's kernels."""
    from interpreted import DEVICE

    from paceline.kernels.triton.ops import TritonOps

    return TritonOps(DEVICE, max_context=600)
