"""Prompts whose responses are long enough to measure speculation at a constant batch size."""

from __future__ import annotations

from benchmarks.lib.setup import Setting
from paceline import SamplingParams
from paceline.models.decoder import Decoder


def long_responses(setting: Setting, policy: Decoder, prompts: list[list[int]], new_tokens: int) -> tuple[list[list[int]], float]:
    """Prompts whose responses reach `new_tokens` with the seeds of `sampling`, followed by the others if there are few; and the
    share of tokens past the end of a response if all of them are used."""
    engine = setting.engine(policy, None, 256)
    groups = engine.generate(prompts, sampling(new_tokens, ignore_eos=False))
    lengths = [len(group.rollouts[0].token_ids) for group in groups]
    order = sorted(range(len(prompts)), key=lambda i: lengths[i] < new_tokens)  # stable
    enough = sum(length >= new_tokens for length in lengths)
    print(f"{enough} of {len(prompts)} responses have {new_tokens} tokens or more", flush=True)
    if enough >= 64 and not setting.tiny:
        order = order[:enough]
    del engine
    setting.free()
    return [prompts[i] for i in order], 1 - sum(lengths[i] for i in order) / (new_tokens * len(order))


def sampling(new_tokens: int, ignore_eos: bool = True) -> SamplingParams:
    return SamplingParams(temperature=1.0, max_new_tokens=new_tokens, seed=11, ignore_eos=ignore_eos)
