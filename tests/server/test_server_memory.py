"""A server under load keeps nothing but the suffix drafter's history, and that stays within its bound."""

from __future__ import annotations

import gc
import random
import tracemalloc

import openai
import pytest
import tiny
from running import RunningServer, tokenizer, wait_until

from paceline import Engine
from paceline.config import EngineConfig

BOUND = 1 << 17


def mixed_round(server: RunningServer, rng: random.Random) -> None:
    """Whole answers, streams, streams that are given up and wrong requests, all to new prompts."""
    for kind in ("whole", "stream", "leave", "wrong"):
        asked = {"model": "tiny", "prompt": "".join(rng.choices("abcdefgh", k=20)), "max_tokens": 50, "n": 4, "logprobs": 1,
                 "temperature": 0.9, "extra_body": {"ignore_eos": True}}
        if kind == "whole":
            server.client.completions.create(**asked)
        elif kind == "wrong":
            with pytest.raises(openai.BadRequestError):
                server.client.completions.create(**{**asked, "temperature": -1})
        else:
            with server.client.completions.create(**asked, stream=True) as stream:
                for _ in zip(range(20 if kind == "leave" else 10**6), stream, strict=False):
                    pass
    wait_until(lambda: server.is_idle)


def test_load_leaves_a_history_within_its_bound_and_nothing_else(tmp_path):
    engine = Engine(tiny.model("llama"), tokenizer(tmp_path), "suffix", "suffix:d4w2v8",
                    EngineConfig(kv_tokens=4096, max_batch=16, profile=False, suffix_memory_gb=BOUND / 2**30))
    history, rng, in_use = engine.drafting.suffix, random.Random(1), []
    with RunningServer(engine) as server:
        mixed_round(server, rng)
        tracemalloc.start()
        try:
            for _ in range(4):
                mixed_round(server, rng)
                gc.collect()
                in_use.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
    assert BOUND / 2 < history.nbytes <= BOUND, "the history is full, so the memory below is not that of filling it"
    assert max(in_use[2:]) < max(in_use[:2]) + 80_000, in_use
