"""The Triton kernels of training against the torch reference, values and gradients: natively on a GPU, elsewhere through Triton's
interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny
import torch
from kernels.interpreted import CUDA, DEVICE  # first: it decides how Triton is imported
from packed import assert_same, normal

from paceline.kernels.reference.training import TrainOps
from paceline.kernels.triton import training
from paceline.kernels.triton.training import TritonTrainOps
from paceline.models.decoder import Decoder
from paceline.rl import models as rl_models
from paceline.rl import pack
from paceline.rl.batch import Sample
from paceline.rl.models import Policy

HALF = torch.bfloat16 if CUDA else torch.float16
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, HALF])


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return normal(*shape, dtype=dtype, seed=seed, device=DEVICE)


@DTYPES
@pytest.mark.parametrize("shape", [(7, 24), (2, 2, 16), (3, 33)])
def test_rms_norm(dtype, shape, monkeypatch):
    monkeypatch.setattr(training, "_NORM_PROGRAMS", 3)  # some take several rows
    x, residual, weight = (draw(*s, dtype=dtype, seed=i) for i, s in enumerate((shape, shape, shape[-1:])))
    ours, reference = ([lambda x, w, ops=ops: ops.rms_norm(x, w, 1e-5),
                        lambda x, r, w, ops=ops: ops.add_rms_norm(x, r, w, 1e-5)[0]] for ops in (TritonTrainOps(), TrainOps()))
    for one, other, inputs in zip(ours, reference, ([x, weight], [x, residual, weight]), strict=True):
        assert_same(one, other, inputs, TOLERANCE[dtype])


def test_a_frozen_norm_gets_no_gradient():
    x, weight = draw(4, 8, dtype=torch.float32), draw(8, dtype=torch.float32, seed=1).detach()
    TritonTrainOps().rms_norm(x, weight, 1e-5).sum().backward()
    assert x.grad is not None and weight.grad is None


@DTYPES
@pytest.mark.parametrize("width", [40, 3000])
def test_silu_mul(dtype, width):
    assert_same(TritonTrainOps().silu_mul, TrainOps().silu_mul, [draw(3, width, dtype=dtype)], TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize(("vocabulary", "temperature"), [(50, 1.0), (4096, 0.7), (5001, 1.0)])
def test_logprobs_and_entropy_of_sampled_tokens(dtype, vocabulary, temperature):
    logits = (4 * draw(3, vocabulary, dtype=dtype).detach()).requires_grad_()
    targets = torch.tensor([0, vocabulary - 1, 3], device=DEVICE)
    assert_same(*(lambda x, ops=ops: ops.token_logprobs(x, targets, temperature)[0] for ops in (TritonTrainOps(), TrainOps())),
                [logits], 2e-5 if dtype == torch.float32 else TOLERANCE[dtype])
    found, wanted = (ops.token_logprobs(logits, targets, temperature)[1] for ops in (TritonTrainOps(), TrainOps()))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert not found.requires_grad


def test_a_policy_has_the_same_logprobs_and_gradients(monkeypatch):
    """Two models of one shape, one with these kernels and one with the reference."""
    samples = [Sample([1, 2, 3, 4], 2, 0, 0.0, False, torch.zeros(2)), Sample([5, 6], 1, 0, 0.0, False, torch.zeros(1))]
    (batch,) = pack(samples, 10_000, device=DEVICE)
    found = []
    for ops in (TritonTrainOps(), TrainOps()):
        monkeypatch.setattr(rl_models, "train_ops", lambda device, ops=ops: ops)
        model = Decoder.random(replace(tiny.CONFIGS["qwen3"], num_layers=1), std=0.3, device=DEVICE).requires_grad_(True)
        logprobs, entropy = Policy(model, torch.float32).logprobs(batch, 1.0)
        logprobs.sum().backward()
        found.append((logprobs.detach(), entropy, [p.grad for p in model.parameters()]))
    for ours, theirs in zip(found[0][:2], found[1][:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(found[0][2], found[1][2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
