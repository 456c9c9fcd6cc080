"""`learner.exact_logprobs` in bfloat16 on a CUDA device: log-probabilities with the engine's bits, in shapes of Qwen, and
gradients near those of the ordinary forward pass."""

from __future__ import annotations

import pytest
import torch

from paceline import Engine, SamplingParams
from paceline.config import EngineConfig, LearnerConfig, OptimizerConfig
from paceline.drafters.eagle import Eagle, EagleConfig
from paceline.models.config import ExpertsSpec, LayerSpec, ModelConfig
from paceline.models.decoder import Decoder
from paceline.rl import Learner, make_algorithm, pack, samples_of
from paceline.rl.batch import Sample
from paceline.rl.models import SamplingFilters

SHAPES = {
    # Qwen2.5-0.5B and -1.5B with few layers and a small vocabulary: fused products, and K in shares in the second one's down.
    "0.5B": ModelConfig("qwen2", 8021, 896, 4864, 3, 14, 2, 64, qkv_bias=True, tie_embeddings=True, max_context=4096),
    "1.5B": ModelConfig("qwen2", 5003, 1536, 8960, 2, 12, 2, 128, qkv_bias=True, max_context=4096),
    "experts": ModelConfig("qwen3_moe", 4093, 1024, 2048, 2, 16, 4, 64, qk_norm=True, max_context=4096,
                           layers=(LayerSpec(experts=ExpertsSpec(32, 4, 384, normalised=False)),) * 2),
    "qwen3": ModelConfig("qwen3", 4093, 1024, 3072, 3, 16, 8, 128, qk_norm=True, tie_embeddings=True, max_context=4096),
}
LENGTHS = [3, 40, 127, 128, 129, 700, 1500]
"""Numbers of prompt tokens, on both sides of the attention's chunks."""
FILTERS = {"top_k": 200, "top_p": 0.95, "min_p": 0.001}


def policy(shape: str, dtype: torch.dtype) -> Decoder:
    model = Decoder.random(SHAPES[shape], seed=1, std=0.06, dtype=dtype, device="cuda")
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(0, 0.2, generator=torch.Generator("cuda").manual_seed(2))
    return model


def answers(engine: Engine, shape: str, strategy: str, **filters: float) -> list[Sample]:
    """Groups of three, whose prompts begin alike in part, with answers of several lengths."""
    draw = torch.Generator().manual_seed(0)
    start = torch.randint(0, SHAPES[shape].vocab_size, (64,), generator=draw).tolist()
    prompts = [(start + torch.randint(0, SHAPES[shape].vocab_size, (n,), generator=draw).tolist())[:n] for n in LENGTHS]
    params = [SamplingParams(temperature=0.8, max_new_tokens=20 + 30 * i, seed=i, ignore_eos=True, **filters)
              for i in range(len(LENGTHS))]
    groups = engine.generate(prompts, params, n=3, strategy=strategy)
    for reward, rollout in enumerate(rollout for group in groups for rollout in group.rollouts):
        rollout.reward = float(reward % 3)
    return samples_of(groups, torch.float32)


def make_learner(model: Decoder, filters: dict[str, float] | None = None, compute: torch.dtype = torch.bfloat16,
                 **config) -> Learner:
    learner = Learner(model, make_algorithm("grpo", 16), LearnerConfig(**config), OptimizerConfig(lr=1e-4), 10, 0.8, compute,
                      filters=SamplingFilters(**(filters or {})))
    learner.warm_up()
    return learner


def engine_for(model: Decoder, shape: str) -> Engine:
    drafter = Eagle.random(EagleConfig.for_policy(SHAPES[shape], "eagle"), 3, 0.05, model.norm.dtype, "cuda")
    return Engine(model, None, drafter, "off", EngineConfig(max_batch=16, kv_tokens=40_000, max_rows=512, profile=False))


@pytest.mark.parametrize(("shape", "dtype", "filters"), [
    ("0.5B", torch.bfloat16, {}), ("1.5B", torch.bfloat16, {}), ("qwen3", torch.bfloat16, {}), ("0.5B", torch.bfloat16, FILTERS),
    ("0.5B", torch.float32, {})], ids=str)
def test_logprobs_have_the_engines_bits(shape, dtype, filters):
    engine = engine_for(policy(shape, dtype), shape)
    learner = make_learner(policy(shape, dtype).float(), filters, dtype, exact_logprobs=True)
    for strategy in ("off", "eagle:d3w2v6"):
        samples = answers(engine, shape, strategy, **filters)
        for max_tokens in (1, 8192):
            for batch in pack(samples, max_tokens, device="cuda"):
                logprobs, _ = learner.policy.logprobs(batch, 0.8, learner.filters)
                assert torch.equal(logprobs.detach(), batch.sampled), (strategy, batch.lengths)


@pytest.mark.parametrize("config", [{}, {"lora_rank": 4, "minibatches": 2}], ids=str)
def test_updates_report_no_difference_and_weights_stay_those_of_the_engine(config):
    """The second step's answers are sampled with the updated weights."""
    model = policy("1.5B", torch.bfloat16)
    learner = make_learner(model if config else model.float(), exact_logprobs=True, **config)
    engine = engine_for(policy("1.5B", torch.bfloat16), "1.5B")
    for step in range(2):
        engine.update_weights(learner.weights())
        samples = answers(engine, "1.5B", "eagle:d3w2v6")
        learner.infer(samples)
        learner.algorithm.compute_advantages(samples)
        metrics = learner.update(samples, step)
        assert metrics["logprob_difference/max"] == 0.0


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_as_accurate_as_those_of_the_ordinary_forward_pass(shape):
    """Both are bfloat16, with sums in other orders; what they are worth is how far they are from those of float32."""
    samples = answers(engine_for(policy(shape, torch.bfloat16), shape), shape, "off")
    gradients = []
    for dtype, exact in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        learner = make_learner(policy(shape, torch.bfloat16).float(), {}, dtype, exact_logprobs=exact)
        (batch,) = pack(samples[:12], 1 << 20, device="cuda")
        learner.policy.logprobs(batch, 0.8)[0].mean().backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in learner.policy.parameters()]))
    ordinary, exact = (float((found - gradients[0]).norm() / gradients[0].norm()) for found in gradients[1:])
    assert exact < 1.25 * ordinary < 0.2, (exact, ordinary)
    assert float(torch.cosine_similarity(gradients[1], gradients[2], dim=0)) > 0.995
