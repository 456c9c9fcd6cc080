from __future__ import annotations

import torch

from paceline.cache.store import PagedStore
from paceline.kernels import TorchOps


def filled(seed: int) -> PagedStore:
    store = PagedStore(8, 4, [(2, 8), (1, 4)], feature_size=6, dtype=torch.float64, device="cpu")
    generator = torch.Generator().manual_seed(seed)
    for tensor in store.tensors():
        tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * 100)
    return store


def test_a_request_moves_to_another_store_bit_for_bit():
    """Keys, values, features and tokens of the first ten positions, onto other pages."""
    here, there = filled(0), filled(1)
    untouched = [tensor[there.slots([1, 4], 8)].clone() for tensor in there.tensors()]
    there.import_request([6, 0, 3], here.export_request([2, 5, 7], 10))
    for mine, theirs in zip(here.tensors(), there.tensors(), strict=True):
        assert torch.equal(mine[here.slots([2, 5, 7], 10)], theirs[there.slots([6, 0, 3], 10)])
    for before, tensor in zip(untouched, there.tensors(), strict=True):
        assert torch.equal(before, tensor[there.slots([1, 4], 8)])


def test_moves_read_all_before_they_write():
    store = filled(2)
    before = [tensor.clone() for tensor in store.tensors()]
    ops = TorchOps()
    ops.move_tokens(ops.movable(store.tensors()), torch.tensor([[5, 6, 7, 1]]), torch.tensor([[4, 5, 6, 1]]))
    for old, new in zip(before, store.tensors(), strict=True):
        assert torch.equal(new[4:7], old[5:8])
