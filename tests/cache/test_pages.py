from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cache.pages import PageAllocator


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), num_pages=st.integers(1, 24), page_size=st.integers(1, 5))
def test_random_operations_keep_integrity(seed, num_pages, page_size):
    rng = random.Random(seed)
    pages = PageAllocator(num_pages, page_size)
    held: list[tuple[list[int], list[int], str | None]] = []  # (tokens, pages, salt)
    for _ in range(300):
        match rng.randrange(5):
            case 0 | 1:
                tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 4 * page_size))]
                salt = rng.choice([None, "a"])
                known = pages.match(tokens, salt)
                assert len(known.pages) * page_size + known.num_tail <= len(tokens)
                fresh = pages.allocate(pages.pages_for(len(tokens)) - len(known.pages))
                if known.tail is not None:
                    pages.release([known.tail])
                if fresh is None:
                    pages.release(known.pages)
                else:
                    held.append((tokens, known.pages + fresh, salt))
            case 2:
                if held:
                    pages.release(held.pop(rng.randrange(len(held)))[1])
            case 3:
                if held:
                    pages.publish(*rng.choice(held))
            case 4:
                if rng.random() < 0.1:
                    pages.drop_prefixes()
        pages.check_integrity()
    for _, mine, _ in held:
        pages.release(mine)
    pages.check_integrity()
    assert pages.num_available == num_pages


def test_a_prefix_is_shared_by_requests_of_the_same_salt_only():
    pages = PageAllocator(8, 2)
    mine, theirs = pages.allocate(2), pages.allocate(2)
    assert mine is not None and theirs is not None
    pages.publish([1, 2, 3, 4], mine, "me")
    assert pages.match([1, 2, 3, 4]).pages == pages.match([1, 2, 3, 4], "others").pages == []
    pages.publish([1, 2, 3, 4], theirs)
    assert pages.match([1, 2, 3, 4], "me").pages == mine and pages.match([1, 2, 3, 4]).pages == theirs
    pages.check_integrity()
    pages.drop_prefixes()
    assert pages.match([1, 2, 3, 4], "me").pages == []


def test_a_prefix_is_found_until_its_room_is_needed():
    pages = PageAllocator(4, 2)
    mine = pages.allocate(3)
    assert mine is not None
    pages.publish([1, 2, 3, 4, 5], mine)
    pages.release(mine)
    found = pages.match([1, 2, 3, 4, 5])
    assert found.pages == mine[:2] and found.tail == mine[2] and found.num_tail == 1
    assert pages.match([1, 2, 9, 9]).pages == mine[:1]
    pages.release([*found.pages, found.tail, mine[0]])
    everything = pages.allocate(4)  # kept pages are given away
    assert everything is not None and pages.match([1, 2, 3, 4, 5]).pages == []
    pages.check_integrity()


def test_finished_prompts_take_no_more_room_than_live_ones_did():
    pages = PageAllocator(1000, 2)
    touched = set()
    for job in range(200):
        mine = pages.allocate(3)
        assert mine is not None
        touched |= set(mine)
        pages.publish([job, 1, 2, 3, 4, 5], mine)
        pages.release(mine)
        pages.check_integrity()
    assert len(touched) <= 6


def test_nothing_changes_when_there_is_no_room():
    pages = PageAllocator(2, 4)
    assert pages.allocate(3) is None
    assert pages.num_available == 2


def test_integrity_check_notices_damage():
    pages = PageAllocator(3, 4)
    pages.allocate(1)
    pages._free.append(0)
    with pytest.raises(AssertionError):
        pages.check_integrity()


def test_a_page_released_twice_is_noticed():
    pages = PageAllocator(3, 4)
    mine = pages.allocate(1)
    assert mine is not None
    pages.release(mine)
    with pytest.raises(AssertionError):
        pages.release(mine)


def test_a_reset_frees_all_pages_but_those_of_somebody_else():
    pages = PageAllocator(6, 2)
    mine, others = pages.allocate(3), pages.allocate(2)
    assert mine is not None and others is not None
    pages.publish([1, 2, 3, 4], mine)
    pages.reset(held=others)
    pages.check_integrity()
    assert pages.num_available == 4 and pages.match([1, 2, 3, 4]).pages == []
    assert set(pages.allocate(4) or ()) == set(range(6)) - set(others)
    pages.release(others)
    pages.check_integrity()
