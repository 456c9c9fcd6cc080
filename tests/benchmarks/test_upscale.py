"""A twin computes what its original does, and its drafter guesses what the original's does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import CONFIGS, VOCAB, eagle, model

from benchmarks.lib.upscale import twin_config, upscale, upscale_drafter
from paceline import Engine, SamplingParams
from paceline.config import EngineConfig
from paceline.kernels import TorchOps
from paceline.models.attend import PackedAttend
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder, Rope

OPS = TorchOps()
PROMPTS = [[1, 2, 3, 4, 5] * 3, [7, 8, 9], [3], [11] * 20]
# Qwen2: 6 query heads on 2 key heads inside 16 on 4, three of four in the first two groups, as 1.5B lies inside 7B.
LARGE = {"llama": replace(CONFIGS["llama"], hidden_size=56, intermediate_size=80, num_heads=12, num_kv_heads=4),
         "qwen2": replace(CONFIGS["qwen2"], hidden_size=56, intermediate_size=88, num_heads=16, num_kv_heads=4, num_layers=3),
         "qwen3": replace(CONFIGS["qwen3"], hidden_size=48, intermediate_size=64, num_heads=10, num_kv_heads=2)}


def logits(policy: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    rope = Rope(policy.config, 64, torch.float64, "cpu")
    attend = PackedAttend(OPS, *rope(torch.arange(len(tokens))), (len(tokens),))
    return policy.logits(policy(tokens, attend).final, OPS)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_the_same(kind, tied):
    small = model(kind)
    if tied and not small.config.tie_embeddings:
        with pytest.raises(ValueError, match="tie_embeddings"):
            upscale(small, replace(LARGE[kind], tie_embeddings=True))
        return
    twin = upscale(small, replace(LARGE[kind], tie_embeddings=tied))
    assert (twin.head.weight is twin.embed.weight) == tied
    tokens = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(logits(twin, tokens), logits(small, tokens), rtol=0, atol=1e-9)
    assert sum(p.numel() for p in twin.layers.parameters()) > 2 * sum(p.numel() for p in small.layers.parameters())


@pytest.mark.parametrize(("kind", "temperature", "form", "draft_vocab"), [
    ("llama", 0.0, "eagle", 0), ("qwen2", 1.0, "eagle", 20), ("llama", 1.0, "eagle3", 0), ("qwen2", 0.0, "eagle3", 0)])
def test_the_engine_draws_and_drafts_the_same(kind, temperature, form, draft_vocab):
    small, drafter = model(kind), eagle(kind, form, draft_vocab=draft_vocab)
    twin = upscale(small, LARGE[kind])
    params = SamplingParams(temperature=temperature, max_new_tokens=24, seed=5)

    def run(policy, learned, strategy):
        engine = Engine(policy, drafter=learned, strategy=strategy, config=EngineConfig(max_batch=8, kernels="torch", tau=1.0))
        found = [r.token_ids for group in engine.generate(PROMPTS, params) for r in group.rollouts]
        return found, engine.stats()

    plain, _ = run(small, None, "off")
    want, small_stats = run(small, drafter, "eagle:d3w3v8")
    got, twin_stats = run(twin, upscale_drafter(drafter, twin.config), "eagle:d3w3v8")
    assert got == want == plain == run(twin, None, "off")[0]
    assert small_stats.accepted > 0
    assert (twin_stats.verifications, twin_stats.drafted, twin_stats.accepted) == (
        small_stats.verifications, small_stats.drafted, small_stats.accepted)


def test_what_does_not_fit_is_named():
    small = ModelConfig("llama", VOCAB, 32, 48, 2, 4, 2, 8)
    for change, name in (({"hidden_size": 24}, "hidden_size"), ({"head_dim": 16}, "head_dim"), ({"num_layers": 1}, "num_layers"),
                         ({"num_heads": 8, "num_kv_heads": 8}, "num_heads")):
        with pytest.raises(ValueError, match=name):
            twin_config(small, replace(small, **change))
