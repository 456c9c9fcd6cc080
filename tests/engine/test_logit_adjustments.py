"""Penalties, logit bias and minimum lengths: what they mean, for every kernel backend, with draft trees and without."""

from __future__ import annotations

import pytest
import torch
from e2e.toy import LETTERS
from tiny import VOCAB, eagle, model
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from paceline import Engine, SamplingParams
from paceline.config import EngineConfig
from paceline.kernels import SamplingTensors, TorchOps
from paceline.rl.batch import Sample, pack
from paceline.rl.models import Policy

PROMPT = [5, 9, 9, 2, 40]
PARAMS = {
    "presence": SamplingParams(seed=1, max_new_tokens=24, presence_penalty=1.5),
    "frequency": SamplingParams(seed=2, max_new_tokens=24, frequency_penalty=0.8, temperature=0.6),
    "repetition": SamplingParams(seed=3, max_new_tokens=24, repetition_penalty=1.8, temperature=0.0),
    "bias": SamplingParams(seed=4, max_new_tokens=12, logit_bias={3: 8.0, 60: -5.0}, top_k=4),
    "allowed": SamplingParams(seed=6, max_new_tokens=24, allowed_token_ids=(1, 3, 7, 9, 40), logit_bias={3: 2.0},
                              min_tokens=5, stop_token_ids=(7,)),
    "all": SamplingParams(seed=5, max_new_tokens=24, presence_penalty=-0.5, frequency_penalty=0.4, repetition_penalty=0.8,
                          logit_bias={1: 2.0}, min_tokens=7, stop_token_ids=tuple(range(20, 61)), top_p=0.9),
}


def adjusted(logits: torch.Tensor, params: SamplingParams, output: list[int]) -> torch.Tensor:
    """The definition, token by token."""
    found = logits.clone()
    for token in range(VOCAB):
        if token in PROMPT or token in output:
            found[token] *= 1 / params.repetition_penalty if found[token] > 0 else params.repetition_penalty
        found[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty * (token in output)
        found[token] += dict(params.logit_bias).get(token, 0.0)
        if len(output) < params.min_tokens and token in params.stop_token_ids:
            found[token] = -torch.inf
        if params.allowed_token_ids and token not in params.allowed_token_ids:
            found[token] = -torch.inf
    return found


def logits_after(tokens: list[int]) -> torch.Tensor:
    """Logits of the next token, from the model that training uses."""
    policy = Policy(model(), torch.float64)
    (batch,) = pack([Sample([*tokens, 0], len(tokens), 0, 0.0, False, torch.zeros(1, dtype=torch.float64))], 1000)
    with torch.no_grad():
        return policy.model.logits(policy.hidden(batch)[batch.rows], policy.ops)[0]


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("name", PARAMS)
def test_every_token_is_sampled_from_the_adjusted_logits(name, kernels):
    """A tree of drafts is verified; every token is the one that the definition gives, with its log-probability."""
    params, config = PARAMS[name], EngineConfig(kernels=kernels)
    engine = Engine(model(), None, eagle(), "eagle:d4w3v10", config)
    (rollout,) = engine.generate([PROMPT], params)[0].rollouts
    assert engine.stats().drafted > 0
    for number, (token, logprob) in enumerate(zip(rollout.token_ids, rollout.logprobs, strict=True)):
        output = rollout.token_ids[:number]
        row = SamplingTensors(*(torch.tensor([value], dtype=dtype) for value, dtype in (
            (rollout.seed - 2**64 if rollout.seed >= 2**63 else rollout.seed, torch.int64), (len(PROMPT) + number, torch.int64),
            (params.temperature, torch.float32), (params.top_k, torch.int32), (params.top_p, torch.float32),
            (params.min_p, torch.float32))))
        expected, chance = TorchOps().sample(adjusted(logits_after([*PROMPT, *output]), params, output)[None], row)
        assert token == int(expected) and logprob == pytest.approx(float(chance), abs=1e-9), number
    if params.min_tokens:
        assert len(rollout.token_ids) >= params.min_tokens


def test_requests_without_adjustments_are_not_changed_by_their_neighbours():
    plain = SamplingParams(seed=7, max_new_tokens=16)
    alone = Engine(model(), None, "none", "off").generate([PROMPT], plain)[0].rollouts[0]
    together = Engine(model(), None, "suffix", "suffix:d4w2v8").generate([PROMPT, PROMPT], [plain, PARAMS["all"]])
    assert together[0].rollouts[0].token_ids == alone.token_ids
    assert together[0].rollouts[0].logprobs == pytest.approx(alone.logprobs, abs=1e-9)


def test_raw_logprobs_are_the_policys_own():
    penalised = SamplingParams(seed=1, max_new_tokens=8, presence_penalty=5.0, raw_logprobs=True)
    (rollout,) = Engine(model(), None, "none", "off").generate([PROMPT], penalised)[0].rollouts
    own = [float(logits_after([*PROMPT, *rollout.token_ids[:n]]).log_softmax(0)[token])
           for n, token in enumerate(rollout.token_ids)]
    assert rollout.raw_logprobs == pytest.approx(own, abs=1e-9) and rollout.logprobs != pytest.approx(own, abs=1e-3)


def test_a_stop_string_ends_no_answer_before_its_minimum_length():
    tokenizer = Tokenizer(WordLevel({c: i for i, c in enumerate(LETTERS)}, unk_token="~"))
    tokenizer.pre_tokenizer, tokenizer.decoder = Split("", "isolated"), Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="~", clean_up_tokenization_spaces=False)
    stop = tuple(LETTERS[::2])
    for least in (0, 5, 12):
        unnamed = dict.fromkeys(range(len(LETTERS) - 1, VOCAB), -1e9)  # ids without a letter
        params = SamplingParams(seed=3, max_new_tokens=40, stop=stop, min_tokens=least, logit_bias=unnamed)
        for rollout in Engine(model(), fast, "suffix", "suffix:d4w2v8").generate([PROMPT], params, n=4)[0].rollouts:
            assert rollout.finish_reason == "stop" and len(rollout.token_ids) > least
            assert len(rollout.text) == len(rollout.token_ids) - 1, "cut before the stop string that ended it, not an earlier one"


@pytest.mark.parametrize(("wrong", "message"), [
    ({"repetition_penalty": 0.0}, "repetition_penalty"), ({"presence_penalty": float("nan")}, "presence_penalty"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias"), ({"logit_bias": {1: float("inf")}}, "logit_bias"),
    ({"logit_bias": 3}, "logit_bias"),
    ({"logit_bias": [(1, 2.0), (1, 3.0)]}, "logit_bias"), ({"min_tokens": 9, "max_new_tokens": 8}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens")])
def test_wrong_values_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**wrong)


def test_a_bias_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="logit_bias: token id 61 is outside the vocabulary of 61 tokens"):
        Engine(model(), None, "none", "off").add(PROMPT, SamplingParams(logit_bias={61: 1.0}))
