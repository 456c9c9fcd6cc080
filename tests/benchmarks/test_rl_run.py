"""RL steps with given answer lengths: what is counted, and what follows from it."""

from __future__ import annotations

import weakref
from argparse import Namespace
from copy import deepcopy
from dataclasses import replace

import pytest
import tiny
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu import memory, rl_step
from benchmarks.lib.results import Report
from benchmarks.lib.rl_run import nats_by_position, share_past_end, share_repeated, silence_ends, update_flops
from benchmarks.lib.rl_tables import gpu_rl_step
from benchmarks.lib.setup import Budget, Setting, free_memory
from paceline.config import LearnerConfig, OptimizerConfig
from paceline.engine.strategy_control import StrategyControl
from paceline.models.decoder import Decoder
from paceline.rl import Learner, make_algorithm
from paceline.rl.batch import Sample
from paceline.types import Rollout


def side(seconds: float, rollout: float, **more) -> dict:
    return {"seconds": seconds, "rollout_seconds": rollout, "publish_seconds": 0.5, "update_seconds": seconds - rollout - 0.5,
            "drafter_seconds": 0.0, "update_flops": 4e14, "accept_length": 2.0, **more}


def test_ratios_of_a_step():
    content = {"matrix_tflops": 500.0, "vllm": {"rollout_seconds": 20.0}, "answers": 256, "max_length": 8192,
               "sides": {"auto": {"steps": [side(9, 6), side(6.5, 4)]}, "off": {"steps": [side(12.5, 10)]}}}
    content |= rl_step.conclusions(content)
    assert content["first_over_later"] == pytest.approx(9 / 6.5)
    assert content["training_share"] == pytest.approx(4e14 / 2 / 500e12)
    assert content["vllm_step_seconds"] == 22  # no time for new weights
    assert content["auto_over"] == {"off": {"rollout": 2.5, "step": pytest.approx(12.5 / 6.5)},
                                    "vllm": {"rollout": 5.0, "step": pytest.approx(22 / 6.5)}}
    table = gpu_rl_step(content, "GPU")
    assert [row[0] for row in table.rows] == ["auto", "off", "vLLM"] and "5.00×" in table.sentence and "40%" in table.sentence


def test_the_operations_of_an_update_are_those_of_its_products():
    """As torch counts them, apart from what is computed twice, and from attention, of which torch counts the whole square."""
    model = deepcopy(tiny.model())
    learner = Learner(model, make_algorithm("grpo", 16), LearnerConfig(), OptimizerConfig(), 1, 1.0, torch.float64)
    samples = [Sample([1, 2, 3] + [4] * n, 3, 0, float(n % 2), False, torch.zeros(n, dtype=torch.float64)) for n in (9, 14)]
    learner.algorithm.compute_advantages(samples)
    with FlopCounterMode(display=False) as counter:
        learner.update(samples, 0)
    by_op = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    products = sum(flops for op, flops in by_op.items() if op.split(".")[-1] in ("mm", "addmm"))
    shape = model.config
    head = 2 * 23 * shape.vocab_size * shape.hidden_size  # the head's forward pass is repeated
    heads = shape.num_heads * shape.head_dim
    attention = 6 * shape.num_layers * heads * (12**2 + 17**2)
    assert update_flops(shape, [(3, 9), (3, 14)]) - attention == pytest.approx(products - head, rel=1e-9)


def test_predictability_by_position_is_a_mean_over_all_answers():
    answers = [Rollout(0, 0, [], [5] * len(values), values, "", "length", []) for values in ([-1.0] * 300, [-3.0] * 100)]
    assert nats_by_position(answers) == {"0": pytest.approx((256 + 300) / 356), "256": 1.0}


def test_tokens_after_the_first_end_token_are_counted():
    answers = [Rollout(0, 0, [], tokens, [], "", "length", []) for tokens in ([5, 0, 7, 0], [5, 6], [0])]
    assert share_past_end(answers, (0,)) == 2 / 7


