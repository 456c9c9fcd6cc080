"""Tokens follow the policy's distribution, through the whole engine and with speculation on."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare
from tiny import VOCAB, model

from paceline import Engine, SamplingParams
from paceline.config import EngineConfig
from paceline.kernels import TorchOps
from paceline.models.attend import PackedAttend
from paceline.models.decoder import Rope

PROMPT = [3, 1, 4, 1, 5]
DRAWS = 3000


def exact(temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> torch.Tensor:
    """The filtered distribution of the first token, straight from the definition."""
    policy = model("qwen2")
    cos, sin = Rope(policy.config, 16, torch.float64, "cpu")(torch.arange(len(PROMPT)))
    hidden = policy(torch.tensor(PROMPT), PackedAttend(TorchOps(), cos, sin, (len(PROMPT),)))
    p = torch.softmax(policy.logits(hidden.final[-1:], TorchOps())[0] / temperature, dim=0)
    order = p.argsort(descending=True)
    if top_k:
        p[order[top_k:]] = 0
        p = p / p.sum()
    if top_p < 1:
        before = p[order].cumsum(0) - p[order]
        p[order[before >= top_p]] = 0
    p[p < min_p * p.max()] = 0
    return p / p.sum()


@pytest.mark.parametrize("filters", [
    {"temperature": 1.0}, {"temperature": 0.7}, {"temperature": 1.0, "top_k": 6}, {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.3, "min_p": 0.05}, {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01}])
def test_goodness_of_fit(filters):
    engine = Engine(model("qwen2"), strategy="suffix:d3w2v4", config=EngineConfig(max_batch=128, kv_memory_gb=0.1))
    params = SamplingParams(max_new_tokens=2, seed=11, **filters)
    rollouts = engine.generate([PROMPT], params, n=DRAWS)[0].rollouts
    counts = torch.bincount(torch.tensor([rollout.token_ids[0] for rollout in rollouts]), minlength=VOCAB).double()
    p = exact(**filters)
    assert counts[p == 0].sum() == 0, "a filtered token was drawn"
    common = p * DRAWS >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    expected = torch.cat([p[common], p[~common].sum()[None]]) * DRAWS
    if expected[-1] < 1:
        observed, expected = observed[:-1], expected[:-1] * observed[:-1].sum() / expected[:-1].sum()
    assert chisquare(observed.numpy(), expected.numpy()).pvalue > 1e-3
    for rollout in rollouts[:50]:  # and the log-probability reported is that of the sampled distribution
        assert rollout.logprobs[0] == pytest.approx(float(p[rollout.token_ids[0]].log()), abs=1e-6)
