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

from benchmarks.gpu import headline, memory
from benchmarks.lib.headline import GradedProblem, compose_graded, write_choices
from benchmarks.lib.headline_figures import conclusions, overtakes_after
from benchmarks.lib.results import Report
from benchmarks.lib.rl_run import GivenLengthsTask, nats_by_position, share_past_end, share_repeated, silence_ends, update_flops
from benchmarks.lib.rl_tables import gpu_headline
from benchmarks.lib.setup import Budget, Setting, free_memory
from paceline.config import LearnerConfig, OptimizerConfig
from paceline.engine.strategy_control import StrategyControl
from paceline.models.decoder import Decoder
from paceline.rl import Learner, make_algorithm
from paceline.rl.batch import Sample
from paceline.tasks import make_task
from paceline.types import Rollout


def step(rollout: float, drafter: float = 0.0, reward: float = 0.5, answers: str = "aaaaaaaabbbbbbbb") -> dict:
    parts = {"rollout": rollout, "reward": 0.1, "update": 5.0, "drafter": drafter, "publish": 0.3, "other": 0.1}
    return {**{f"{name}_seconds": value for name, value in parts.items()}, "seconds": sum(parts.values()), "accept_length": 2.0,
            "reward": reward, "answer_hashes": answers, "tokens": 1000}


def test_a_run_from_nothing_pays_for_its_warm_up():
    new = {"warm_up_seconds": 3.0, "notes": [], "steps": [step(10, drafter=6), step(6), step(5), step(5)]}
    off = {"warm_up_seconds": 1.0, "notes": [], "steps": [step(10), step(10), step(10, answers="aaaaaaaacccccccc"),
                                                        step(10, reward=0.25), step(10)]}
    found = conclusions({"new": new, "off": off, "vllm": {"rollout_seconds": [12.0, 14.0]}})
    assert found["steps"] == 4 and found["totals"]["off"]["rollout"] == 40 and found["totals"]["new"]["warm_up"] == 3
    assert found["totals"]["vllm"]["rollout"] == 52 and found["totals"]["vllm"]["warm_up"] == 0
    assert found["over"]["new"]["off"]["rollout"] == pytest.approx(40 / 26)
    assert found["over"]["new"]["off"]["run"] == pytest.approx((1 + 62) / (3 + 54))
    assert found["overtakes_after"] == 3  # behind by 2 + 6 s at first: ahead once 4 + 5 s of it are saved
    assert found["identical_answers"] == 7 / 8 and found["identical_rewards"] == 0.75
    assert overtakes_after({**new, "warm_up_seconds": 30.0}, off) is None


def test_a_headline_says_what_is_imposed():
    sides = {"off": {"warm_up_seconds": 1.0, "steps": [step(10)]}, "ready": {"warm_up_seconds": 2.0, "steps": [step(5)]},
             "vllm": {"rollout_seconds": [12.0]}}
    domain = {"accept_length": 3.0, "rollout_over_off": 1.5, "tokens_per_answer": 200.0, "reward": 0.4, "is_made": True}
    table = gpu_headline({"cost": "1.5B", "answers": 256, "max_length": 8192, "sides": sides, "domains": {"choice": domain},
                          "conclusions": conclusions(sides)}, "GPU")
    assert [row[0] for row in table.rows] == ["trained before", "none", "vLLM, our trainer"]
    assert "end tokens are not sampled" in table.sentence and "2.00× the rollouts" in table.sentence
    assert all(len(row) == len(table.columns) for row in table.rows) and table.more.rows[0][2] == "1.50×"


def test_the_reward_is_the_share_of_right_results():
    task = GivenLengthsTask(["two problems"], [[5, 6]], [["42", "1000"]])
    problem = task[0]
    for answer, reward in (("Answer 1: 42\nso\nAnswer 2: $1,000.", 1.0), ("answer 1: 6 * 7 = 42", 0.5), ("42, 1000", 0.0),
                           ("Answer 1: 42\nwait\nAnswer 1: 41\nAnswer 2 = 1000.0", 0.5)):
        assert task.grade(problem, answer) == reward


def test_prompts_have_room_for_their_problems_and_choices_have_one_right_answer(tmp_path):
    problems = [GradedProblem(f"question {i}?", str(i)) for i in range(20)]
    short, long = compose_graded(problems, [10, 2000], 0)
    assert len(short.results) == 1 and len(long.results) == 12 and "12. question" in long.text
    write_choices(problems, tmp_path / "choice.jsonl")
    task = make_task("arc", data=str(tmp_path / "choice.jsonl"))
    for number in range(len(task)):
        grades = [task.grade(task[number], f"Answer: {label}") for label in "ABCD"]
        assert sorted(grades) == [0, 0, 0, 1]
        assert task[number].truth["choices"]["ABCD"[grades.index(1)]] == str(number)


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
    seen, real = [], StrategyControl._view
    monkeypatch.setattr(StrategyControl, "_view", lambda self, *args: seen.append(real(self, *args)) or seen[-1])
    config = memory.train_config
    monkeypatch.setattr(memory, "train_config", lambda *args: config(*args).model_copy(
        update={"strategy": "auto", "drafter": "suffix"}))
    args = Namespace(group=2, max_new_tokens=16, tiny=True, optimizer="adamw", micro_batch_tokens=64, lengths=None, max_length=4,
                     steps=1)
    memory.run_case(memory.TINY_CASES["full weights"], args, Setting(torch.device("cpu"), True), Budget(5.0), tmp_path)
    assert seen and not any(view.remaining for view in seen)


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


def test_the_peer_generates_every_answer_and_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(headline, "open_checkpoint", lambda model: Namespace(tokenizer=lambda: None))
    report = Report(Namespace(benchmark="gpu/headline", out=tmp_path / "x.json", revision="1", allow_dirty=True), sides={})
    peer, none = Peer(), [[], []]
    steps = [headline.StepInput(["a", "bb"], [[3, 4], [5, 600]], none), headline.StepInput(["c", "dd"], [[5, 600], [3, 4]], none)]
    headline.measure_vllm(peer, Namespace(model="m"), steps, report, Budget(1.0))
    prompts, lengths = peer.asked[1]
    assert lengths == [3, 4, 5, 600] and prompts[0] == prompts[1] != prompts[2] == prompts[3]
    assert max(peer.asked[0][1]) < 600 and peer.is_closed and report.content["sides"]["vllm"]["rollout_seconds"] == [7.0, 7.0]