def test_repeated_tokens_are_counted():
    answers = [Rollout(0, 0, [], tokens, [], "", "length", []) for tokens in ([1, 2, 3, 1, 2, 3, 1], [1, 2, 3])]
    assert share_repeated(answers, run=3) == 2 / 10  # 1 2 3 and 2 3 1 come again


def test_a_policy_that_cannot_end_is_otherwise_the_same():
    policy = deepcopy(tiny.model())
    config = replace(policy.config, eos_token_ids=(5,), tie_embeddings=False)
    loud, tokenizer = Decoder.random(config, seed=3), Namespace(get_added_vocab=lambda: {"<|end|>": 5, "<|start|>": 7})
    hidden = torch.randn(4, config.hidden_size, dtype=loud.norm.dtype)
    before = hidden @ loud.head.weight.T
    assert silence_ends(loud, tokenizer)
    after = hidden @ loud.head.weight.T
    others = [token for token in range(config.vocab_size) if token not in (5, 7)]
    assert after[:, [5, 7]].eq(0).all() and torch.equal(after[:, others], before[:, others])
    tied = Decoder.random(replace(config, tie_embeddings=True), seed=3)
    assert not silence_ends(tied, tokenizer) and tied.head.weight[5].any()


def test_a_run_gives_its_memory_back(tmp_path, monkeypatch):
    """The next side of a benchmark needs it. The engine's warm-up freezes the garbage collector's generations."""
    made = []
    load = memory.RandomTrainer._load
    monkeypatch.setattr(memory.RandomTrainer, "_load", lambda self: (load(self), made.append(weakref.ref(self.engine.model))))
    args = Namespace(group=2, max_new_tokens=16, tiny=True, optimizer="adamw", micro_batch_tokens=64, lengths=None, max_length=4,
                     steps=1)
    found = memory.run_case(memory.TINY_CASES["full weights"], args, Setting(torch.device("cpu"), True), Budget(5.0), tmp_path)
    assert len(found["steps"]) == 1 and found["phases"]["train"]["peak_gib"] > 0
    free_memory()
    assert made[0]() is None


def test_the_engine_does_not_know_where_answers_end(tmp_path, monkeypatch):
    """In `paceline train` answer lengths are not known. If they were known here, `auto` would draft for the request that finishes
    last, and the benchmark would measure another mode."""
    seen, real = [], StrategyControl._remaining
    monkeypatch.setattr(StrategyControl, "_remaining", lambda self, decoding: seen.append(real(self, decoding)) or seen[-1])
    config = memory.train_config
    monkeypatch.setattr(memory, "train_config", lambda *args: config(*args).model_copy(
        update={"strategy": "auto", "drafter": "suffix"}))
    args = Namespace(group=2, max_new_tokens=16, tiny=True, optimizer="adamw", micro_batch_tokens=64, lengths=None, max_length=4,
                     steps=1)
    memory.run_case(memory.TINY_CASES["full weights"], args, Setting(torch.device("cpu"), True), Budget(5.0), tmp_path)
    assert seen and not any(seen)


class Peer:
    """A stand-in for vLLM."""

    def __init__(self):
        self.asked, self.is_closed = [], False

    def wait(self, timeout):
        return {"version": "0"}

    def seconds(self, prompts, lengths):
        self.asked.append((prompts, lengths))
        return 7.0

    def close(self):
        self.is_closed = True


def test_the_peer_generates_every_answer_of_the_first_step_and_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(rl_step, "open_checkpoint", lambda model: Namespace(tokenizer=lambda: None))
    report = Report(Namespace(benchmark="gpu/rl_step", out=tmp_path / "x.json", revision="1", allow_dirty=True))
    peer, steps = Peer(), [(["a", "bb"], [[3, 4], [5, 600]]), (["c", "dd"], [[5, 600], [3, 4]])]
    rl_step.measure_vllm(peer, Namespace(model="m"), steps, report, Budget(1.0))
    prompts, lengths = peer.asked[-1]
    assert lengths == [3, 4, 5, 600] and prompts[0] == prompts[1] != prompts[2] == prompts[3]
    assert max(peer.asked[0][1]) < 600 and peer.is_closed and report.content["vllm"]["rollout_seconds"] == 7.0
