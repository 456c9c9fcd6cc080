"""Coverage: against a drafter that is the policy's twin, and noise that is consistent with what was drawn."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from spot.answers import OPS, answers, features_of, sampled
from spot.test_unroll import slow_path
from tiny import eagle, model

from paceline.drafters.eagle import Eagle
from paceline.spot.coverage import coverage, posterior_noise
from paceline.spot.initialization import capture_layers
from paceline.spot.packing import random_stretch, stretches
from paceline.types import FeatureRecord


def test_noise_given_what_was_drawn():
    """It draws that token, and over many draws from p it is plain Gumbel noise again."""
    generator = torch.Generator().manual_seed(0)
    log_p = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64).log().expand(60_000, 3)
    drawn = log_p.exp().multinomial(1, generator=generator)[:, 0]
    chance = log_p.gather(1, drawn[:, None])[:, 0]
    noise = posterior_noise(log_p, chance, torch.arange(3) == drawn[:, None], generator)
    assert torch.equal((log_p + noise).argmax(-1), drawn)
    mean, variance = noise.mean(0), noise.var(0)
    assert torch.allclose(mean, torch.full((3,), 0.5772, dtype=torch.float64), atol=0.03)
    assert torch.allclose(variance, torch.full((3,), 1.6449, dtype=torch.float64), atol=0.06)
    assert abs(float(torch.corrcoef(noise.T)[0, 1])) < 0.02


@pytest.mark.parametrize("form", ["eagle", "eagle3"])
def test_without_noise_it_is_the_place_of_the_drawn_token_in_q(form):
    policy, drafter = model("qwen3"), eagle("qwen3", form)
    records = answers(policy, [12, 16], capture_layers(drafter.config))
    depth, hits, rows = 3, torch.zeros(3), torch.zeros(3)
    verifications = tokens = 0
    for r in records:
        ready, tokens = 0, tokens + len(r.token_ids) - r.prompt_length  # where the next tree starts
        for start in range(r.prompt_length - 2, len(r.token_ids) - 2):
            outputs = slow_path(policy, drafter, r.token_ids, start, min(depth, len(r.token_ids) - 2 - start))
            best = [drafter.logits(out[None], policy, OPS)[0].topk(4).indices.tolist() for out in outputs]
            right = [r.token_ids[start + k + 2] in guesses for k, guesses in enumerate(best)]
            for k, hit in enumerate(right):
                hits[k] += hit
                rows[k] += 1
            if start - (r.prompt_length - 2) == ready:
                ready += 1 + next((k for k, hit in enumerate(right) if not hit), len(right))
                verifications += 1
    found = coverage(drafter, policy, records, tau=0.0, depth=depth)
    assert found.by_depth[4] == pytest.approx((hits / rows).tolist(), abs=1e-6)
    assert found.accept_length[4][-1] == pytest.approx(tokens / verifications) and 1 < tokens / verifications < 1 + depth


def test_by_position_and_version_counts_every_token_once():
    policy, drafter = model("qwen3"), eagle("qwen3")
    records = [FeatureRecord(r.token_ids, r.features, r.layers, [1] * 10 + [2] * (len(r.versions) - 10), 3)
               for r in sampled(policy, [60, 80])]
    found = coverage(drafter, policy, records, tau=1.0)
    tokens = 57 + 77
    assert sum(share.rows for _, share in found.by_position) == sum(share.rows for share in found.by_quarter) == tokens
    assert {v: share.rows for v, share in found.by_version.items()} == {1: 20, 2: tokens - 20}
    assert [edge for edge, _ in found.by_position] == [0, 32, 64]
    overall = sum(share.covered * share.rows for share in found.by_quarter) / tokens
    assert overall == pytest.approx(found.by_depth[1][0]) and "top-4" in str(found)
    assert all(a <= b for a, b in zip(found.by_depth[1], found.by_depth[4], strict=True))


def test_nothing_to_evaluate_on_is_said():
    policy = model("qwen3")
    prompt_only = FeatureRecord([1, 2, 3], features_of(policy, [1, 2, 3], (-1,)), (-1,), [], 3)
    with pytest.raises(ValueError, match="records"):
        coverage(eagle("qwen3"), policy, [prompt_only])


def test_a_part_of_an_answer_is_measured_as_what_it_is():
    policy, drafter = model("qwen3"), eagle("qwen3")
    (whole,) = sampled(policy, [80])
    whole = replace(whole, prompt_length=3, versions=list(range(77)))
    for seed in range(4):
        part = random_stretch(whole, 20, None, random.Random(seed)).of(whole)
        start = part.prompt_length
        assert part.token_ids == whole.token_ids[: start + 20] and len(part.features) == start + 19
        assert part.versions == list(range(start - 3, start + 17))
        found = coverage(drafter, policy, [part], tau=0.0, depth=1)
        reference = coverage(drafter, policy, [replace(whole, prompt_length=start, versions=whole.versions[start - 3 :])],
                             tau=0.0, depth=1)
        first = sum(share.covered * share.rows for version, share in reference.by_version.items() if version < start + 17)
        assert found.by_depth[1][0] * 20 == pytest.approx(first)
        near = random_stretch(whole, 20, 8, random.Random(seed))
        assert near == (max(0, start - 8), start, start + 20) and len(near.of(whole).token_ids) == near.end - near.first
    assert random_stretch(whole, 77, None, random.Random(0)).of(whole) is whole


def test_a_long_answer_is_measured_in_parts_with_its_positions():
    policy, drafter = model("qwen3"), eagle("qwen3")
    windowed = Eagle(replace(drafter.config, window=32), None).to(torch.float64)
    windowed.load_state_dict(drafter.state_dict())
    (record,) = sampled(policy, [200])
    record = replace(record, prompt_length=3, versions=[1] * 100 + [2] * 97)
    found = coverage(windowed, policy, [record], tau=0.0, depth=2)
    assert [(edge, share.rows) for edge, share in found.by_position] == [(0, 32), (32, 32), (64, 64), (128, 69)]
    assert {version: share.rows for version, share in found.by_version.items()} == {1: 100, 2: 97}
    assert sum(share.rows for share in found.by_quarter) == 197
    parts = stretches(200, 3, 32)
    assert [part.start for part in parts[1:]] == [part.end for part in parts[:-1]] and (parts[0].start, parts[-1].end) == (3, 200)
    assert all(part.end - part.start <= 32 and part.first == max(0, part.start - 32) for part in parts)
    by_hand = [coverage(drafter, policy, [part.of(record)], tau=0.0, depth=1) for part in parts]
    assert found.by_depth[1][0] == pytest.approx(sum(
        each.by_depth[1][0] * (part.end - part.start) for each, part in zip(by_hand, parts, strict=True)) / 197)
