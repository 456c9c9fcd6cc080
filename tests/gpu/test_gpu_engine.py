"""The engine on a CUDA device. One command on a GPU host: `python -m pytest tests/gpu`."""

from __future__ import annotations

import pytest
import torch
from tiny import eagle, model

from paceline import Engine, SamplingParams
from paceline.config import EngineConfig
from paceline.models.decoder import Decoder
from paceline.types import Decision, StepOutcome, StepView, Strategy

PROMPTS = [[1, 2, 3, 4, 5] * 5, [7, 8, 9], [3], [11] * 40]
PARAMS = SamplingParams(max_new_tokens=48, seed=3)


def moved(kind: str, dtype: torch.dtype) -> Decoder:
    decoder = Decoder(model(kind).config).to("cuda", dtype)
    decoder.load_state_dict(model(kind).state_dict())
    return decoder.requires_grad_(False)


def tokens(engine: Engine, n: int = 3, params: SamplingParams = PARAMS) -> list[list[int]]:
    return [r.token_ids for group in engine.generate(PROMPTS, params, n) for r in group.rollouts]


def reference(kind: str) -> list[list[int]]:
    return tokens(Engine(model(kind), drafter=None, strategy="off", config=EngineConfig(kernels="torch")))  # nothing to compile


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("strategy", ["off", "suffix:d4w2v8"])
def test_float64_gives_the_tokens_of_a_cpu(kind, strategy):
    engine = Engine(moved(kind, torch.float64), strategy=strategy, config=EngineConfig(max_batch=16, kv_memory_gb=0.5))
    assert tokens(engine) == reference(kind)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("strategy", ["off", "suffix:d4w2v8", "eagle:d3w2v6"])
def test_float32_differs_only_by_near_ties(kind, graphs, strategy):
    """Captured or not, speculating or not: the first tokens that differ from float64 on a CPU are rare."""
    drafter = eagle(kind, "eagle") if "eagle" in strategy else "suffix"
    engine = Engine(moved(kind, torch.float32), drafter=drafter, strategy=strategy,
                    config=EngineConfig(max_batch=16, kv_memory_gb=0.5, cuda_graphs=graphs))
    got, want = tokens(engine), reference(kind)
    same = sum(a == b for a, b in zip(got, want, strict=True))
    assert same >= len(want) - 1, f"{same} of {len(want)} rollouts are the same"
    assert engine.stats().free_pages == engine.stats().total_pages


@pytest.mark.parametrize("strategy", ["suffix:d4w2v8", "eagle:d3w2v6", "auto"])
def test_deterministic_bfloat16_does_not_depend_on_the_strategy(strategy):
    config = EngineConfig(max_batch=16, kv_memory_gb=0.5, deterministic=True)
    plain = tokens(Engine(moved("qwen3", torch.bfloat16), drafter=None, strategy="off", config=config))
    engine = Engine(moved("qwen3", torch.bfloat16), drafter=eagle("qwen3", "eagle"), strategy=strategy, config=config)
    assert tokens(engine) == plain


def test_the_step_after_prompts_is_timed_like_others():
    """The learned drafter reads prompts within their own step, not in the time of the next one."""
    outcomes = []

    class Recorder:
        def select(self, view: StepView) -> Decision:
            return Decision(Strategy.OFF)

        def observe(self, outcome: StepOutcome) -> None:
            outcomes.append(outcome)

        def drafter_replaced(self) -> None:
            pass

    engine = Engine(moved("qwen3", torch.bfloat16), drafter=eagle("qwen3", "eagle"), strategy=Recorder(),
                    config=EngineConfig(max_batch=16, kv_memory_gb=0.5, profile=False))  # with known costs prompts are left out
    for first in range(1, 6):  # other prompts every time; the last time every step has been captured
        outcomes.clear()
        engine.generate([[first, *range(3, 3 + length)] for length in (4, 20, 40)], PARAMS, 3)
    assert outcomes[0].num_prefill_rows > 0
    times = [outcome.ms for outcome in outcomes if not outcome.num_prefill_rows]
    assert all(ms > 0 for ms in times)


def test_preemption_and_sharing_under_pressure():
    engine = Engine(moved("llama", torch.float32), strategy="off", config=EngineConfig(max_batch=8, kv_tokens=200, page_size=4))
    got, want = tokens(engine), reference("llama")
    assert engine.stats().preemptions > 0
    assert sum(a == b for a, b in zip(got, want, strict=True)) >= len(want) - 1


def test_weights_are_updated_in_place_and_graphs_stay_valid():
    decoder = moved("llama", torch.float32)
    engine = Engine(decoder, drafter=None, strategy="off")
    before = tokens(engine)
    changed = {name: tensor * 1.05 for name, tensor in decoder.state_dict().items()}
    engine.update_weights(changed)
    after = tokens(engine)
    fresh = moved("llama", torch.float32)
    fresh.load_state_dict(changed)
    assert after == tokens(Engine(fresh, drafter=None, strategy="off")) != before


ADJUSTED = SamplingParams(max_new_tokens=48, seed=5, presence_penalty=0.4, frequency_penalty=0.2, repetition_penalty=1.3,
                          logit_bias={3: 1.5, 60: -4.0}, min_tokens=12, stop_token_ids=(7, 8, 9, 10, 11, 12))


@pytest.mark.parametrize("strategy", ["off", "suffix:d4w2v8"])
def test_adjusted_logits_give_the_tokens_of_a_cpu(strategy):
    """Penalties, logit bias and a minimum length: the same torch code on both, in steps that are launched ahead."""
    engine = Engine(moved("llama", torch.float64), strategy=strategy, config=EngineConfig(max_batch=16, kv_memory_gb=0.5))
    want = tokens(Engine(model("llama"), drafter=None, strategy="off"), params=ADJUSTED)
    assert tokens(engine, params=ADJUSTED) == want


@pytest.mark.parametrize("strategy", ["suffix:d4w2v8", "eagle:d3w2v6"])
def test_adjusted_logits_do_not_depend_on_the_strategy(strategy):
    config = EngineConfig(max_batch=16, kv_memory_gb=0.5, deterministic=True)
    plain = tokens(Engine(moved("qwen3", torch.bfloat16), drafter=None, strategy="off", config=config), params=ADJUSTED)
    engine = Engine(moved("qwen3", torch.bfloat16), drafter=eagle("qwen3", "eagle"), strategy=strategy, config=config)
    assert tokens(engine, params=ADJUSTED) == plain
