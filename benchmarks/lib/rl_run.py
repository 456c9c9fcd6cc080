"""An RL run as `paceline train` does it, with answers that end at given lengths: its task, its trainer, and what it measures."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from benchmarks.lib.answer_hashes import answer_hashes
from benchmarks.lib.interruptions import Interruptions
from benchmarks.lib.setup import Budget, freeze_memory
from benchmarks.lib.stages import Stages
from paceline.engine.pool import Owner, PoolStep, RequestPool
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.rl.learner import Learner
from paceline.tasks import Problem
from paceline.trainer import RolloutProgress, RunStatus, Trainer, TrainerCallback
from paceline.trainer.backend import LocalBackend
from paceline.trainer.rollouts import OpenGroup, PromptStream, RolloutCollector
from paceline.types import Rollout, RolloutGroup, SamplingParams, StepResult


class Given(NamedTuple):
    """What a benchmark knows of a prompt beforehand (`Problem.truth`)."""

    lengths: list[int]
    """Lengths of its answers."""
    results: list[str]
    """The right result of every problem in it. Empty: there is nothing to grade."""


class GivenLengthsTask:
    """Prompts, the lengths of their answers and the results that are right, in the order in which a run uses them."""

    name = "given lengths"

    def __init__(self, prompts: Sequence[str | list[dict[str, str]]], lengths: Sequence[Sequence[int]],
                 results: Sequence[Sequence[str]] = ()) -> None:
        """`lengths[i]` are the lengths of the answers to `prompts[i]`, `results[i]` what is right in them."""
        right = results or [()] * len(prompts)
        self.problems = [Problem(f"p{i}", prompt, Given(list(each), list(found)))
                         for i, (prompt, each, found) in enumerate(zip(prompts, lengths, right, strict=True))]

    def __len__(self) -> int:
        return len(self.problems)

    def __getitem__(self, index: int) -> Problem:
        return self.problems[index]

    def grade(self, problem: Problem, answer: str) -> float:
        """Share of the prompt's problems of which the answer names the right result."""
        results: list[str] = problem.truth.results
        said = named_results(answer)
        return sum(said.get(number) == float(right) for number, right in enumerate(results, 1)) / len(results)


_NAMED = re.compile(r"answer\s*#?(\d{1,3})\s*[:=]([^\n]{0,200})", re.IGNORECASE)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def named_results(answer: str) -> dict[int, float]:
    """The last number of the last line "Answer N: …" for every N."""
    found = {int(number): _NUMBER.findall(line) for number, line in _NAMED.findall(answer)}
    return {number: float(values[-1].replace(",", "")) for number, values in found.items() if values}


class GivenLengths(RolloutCollector):
    """Ends every answer at its given length, which the engine does not know: it is told the longest for all. Where nothing can be
    graded, rewards alternate within a group, so that every answer has an advantage."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._lengths: dict[int, int] = {}  # by request
        self._drawn: Counter[int] = Counter()  # number of tokens by request

    def _add(self, requests: RequestPool[Owner], problem: Problem, key: str, owners: Sequence[Owner]) -> list[int]:
        params = SamplingParams(temperature=self.params.temperature, max_new_tokens=self.params.max_new_tokens,
                                seed=self.params.seed)
        ids = requests.add(requests.engine.encode(problem.prompt), params, owners, key)
        self._lengths.update(zip(ids, problem.truth.lengths, strict=False))  # answers ahead are fewer
        return ids

    def _step(self, requests: RequestPool[OpenGroup]) -> PoolStep[OpenGroup]:
        result, finished, _ = requests.step()
        for request, tokens in result.tokens.items():
            self._drawn[request] += len(tokens)
        finished += requests.abort([i for i in result.tokens if i in requests.owners and self._drawn[i] >= self._lengths[i]])
        for _, rollout in finished:
            if rollout.finish_reason != "error":
                self._cut(rollout, self._lengths[rollout.request_id])
        return PoolStep(result, finished, [])

    def _cut(self, rollout: Rollout, length: int) -> None:
        """Remove the tokens that a draft added beyond a rollout's length."""
        assert len(rollout.token_ids) >= length, "an answer does not have its length"
        if len(rollout.token_ids) > length:
            rollout.token_ids, rollout.logprobs, rollout.versions = (
                values[:length] for values in (rollout.token_ids, rollout.logprobs, rollout.versions))
            if self.engine.tokenizer is not None:
                rollout.text = self.engine.tokenizer.decode(rollout.token_ids)

    def _grade(self, problem: Problem, rollout: Rollout) -> Any:
        if problem.truth.results:
            return super()._grade(problem, rollout)
        rollout.reward = float(rollout.sample % 2)
        return None

    def _collect_grades(self, handles: list[tuple[Rollout, Any]]) -> None:
        super()._collect_grades([(rollout, handle) for rollout, handle in handles if handle is not None])


