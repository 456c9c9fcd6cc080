"""The noise is Philox 4x32-10 turned into Gumbel numbers, the same bits in every family."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.kernels.cpu.ops import CpuOps
from paceline.kernels.noise import gumbel, gumbel_from_bits, philox4x32
from paceline.kernels.reference.ops import TorchOps

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(("counter", "key", "expected"), [  # the known answers that come with Random123
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
])
def test_philox_known_answers(counter, key, expected):
    words = philox4x32(tuple(torch.tensor(c) for c in counter), tuple(torch.tensor(k) for k in key))
    assert tuple(int(w) for w in words) == expected


def test_counter_layout():
    """key = the seed's halves, counter = (token // 4, position, 0, 0), lane = token % 4."""
    seed, position, token = -0x123456789ABCDEF, 77, 1234567
    words = philox4x32(tuple(torch.tensor(c) for c in (token // 4, position, 0, 0)),
                       (torch.tensor(seed & ONES), torch.tensor((seed >> 32) & ONES)))
    expected = gumbel_from_bits(words[token % 4][None])
    got = gumbel(torch.tensor([seed]), torch.tensor([position]), torch.tensor([token]))
    assert torch.equal(got[0], expected)


def test_formula_is_accurate():
    g = torch.Generator().manual_seed(0)
    x = torch.cat((torch.arange(5000), torch.randint(0, 2**32, (200_000,), generator=g), 2**32 - 1 - torch.arange(5000)))
    w = ((x.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24).double()
    exact = -torch.log(-torch.log1p(-w))
    assert (gumbel_from_bits(x).double() - exact).abs().max() < 2e-6


@pytest.mark.parametrize("vocab", [1, 3, 256, 1003])
def test_numba_equals_torch_bit_for_bit(vocab):
    g = torch.Generator().manual_seed(vocab)
    seed = torch.cat((torch.tensor([0, 1, -1, -(2**63), 2**63 - 1, 2**32, -(2**32)]),
                      torch.randint(-(2**63), 2**63 - 1, (93,), generator=g)))
    position = torch.cat((torch.tensor([0, 1, 2**31, 2**32 - 1, 2**32 + 5, 7, 8]), torch.randint(0, 10**6, (93,), generator=g)))
    scattered = torch.randint(0, 200_000, (vocab,), generator=g)
    for ids in (torch.arange(vocab), torch.arange(vocab).flip(0), scattered):
        reference, fast = TorchOps().gumbel(seed, position, ids), CpuOps().gumbel(seed, position, ids)
        assert torch.equal(reference.view(torch.int32), fast.view(torch.int32))


def test_every_float_path_is_bit_identical():
    """A million draws meet every branch (w below and above 0.29, the clamp) and rounding case in practice."""
    seed, position, ids = torch.arange(16) * 2**40 - 5, torch.arange(16), torch.arange(65536)
    reference, fast = TorchOps().gumbel(seed, position, ids), CpuOps().gumbel(seed, position, ids)
    assert torch.equal(reference.view(torch.int32), fast.view(torch.int32))


def test_a_subset_of_tokens_gets_the_same_noise():
    seed, position = torch.tensor([5, 6]), torch.tensor([9, 9])
    ids = torch.tensor([17, 4, 4, 999])
    assert torch.equal(gumbel(seed, position, ids), gumbel(seed, position, torch.arange(1000))[:, ids])


def test_follows_the_gumbel_law():
    x = gumbel(torch.arange(40) + 10**12, torch.arange(40), torch.arange(5000)).double().flatten()
    n = len(x)
    assert abs(x.mean() - 0.5772156649) < 5 * math.pi / math.sqrt(6 * n)
    assert abs(x.var() - math.pi**2 / 6) < 0.05
    law = torch.exp(-torch.exp(-x.sort().values))
    steps = torch.arange(1, n + 1, dtype=torch.float64) / n
    distance = torch.maximum((steps - law).abs(), (steps - 1 / n - law).abs()).max()
    assert distance < 2.2 / math.sqrt(n)  # Kolmogorov-Smirnov: chance about 1e-4


def test_seeds_positions_and_neighbours_are_uncorrelated():
    base = gumbel(torch.tensor([3]), torch.tensor([10]), torch.arange(20_000))[0]
    others = (gumbel(torch.tensor([4]), torch.tensor([10]), torch.arange(20_000))[0],
              gumbel(torch.tensor([3]), torch.tensor([11]), torch.arange(20_000))[0],
              gumbel(torch.tensor([3 + 2**32]), torch.tensor([10]), torch.arange(20_000))[0], base.roll(1))
    for other in others:
        assert abs(torch.corrcoef(torch.stack((base, other)))[0, 1]) < 0.04
