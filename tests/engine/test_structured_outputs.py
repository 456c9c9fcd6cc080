"""Grammars and bad words: every token is sampled from the policy's distribution without the forbidden tokens, with and without
speculation."""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
from copy import deepcopy
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from json_policy import EOS, PIECES, policy, tokenizer
from test_logit_adjustments import logits_after
from tiny import VOCAB, captured, eagle, model

from paceline import Engine, SamplingParams, Strategy
from paceline.config import EngineConfig
from paceline.engine.command import Constraint, TokenMasks
from paceline.engine.grammar import Grammars
from paceline.engine.token_masks import TokenMasker
from paceline.kernels import SamplingTensors, TorchOps
from paceline.structured_outputs import Grammar, StructuredOutputs

PROMPT = [5, 9, 9, 2, 40]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "name": {"type": "string", "maxLength": 6}},
          "required": ["a", "name"], "additionalProperties": False}
FORMS = {
    "json": {"json": SCHEMA}, "regex": {"regex": "(ab|c)+[0-9]{2,4}"}, "choice": {"choice": ["abc", "abcabc", "12"]},
    "grammar": {"grammar": 'start: "[" item ("," item)* "]"\nitem: /[a-c]+/ | "true"'},
    "ebnf": {"grammar": 'root ::= "a" b\nb ::= "1" | "2" b'},
}


def make(drafter="none", strategy="off", kind: str = "llama", **config) -> Engine:
    return Engine(policy(kind), tokenizer(), drafter, strategy, EngineConfig(profile=False, **config))


def params(form: str, **more) -> SamplingParams:
    return SamplingParams(**{"seed": 3, "max_new_tokens": 40, "structured_outputs": FORMS[form], **more})