class MeasuredBackend(LocalBackend):
    """A `LocalBackend` that measures its warm-up."""

    warm_up_s = 0.0
    """Seconds of warm-up before the first step: kernels compiled, engine steps captured and timed, memory planned."""

    def _warm_up_learner(self) -> None:
        began = time.perf_counter()
        super()._warm_up_learner()
        synchronize(self.learner.device)
        self.warm_up_s += time.perf_counter() - began

    def warm_up(self, on_progress: Callable[[int, int], None]) -> list[str]:
        began = time.perf_counter()
        lines = super().warm_up(on_progress)
        synchronize(self.learner.device)
        self.warm_up_s += time.perf_counter() - began
        return lines


class MeasuredTrainer(Trainer):
    """A `Trainer` that measures what is not a phase of a step."""

    backend: MeasuredBackend
    publish_s = 0.0
    """Seconds that the last step took to hand the new weights to the engine."""

    def _make_backend(self) -> MeasuredBackend:
        return MeasuredBackend(self.config, self.folder.path)

    def _publish(self, learner: Learner, version: int) -> None:
        synchronize(learner.device)
        self.listeners.tell(lambda callback: callback.on_phase("publish"))
        began = time.perf_counter()
        super()._publish(learner, version)
        synchronize(learner.device)
        self.publish_s = time.perf_counter() - began


class GivenLengthsTrainer(MeasuredTrainer):
    """A `Trainer` whose answers have given lengths. Its task is a `GivenLengthsTask`."""

    def _load(self) -> None:
        super()._load()
        self.engine.planner.eos = frozenset()  # with `ignore_eos`, `auto` would take the limit for the length of every answer
        assert self._task is not None
        self.collector = GivenLengths(self.engine, None, PromptStream(self._task, 0, None, shuffle=False), self.pool,
                                      self.config.rollout, self.config.seed, self._on_engine_step)
        if self.drafter_trainer is not None:
            self.drafter_trainer.answers_ahead = self.collector.answers_ahead


class EndlessTrainer(GivenLengthsTrainer):
    """A `GivenLengthsTrainer` whose policy never samples an end token, so that every answer is ordinary text up to its length.
    What a model generates behind an end token is unrelated text, which no real run contains and no drafter predicts."""

    def _load(self) -> None:
        super()._load()
        if silence_ends(self.learner.policy.model, self.engine.tokenizer):
            self.backend.publish(self.state.step)


def silence_ends(policy: Decoder, tokenizer: Any) -> bool:
    """Makes the logits of special tokens 0, which keeps a policy from ending answers as `min_tokens` would, at no cost per step.
    Returns whether that is possible: it is not where the head is the embedding."""
    if tokenizer is None or policy.config.tie_embeddings:
        return False
    with torch.no_grad():
        policy.head.weight[sorted({*policy.config.eos_token_ids, *tokenizer.get_added_vocab().values()})] = 0
    return True


@dataclass
class StepRecorder(TrainerCallback):
    """Records the figures of each step, and interrupts the run after `num_steps` of them or when no time is left."""

    num_steps: int
    budget: Budget
    steps: list[dict[str, Any]] = field(default_factory=list)
    warm_up_s: float = 0.0
    """Seconds of warm-up before the first step."""
    notes: list[str] = field(default_factory=list)
    """What the run said, with the step in which it did."""
    trainer: MeasuredTrainer | None = None
    """The run, while it lasts."""
    _strategies: Counter[str] = field(default_factory=Counter)
    _stages: Stages = field(default_factory=Stages)
    _step: int = 0
    interruptions: Interruptions = field(default_factory=Interruptions)

    def on_run_begin(self, trainer: Trainer) -> None:
        assert isinstance(trainer, MeasuredTrainer)
        self.trainer = trainer

    def on_note(self, message: str) -> None:
        self.notes.append(f"step {self._step}: {message}" if self._step else message)

    def on_step_begin(self, step: int) -> None:
        assert self.trainer is not None
        self._step = step
        if not self.steps:  # the engines are warm
            self.warm_up_s = self.trainer.backend.warm_up_s
            freeze_memory()
        longest = max((found["seconds"] for found in self.steps), default=0.0)
        if step > self.num_steps or (self.steps and self.budget.left < longest):
            raise KeyboardInterrupt

    def on_engine_step(self, result: StepResult, progress: RolloutProgress) -> None:
        self._stages.add(result)
        if result.num_requests:
            self._strategies[str(result.strategy)] += 1

    def on_step_end(self, step: int, metrics: Mapping[str, Any], groups: Sequence[RolloutGroup]) -> None:
        assert self.trainer is not None
        answers = [rollout for group in groups for rollout in group.rollouts]
        publish, shape = self.trainer.publish_s, self.trainer.learner.policy.model.config
        rollout, steps = metrics["time/generate"], self._strategies.total()
        parts = {"rollout_seconds": rollout, "reward_seconds": metrics["time/reward"],
                 "update_seconds": metrics["time/infer"] + metrics["time/train"] - publish,
                 "drafter_seconds": metrics.get("time/drafter", 0.0), "publish_seconds": publish}
        self.steps.append({
            **parts, "seconds": metrics["time/step"], "other_seconds": metrics["time/step"] - sum(parts.values()),
            "drafter_training_seconds": metrics.get("drafter/seconds", 0.0),
            "drafter_wait_seconds": metrics.get("drafter/wait_seconds", 0.0),
            "drafter_measure_seconds": metrics.get("drafter/measure_seconds", 0.0),
            "drafter_expected": metrics.get("drafter/expected_after", 0.0),
            "tokens": sum(len(answer.token_ids) for answer in answers), "reward": metrics["reward/mean"],
            "accept_length": metrics["accept_length"], "preemptions": metrics["preemptions"],
            "grad_norm": metrics["grad_norm"], "share_past_end": share_past_end(answers, shape.eos_token_ids),
            "share_repeated": share_repeated(answers), "share_off": self._strategies["off"] / max(1, steps),
            "update_flops": update_flops(shape, [(len(a.prompt_ids), len(a.token_ids)) for a in answers]),
            "nats_by_position": nats_by_position(answers), "stages": self._stages.take(),
            "answer_hashes": answer_hashes(answer.token_ids for answer in answers), "interruptions": self.interruptions.found})
        self._strategies.clear()
        self.interruptions.found = []
        print(f"step {step}: {metrics['time/step']:.2f} s, rollout {rollout:.2f} s, accept length "
              f"{metrics['accept_length']:.2f}", flush=True)


