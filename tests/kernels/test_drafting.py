"""Trees as rows, a drafter's rows and choices: the CPU family against its torch twins, padding and failed numbers included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import eagle, model
from trees import assert_same_growth, assert_same_rows, assert_same_walk, random_cache, random_requests

from paceline import Engine, SamplingParams, Strategy
from paceline.config import EngineConfig
from paceline.kernels import Candidates, TorchOps
from paceline.kernels.cpu.ops import CpuOps

TORCH, CPU = TorchOps(), CpuOps()
WIDE = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


# -- trees


@pytest.mark.parametrize(("num_nodes", "depth", "nodes"), [
    ([3, 0, 12, 7, 0, 0], 6, 12), ([70, 0, 66], 9, 70), ([1], 1, 1), ([6, 6], 6, 6), ([0, 0, 0, 0], 0, 0)])
@pytest.mark.parametrize("fixed", [False, True])
@WIDE
def test_trees_become_rows_and_are_walked(num_nodes: list[int], depth: int, nodes: int, fixed: bool, dtype: torch.dtype) -> None:
    assert_same_walk(CPU, TORCH, num_nodes, depth, nodes, fixed, dtype, raw=fixed)


@pytest.mark.parametrize(("num_nodes", "depth", "nodes"), [([3, 0, 12], 6, 12), ([0, 0], 0, 0), ([], 0, 0)])
@pytest.mark.parametrize("forced", [((5, True),), ((4, False), (9, True), (1, True)), ((30, False),)])
@pytest.mark.parametrize("fixed", [False, True])
def test_forced_rows_are_accepted_without_comparison(num_nodes, depth, nodes, forced, fixed) -> None:
    assert_same_walk(CPU, TORCH, num_nodes, depth, nodes, fixed, forced=forced)


def test_move_tokens() -> None:
    tensors = [torch.arange(40)] + [torch.randn(40, 2, 17).bfloat16() for _ in range(3)] + [torch.randn(40, 700)]
    source = torch.tensor([[0, 3, 4, 7, 39], [20, 22, 39, 39, 39], [30, 31, 32, 39, 39], [10, 11, 39, 39, 39]])
    target = torch.tensor([[0, 4, 2, 3, 39], [20, 21, 39, 39, 39], [31, 32, 33, 39, 39], [10, 11, 39, 39, 39]])
    expected = [tensor.clone() for tensor in tensors]
    for tensor in expected:
        tensor[target.flatten()] = tensor[source.flatten()]
    what = CPU.movable(tensors)
    CPU.move_tokens(what, target, target)
    CPU.move_tokens(what, source, target)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(tensors, expected, strict=True))


# -- drafting


@pytest.mark.parametrize(("counts", "least"), [([5, 5, 5, 5, 5], 1), ([0, 2, 4, 300, 1], 0), ([1], 1), ([0, 0], 0)])
def test_catch_up_rows(counts: list[int], least: int) -> None:
    """Windows longer than a text, nothing at all, contexts that end where sharing does."""
    batch = len(counts)
    requests, stored, cache = random_requests(batch, 6), torch.randint(0, 1000, (6 * 8 * 16,)), random_cache(8, slots=6)
    request = torch.repeat_interleave(torch.arange(batch), torch.tensor(counts))
    back = torch.cat([torch.arange(count, 0, -1) for count in counts])
    args = (requests, stored, cache, request, back, torch.tensor(counts), least, 77)
    assert_same_rows(CPU.catch_up_rows(*args), TORCH.catch_up_rows(*args))


@pytest.mark.parametrize(("depth", "width", "budget"), [(4, 3, 12), (1, 1, 1), (5, 1, 5), (5, 1, 9), (6, 4, 16), (3, 20, 127),
                                                        (18, 7, 50)])
@pytest.mark.parametrize("reduced", [False, True])
@WIDE
def test_a_tree_grows_and_is_chosen(depth: int, width: int, budget: int, reduced: bool, dtype: torch.dtype) -> None:
    assert_same_growth(CPU, TORCH, depth, width, budget, reduced, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("vocab", [14, 2100])
def test_draft_topk(dtype: torch.dtype, reduced: bool, vocab: int) -> None:
    logits = (2 * torch.randn(4, vocab)).to(dtype)
    ids = torch.randperm(50000)[:vocab].sort().values if reduced else None
    seed, position, temperature = torch.arange(4) * 2**40, torch.arange(4), torch.tensor([1, 0.6, 0, 2.0])
    tolerance = 1e-10 if dtype == torch.float64 else 2e-5
    for k, tau in ((1, 1.0), (5, 0.0), (5, torch.tensor([0.35])), (14, 0.35)):
        ours = CPU.draft_topk(logits, seed, position, temperature, tau, k, ids)
        theirs = TORCH.draft_topk(logits, seed, position, temperature, tau, k, ids)
        torch.testing.assert_close(ours.values, theirs.values, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(ours.logsumexp, theirs.logsumexp, rtol=tolerance, atol=tolerance)
        noisy = temperature > 0 if float(tau) > 0 else torch.zeros(4, dtype=torch.bool)  # bfloat16 ties without noise
        assert torch.equal(ours.columns[noisy], theirs.columns[noisy])
        assert all(len(set(row)) == k for row in ours.columns.tolist())


def test_equal_logits_rank_in_order() -> None:
    ranked = CPU.draft_topk(torch.zeros(1, 300), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64),
                            torch.zeros(1), 0.35, 4)
    assert ranked.columns.tolist() == [[0, 1, 2, 3]]


def test_drafting_survives_what_is_no_number() -> None:
    """Columns stay distinct and within the vocabulary, parents within the tree, whatever the logits were."""
    logits = torch.randn(4, 2100)
    logits[1], logits[2, 7], logits[3, 2:] = torch.nan, torch.nan, -torch.inf
    zeros = torch.zeros(4, dtype=torch.int64)
    ranked = CPU.draft_topk(logits, zeros, zeros, torch.ones(4), 0.35, 4)
    assert all(len(set(row)) == 4 and min(row) >= 0 and max(row) < 2100 for row in ranked.columns.tolist())
    assert set(ranked.columns[3, :2].tolist()) == {0, 1}
    room = Candidates(torch.zeros(4, 4, dtype=torch.int64), torch.zeros(4, 4, dtype=torch.int64), torch.zeros(4, 4))
    CPU.add_candidates(ranked, torch.zeros(4, 1), torch.full((4, 1), -1), None, room, 0)
    beam = CPU.select_beam(room, 0, torch.zeros(4, 1, 2, dtype=torch.int64), random_requests(4, 6), random_cache(8, slots=6), 1,
                           4)
    assert beam.origin.sort(dim=1).values.tolist() == [[0, 1, 2, 3]] * 4
    assert CPU.select_nodes(room, 4, 3)[1].tolist() == [[-1, -1, -1]] * 4


# -- a small drafter in one call


@pytest.mark.parametrize("form", ["eagle", "eagle3"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@WIDE
def test_a_whole_tree_in_one_call_is_what_its_parts_make(form: str, kind: str, dtype: torch.dtype, monkeypatch: Any) -> None:
    """The tree, and the drafter's keys and values behind it, as the plain operations of torch make them."""
    policy, drafter = model(kind, dtype=dtype), eagle(kind, form, dtype=dtype)  # type: ignore[arg-type]
    engine = Engine(policy, drafter=drafter, strategy="off", config=EngineConfig(page_size=64, max_batch=6))
    for prompt in ([5, 6, 7, 8, 9, 10, 11], [3, 1], [30, 31, 32]):
        engine.add(prompt, SamplingParams(max_new_tokens=40, ignore_eos=True), n=2)
    for _ in range(5):
        engine.step()
    for depth, width, budget in ((6, 1, 6), (4, 4, 16), (1, 3, 2), (3, 2, 99)):
        made = []
        for family in (CPU, engine.executor.ops):  # the first knows no weights: nothing is fused
            with monkeypatch.context() as patch:
                patch.setattr(engine.eagle, "ops", family)
                slots = torch.tensor([request.slot for request in engine.scheduler.running])
                drafts = engine.executor.learned._draft(slots, Strategy("eagle", depth, width, budget), depth + 1)
                made.append([*drafts, engine.executor.store.layers[-1].k.clone(), engine.executor.store.layers[-1].v.clone()])
        assert engine.executor.ops._trees, "the second family made it in one call"
        for i, (parts, whole) in enumerate(zip(*made, strict=True)):
            torch.testing.assert_close(whole, parts, rtol=1e-4, atol=1e-5, equal_nan=True, msg=str(i))
