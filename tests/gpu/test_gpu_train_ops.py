"""Training operations that exist only on a CUDA device."""

from __future__ import annotations

import pytest
import torch
from packed import HEADS, KV_HEADS, assert_same, normal, rows_of, tables

from paceline.config import LearnerConfig, OptimizerConfig
from paceline.kernels.reference.packed_attention import PackedPlan, join_rotated, packed_attention
from paceline.kernels.reference.training import TrainOps
from paceline.kernels.triton.ops import TritonOps
from paceline.kernels.triton.training import TritonTrainOps
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.optim import reproducible
from paceline.rl import Learner, make_algorithm, pack
from paceline.rl import models as rl_models
from paceline.rl.batch import Sample
from paceline.rl.models import Policy, train_ops


def test_variable_length_kernel_equals_groups():
    lengths, dim = (200, 3, 77, 1, 512, 40), 64
    cos, sin = tables(lengths, torch.bfloat16, "cuda", dim)
    plan = PackedPlan(lengths, torch.device("cuda"))

    def packed(q, k, v):
        return packed_attention(join_rotated(q, k, v, cos, sin), HEADS, KV_HEADS, plan)

    def wide(q, k, v):
        return packed(q.float(), k.float(), v.float()).to(v.dtype)

    assert_same(packed, wide, rows_of(lengths, torch.bfloat16, "cuda", dim), 4e-2)


@pytest.mark.parametrize(("out_features", "in_features"), [(4608, 3584), (3584, 3584), (2048, 1536), (151936, 896)])
def test_products_have_the_bits_of_the_engine_whatever_the_number_of_rows(out_features, in_features):
    """With gradients, in the autocast of a learner whose weights are in float32."""
    x = normal(300, in_features, dtype=torch.float32, seed=1, device="cuda")
    weight = normal(out_features, in_features, dtype=torch.float32, seed=2, device="cuda").requires_grad_()
    ours, engine = TritonTrainOps(), TritonOps()
    with torch.autocast("cuda", torch.bfloat16):
        found = ours.linear(x, weight)
        for rows in (1, 17, 64, 200):
            assert torch.equal(ours.linear(x[:rows], weight), found[:rows])
    assert found.dtype == torch.bfloat16 and found.requires_grad
    with torch.inference_mode():
        assert torch.equal(engine.linear(x.bfloat16(), weight.bfloat16()), found)


def test_fused_operations_equal_the_reference():
    ours, theirs = TritonTrainOps(), TrainOps()
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 5e-2)):
        x, weight = (normal(*s, dtype=dtype, seed=i, device="cuda") for i, s in enumerate(((3000, 1536), (1536,))))
        assert_same(lambda x, w: ours.rms_norm(x, w, 1e-6), lambda x, w: theirs.rms_norm(x, w, 1e-6), [x, weight], tolerance)
        assert_same(ours.silu_mul, theirs.silu_mul, [normal(2000, 2 * 8960, dtype=dtype, device="cuda")], tolerance)
        logits = (3 * normal(64, 151936, dtype=dtype, device="cuda").detach()).requires_grad_()
        targets = torch.arange(64, device="cuda") * 2000
        assert_same(*(lambda x, ops=ops, t=targets: ops.token_logprobs(x, t, 0.8)[0] for ops in (ours, theirs)),
                    [logits], tolerance)
        entropies = (ops.token_logprobs(logits, targets, 0.8)[1] for ops in (ours, theirs))
        torch.testing.assert_close(*entropies, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_policy_trains_the_same_with_fused_operations(monkeypatch, checkpointing):
    """In bfloat16, with float32 weights, as a run trains."""
    assert type(train_ops("cuda")) is TritonTrainOps
    shape = ModelConfig("qwen2", 5000, 256, 704, 3, 4, 2, 64, qkv_bias=True, max_context=512)
    samples = [Sample([i % 4999 for i in range(7, 7 + n)], 5, 0, 0.0, False, torch.zeros(n - 5)) for n in (300, 90, 211)]
    (batch,) = pack(samples, 10_000, device="cuda")
    found = []
    for ops in (TritonTrainOps(), TrainOps()):
        monkeypatch.setattr(rl_models, "train_ops", lambda device, ops=ops: ops)
        policy = Policy(Decoder.random(shape, std=0.05, device="cuda").requires_grad_(True), torch.bfloat16)
        if checkpointing:
            rl_models.recompute_activations(policy)
        logprobs, entropy = policy.logprobs(batch, 1.0)
        logprobs.sum().backward()
        found.append((logprobs.detach(), entropy, [p.grad for p in policy.parameters()]))
    for ours, theirs in zip(found[0][:2], found[1][:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    for ours, theirs in zip(found[0][2], found[1][2], strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 3e-2


def test_a_reproducible_gradient_of_attention_has_the_same_bits_every_time():
    lengths, dim = (900, 3, 777, 1, 512, 40), 128
    cos, sin = tables(lengths, torch.bfloat16, "cuda", dim)
    plan, rows = PackedPlan(lengths, torch.device("cuda")), rows_of(lengths, torch.bfloat16, "cuda", dim)
    found = []
    for _ in range(6):
        inputs = [x.detach().clone().requires_grad_() for x in rows]
        with reproducible(True):
            out = packed_attention(join_rotated(*inputs, cos, sin), HEADS, KV_HEADS, plan)
            out.float().square().sum().backward()
        found.append([x.grad for x in inputs])
    assert all(torch.equal(a, b) for grads in found[1:] for a, b in zip(grads, found[0], strict=True))


@pytest.mark.parametrize("config", [{}, {"gradient_checkpointing": True}, {"exact_logprobs": True}], ids=str)
def test_updates_of_a_deterministic_learner_have_the_same_bits(config):
    shape = ModelConfig("qwen2", 1003, 256, 640, 3, 4, 2, 64, qkv_bias=True, max_context=1024)
    draw = torch.Generator().manual_seed(0)
    answers = [(torch.randint(0, shape.vocab_size, (n,), generator=draw).tolist(), -torch.rand(n - 20, generator=draw))
               for n in (30, 700, 301, 64, 513, 129, 450, 22)]
    found = []
    for _ in range(3):
        learner = Learner(Decoder.random(shape, std=0.05, device="cuda"), make_algorithm("grpo", 16),
                          LearnerConfig(deterministic=True, minibatches=2, micro_batch_tokens=1024, **config),
                          OptimizerConfig(lr=1e-3), 10, 1.0, torch.bfloat16)
        for step in range(2):
            samples = [Sample(tokens, 20, i // 4, float(i % 3), False, sampled) for i, (tokens, sampled) in enumerate(answers)]
            learner.algorithm.compute_advantages(samples)
            learner.update(samples, step)
        found.append([parameter.detach().clone() for parameter in learner.policy.parameters()])
    assert all(torch.equal(a, b) for weights in found[1:] for a, b in zip(weights, found[0], strict=True))