MATCHES = {"json": lambda text: {"a", "name"} == json.loads(text).keys(), 
           "regex": lambda text: re.fullmatch("(ab|c)+[0-9]{2,4}", text),
           "choice": lambda text: text in FORMS["choice"]["choice"],
           "grammar": lambda text: re.fullmatch(r"\[([a-c]+|true)(,([a-c]+|true))*\]", text),
           "ebnf": lambda text: re.fullmatch("a2*1", text)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("drafter", ["suffix", "eagle"])
def test_answers_have_the_form_and_do_not_depend_on_drafts(form, drafter):
    wanted = make().generate([PROMPT], params(form), n=4)[0].rollouts
    assert [rollout.finish_reason for rollout in wanted].count("stop") >= 1, "nothing was finished"
    for rollout in wanted:
        assert rollout.finish_reason != "stop" or MATCHES[form](rollout.text), rollout.text
    engine = make(eagle() if drafter == "eagle" else "suffix", f"{drafter}:d4w3v10")
    found = engine.generate([PROMPT], params(form), n=4)[0].rollouts
    assert engine.stats().drafted > 0
    for one, other in zip(wanted, found, strict=True):
        assert one.token_ids == other.token_ids and one.logprobs == pytest.approx(other.logprobs, abs=1e-9)


def test_every_token_is_sampled_from_the_masked_distribution():
    """The regular expression as a definition: a token may follow if the text with it can be continued to a match."""
    (rollout,) = make(eagle(), "eagle:d4w3v10").generate([PROMPT], params("regex", temperature=1.2))[0].rollouts
    for number, (token, logprob) in enumerate(zip(rollout.token_ids, rollout.logprobs, strict=True)):
        before = "".join(PIECES[each] for each in rollout.token_ids[:number])
        allowed = [bool(re.fullmatch("(ab|c)+[0-9]{2,4}", before)) if i == EOS else i < len(PIECES) and begins(before + PIECES[i])
                   for i in range(VOCAB)]
        logits = logits_after([*PROMPT, *rollout.token_ids[:number]]).masked_fill(~torch.tensor(allowed), -torch.inf)
        seed = rollout.seed - 2**64 if rollout.seed >= 2**63 else rollout.seed
        row = SamplingTensors(*(torch.tensor([value], dtype=dtype) for value, dtype in (
            (seed, torch.int64), (len(PROMPT) + number, torch.int64), (1.2, torch.float32), (0, torch.int32),
            (1.0, torch.float32), (0.0, torch.float32))))
        expected, chance = TorchOps().sample(logits[None], row)
        assert token == int(expected) and logprob == pytest.approx(float(chance), abs=1e-9), number


def begins(text: str) -> bool:
    """Whether a match of the regular expression begins with this text."""
    return bool(re.fullmatch("((ab|c)*a?|(ab|c)+[0-9]{0,4})", text))


JOBS = [(PROMPT, params("json"), 2), (PROMPT, params("json", seed=8, temperature=0.0), 1),
        ([7, 8] * 9, params("regex", top_k=9), 2), (PROMPT, SamplingParams(seed=4, max_new_tokens=30), 2), 
        ([3], params("grammar", presence_penalty=0.7), 2),
        (PROMPT, SamplingParams(seed=4, max_new_tokens=30, bad_words=("a", "b", "1", "xy", "abc")), 2)]


@cache
def reference(kind: str) -> list[list[tuple[list[int], list[float], str]]]:
    found = []
    for prompt, wanted, n in JOBS:
        rollouts = make(None, "off", kind, max_batch=1, kernels="torch").generate([prompt], wanted, n)[0].rollouts
        found.append([(each.token_ids, each.logprobs, each.finish_reason) for each in rollouts])
    return found


@settings(max_examples=3, phases=[Phase.generate], deadline=None, suppress_health_check=list(HealthCheck))
@given(kind=st.sampled_from(["llama", "qwen3"]), learned=st.booleans(), page_size=st.integers(1, 9),
       max_batch=st.integers(1, 9), max_rows=st.integers(2, 50), kv_tokens=st.integers(90, 300),
       pipelined=st.sampled_from(["no", "launches first", "captures"]),
       disturbed=st.sampled_from(["no", "preempted", "moved", "preempted and moved"]), seed=st.integers(0, 2**32))
def test_tokens_do_not_depend_on_how_they_are_made(kind, learned, page_size, max_batch, max_rows, kv_tokens, pipelined,
                                                   disturbed, seed):
    """Random trees, batches, pre-emptions, and moves between two engines."""
    rng = random.Random(seed)

    def choose(view) -> Strategy:
        drafter = rng.choice(["none", *view.available])
        return Strategy.OFF if drafter == "none" else Strategy(drafter, rng.randint(1, 6), rng.randint(1, 4), rng.randint(1, 20))

    engines = [make(eagle(kind) if learned else "suffix", choose, kind, page_size=page_size, max_batch=max_batch,
                    max_rows=max_rows, kv_tokens=kv_tokens) for _ in range(2)]
    for engine in engines:
        engine.planner.pipelined = pipelined != "no"
        if pipelined == "captures":
            captured(engine, (1, 4, 16, 40))
    names = {}
    for job, (prompt, wanted, n) in enumerate(JOBS):
        names |= {(0, i): (job, sample) for sample, i in enumerate(engines[0].add(prompt, wanted, n))}
    got = {}
    for _ in range(3000):
        for index, engine in enumerate(engines):
            for rollout in engine.step().finished:
                got[names.pop((index, rollout.request_id))] = rollout.token_ids, rollout.logprobs, rollout.finish_reason
            if engine.scheduler.running and "preempted" in disturbed and rng.random() < 0.2:
                engine._drain()
                engine.scheduler.preempt_all()
            if engine.planner.requests and "moved" in disturbed and rng.random() < 0.2:
                request = rng.choice(list(engine.planner.requests))
                state = engine.migration.export_request(request, 0)
                if state is not None:
                    names[1 - index, engines[1 - index].migration.import_request(state, 0)] = names.pop((index, request))
        if not names:
            break
    assert not names
    for job, answers in enumerate(reference(kind)):
        for sample, (tokens, logprobs, reason) in enumerate(answers):
            assert got[job, sample][0] == tokens and got[job, sample][2] == reason, (job, sample)
            assert got[job, sample][1] == pytest.approx(logprobs, abs=1e-9)


def test_bad_words_are_not_sampled():
    words = ("a", "ab", "bc", "12")
    plain = SamplingParams(seed=1, max_new_tokens=200)
    free = make().generate([PROMPT], plain, n=4)[0].rollouts
    assert any("bc" in rollout.text for rollout in free) or any("a" in rollout.text for rollout in free)
    limited = SamplingParams(seed=1, max_new_tokens=200, bad_words=words)
    for rollout in make("suffix", "suffix:d4w2v8").generate([PROMPT], limited, n=4)[0].rollouts:
        pieces = [PIECES[i] if i < len(PIECES) else "" for i in rollout.token_ids]
        assert "a" not in pieces
        assert not any(pair in (("b", "c"), ("1", "2")) for pair in itertools.pairwise(pieces))


@pytest.mark.parametrize("strategy", ["off", "suffix:d4w2v8"])
def test_bad_words_that_leave_no_token(strategy):
    """The request is told, and others go on; it is not blamed for logits that are not numbers."""
    first, second = PIECES.index("a"), PIECES.index("b")
    stuck = SamplingParams(bad_words=("aa", "ab", "ba", "bb"), allowed_token_ids=(first, second), max_new_tokens=30)
    engine = make("suffix", strategy)
    (impossible,), (other,) = (group.rollouts for group in engine.generate([PROMPT, PROMPT[:3]], [stuck, params("regex")]))
    assert impossible.finish_reason == "error" and impossible.no_token_allowed and len(impossible.token_ids) == 1
    assert impossible.error == "bad_words: no token is allowed behind the 1 tokens of the answer"
    assert other.finish_reason != "error" and not engine.has_work
    broken = Engine(deepcopy(policy("llama")), tokenizer(), "suffix", strategy, EngineConfig(profile=False))
    broken.model.embed.weight.data[first] = float("nan")
    (rollout,) = broken.generate([PROMPT], SamplingParams(bad_words=("ab",), allowed_token_ids=(first,)))[0].rollouts
    assert rollout.finish_reason == "error" and not rollout.no_token_allowed and "are not numbers" in rollout.error


def test_masks_of_a_tree():
    """Every row is masked by the text on its own path; rows behind forbidden draft tokens are left as they are."""
    ids = {piece: i for i, piece in enumerate(PIECES)}
    masker = TokenMasker(Grammars(tokenizer(), VOCAB, (EOS,)))
    draft, parents = [ids[piece] for piece in ("a", "c", "b", "x", "c", "1")], [-1, -1, 0, -1, 3, 1]
    found = TokenMasks([7], [4], [7], [0], [[ids["c"]]], [Constraint(Grammar("regex", "(ab|c)+[0-9]{2,4}"), ())])
    for _ in range(2):  # the state of the answer is what it was
        rows, masks = masker.masks(found, (np.array([draft]), np.array([parents])))
        assert rows.tolist() == list(range(4, 11))
        allowed = [{PIECES[i] for i in np.unpackbits(mask, bitorder="little")[:len(PIECES)].nonzero()[0]} for mask in masks]
        digits = set("0123456789") | {"12"}
        start = {"a", "c", "ab", "abc"}
        assert allowed[0] == start | digits and allowed[1] == {"b", "bc"} and allowed[2] == start | digits == allowed[3]
        assert allowed[4] == allowed[5] == set(PIECES), "behind a token that may not follow"
        assert allowed[6] == digits
        found = found._replace(new_tokens=[[]], constraints=[None])


def test_requests_without_constraints_do_not_wait_for_outputs():
    engine = make("suffix", "off")
    engine.planner.pipelined = True
    engine.add(PROMPT, SamplingParams(max_new_tokens=8, repetition_penalty=1.2))
    assert not engine.planner.needs_outputs
    (limited,) = engine.add(PROMPT, params("json"))
    assert engine.planner.needs_outputs
    engine.abort([limited])
    assert not engine.planner.needs_outputs


@pytest.mark.parametrize(("given", "message"), [
    ({}, "exactly one"), ({"regex": "a", "choice": ["b"]}, "exactly one"), ({"schema": {}}, "schema is not one of"),
    ({"regex": 3}, "regex is not a string"), ({"choice": [""]}, "non-empty strings"), ({"choice": [1]}, "non-empty strings"),
    ({"json_object": 1}, "True or False")])
def test_wrong_forms_are_named(given, message):
    with pytest.raises(ValueError, match=f"structured_outputs: .*{message}"):
        SamplingParams(structured_outputs=given)


@pytest.mark.parametrize("given", [{"regex": "("}, {"json": "{"}, {"json": {"type": "wrong"}},
                                   {"json": {"not": {"type": "string"}}}, {"grammar": "start: missing"},
                                   {"grammar": "start ::= "}])
def test_grammars_that_the_library_does_not_take_are_refused(given):
    engine = make()
    with pytest.raises(ValueError, match="structured_outputs: "):
        engine.add(PROMPT, SamplingParams(structured_outputs=given))
    assert not engine.has_work


@pytest.mark.parametrize("more", [{"ignore_eos": True}, {"min_tokens": 3}, {"allowed_token_ids": (3,)}, {"bad_words": ("a",)}])
def test_what_contradicts_a_grammar_is_refused(more):
    with pytest.raises(ValueError, match=f"{next(iter(more))}: not together with structured_outputs"):
        SamplingParams(structured_outputs=StructuredOutputs(json_object=True), **more)


def test_what_is_missing_is_said(monkeypatch):
    with pytest.raises(ValueError, match="structured_outputs: the model came without a tokenizer"):
        Engine(policy(), None, "none", "off").add(PROMPT, params("json"))
    with pytest.raises(ValueError, match="structured_outputs: the model came without an end-of-text token"):
        Engine(model(), tokenizer(), "none", "off").add(PROMPT, params("json"))
    with pytest.raises(ValueError, match="bad_words: the model came without a tokenizer"):
        Engine(policy(), None, "none", "off").add(PROMPT, SamplingParams(bad_words=("a",)))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"structured_outputs: needs the package llguidance; pip install "):
        make().add(PROMPT, params("json"))
