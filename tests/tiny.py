"""Tiny seeded models for tests: small enough to run thousands of steps, random enough that every token is in play."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from paceline import Engine
from paceline.drafters.eagle import Eagle, EagleConfig, Form
from paceline.engine.graphs import GraphReport
from paceline.kernels import TorchOps
from paceline.models.attend import PackedAttend
from paceline.models.config import ExpertsSpec, LayerSpec, ModelConfig, RopeConfig
from paceline.models.decoder import Decoder, Rope

VOCAB = 61
OPS = TorchOps()
SPARSE = LayerSpec(experts=ExpertsSpec(6, 2, 20))

CONFIGS = {
    "llama": ModelConfig("llama", VOCAB, 32, 48, 2, 4, 2, 8, max_context=256, tie_embeddings=True,
                         rope=RopeConfig(kind="llama3", factor=4.0, original_context=64)),
    "qwen2": ModelConfig("qwen2", VOCAB, 24, 40, 2, 6, 2, 4, max_context=256, qkv_bias=True),
    "qwen3": ModelConfig("qwen3", VOCAB, 32, 48, 3, 4, 1, 16, max_context=256, qk_norm=True),
    "qwen3_moe": ModelConfig("qwen3_moe", VOCAB, 24, 40, 3, 4, 2, 8, max_context=256, qk_norm=True,
                             layers=(SPARSE, LayerSpec(), SPARSE)),
}
LOCAL = LayerSpec(window=7, scale=6**-0.5, rope=RopeConfig(100.0, original_context=256), activation="gelu_tanh", post_norms=True)
OSS = LayerSpec(sinks=True, experts=ExpertsSpec(5, 2, 16, bias=True), activation="clamped_silu")
WINDOWED = {
    "gemma3": ModelConfig("gemma3", VOCAB, 24, 128, 3, 4, 2, 8, max_context=256, qk_norm=True, tie_embeddings=True,
                          norm_offset=1.0, layers=(LOCAL, replace(LOCAL, window=0, rope=None), LOCAL), embed_scale=24**0.5,
                          logit_cap=30.0),
    "gemma2": ModelConfig("gemma2", VOCAB, 24, 128, 2, 4, 2, 8, max_context=256, tie_embeddings=True, norm_offset=1.0,
                          layers=(replace(LOCAL, rope=None, soft_cap=2.0), replace(LOCAL, window=0, rope=None, soft_cap=2.0)),
                          embed_scale=24**0.5, logit_cap=10.0),
    "gpt_oss": ModelConfig("gpt_oss", VOCAB, 24, 16, 2, 4, 2, 8, max_context=256, qkv_bias=True, o_bias=True,
                           rope=RopeConfig(kind="yarn", factor=4.0, original_context=64), layers=(replace(OSS, window=9), OSS)),
    "mixtral": ModelConfig("mixtral", VOCAB, 24, 20, 2, 4, 2, 8, max_context=256,
                           layers=(LayerSpec(window=11, experts=ExpertsSpec(4, 1, 20)),) * 2),
}
"""Models with windows, sinks and caps."""


@cache
def model(kind: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float64) -> Decoder:
    decoder = Decoder.random((CONFIGS | WINDOWED)[kind], seed, std=0.35, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():  # biases and norms that do something
        for parameter in decoder.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=dtype) * 0.2)
    return decoder


@cache
def eagle(kind: str = "llama", form: Form = "eagle", seed: int = 1, dtype: torch.dtype = torch.float64,
          draft_vocab: int = 0) -> Eagle:
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:draft_vocab] if draft_vocab else None
    return Eagle.random(EagleConfig.for_policy((CONFIGS | WINDOWED)[kind], form), seed, 0.2, dtype, draft_ids=ids)


def greedy_chain(policy: Decoder, drafter: Eagle, tokens: list[int], depth: int) -> list[int]:
    """What the drafter guesses behind `tokens`, one after the other, recomputing everything each time. Row i combines the
    policy's features at i with the token at i + 1."""
    rope, drafter_rope = (Rope(config, 256, torch.float64, "cpu") for config in (policy.config, drafter.config.model))

    def attend(length: int, rope: Rope) -> PackedAttend:
        return PackedAttend(OPS, *rope(torch.arange(length)), (length,))

    fed = torch.tensor(tokens[:-1])
    features = policy(fed, attend(len(fed), rope), drafter.config.feature_layers).features
    near = 0 if drafter.config.window is None else max(0, len(fed) - drafter.config.window)  # positions matter only relatively
    state, follow, guesses = drafter.encode(features, OPS)[near:], tokens[1 + near :], []
    for _ in range(depth):
        out = drafter(policy.embed(torch.tensor(follow)), state, attend(len(follow), drafter_rope))
        logits = drafter.logits(out[-1:], policy, OPS)
        index = int(logits.argmax())
        guesses.append(index if drafter.draft_ids is None else int(drafter.draft_ids[index]))
        state, follow = torch.cat([state, out[-1:]]), [*follow, guesses[-1]]
    return guesses


class FakeGraphs:
    """A graph pool without a GPU: a step that has run once before is kept, and run again with the tensors that it holds. So a
    step that reads anything from elsewhere than fixed addresses gives itself away."""

    def __init__(self) -> None:
        self.steps: dict[Hashable, Callable[[], Any]] = {}
        self.asked: set[Hashable] = set()
        self.capture_seconds, self.num_irregular = 0.0, 0

    def run(self, key: Hashable, step: Callable[[], Any], warm_up: Callable[[], None], capture_now: bool = False,
            is_rare: bool = False) -> Any:
        if key not in self.steps:
            if not capture_now and key not in self.asked:
                self.asked.add(key)
                return step()
            warm_up()
            self.steps[key] = step
        return self.steps[key]()

    def clear(self) -> None:
        self.steps.clear()

    def report(self) -> GraphReport:
        return GraphReport(len(self.steps))


def captured(engine: Engine, row_sizes: tuple[int, ...]) -> FakeGraphs:
    """Make this engine capture its steps, without a GPU, and launch each step before it reads the last one's outputs."""
    graphs = FakeGraphs()
    engine.executor.graphs.attach(graphs, row_sizes)
    engine.planner.pipelined = True
    return graphs
