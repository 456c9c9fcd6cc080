"""The trainer's forward pass by the Triton kernels (`learner.exact_logprobs`): natively on a GPU, elsewhere through Triton's
interpreter, whose products may depend on their shape: equal bits are tested on a GPU only (`tests/gpu`)."""

from __future__ import annotations

import warnings

import pytest
import torch
from interpreted import DEVICE

from paceline.kernels.triton.ops import TritonOps
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.rl.batch import Sample, pack
from paceline.rl.exact import ExactForward
from paceline.rl.models import Policy, SamplingFilters

SHAPES = {"qwen2": ModelConfig("qwen2", 61, 32, 48, 2, 2, 1, 32, qkv_bias=True, max_context=64),  # fused products
          "qwen3": ModelConfig("qwen3", 61, 32, 48, 1, 3, 1, 24, qk_norm=True, max_context=64)}


@pytest.mark.parametrize(("shape", "filters"), [("qwen2", SamplingFilters()), ("qwen3", SamplingFilters(30, 0.9, 0.01))])
def test_packed_sequences_give_the_ordinary_values_and_gradients(shape, filters, monkeypatch):
    """Sequences of one page and of several: log-probabilities, entropy, and the gradient of every weight."""
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # numpy warns about infinities
    monkeypatch.setattr("paceline.rl.exact._PAGE_SIZE", 4)
    draw, found = torch.Generator().manual_seed(0), []
    samples = [Sample(torch.randint(0, 61, (n,), generator=draw).tolist(), start, 0, 0.0, False, torch.zeros(n - start))
               for n, start in ((7, 5), (2, 1))]
    (batch,) = pack(samples, 1000, device=DEVICE)
    for exact in (False, True):
        policy = Policy(Decoder.random(SHAPES[shape], std=0.2, device=DEVICE).requires_grad_(True), torch.float32)
        if exact:
            policy.exact = ExactForward(policy.model, TritonOps(DEVICE, max_context=64))
        logprobs, entropy = policy.logprobs(batch, 0.7, filters)
        logprobs.square().mean().backward()
        found.append([logprobs, entropy, *(parameter.grad for parameter in policy.parameters())])
    for ordinary, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, ordinary, rtol=2e-3, atol=2e-4)
