"""The suffix drafter through the whole engine: it saves steps where text repeats and adds almost no rows where it does not."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from paceline import Engine, SamplingParams
from paceline.config import EngineConfig
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder

CONFIG = ModelConfig("llama", 2048, 256, 768, 12, 8, 4, 32, max_context=1024)


def test_repetitive_text_gives_more_than_three_tokens_per_verification():
    """With a tied head a random greedy model goes on repeating itself, like one that lists or counts."""
    engine = Engine(Decoder.random(replace(CONFIG, tie_embeddings=True), std=0.03), strategy="suffix:d8w2v16")
    plain = Engine(engine.model, drafter=None, strategy="off")
    params = SamplingParams(temperature=0, max_new_tokens=300)
    prompts = [[1, 2, 3], [50, 60], [7] * 5]
    assert ([r.token_ids for g in engine.generate(prompts, params) for r in g.rollouts]
            == [r.token_ids for g in plain.generate(prompts, params) for r in g.rollouts])
    assert engine.stats().tokens_per_verification > 3


def engine_and_random_prompts() -> tuple[Engine, list[list[int]]]:
    """Random text at a high temperature repeats nothing."""
    engine = Engine(Decoder.random(CONFIG, std=0.05), strategy="suffix:d8w2v16", config=EngineConfig(max_batch=8))
    prompts = [torch.randint(0, 2048, (32,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(8)]
    engine.generate(prompts, SamplingParams(max_new_tokens=8, seed=1))  # compiles
    engine.reset_stats()
    return engine, prompts


def test_random_text_has_few_draft_tokens():
    engine, prompts = engine_and_random_prompts()
    seen = []
    engine.generate(prompts, SamplingParams(max_new_tokens=200, seed=2), on_step=seen.append)
    stats = engine.stats()
    assert stats.generated_tokens == 8 * 200
    assert stats.drafted / stats.verifications < 0.05
    rows = sum(result.num_rows - result.num_prefill_rows for result in seen)
    assert rows == stats.verifications + stats.drafted, "one row per request and step, and one per draft token"


@pytest.mark.slow
def test_suffix_drafting_takes_less_than_five_percent_of_the_time():
    """CPU time inside the drafter on random text."""
    engine, prompts = engine_and_random_prompts()
    spent = 0.0

    def timed(function):
        def call(*args):
            nonlocal spent
            began = time.thread_time()
            try:
                return function(*args)
            finally:
                spent += time.thread_time() - began
        return call

    engine.drafting.draft = timed(engine.drafting.draft)
    engine.drafting.on_complete = timed(engine.drafting.on_complete)
    began = time.thread_time()
    engine.generate(prompts, SamplingParams(max_new_tokens=200, seed=2))
    total = time.thread_time() - began
    assert spent / total < 0.05
