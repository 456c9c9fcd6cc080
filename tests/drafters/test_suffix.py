"""The suffix drafter: counts equal brute force, trees are well formed, repetition is found, and memory is bounded."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drafters.suffix import SuffixDrafter, SuffixDrafts
from paceline.drafters.suffix_trees import _gumbel
from paceline.kernels.noise import gumbel

VOCAB = 1000


def draft(drafter: SuffixDrafter, request_ids: list[int], depth=8, width=2, budget=16, *, seed=0, position=0,
          temperature=0.0, tau=0.0) -> SuffixDrafts:
    size = len(request_ids)
    return drafter.draft(request_ids, depth, width, [budget] * size, [seed] * size, [position] * size, [temperature] * size, tau)


def random_text(seed: int, size: int, vocab: int = VOCAB) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, size).tolist()


def path(drafts: SuffixDrafts, row: int, node: int) -> list[int]:
    """Tokens from the root to a node."""
    tokens = []
    while node >= 0:
        tokens.append(int(drafts.tokens[row, node]))
        node = int(drafts.parents[row, node])
    return tokens[::-1]


def main_path(drafts: SuffixDrafts, row: int = 0) -> list[int]:
    """Tokens of the deepest node."""
    if drafts.num_nodes[row] == 0:
        return []
    return path(drafts, row, int(np.argmax(drafts.depths[row, :drafts.num_nodes[row]])))


def check_trees(drafts: SuffixDrafts, depth: int, width: int, budgets, min_survival: float) -> None:
    for row, count in enumerate(drafts.num_nodes):
        assert count <= budgets[row]
        siblings: dict[int, list[int]] = {}
        for node in range(count):
            parent, survival = drafts.parents[row, node], drafts.survival[row, node]
            assert -1 <= parent < node
            assert drafts.depths[row, node] == (1 if parent < 0 else drafts.depths[row, parent] + 1) <= depth
            assert min_survival - 1e-6 <= survival <= (1.0 if parent < 0 else drafts.survival[row, parent])
            siblings.setdefault(parent, []).append(int(drafts.tokens[row, node]))
        assert all(len(s) == len(set(s)) <= width for s in siblings.values())


def brute_force(prompt: list[int], answers: list[list[int]], text: list[int]) -> Counter:
    """What followed the longest suffix of `text` that was followed by anything; how often. The prompt counts once."""
    for length in range(len(text), 0, -1):
        found: Counter = Counter()
        for i, answer in enumerate([[], *answers]):
            whole = prompt + answer
            for end in range(length, len(whole)):
                if whole[end - length:end] == text[len(text) - length:] and (i == 0 or end >= len(prompt)):
                    found[whole[end]] += 1
        if found:
            return found
    return Counter()


small_text = st.lists(st.integers(0, 2), max_size=6)


@settings(max_examples=300, deadline=None)
@given(prompt=small_text, pieces=st.lists(st.tuples(st.integers(0, 2), small_text), max_size=10),
       finished=st.sets(st.integers(0, 1)))
def test_drafts_equal_brute_force_counts(prompt, pieces, finished):
    drafter = SuffixDrafter(min_survival=0.0)
    answers: list[list[int]] = [[], [], []]
    for i in range(3):
        drafter.start(i, prompt)
    for i, piece in pieces:
        drafter.extend(i, piece)
        answers[i] += piece
    for i in finished:
        drafter.finish(i)
    live = [i for i in range(3) if i not in finished]
    drafts = draft(drafter, live, depth=3, width=8, budget=64)
    check_trees(drafts, 3, 8, [64] * len(live), 0.0)
    for row, i in enumerate(live):
        for node in range(-1, drafts.num_nodes[row]):
            if node >= 0 and drafts.depths[row, node] == 3:
                continue
            wanted = brute_force(prompt, answers, prompt + answers[i] + path(drafts, row, node))
            children = np.flatnonzero(drafts.parents[row, :drafts.num_nodes[row]] == node)
            got = dict(zip(drafts.tokens[row, children].tolist(), drafts.survival[row, children], strict=True))
            assert got.keys() == wanted.keys()
            if wanted:
                shares = np.array([got[t] for t in wanted]) / sum(got.values())
                np.testing.assert_allclose(shares, np.array(list(wanted.values())) / wanted.total(), rtol=1e-4)
                assert wanted[int(drafts.tokens[row, children[0]])] == max(wanted.values())


@pytest.mark.parametrize("bounds", [{}, {"max_tokens_per_prompt": 150}, {"max_bytes": 40_000}])
def test_texts_that_grow_together_give_the_drafts_of_texts_that_grow_in_turns(bounds):
    """Two prompts, now and then a request that gets nothing; with too little room the bounds hold just the same."""
    together, in_turns = SuffixDrafter(min_survival=0.0, **bounds), SuffixDrafter(min_survival=0.0, **bounds)
    rng = random.Random(3)
    for drafter in (together, in_turns):
        for i in range(6):
            drafter.start(i, [1, 2, 3] if i not in (2, 4) else [4, 5])  # not all of one stand side by side
    for _ in range(60):
        accepted = {i: [rng.randrange(4) for _ in range(rng.randrange(4))] for i in range(6)}
        together.extend_all(accepted)
        for i, tokens in accepted.items():
            in_turns.extend(i, tokens)
        a, b = (draft(drafter, range(6), depth=4, width=3, budget=20) for drafter in (together, in_turns))
        if bounds:
            assert together.nbytes <= together.max_bytes
            assert together.num_tokens == sum(len(text) for p in together._prompts.values()
                                              for text in (p.tokens, *(t.tokens for t in (*p.active.values(), *p.finished))))
            check_trees(a, 4, 3, [20] * 6, 0.0)
        else:
            assert together.num_tokens == in_turns.num_tokens
            for mine, other in zip(a, b, strict=True):
                np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("tau", [0.0, 0.4, 1.0])
def test_trees_are_well_formed(tau):
    drafter = SuffixDrafter(min_survival=0.01)
    for i in range(6):
        drafter.start(i, [1, 2, 3] if i < 4 else [4, 5], random_text(i, 300, vocab=4))
    budgets = [0, 1, 5, 40, 64, 17]
    for depth, width in ((1, 1), (4, 2), (16, 4), (3, 64)):
        drafts = drafter.draft([5, 0, 3, 1, 4, 2], depth, width, budgets, range(-3, 3), [305] * 6, [0, 1, 1, 1, 0.5, 1], tau)
        assert drafts.tokens.shape == (6, 64) and drafts.tokens.dtype == np.int64
        check_trees(drafts, depth, width, budgets, 0.01)
        assert drafts.num_nodes[0] == 0 and drafts.num_nodes[3] > 0
    empty = draft(drafter, [])
    assert empty.tokens.shape[0] == 0 and len(empty.num_nodes) == 0


def test_periodic_text_is_predicted_fully():
    drafter = SuffixDrafter()
    period = [7, 3, 9, 9, 1]
    drafter.start(0, [2], period * 6)
    assert main_path(draft(drafter, [0], depth=16, width=1)) == (period * 4)[:16]


def test_group_mates_help_while_they_are_live():
    drafter, answer = SuffixDrafter(), random_text(1, 200)
    drafter.start(0, [1, 2, 3])
    drafter.start(1, [1, 2, 3])
    drafter.extend(1, answer[50:70])  # another beginning, the same passage
    for token in answer[:100]:
        drafter.extend(0, [token])
    assert main_path(draft(drafter, [1], depth=10)) == answer[70:80]
    drafter.start(2, [9, 9], answer[50:70])
    assert draft(drafter, [2]).num_nodes[0] == 0, "another prompt shares nothing"


def test_earlier_rollouts_help_until_reset():
    drafter, answer, prompt = SuffixDrafter(), random_text(2, 500), random_text(3, 50)
    drafter.start(0, prompt, answer)
    drafter.finish(0)
    drafter.start(1, prompt)
    assert main_path(draft(drafter, [1])) == answer[:8]
    drafter.extend(1, answer[:40])
    assert main_path(draft(drafter, [1])) == answer[40:48]
    drafter.reset()
    assert drafter.num_tokens == 90
    assert len(main_path(draft(drafter, [1]))) <= 1, "at most what followed one equal token"
    drafter.extend(1, answer[:20])
    assert main_path(draft(drafter, [1])) == answer[20:28], "its own text stayed"


def test_the_noise_is_that_of_the_kernels():
    """Bit for bit, so that drafter and policy mean the same sample."""
    for seed, position in ((0, 0), (5, 17), (2**63 + 11, 2**31 + 3)):
        tokens = torch.tensor([0, 1, 2, 3, 50_000, 151_935])
        signed = seed if seed < 2**63 else seed - 2**64
        wanted = gumbel(torch.tensor([signed]), torch.tensor([position]), tokens)[0]
        assert [_gumbel(np.uint64(seed), position, token) for token in tokens.tolist()] == wanted.tolist()


def test_shared_noise_guesses_the_sample():
    """Eight continuations, equally frequent: counts guess one in eight, the noise knows better."""
    drafter, rng, seed = SuffixDrafter(min_survival=0.0), np.random.default_rng(0), np.uint64(5)
    choices = np.arange(100, 108)
    drafter.start(0, [1], [t for c in rng.permutation(np.repeat(choices, 8)) for t in (50, 51, int(c))] + [99, 50, 51])
    hits = {0.0: 0, 1.0: 0}
    for position in range(200):
        sampled = choices[np.argmax([_gumbel(seed, position, c) for c in choices])]
        for tau in hits:
            drafts = draft(drafter, [0], depth=1, width=1, seed=seed, position=position, temperature=1.0, tau=tau)
            hits[tau] += drafts.num_nodes[0] > 0 and drafts.tokens[0, 0] == sampled
    assert hits[1.0] > 190 and hits[0.0] < 60


def test_random_text_drafts_nearly_nothing():
    drafter, text, drafted = SuffixDrafter(), random_text(4, 6000), []
    drafter.start(0, [1])
    for i in range(0, len(text), 2):
        drafted.append(draft(drafter, [0]).num_nodes[0])
        drafter.extend(0, text[i:i + 2])
    assert np.mean(drafted[400:]) < 0.1


def test_trust_comes_back():
    """Contexts that are no longer drafted from are still watched."""
    drafter, text = SuffixDrafter(), random_text(4, 2000)
    drafter.start(0, [1])
    for token in text:
        draft(drafter, [0])
        drafter.extend(0, [token])
    accepted = 0
    for token in random_text(5, 40) * 12:
        drafts = draft(drafter, [0], depth=1, width=1)
        accepted += drafts.num_nodes[0] > 0 and drafts.tokens[0, 0] == token
        drafter.extend(0, [token])
    assert accepted > 400


@pytest.mark.parametrize(("prompt_length", "answer_length", "bound"),
                         [(5, 6, 300_000), (40, 580, 1_000_000), (30, 5_000, 2_000_000)])
def test_memory_is_bounded(prompt_length, answer_length, bound):
    """By what is really allocated, for short texts and long ones; and the newest stay."""
    SuffixDrafter.warm_up()
    prompts = [random_text(i, prompt_length) for i in range(25 if prompt_length > 10 else 10_000)]
    num_texts = 6 * bound // (130 * answer_length + 1500)
    answers = [random_text(20_000 + i, answer_length) for i in range(num_texts)]
    gc.collect()
    tracemalloc.start()
    try:
        drafter, before = SuffixDrafter(max_bytes=bound), tracemalloc.get_traced_memory()[0]
        for i, answer in enumerate(answers):
            drafter.start(i, prompts[i % len(prompts)], answer[: answer_length // 2])
            drafter.extend(i, answer[answer_length // 2 :])
            assert drafter.nbytes <= bound and drafter.nbytes == sum(p.measure() for p in drafter._prompts.values())
            drafter.finish(i)
            if i % 50 == 0 or i == num_texts - 1:
                assert tracemalloc.get_traced_memory()[0] - before < 1.1 * bound + 20_000
    finally:
        tracemalloc.stop()
    assert drafter.nbytes > bound / 2
    drafter.start(num_texts, prompts[(num_texts - 1) % len(prompts)])
    assert main_path(draft(drafter, [num_texts], depth=4)) == answers[-1][:4], "the newest stayed"


def test_full_prompt_keeps_the_newest():
    drafter, prompt = SuffixDrafter(max_tokens_per_prompt=4_000), random_text(0, 30)
    for i in range(30):
        drafter.start(i, prompt, random_text(100 + i, 500))
        drafter.finish(i)
        assert drafter.num_tokens <= 4_000
    drafter.start(99, prompt, [VOCAB] + random_text(100 + 29, 500)[:20])
    assert main_path(draft(drafter, [99])) == random_text(100 + 29, 500)[20:28]
    drafter.extend(99, [VOCAB + 1] + random_text(100, 500)[:20])
    assert draft(drafter, [99]).num_nodes[0] == 0, "the oldest did not"


def test_live_texts_alone_are_bounded_and_keep_their_end():
    drafter = SuffixDrafter(max_bytes=300_000, max_tokens_per_prompt=1_000)
    loop = random_text(1, 20)
    for i in range(8):
        drafter.start(i, [i], [])
    for _ in range(100):
        for i in range(8):
            drafter.extend(i, loop)
            assert drafter.nbytes <= 300_000
    drafts = draft(drafter, list(range(8)))
    assert all(main_path(drafts, row) == loop[:8] for row in range(8))
    for i in range(8):
        drafter.finish(i)
    drafter.start(9, random_text(9, 5_000), random_text(10, 5_000))
    assert drafter.nbytes <= 300_000


def test_requests_are_checked():
    drafter = SuffixDrafter()
    drafter.start(0, [], [])
    assert draft(drafter, [0]).num_nodes[0] == 0
    with pytest.raises(ValueError, match="request_id"):
        drafter.start(0, [1])
    with pytest.raises(KeyError):
        drafter.extend(1, [1])
    with pytest.raises(ValueError, match="max_bytes"):
        SuffixDrafter(max_bytes=0)


@pytest.mark.parametrize("vocab", [1, 4, 200])
def test_memory_per_token_does_not_grow_with_history(vocab):
    """Neither does the work per token: the number of suffix links followed is bounded by constants (`benchmarks/` time it)."""
    def bytes_per_token(history: int) -> float:
        drafter = SuffixDrafter()
        drafter.start(0, [1], random_text(7, history, vocab))
        return drafter.nbytes / history

    assert bytes_per_token(200_000) < 1.5 * bytes_per_token(2_000)


def test_shared_history_reaches_across_prompts():
    """What one prompt's answer was helps another's, but only when shared; and what is remembered stays bounded."""
    answer = list(range(100, 120))

    def hits(shared: bool) -> int:
        drafter = SuffixDrafter(shared=shared, max_tokens_per_prompt=300)
        for request in range(40):
            drafter.start(request, [20 + request, 1, 2])
            drafter.extend(request, answer)
            drafter.finish(request)
        assert drafter.num_tokens <= (300 if shared else 40 * 23)
        drafter.start(99, [5, 5, 5])
        drafter.extend(99, answer[:15])
        drafts = drafter.draft([99], 4, 1, [4], [1], [18], [0.0], 1.0)
        found = drafts.tokens[0, : drafts.num_nodes[0]].tolist()
        return sum(a == b for a, b in zip(found, answer[15:], strict=False))

    assert hits(shared=True) == 4 and hits(shared=False) == 0


@pytest.mark.parametrize("shared", [False, True])
def test_history_is_shared_by_requests_of_the_same_salt_only(shared):
    drafter, answer = SuffixDrafter(shared=shared), random_text(2, 30)
    drafter.start(0, [1, 2, 3], answer, "me")
    drafter.finish(0)
    for request, salt in enumerate((None, "others", "me"), start=1):
        drafter.start(request, [1, 2, 3], answer[:5], salt)
    assert main_path(draft(drafter, [1, 2, 3], width=1), 2) == answer[5:13]
    assert draft(drafter, [1, 2, 3], width=1).num_nodes[:2].tolist() == [0, 0]