def run_steps(trainer: MeasuredTrainer, num_steps: int, budget: Budget) -> StepRecorder:
    """Figures of the first `num_steps` steps, or of as many as the time allows. The run is then interrupted, so that it writes no
    checkpoint. A RuntimeError says why a run failed."""
    recorder = StepRecorder(num_steps, budget)
    trainer.callbacks.append(recorder)
    try:
        with recorder.interruptions:
            result = trainer.run()
    finally:
        recorder.trainer = None  # it must not keep the run's memory
    if result.status is RunStatus.FAILED:
        raise RuntimeError(result.message)
    return recorder


def nats_by_position(answers: Sequence[Rollout]) -> dict[str, float]:
    """Mean negative log-probability of the sampled tokens by position in the answer, keyed by the first position of each range:
    how predictable the text is."""
    bounds, found = (0, 256, 1024, 2048, 4096, 1 << 30), {}
    for first, end in pairwise(bounds):
        values = [value for answer in answers for value in answer.logprobs[first:end]]
        if values:
            found[str(first)] = -sum(values) / len(values)
    return found


def share_past_end(answers: Sequence[Rollout], ends: tuple[int, ...]) -> float:
    """Share of tokens that come after an answer's first end token."""
    past = 0
    for answer in answers:
        end = next((i for i, token in enumerate(answer.token_ids) if token in ends), len(answer.token_ids) - 1)
        past += len(answer.token_ids) - 1 - end
    return past / sum(len(answer.token_ids) for answer in answers)


def share_repeated(answers: Sequence[Rollout], run: int = 32) -> float:
    """Share of tokens that are the last of `run` tokens which the same answer had before in the same order: whether answers that
    must go on repeat themselves."""
    repeated = 0
    for answer in answers:
        tokens, seen = answer.token_ids, set[tuple[int, ...]]()
        for end in range(run, len(tokens) + 1):
            last = tuple(tokens[end - run : end])
            repeated += last in seen
            seen.add(last)
    return repeated / sum(len(answer.token_ids) for answer in answers)


def update_flops(shape: ModelConfig, answers: Sequence[tuple[int, int]]) -> float:
    """Floating-point operations of the matrix products in one forward and backward pass over answers, given as (prompt tokens,
    answer tokens); what is recomputed counts once. A weight takes 2 operations per row forward and 4 backward. Only the rows that
    predict an answer token pass the head; a row attends to half of its sequence on average."""
    heads = shape.num_heads * shape.head_dim
    layer = shape.hidden_size * (heads + 2 * shape.num_kv_heads * shape.head_dim) + heads * shape.hidden_size
    layer += 3 * shape.hidden_size * shape.intermediate_size
    rows, targets = sum(p + n for p, n in answers), sum(n for _, n in answers)
    attention = sum((p + n) ** 2 for p, n in answers) * heads  # two products of length x length / 2, 2 operations each
    return 3.0 * (2 * rows * shape.num_layers * layer + 2 * targets * shape.vocab_size * shape.hidden_size
                  + 2 * shape.num_layers * attention)


def matrix_rate(device: torch.device, size: int = 8192, seconds: float = 1.0) -> float:
    """Operations per second of a large square product in bfloat16 (float32 on a CPU), the median of what fits into `seconds`."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times, began = [], time.perf_counter()
    while len(times) < 4 or time.perf_counter() - began < seconds:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(4):
            a @ b
        synchronize(device)
        times.append((time.perf_counter() - start) / 4)
    return 2 * size**3 / sorted(times)[len(times) // 2]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
