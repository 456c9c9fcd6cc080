"""The benchmarks' drafter training: rows shifted right, paths as in drafting, and a drafter that an engine profits from."""

from __future__ import annotations

import pytest
import torch
from drafter_coverage import coverage
from drafter_training import (
    Scales,
    SoftCrossEntropy,
    TrainOptions,
    answers_of,
    collate,
    draft_vocabulary,
    outputs,
    train,
)
from tiny import CONFIGS, VOCAB, eagle, model

from paceline import Engine, SamplingParams
from paceline.config import EngineConfig
from paceline.drafters.eagle import Eagle
from paceline.kernels import TorchOps
from paceline.models.attend import PackedAttend
from paceline.models.decoder import Decoder, Rope

OPS = TorchOps()
PROMPTS = [[i, 2 * i, 3 * i + 1, 5, i] for i in range(8)]


def captured(policy: Decoder, new_tokens: int = 24):
    engine = Engine(policy, drafter=None, strategy="off", config=EngineConfig(max_batch=8, capture=(-1,), kernels="torch"))
    groups = engine.generate(PROMPTS, SamplingParams(max_new_tokens=new_tokens, seed=2, ignore_eos=True))
    return groups, answers_of(groups)


def test_paths_are_those_of_drafting():
    """Step j at row i equals a drafter that saw true features up to row i - j and then its own outputs."""
    policy, drafter = model("qwen2"), eagle("qwen2")
    _, answers = captured(policy)
    batch = collate(answers[:3])
    rope = Rope(policy.config, 64, torch.float64, "cpu")
    steps = outputs(drafter, policy, Scales(1.0, 1.0), rope, batch, 3)
    for i in range(3):
        tokens, features = answers[i].tokens, answers[i].features
        for start in range(5, 9):
            state = features[: start + 1]
            for j in range(3):
                size = start + j + 1
                attend = PackedAttend(OPS, *rope(torch.arange(size)), (size,))
                out = drafter(policy.embed(tokens[1 : size + 1]), state, attend)[-1]
                torch.testing.assert_close(steps[j][i, start + j], out, rtol=0, atol=1e-9)
                state = torch.cat([state, out[None]])


def test_targets_are_the_policys_own_next_state():
    """The features at i + 1, through the head, are what token i + 2 was drawn from."""
    policy = model("llama")
    groups, answers = captured(policy)
    batch = collate(answers)
    rows = batch.rows(0)
    logprobs = torch.log_softmax(policy.logits(batch.features[:, 1:][rows], OPS), dim=-1)
    drawn = logprobs.gather(1, batch.predicted[rows][:, None])[:, 0]
    reported = torch.tensor([x for group in groups for x in group.rollouts[0].logprobs], dtype=torch.float64)
    torch.testing.assert_close(drawn, reported, rtol=0, atol=1e-6)


def test_soft_cross_entropy_has_the_gradient_of_the_plain_formula():
    generator = torch.Generator().manual_seed(0)
    own, wanted, head = (torch.randn(*s, dtype=torch.float64, generator=generator) for s in ((2, 5, 4), (5, 4), (7, 4)))
    weight = torch.rand(2, 5, dtype=torch.float64, generator=generator)
    own.requires_grad_(True)
    cross, entropy = SoftCrossEntropy.apply(own, wanted, head, weight)
    p = (wanted @ head.T).softmax(-1)
    plain = -(weight * (p * (own @ head.T).log_softmax(-1)).sum(-1)).sum(1)
    torch.testing.assert_close(cross, plain)
    assert (entropy <= cross).all()
    (got,), (want,) = (torch.autograd.grad((x * torch.tensor([1.0, 3.0])).sum(), own) for x in (cross, plain))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("draft_vocab", [0, 48])
def test_it_learns_one_batch_and_an_engine_profits(draft_vocab):
    policy = model("llama", dtype=torch.float32)
    _, answers = captured(policy)
    lines: list[str] = []
    options = TrainOptions(seconds=60, max_steps=150, depth=3, batch=8, lr=1e-2, draft_vocab=draft_vocab)
    trained = train(policy, answers, options, lines.append)
    seen = {token for answer in answers for token in answer.tokens.tolist()}
    assert draft_vocab == 0 or len(seen & set(trained.drafter.draft_ids.tolist())) == min(48, len(seen))
    found = coverage(trained.drafter, policy, answers, tau=1.0, depth=3)
    bound = 0.9 if draft_vocab == 0 else 0.8  # some tokens it cannot name
    assert found.by_depth[4][0] > bound, str(found)
    assert lines and "excess_1" in lines[0]

    def per_verification(drafter: Eagle) -> float:
        engine = Engine(policy, drafter=drafter, strategy="eagle:d3w4v24",
                        config=EngineConfig(max_batch=8, kernels="torch", tau=1.0))
        engine.generate(PROMPTS, SamplingParams(max_new_tokens=24, seed=2, ignore_eos=True))
        return engine.stats().tokens_per_verification

    mine = per_verification(trained.drafter)
    assert mine > 1.3 * per_verification(eagle("llama", dtype=torch.float32))
    # A tree of this engine holds at most what a full one does, and most of it.
    assert 0.6 * found.tokens_per_verification[4] < mine <= found.tokens_per_verification[4] + 0.5


def test_the_draft_vocabulary_is_frequent_first_then_low():
    _, answers = captured(model("llama"))
    ids = draft_vocabulary(answers, 50, VOCAB)
    assert ids is not None and len(ids) == 50 and ids.tolist() == sorted(set(ids.tolist()))
    assert draft_vocabulary(answers, VOCAB, VOCAB) is None


def test_keys_of_other_answers_are_not_seen():
    """A longer neighbour in the batch changes nothing."""
    policy, drafter = model("llama"), eagle("llama")
    _, answers = captured(policy)
    short = answers[0]._replace(tokens=answers[0].tokens[:12], features=answers[0].features[:11])
    rope = Rope(CONFIGS["llama"], 64, torch.float64, "cpu")
    alone, beside = (outputs(drafter, policy, Scales(1.0, 1.0), rope, collate(part), 2)[1]
                     for part in ([short], [short, answers[1]]))
    torch.testing.assert_close(alone[0], beside[0, :10])
