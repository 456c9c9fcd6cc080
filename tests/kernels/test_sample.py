"""Sampling: exact distributions, exact agreement between families, filters, and rows that cannot be sampled."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.kernels.cpu.ops import CpuOps
from paceline.kernels.records import SamplingTensors
from paceline.kernels.reference.ops import TorchOps, thresholds

FAMILIES = [TorchOps(), CpuOps()]
SETTINGS = {
    "plain": {}, "cooler": {"temperature": 0.7}, "hotter": {"temperature": 1.6}, "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8}, "min_p": {"min_p": 0.1}, "all": {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
}


def params(num_rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0,
           seed: int = 0) -> SamplingTensors:
    return SamplingTensors(torch.arange(num_rows) * 7919 + seed, torch.arange(num_rows) % 97,
                           torch.full((num_rows,), temperature), torch.full((num_rows,), top_k, dtype=torch.int32),
                           torch.full((num_rows,), top_p), torch.full((num_rows,), min_p))


def exact(logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
          min_p: float = 0.0) -> torch.Tensor:
    """The distribution [V], written the slow way, token by token."""
    p = (logits.double() / temperature).softmax(-1).tolist()
    order = sorted(range(len(p)), key=lambda v: -p[v])
    if top_k:
        order = order[:top_k]
    if top_p < 1:
        mass, kept = sum(p[v] for v in order), []
        for v in order:
            kept.append(v)
            if sum(p[u] for u in kept) / mass >= top_p:
                break
        order = kept
    order = [v for v in order if p[v] >= min_p * p[order[0]]]
    out = torch.zeros(len(p), dtype=torch.float64)
    out[order] = torch.tensor([p[v] for v in order], dtype=torch.float64)
    return out / out.sum()


@pytest.mark.parametrize("ops", FAMILIES, ids=lambda ops: ops.name)
@pytest.mark.parametrize("setting", SETTINGS)
def test_tokens_follow_the_exact_distribution(ops, setting):
    logits = torch.randn(24, generator=torch.Generator().manual_seed(3)) * 1.5
    expected = exact(logits, **SETTINGS[setting])
    n = 20_000
    token, logprob = ops.sample(logits.expand(n, -1), params(n, **SETTINGS[setting]))
    counts = torch.bincount(token, minlength=24).double()
    kept = expected > 0
    assert counts[~kept].sum() == 0
    chi_square = float(((counts - n * expected)[kept].square() / (n * expected[kept])).sum())
    freedom = int(kept.sum()) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 4  # seeded; about four standard deviations
    assert torch.allclose(logprob.double(), expected[token].log(), atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_families_agree(dtype):
    g = torch.Generator().manual_seed(1)
    for vocab, spread in ((7, 1.0), (256, 4.0), (3001, 2.0), (5000, 8.0)):
        n = 60
        logits = (torch.randn(n, vocab, generator=g, dtype=torch.float64) * spread).to(dtype)
        logits[:, ::9] = -torch.inf
        chosen = SamplingTensors(
            torch.randint(-(2**63), 2**63 - 1, (n,), generator=g), torch.randint(0, 5000, (n,), generator=g),
            torch.tensor([1.0, 0.7, 0.0, 1.3]).repeat(15), torch.tensor([0, 3, 50, 0, 2500], dtype=torch.int32).repeat(12),
            torch.tensor([1.0, 0.9, 0.3]).repeat(20), torch.tensor([0.0, 0.0, 0.0, 0.02, 0.0, 0.3]).repeat(10))
        (token, logprob), (token2, logprob2) = (ops.sample(logits, chosen) for ops in FAMILIES)
        assert logprob.dtype == logprob2.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert torch.equal(token, token2)
        assert torch.allclose(logprob, logprob2, atol=1e-12 if dtype == torch.float64 else 5e-6)


def test_token_is_the_argmax_of_logits_plus_noise():
    """The definition itself, with the noise asked for separately: what drafters rely on."""
    logits = torch.randn(40, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    chosen = params(40)
    expected = (logits + CpuOps().gumbel(chosen.seed, chosen.position, torch.arange(1000))).argmax(-1)
    for ops in FAMILIES:
        assert torch.equal(ops.sample(logits, chosen)[0], expected)


@pytest.mark.parametrize("ops", FAMILIES, ids=lambda ops: ops.name)
def test_greedy_and_ties(ops):
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [0.0, 0.0, 0.0, 0.0], [-1.0, -torch.inf, -5.0, -torch.inf]])
    token, logprob = ops.sample(logits, params(3, temperature=0.0))
    assert token.tolist() == [1, 0, 0] and logprob.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("ops", FAMILIES, ids=lambda ops: ops.name)
def test_ties_with_the_last_kept_are_kept(ops):
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0, -1.0]).expand(4000, -1)
    for setting in ({"top_k": 2}, {"top_p": 0.6}):  # the second token is needed, and three tie there
        assert set(ops.sample(logits, params(4000, **setting))[0].tolist()) == {0, 1, 2, 3}
    assert set(ops.sample(logits, params(4000, top_p=1e-6))[0].tolist()) == {0}


@pytest.mark.parametrize("ops", FAMILIES, ids=lambda ops: ops.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_cannot_be_sampled(ops, dtype, temperature):
    logits = torch.zeros(6, 300, dtype=dtype)
    logits[0, 299] = torch.nan
    logits[1, 0] = -torch.tensor(torch.nan, dtype=dtype).abs()  # NaN with its sign bit set
    logits[2] = -torch.inf
    logits[3, 5] = torch.inf
    logits[4, 1:] = -torch.inf
    token, logprob = ops.sample(logits, params(6, temperature=temperature))
    assert token[:4].tolist() == [-1] * 4 and logprob[:4].isnan().all()
    assert token[4] == 0 and logprob[4] == 0 and token[5] >= 0 and logprob[5].isfinite()


@pytest.mark.parametrize("spread", [0.01, 3.0, 30.0])
def test_top_p_without_sorting_equals_sorting(spread):
    """Flat and peaked rows: the bins of the numba kernel, and their last open one, against a full sort."""
    g = torch.Generator().manual_seed(2)
    logits = torch.randn(64, 2000, dtype=torch.float64, generator=g) * spread
    for top_p in (0.05, 0.5, 0.95, 0.9999):
        chosen = params(64, top_p=top_p)
        scaled = logits.masked_fill(logits < thresholds(logits, chosen)[:, None], -torch.inf)
        token, logprob = CpuOps().sample(logits, chosen)
        expected = scaled.log_softmax(-1).gather(1, token[:, None])[:, 0]
        assert torch.allclose(logprob, expected, atol=1e-10)


def test_rows_do_not_depend_on_their_neighbours():
    logits = torch.randn(33, 700, generator=torch.Generator().manual_seed(4))
    chosen = params(33, temperature=0.9)
    ops = CpuOps()
    token, logprob = ops.sample(logits, chosen)
    for i in range(33):
        alone, alone_logprob = ops.sample(logits[i : i + 1], SamplingTensors(*(t[i : i + 1] for t in chosen)))
        assert alone[0] == token[i] and alone_logprob[0] == logprob[i]


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="rows of sampling parameters"):
        CpuOps().sample(torch.zeros(4, 10), params(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ops", FAMILIES, ids=lambda ops: ops.name)
@pytest.mark.parametrize("setting", SETTINGS)
def test_log_probabilities_of_given_tokens_are_those_of_sampled_ones(ops, setting, dtype):
    logits = (torch.randn(40, 3000, generator=torch.Generator().manual_seed(5)) * 2).to(dtype)
    token, logprob = ops.sample(logits, params(40, **SETTINGS[setting]))
    assert torch.equal(ops.logprobs_of(logits, token, params(40, **SETTINGS[setting], seed=99)), logprob)
    other = (token + 1) % 3000  # mostly outside of the filters, where such a token is added to those that they keep
    scaled = logits.double() / SETTINGS[setting].get("temperature", 1.0)
    kept = (scaled >= thresholds(scaled, params(40, **SETTINGS[setting]))[:, None]).scatter(1, other[:, None], True)
    expected = scaled.masked_fill(~kept, -torch.inf).log_softmax(-1).gather(1, other[:, None])[:, 0]
    found = ops.logprobs_of(logits, other, params(40, **SETTINGS[setting])).double()
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
