"""Packing, the one-token shift, and the unrolled paths: against a slow reference and against the drafter that engines run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from spot.answers import OPS, answers, features_of, record
from tiny import eagle, model

from paceline.drafters.eagle import Eagle
from paceline.drafters.eagle_drafter import DraftView, EagleDrafter
from paceline.kernels import DraftRequests, PagedCache
from paceline.models.attend import PackedAttend
from paceline.models.decoder import Decoder, Rope
from paceline.packing import first_fit_decreasing
from paceline.spot.attention import CpuCausalAttention, ReferenceCausalAttention, UnrolledAttend
from paceline.spot.initialization import capture_layers
from paceline.spot.packing import Stretch, align, answer_rows, pack, stretches, unroll


def unrolled(policy: Decoder, drafter: Eagle, records, steps):
    packed = pack(records, drafter.config.feature_layers, policy.config.hidden_size)
    rope = Rope(policy.config, 256, torch.float64, "cpu")
    state, attend = drafter.encode(packed.features, OPS), UnrolledAttend(OPS, rope, packed)
    return packed, unroll(drafter, policy.embed(packed.next_tokens), state, attend, packed.answers, steps)


def slow_path(policy: Decoder, drafter: Eagle, tokens: list[int], start: int, steps: int) -> list[torch.Tensor]:
    """Outputs along the true tokens of the path that starts at row `start`, recomputing everything each time."""
    rope = Rope(policy.config, 256, torch.float64, "cpu")
    features = features_of(policy, tokens, drafter.config.feature_layers)[: start + 1]
    state, found = drafter.encode(features, OPS), []
    for k in range(steps):
        rows = start + 1 + k
        follow = torch.tensor(tokens[1 : rows + 1])  # row i takes token i + 1
        out = drafter(policy.embed(follow), state, PackedAttend(OPS, *rope(torch.arange(rows)), (rows,)))
        found.append(out[-1])
        state = torch.cat([state, out[-1:]])
    return found


@pytest.mark.parametrize("form", ["eagle", "eagle3"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_paths_equal_a_slow_reference(form, kind):
    policy, drafter = model(kind), eagle(kind, form)
    records = answers(policy, [9, 4, 14], capture_layers(drafter.config))
    packed, outputs = unrolled(policy, drafter, records, 4)
    path = 0
    for r in records:
        for start in range(r.prompt_length - 2, len(r.token_ids) - 2):
            steps = min(4, len(r.token_ids) - 2 - start)
            for k, expected in enumerate(slow_path(policy, drafter, r.token_ids, start, steps)):
                assert torch.allclose(outputs[k][path], expected, atol=1e-10)
            path += 1
    assert path == len(packed.answers) == sum(packed.answer_lengths) < len(packed.next_tokens)


@pytest.mark.parametrize("form", ["eagle", "eagle3"])
def test_paths_equal_what_the_engines_drafter_computes(form):
    """A chain of width 1 follows its own guesses; on the text those guesses make, training computes the same states."""
    policy, drafter = model("qwen3"), eagle("qwen3", form)
    tokens, depth = [5, 17, 3, 60, 22, 9, 41], 5
    shape, context = drafter.config.model, len(tokens) - 1
    cache = PagedCache(*(torch.zeros(64, shape.num_kv_heads, shape.head_dim, dtype=torch.float64) for _ in range(2)),
                       torch.arange(16, dtype=torch.int32)[None], 4)
    stored = torch.zeros(64, features_of(policy, tokens, drafter.config.feature_layers).shape[1], dtype=torch.float64)
    stored[:context] = features_of(policy, tokens, drafter.config.feature_layers)
    known = torch.zeros(64, dtype=torch.int64)
    known[:context] = torch.tensor(tokens[:-1])
    requests = DraftRequests(torch.tensor([0]), torch.tensor([context]), torch.tensor(tokens[-1:]), torch.tensor([1]),
                             torch.tensor([0.0]), torch.tensor([0]))
    view = DraftView(requests, known, stored, cache, spare=63)
    seen: list[torch.Tensor] = []
    rope = Rope(policy.config, 256, torch.float64, "cpu")
    drafting = EagleDrafter(drafter, policy, rope, OPS, None, 0.0)
    handle = drafter.register_forward_hook(lambda _module, _inputs, out: seen.append(out[-1]))
    guesses = drafting.draft(view, context, depth, 1, depth).tokens[0].tolist()
    handle.remove()
    text = record(policy, [*tokens, *guesses], capture_layers(drafter.config))
    packed, outputs = unrolled(policy, drafter, [text], depth)
    for k in range(depth):
        path = outputs[k][[packed.answers.tolist().index(context - 1)]]
        assert torch.allclose(path[0], seen[k], atol=1e-10)
        assert int(drafter.logits(path, policy, OPS).argmax()) == guesses[k]


def test_row_i_is_held_to_the_state_that_predicts_token_i_plus_2():
    policy = model("llama")
    (r,) = answers(policy, [8])
    packed = pack([r], (-1,), 32)
    assert packed.next_tokens.tolist() == r.token_ids[1:-1] and packed.sampled_tokens.tolist() == r.token_ids[2:]
    for i in range(6):
        longer = features_of(policy, [*r.token_ids[: i + 2], 0], (-1,))  # fed tokens 0..i+1
        assert torch.allclose(packed.targets[i], longer[-1], atol=1e-12)
        assert torch.equal(packed.features[i], r.features[i])


@pytest.mark.parametrize("form", ["eagle", "eagle3"])
def test_packed_equals_alone(form):
    """Outputs and gradients, whoever lies beside."""
    policy, drafter = model("llama"), eagle("llama", form)
    drafter = Eagle.random(drafter.config, 3, 0.2, torch.float64).requires_grad_(True)
    records = answers(policy, [12, 3, 7, 30, 5], capture_layers(drafter.config))

    def gradients(parts):
        drafter.zero_grad()
        for part in parts:
            packed, outputs = unrolled(policy, drafter, part, 3)
            aligned = align(outputs, packed)
            (aligned.outputs.square().sum(-1) * aligned.valid).sum().backward()
        return [p.grad.clone() for p in drafter.parameters() if p.grad is not None]

    together, alone = gradients([records]), gradients([[r] for r in records])
    for a, b in zip(together, alone, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-10)


def test_the_fast_attention_equals_the_plain_one():
    """Value and gradients of the joint softmax; the plain one is checked by automatic differentiation."""
    torch.manual_seed(0)
    lengths, queries = (5, 1, 9), (3, 1, 9)
    positions = torch.cat([torch.arange(n) for n in lengths])
    answers = torch.tensor([2, 3, 4, *range(5, 15)])
    packed = SimpleNamespace(positions=positions, answers=answers, lengths=lengths, answer_lengths=queries)
    rope, layer = Rope(model("llama").config, 64, torch.float64, "cpu"), eagle("llama").attention
    qkv = [torch.randn(rows, (4 + 2 * 2) * 8, dtype=torch.float64, requires_grad=True) for rows in (15, 13, 13)]

    def run(causal, *inputs):
        attend = UnrolledAttend(OPS, rope, packed, causal)
        return torch.stack([attend(layer, x) for x in inputs])

    assert torch.autograd.gradcheck(lambda *x: run(ReferenceCausalAttention(lengths, queries), *x), qkv, fast_mode=True)
    plain, fast = run(ReferenceCausalAttention(lengths, queries), *qkv), run(CpuCausalAttention(lengths, queries), *qkv)
    assert torch.allclose(plain, fast, atol=1e-12)
    grad = torch.randn_like(plain)
    for a, b in zip(torch.autograd.grad(plain, qkv, grad), torch.autograd.grad(fast, qkv, grad), strict=True):
        assert torch.allclose(a, b, atol=1e-12)


def test_paths_begin_within_the_answer():
    policy, drafter = model("llama"), eagle("llama")
    records = answers(policy, [10, 6])  # prompts of three tokens
    packed, outputs = unrolled(policy, drafter, records, 3)
    aligned = align(outputs, packed)
    assert packed.sampled_tokens[aligned.rows].tolist() == [t for r in records for t in r.token_ids[3:]]
    for k in range(3):
        assert int(aligned.valid[k].sum()) == sum(answer_rows(len(r.token_ids), 3, k) for r in records)
    for k in range(3):
        for t, row in enumerate(aligned.rows.tolist()):
            if aligned.valid[k, t]:
                assert torch.equal(aligned.outputs[k, t], outputs[k][packed.answers.tolist().index(row - k)])


def test_first_fit_keeps_all_and_the_limit():
    sizes = [7, 3, 9, 2, 2, 30, 1]
    bins = first_fit_decreasing(sizes, 10)
    assert sorted(i for members in bins for i in members) == list(range(7))
    assert all(sum(sizes[i] for i in members) <= 10 or len(members) == 1 for members in bins)
    assert len(bins) == 4  # 30 alone; 9+1, 7+3, 2+2


def test_a_layer_that_was_not_captured_is_named():
    policy = model("qwen3")
    with pytest.raises(ValueError, match="layer 0 was not captured"):
        pack(answers(policy, [5]), eagle("qwen3", "eagle3").config.feature_layers, 32)


def test_cut_records_stay_whole():
    (r,) = answers(model("llama"), [20])
    short = Stretch(0, r.prompt_length, 8).of(r)
    assert len(short.token_ids) == 8 and len(short.features) == 7 and len(short.versions) == 5
    assert [part.of(r) for part in stretches(20, r.prompt_length, None)] == [r]
