"""Equal bits in bfloat16 and float32 on a CUDA device: tokens and log-probabilities are those of one request at a time without a
drafter, whatever the strategy, the batch, arrival among others, pages, prompt chunks, pre-emption, shared prefixes, sleep and
graphs."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline import Engine, SamplingParams
from paceline.config import EngineConfig
from paceline.drafters.eagle import Eagle, EagleConfig
from paceline.kernels import PagedCache, Segments
from paceline.models.config import ExpertsSpec, LayerSpec, ModelConfig
from paceline.models.decoder import Decoder

SHAPES = {
    "qwen2": ModelConfig("qwen2", 1021, 224, 600, 3, 7, 1, 64, max_context=1024, qkv_bias=True),
    "qwen3": ModelConfig("qwen3", 509, 256, 320, 3, 6, 2, 48, max_context=1024, qk_norm=True),
    "llama": ModelConfig("llama", 777, 320, 512, 2, 8, 8, 128, max_context=1024, tie_embeddings=True),
    "experts": ModelConfig("qwen3_moe", 509, 256, 320, 3, 6, 2, 64, max_context=1024, qk_norm=True,
                           layers=(LayerSpec(experts=ExpertsSpec(16, 4, 96)), LayerSpec(),
                                   LayerSpec(experts=ExpertsSpec(5, 2, 80)))),
    "one head": ModelConfig("llama", 1021, 96, 160, 2, 1, 1, 48, max_context=6400),
    "forty heads": ModelConfig("qwen2", 509, 512, 640, 2, 40, 8, 64, max_context=6400, qkv_bias=True),
}
USUAL = ("qwen2", "qwen3", "llama", "experts")
LONG_PROMPTS = {100: 5900, 101: 3000, 102: 2047}
"""Length of a few prompts, by number."""
DEVICE = "cuda"
NUM_PROMPTS, NEW_TOKENS = 40, 24
TIGHT = 560
"""Tokens of a KV cache in which requests are pre-empted."""
STRATEGIES = ["off", "suffix:d4w2v8", "eagle:d3w2v6", "eagle:d1w1v1", "eagle:d6w4v32", "auto"]
Answer = tuple[list[int], list[float]]


@cache
def policy(shape: str, dtype: torch.dtype) -> Decoder:
    model = Decoder.random(SHAPES[shape], seed=1, std=0.12, dtype=dtype, device=DEVICE)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(0, 0.2, generator=torch.Generator(DEVICE).manual_seed(2))
    return model


def drafter(shape: str, dtype: torch.dtype) -> Eagle:
    return Eagle.random(EagleConfig.for_policy(SHAPES[shape], "eagle"), 3, 0.1, dtype, DEVICE)


def prompt(shape: str, number: int) -> list[int]:
    """Every third prompt begins like another one; lengths are 1 to 400."""
    generator = torch.Generator().manual_seed(number // 3 if number % 3 == 0 else 1000 + number)
    length = LONG_PROMPTS.get(number, [1, 17, 33, 64, 130, 400][number % 6] + number % 5)
    tokens = torch.randint(0, SHAPES[shape].vocab_size, (length,), generator=generator).tolist()
    return tokens + [number % 7] * (number % 3)


def params(number: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=NEW_TOKENS, seed=number, temperature=[1.0, 0.7, 1.3][number % 3], ignore_eos=True)


@cache
def engine(shape: str, with_drafter: bool, page_size: int, max_rows: int, kv_tokens: int, graphs: bool,
           dtype: torch.dtype = torch.bfloat16, max_batch: int = 16) -> Engine:
    config = EngineConfig(max_batch=max_batch, kv_tokens=kv_tokens, page_size=page_size, max_rows=max_rows, cuda_graphs=graphs,
                          profile=False)
    return Engine(policy(shape, dtype), None, drafter(shape, dtype) if with_drafter else None, "off", config)


def answers(engine: Engine, shape: str, numbers: list[int], strategy: str, apart: int = 0,
            nap_after: int = 0) -> dict[int, Answer]:
    """The answers of these prompts. `apart`: a request arrives so many steps after the one before. `nap_after`: the engine sleeps
    once, after so many steps."""
    own, engine.selector = engine.selector, engine.selector_of(strategy)
    coming, ids, found, steps = list(numbers), {}, {}, 0
    try:
        while coming or engine.has_work:
            while coming and (not apart or steps % apart == 0):
                number = coming.pop(0)
                ids[engine.add(prompt(shape, number), params(number), key=str(number))[0]] = number
                if apart:
                    break
            for each in engine.step().finished:
                assert each.error is None, each.error
                found[ids[each.request_id]] = (each.token_ids, each.logprobs)
            steps += 1
            if steps == nap_after:
                engine.sleep()
                engine.wake()
    finally:
        engine.selector = own
    return found


@cache
def alone(shape: str, number: int, dtype: torch.dtype = torch.bfloat16) -> Answer:
    """One request at a time, no drafter, no graphs, no shared prefix, the prompt in one chunk."""
    plain = engine(shape, False, 16, 6400, 6400 + 512, False, dtype)
    plain.scheduler.drop_prefixes()
    return answers(plain, shape, [number], "off")[number]


CASES = st.fixed_dictionaries({
    "strategy": st.sampled_from(STRATEGIES),
    "numbers": st.lists(st.integers(0, NUM_PROMPTS - 1), min_size=1, max_size=14, unique=True),
    "page_size": st.sampled_from([4, 16]), "max_rows": st.sampled_from([48, 2048]), "kv_tokens": st.sampled_from([TIGHT, 8192]),
    "apart": st.sampled_from([0, 0, 1, 5]), "nap_after": st.sampled_from([0, 0, 7]), "forgets": st.booleans(),
})


EVERY_SHAPE = pytest.mark.parametrize(("shape", "graphs"), [(shape, graphs) for shape in USUAL for graphs in (False, True)])


def cases(count: int):
    return settings(max_examples=count, deadline=None, derandomize=True, database=None,
                    suppress_health_check=list(HealthCheck))


@EVERY_SHAPE
@cases(24)
@given(case=CASES)
def test_tokens_and_logprobs_are_those_of_one_request_alone(shape, graphs, case):
    check_case(shape, graphs, case)


@pytest.mark.slow
@EVERY_SHAPE
@cases(84)
@given(case=CASES)
def test_tokens_and_logprobs_are_those_of_one_request_alone_thoroughly(shape, graphs, case):
    """504 cases in all: `python -m pytest -m slow tests/gpu/test_gpu_same_tokens.py`."""
    check_case(shape, graphs, case)


@cases(12)
@given(case=CASES)
def test_float32_has_the_same_bits_too(case):
    check_case("qwen2", True, case, torch.float32)


def check_case(shape: str, graphs: bool, case: dict, dtype: torch.dtype = torch.bfloat16) -> None:
    one = engine(shape, True, case["page_size"], case["max_rows"], case["kv_tokens"], graphs, dtype)
    if case["forgets"]:
        one.scheduler.drop_prefixes()
    found = answers(one, shape, case["numbers"], case["strategy"], case["apart"], case["nap_after"])
    assert len(found) == len(case["numbers"])
    for number, got in found.items():
        assert got == alone(shape, number, dtype), f"prompt {number}"


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("strategy", ["off", "suffix:d4w2v8", "eagle:d6w4v32", "auto"])
@pytest.mark.parametrize("shape", ["one head", "forty heads"])
def test_long_contexts_in_steps_of_a_thousand_rows(shape, strategy, graphs):
    """Contexts up to 5,900 tokens beside 33 short ones, 1 and 40 heads, up to 36 × 33 rows in a step, captured or not."""
    one = engine(shape, True, 16, 2048, 24_000, graphs, max_batch=36)
    numbers = [*LONG_PROMPTS, *range(33)]
    found = answers(one, shape, numbers, strategy, apart=1)
    assert len(found) == len(numbers)
    for number, got in found.items():
        assert got == alone(shape, number), f"prompt {number}"


def test_cases_are_preempted_and_share_prefixes():
    """The cases above are of use only if these happen."""
    tight = engine("qwen2", True, 4, 48, TIGHT, True)
    answers(tight, "qwen2", [number for number in range(NUM_PROMPTS) if number % 6 in (1, 2, 3)][:14], "eagle:d3w2v6")
    assert tight.stats().preemptions > 0
    roomy = engine("qwen2", True, 4, 48, 8192, True)
    answers(roomy, "qwen2", [10], "off")
    answers(roomy, "qwen2", [10], "off")
    assert roomy.stats().cached_prompt_tokens > 0


def digest(shape: str) -> str:
    found = answers(engine(shape, True, 16, 2048, 8192, True), shape, list(range(12)), "eagle:d3w2v6")
    return hashlib.sha256(json.dumps([found[number] for number in sorted(found)]).encode()).hexdigest()


def test_another_process_gives_the_same_bits():
    code = "import test_gpu_same_tokens as t; print('digest', t.digest('qwen2'))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # the package need not be installed
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, env=environment, stdout=subprocess.PIPE,
                          text=True, check=True)
    assert f"digest {digest('qwen2')}" in done.stdout


# -- operations, at sizes that no small model has


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(28, 4, 128), (12, 2, 128), (14, 2, 64), (40, 8, 128), (40, 40, 96),
                                                        (1, 1, 48), (16, 16, 80)])
def test_attention_of_a_position_has_the_same_bits_in_every_step(heads, kv_heads, dim):
    """One query at 17 contexts up to 6,000: decoded alone, among 200 rows, as a node of a tree, and in a prompt chunk."""
    from paceline.kernels.triton.ops import TritonOps

    torch.manual_seed(0)
    device, ops, length = "cuda", TritonOps("cuda", max_context=6200), 6176
    keys, values = (torch.randn(2 * length, kv_heads, dim, device=device).bfloat16() for _ in "kv")
    table = torch.randperm(2 * length // 16, device=device)[: length // 16].int()[None]
    cache_ = PagedCache(keys, values, table, 16)
    scale = dim**-0.5

    def integers(found: list[int]) -> torch.Tensor:
        return torch.tensor(found, dtype=torch.int32, device=device)

    def run(q: torch.Tensor, lengths: list[int], contexts: list[int], causal: bool, mask: torch.Tensor,
            trees: bool) -> torch.Tensor:
        first = [sum(lengths[:i]) for i in range(len(lengths))]
        segments = Segments(integers(first), integers(lengths), integers([0] * len(lengths)), integers(contexts),
                            torch.full((len(lengths),), causal, device=device), mask)
        chunks = [(0, context, count) for context, count in zip(contexts, lengths, strict=True)] if causal else []
        plan = ops.plan_step(segments, len(q), heads, cache_, chunks, trees)
        return ops.attention(q, cache_, segments, scale, plan)

    def words(rows: list[int]) -> torch.Tensor:
        return torch.tensor([[word, 0] for word in rows], device=device)

    for context in (0, 1, 31, 63, 64, 65, 500, 1015, 1023, 1024, 1025, 2040, 2047, 2048, 4095, 4096, 6000):
        q = torch.randn(12, heads, dim, device=device).bfloat16()
        single = torch.cat([run(q[i : i + 1], [1], [context + i], False, words([1]), False) for i in range(12)])
        chain = run(q, [12], [context], False, words([(2 << i) - 1 for i in range(12)]), True)
        assert torch.equal(chain, single), f"a chain behind {context}"
        chunk = run(q, [12], [context], True, torch.zeros(12, 2, dtype=torch.int64, device=device), False)
        assert torch.equal(chunk, single), f"a prompt chunk behind {context}"
        contexts = [context, *(int(c) for c in torch.randint(0, 6000, (199,)))]
        among = run(torch.cat([q[:1], torch.randn(199, heads, dim, device=device).bfloat16()]), [1] * 200, contexts, False,
                    words([1] * 200), False)
        assert torch.equal(among[:1], single[:1]), f"one of 200 rows behind {context}"
        trees = run(torch.cat([q, torch.randn(300, heads, dim, device=device).bfloat16()]), [12] + [2] * 150,
                    [context, *(c % 3000 for c in contexts[:150])], False,
                    words([(2 << i) - 1 for i in range(12)] + [1, 3] * 150), True)
        assert torch.equal(trees[:12], single), f"one of many trees behind {context}"


@pytest.mark.parametrize(("hidden", "inner", "heads", "kv_heads", "dim"), [(1536, 8960, 12, 2, 128), (896, 4864, 14, 2, 64),
                                                                          (3584, 18944, 28, 4, 128)])
def test_a_layer_has_the_same_bits_for_every_number_of_rows(hidden, inner, heads, kv_heads, dim):
    """Rows 1 to 600 of the products of real models, fused and separate, with odd numbers of rows."""
    from paceline.kernels.triton.ops import TritonOps

    torch.manual_seed(0)
    ops, device = TritonOps("cuda", max_context=2048), "cuda"

    def weight(n: int, k: int) -> torch.Tensor:
        return (torch.randn(n, k, device=device) * k**-0.5).bfloat16()

    qkv, o, gate_up, down = (weight((heads + 2 * kv_heads) * dim, hidden), weight(hidden, heads * dim), weight(2 * inner, hidden),
                             weight(hidden, inner))
    bias, norm = torch.randn(len(qkv), device=device).bfloat16(), torch.rand(hidden, device=device).bfloat16()
    x, residual = torch.randn(600, heads * dim, device=device).bfloat16(), torch.randn(600, hidden, device=device).bfloat16() * 3
    cos, sin = torch.rand(600, dim // 2, device=device), torch.rand(600, dim // 2, device=device)

    def layer(rows: slice) -> list[torch.Tensor]:
        count = rows.stop - rows.start
        cache_ = PagedCache(*(torch.zeros(1024, kv_heads, dim, device=device).bfloat16() for _ in "kv"),
                            torch.zeros(1, 1, dtype=torch.int32, device=device), 16)
        normed, stream = ops.linear_norm(x[rows], o, None, residual[rows], norm, 1e-6)
        inside = ops.gated_linear(normed, gate_up, None)
        normed, stream = ops.linear_norm(inside, down, None, stream, norm, 1e-6)
        write = torch.arange(count, device=device)
        q = ops.qkv_rope(normed, qkv, bias, heads, cos[rows], sin[rows], write, cache_)
        return [stream, inside, q, cache_.k[:count], cache_.v[:count], ops.linear(stream, qkv, bias)]

    every = layer(slice(0, 600))
    for start, stop in ((0, 1), (5, 7), (0, 16), (3, 20), (0, 32), (100, 133), (0, 48), (0, 64), (7, 80), (0, 128), (0, 200),
                        (0, 256), (11, 500)):
        for name, got, want in zip(("stream", "inside", "q", "k", "v", "linear"), layer(slice(start, stop)), every, strict=True):
            assert torch.equal(got, want[start:stop]), f"{name}, rows {start} to {stop}"


@pytest.mark.parametrize(("vocabulary", "hidden"), [(4093, 1024), (777, 320), (1021, 224), (50257, 768), (151936, 1536)])
def test_logits_have_the_same_bits_for_every_number_of_rows(vocabulary, hidden):
    """Libraries have other kernels for a vocabulary that is not a multiple of 8."""
    from paceline.kernels.triton.ops import TritonOps

    ops = TritonOps("cuda")
    weight, x = (torch.randn(rows, hidden, device="cuda").bfloat16() for rows in (vocabulary, 520))
    every = ops.linear(x, weight)
    for rows in (*range(1, 33, 5), *range(33, 300, 9), 300, 400, 519):
        assert torch.equal(ops.linear(x[:rows], weight), every[:rows]), f"{rows} rows"
