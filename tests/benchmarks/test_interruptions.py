"""What stopped a run is recorded, and nothing stays behind."""

from __future__ import annotations

import gc

import pytest

from benchmarks.lib import interruptions
from benchmarks.lib.interruptions import Interruptions


@pytest.fixture
def every(monkeypatch):
    monkeypatch.setattr(interruptions, "_LEAST_SECONDS", 0.0)


def test_collections_are_recorded_while_it_is_entered(every):
    watch, before = Interruptions(), list(gc.callbacks)
    gc.collect()
    with watch:
        gc.collect()
    gc.collect()
    found = [each for each in watch.found if each["kind"] == "collected" and each["name"] == "generation 2"]
    assert len(found) == 1 and found[0]["seconds"] > 0 and gc.callbacks == before


def test_compilations_are_recorded(every):
    knobs = pytest.importorskip("triton.knobs")
    before = knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook
    with Interruptions() as watch:
        knobs.runtime.jit_cache_hook(key="k", repr="kernel[…]", fn=None)
        knobs.runtime.jit_post_compile_hook(key="k", repr="kernel[…]", fn=None)
    assert [(each["kind"], each["name"]) for each in watch.found if each["kind"] == "compiled"] == [("compiled", "kernel[…] k")]
    assert (knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook) == before


def test_short_ones_are_not(monkeypatch):
    monkeypatch.setattr(interruptions, "_LEAST_SECONDS", 1e9)
    with Interruptions() as watch:
        gc.collect()
    assert watch.found == []
