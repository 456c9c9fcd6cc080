"""One GRPO step (generate, reward, train, publish weights) against TRL's GRPOTrainer with transformers' generation.

    python benchmarks/cpu/rl_step.py                                            # random weights, 12 layers of 256
    python benchmarks/cpu/rl_step.py --model SmolLM2-135M --prompts 4 --new-tokens 128 --rounds 3
    python benchmarks/cpu/rl_step.py --lengths deepseek_r1_output_lengths.csv   # measured response lengths
    python benchmarks/cpu/rl_step.py --sections trainer --device cuda --dtype bfloat16      # the learner alone, on a GPU
    python benchmarks/cpu/rl_step.py --quick                                    # smoke run

- `check`: on the same responses, loss and gradient norm equal those of TRL to 1e-4 (with ratios away from 1, so that clipping
  is active).
- `step`: whole steps of `paceline.rl.loop` and of TRL's own loop, alternating in one process, with the same weights, prompts
  (each side tokenizes them), group size, rewards, AdamW and one update per batch, in float32. Sampled lengths would differ, so
  they are given: `fixed`, all of --new-tokens; `long-tailed`, quantiles of a lognormal (sigma 1) or of `--lengths`, the longest
  being --new-tokens. Both sides end each response at its length: Paceline by `abort`, TRL by a logits processor that forces the
  end token; TRL's generation goes on until the last response has ended, and its trainer pads every response to the longest of the
  batch. `--trl-batch` is TRL's micro-batch; try a few values. With `fixed` lengths both trainers multiply the same matrices, and
  those take two thirds of our step.
- `trainer`: our learner alone, in tokens per second without padding: packed, and in batches of `--trainer-batch` sequences padded
  to the longest of each batch. Both give the same gradient.

Two threads on two cores become ten times slower when something else uses a core: use `--threads 1` there.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import NamedTuple

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from torch import Tensor

from benchmarks.lib.figures import Goal, print_goals, print_table, spread
from benchmarks.lib.models import MODEL_FOLDERS, SMALL, SMALL_SHAPE, SMOLLM2, SMOLLM2_FILE, model_folder_with_tokenizer
from benchmarks.lib.prompts import length_quantiles, word_problems
from benchmarks.lib.results import Report, add_result_arguments
from benchmarks.lib.workers import Message, Stopwatch
from paceline import Engine, SamplingParams
from paceline.config import EngineConfig, LearnerConfig, OptimizerConfig
from paceline.models.decoder import Decoder
from paceline.models.weights import load_model
from paceline.rl import Learner, make_algorithm, pack
from paceline.rl.batch import MicroBatch, Sample
from paceline.rl.checkpoint import RunState
from paceline.rl.loop import PhaseTimer, StepOutcome, train
from paceline.types import Rollout, RolloutGroup

SECTIONS = ("check", "step", "trainer")
SCENARIOS = ("fixed", "long-tailed")
LR = 1e-5


def main() -> None:
    options = parse(sys.argv[1:])
    torch.set_num_threads(options.threads)
    report = Report(options, options.device, threads=options.threads, settings=settings(options))
    if set(options.sections) & {"check", "step"}:
        report.content["peer_versions"] = {package: metadata.version(package) for package in ("trl", "accelerate", "datasets")}
    folder = options.work / (options.model if options.model == SMOLLM2 else f"{SMALL}-words")
    model_folder_with_tokenizer(options.model, folder, options.smollm2)
    goals: list[Goal] = []
    sections: dict[str, Callable[[argparse.Namespace, Path, list[Goal]], list[Message]]] = {
        "check": check, "step": step, "trainer": trainer}
    for name in options.sections:
        report.content[name] = sections[name](options, folder, goals)
        report.content["goals"] = [goal.record() for goal in goals]
        report.save()  # after each section: a long run that is stopped loses little
    print_goals(goals)
    print(report.file)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default=SMALL, choices=[SMALL, SMOLLM2])
    add("--sections", nargs="+", default=list(SECTIONS), choices=SECTIONS)
    add("--scenarios", nargs="+", default=list(SCENARIOS), choices=SCENARIOS)
    add("--prompts", type=int, default=8, help="number of prompts per step")
    add("--group", type=int, default=8, help="number of responses per prompt")
    add("--prompt-tokens", type=int, default=64)
    add("--new-tokens", type=int, default=256, help="length of the longest response")
    add("--rounds", type=int, default=5, help="measured steps of each side, after one warm-up step")
    add("--strategy", default="auto", help="Paceline's strategy; with random weights no draft token is ever accepted")
    add("--micro-batch-tokens", type=int, default=4096, help="of Paceline's learner")
    add("--trl-batch", type=int, default=8, help="number of sequences per forward pass of TRL's trainer")
    add("--lengths", type=Path, help="CSV with output_tokens and probability, scaled to --new-tokens (default: a lognormal)")
    add("--trainer-samples", type=int, default=128)
    add("--trainer-batch", type=int, default=16, help="number of sequences that are padded to the longest of them")
    add("--device", default="cpu", help="device of the trainer section")
    add("--dtype", default="float32", choices=["float32", "bfloat16"], help="dtype of the matrix products of the trainer section")
    add("--threads", type=int, default=2)
    add("--smollm2", default=str(SMOLLM2_FILE), help="GGUF file of SmolLM2-135M; scripts/get_smollm2.py fetches it")
    add("--work", type=Path, default=MODEL_FOLDERS, help="folder for model folders")
    add("--quick", action="store_true", help="smoke run with tiny sizes: figures mean nothing")
    add_result_arguments(parser, "rl_step")
    options = parser.parse_args(arguments)
    if options.quick:
        options.prompts, options.group, options.prompt_tokens, options.new_tokens, options.rounds = 2, 4, 8, 24, 1
        options.trl_batch, options.trainer_samples, options.trainer_batch = 4, 16, 4
    return options


def settings(options: argparse.Namespace) -> Message:
    """The options that the figures depend on."""
    left_out = ("work", "out", "lengths", "smollm2", "benchmark", "revision", "allow_dirty")
    return {k: v for k, v in vars(options).items() if k not in left_out} | {
        "lengths": options.lengths.name if options.lengths else "lognormal, sigma 1"}


# --- inputs of both sides


def make_prompts(options: argparse.Namespace, count: int) -> list[str]:
    """Prompts as text, which each side tokenizes itself."""
    rng = random.Random(0)
    if options.model == SMOLLM2:
        return [" ".join(word_problems(rng).split()[: options.prompt_tokens * 3 // 4]) for _ in range(count)]
    words = [f"t{i}" for i in range(3, SMALL_SHAPE.vocab_size)]
    return [" ".join(rng.choices(words, k=options.prompt_tokens)) for _ in range(count)]


def reward(text: str) -> float:
    """A cheap reward that is as good as random, so that rewards differ within a group."""
    return sum(map(ord, text)) % 97 / 96


def draw_lengths(options: argparse.Namespace, scenario: str, count: int, seed: int = 0) -> list[int]:
    """Evenly spaced quantiles in random order: every step has the same response lengths, and the longest is --new-tokens."""
    if scenario == "fixed":
        return [options.new_tokens] * count
    if options.lengths:
        found = length_quantiles(options.lengths, count)
    else:
        found = [math.exp(statistics.NormalDist(0.0, 1.0).inv_cdf((i + 0.5) / count)) for i in range(count)]
    lengths = [max(2, round(x * options.new_tokens / max(found))) for x in found]
    random.Random(seed).shuffle(lengths)
    return lengths


# --- check: the same responses give the same loss and gradient


def check(options: argparse.Namespace, folder: Path, goals: list[Goal]) -> list[Message]:
    """Loss and gradient norm of both sides. Ratios are away from 1, so that clipping is active (at 1 the loss is 0, whatever the
    log-probabilities are); in float64, because the loss is a sum of terms that nearly cancel."""
    from benchmarks.lib import trl_peer

    ours = make_learner(options, folder, 1, compute=torch.float64)
    samples = random_samples(options, ours.policy.model.config.vocab_size, 2 * options.group, torch.float64)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for batch in pack(samples, options.micro_batch_tokens):
            logprobs = ours.policy.logprobs(batch, 1.0)[0].split([samples[i].num_answer for i in batch.members])
            for i, part in zip(batch.members, logprobs, strict=True):
                samples[i].old = part + 0.3 * torch.randn(len(part), generator=draw, dtype=part.dtype)
    our_loss = 0.0
    for batch in pack(samples, options.micro_batch_tokens, ours.algorithm.weights([s.num_answer for s in samples])):
        loss = ours.algorithm.loss(ours.policy.logprobs(batch, 1.0)[0], batch).total
        loss.backward()
        our_loss += float(loss.detach())
    our_norm = float(torch.nn.utils.clip_grad_norm_(ours.policy.parameters(), torch.inf))
    with tempfile.TemporaryDirectory() as scratch:
        sizes = trl_peer.Sizes(2, options.group, options.new_tokens, 2 * options.group, 1, LR)
        theirs, _ = trl_peer.make_trainer(folder, make_prompts(options, 2), reward, sizes, scratch)
        theirs.model.double()
        their_loss, their_norm = trl_peer.loss_and_norm(theirs, padded_inputs(samples))
    differences = {"loss": abs(our_loss - their_loss) / abs(their_loss), "gradient norm": abs(our_norm - their_norm) / their_norm}
    goals += [Goal(f"{options.model}: same responses, {name}, relative difference to TRL's", value, 1e-4, at_least=False)
              for name, value in differences.items()]
    rows = [("paceline", f"{our_loss:.7f}", f"{our_norm:.7f}"), ("TRL", f"{their_loss:.7f}", f"{their_norm:.7f}")]
    print_table(f"{options.model}: the same {len(samples)} responses", ("", "loss", "gradient norm"), rows)
    return [{"model": options.model, "ours": [our_loss, our_norm], "trl": [their_loss, their_norm], "differences": differences}]


def random_samples(options: argparse.Namespace, vocab: int, count: int, dtype: torch.dtype = torch.float32) -> list[Sample]:
    """Samples with long-tailed responses of random tokens, and with advantages."""
    rng, lengths = random.Random(0), draw_lengths(options, "long-tailed", count)
    samples = []
    for number, length in enumerate(lengths):
        group = number // options.group
        prompt = random.Random(group).choices(range(3, vocab), k=max(1, options.prompt_tokens - group % 5))
        samples.append(Sample(prompt + rng.choices(range(3, vocab), k=length), len(prompt), group, rng.random(), False,
                              -torch.rand(length, generator=torch.Generator().manual_seed(number), dtype=dtype)))
    make_algorithm("grpo", options.new_tokens).compute_advantages(samples)
    return samples


def padded_inputs(samples: list[Sample]) -> dict[str, Tensor]:
    """The samples as TRL's trainer lays them out: prompts padded on the left, responses on the right."""
    from torch.nn.utils.rnn import pad_sequence

    prompts = [torch.tensor(s.tokens[: s.prompt_length]) for s in samples]
    answers = [torch.tensor(s.tokens[s.prompt_length:]) for s in samples]
    old = [s.old for s in samples if s.old is not None]
    assert len(old) == len(samples)
    mask = pad_sequence([torch.ones_like(x) for x in answers], batch_first=True)
    return {"prompt_ids": pad_sequence(prompts, True, 0, padding_side="left"),
            "prompt_mask": pad_sequence([torch.ones_like(x) for x in prompts], True, 0, padding_side="left"),
            "completion_ids": pad_sequence(answers, batch_first=True), "completion_mask": mask,
            "advantages": torch.stack([_known(s.advantages)[0] for s in samples]), "num_items_in_batch": mask.sum(),
            "old_per_token_logps": pad_sequence(old, batch_first=True)}


# --- step: whole steps of both sides, alternating


class Turn(NamedTuple):
    """One whole step of one side."""

    seconds: float
    cpu_seconds: float
    tokens: int
    phases: dict[str, float]


def step(options: argparse.Namespace, folder: Path, goals: list[Goal]) -> list[Message]:
    records, rows = [], []
    for scenario in options.scenarios:
        turns = measure(options, folder, scenario)
        ratio = spread([b.seconds / a.seconds for a, b in zip(turns["paceline"], turns["TRL"], strict=True)])
        cpu = spread([b.cpu_seconds / a.cpu_seconds for a, b in zip(turns["paceline"], turns["TRL"], strict=True)])
        lengths = sorted(draw_lengths(options, scenario, options.prompts * options.group))
        for name, mine in turns.items():
            phases = {phase: statistics.median(turn.phases[phase] for turn in mine) for phase in mine[0].phases}
            rate = spread([turn.tokens / turn.seconds for turn in mine])
            cpu_seconds = statistics.median(turn.cpu_seconds for turn in mine)
            against = (ratio, cpu) if name == "paceline" else ("", "")
            rows.append((scenario, name, spread([turn.seconds for turn in mine]), rate, *phases.values(), cpu_seconds, *against))
            records.append({"model": options.model, "scenario": scenario, "side": name, "tokens_per_second": rate._asdict(),
                            "phases": phases, "turns": [turn._asdict() for turn in mine]})
        records.append({"model": options.model, "scenario": scenario, "speedup": ratio._asdict(), "cpu_speedup": cpu._asdict(),
                        "lengths": {"p50": lengths[len(lengths) // 2], "max": lengths[-1], "sum": sum(lengths)}})
        goals.append(Goal(f"{options.model}, {scenario}: TRL's step time / Paceline's", ratio.median, 3.0))
    print_table(f"{options.model}: one GRPO step, {options.prompts} prompts x {options.group} responses of at most "
                f"{options.new_tokens} tokens, strategy {options.strategy}; median (spread) of {options.rounds}",
                ("lengths", "side", "seconds", "response tokens/s", "generate s", "reward s", "train s", "CPU s", "× TRL",
                 "× TRL, CPU s"), rows)
    return records


def measure(options: argparse.Namespace, folder: Path, scenario: str) -> dict[str, list[Turn]]:
    """TRL's own loop drives; a step of Paceline comes before or after each of TRL's steps, alternately. The first is dropped."""
    from benchmarks.lib import trl_peer

    rounds, count = options.rounds + 1, options.prompts * options.group
    prompts = make_prompts(options, rounds * options.prompts)
    lengths = [draw_lengths(options, scenario, count, seed) for seed in range(rounds)]
    ours = Ours(options, folder, prompts, lengths)
    turns: dict[str, list[Turn]] = {"paceline": [], "TRL": []}
    watch = [Stopwatch()]
    with tempfile.TemporaryDirectory() as scratch:
        sizes = trl_peer.Sizes(options.prompts, options.group, options.new_tokens, options.trl_batch, rounds, LR)
        theirs, forced = trl_peer.make_trainer(folder, prompts, reward, sizes, scratch)

        def before(number: int) -> None:
            if number % 2 == 1:
                turns["paceline"].append(ours.step(number))
            forced.begin(lengths[number])
            theirs.seconds.clear()
            watch[0] = Stopwatch()

        def after(number: int) -> None:
            used = watch[0].read()
            assert [len(answer) for answer in theirs.answers] == lengths[number], "TRL's responses have other lengths"
            train_seconds = used.seconds - sum(theirs.seconds.values())
            turns["TRL"].append(Turn(used.seconds, used.cpu_seconds, sum(lengths[number]),
                                     {**dict.fromkeys(("generate", "reward"), 0.0), **theirs.seconds, "train": train_seconds}))
            if number % 2 == 0:
                turns["paceline"].append(ours.step(number))
            print(f"{scenario} {number}: TRL {turns['TRL'][-1].seconds:.2f} s, paceline {turns['paceline'][-1].seconds:.2f} s",
                  file=sys.stderr)

        theirs.add_callback(trl_peer.Turns(before, after))
        theirs.train()
    return {name: mine[1:] for name, mine in turns.items()}


class Ours:
    """Engine, learner and loop of `paceline train`, with given response lengths."""

    def __init__(self, options: argparse.Namespace, folder: Path, prompts: list[str], lengths: list[list[int]]) -> None:
        self.options, self.prompts, self.lengths = options, prompts, lengths
        self.learner = make_learner(options, folder, len(lengths))
        model, tokenizer = load_model(folder, dtype="float32")
        config = EngineConfig(max_batch=options.prompts * options.group, kv_memory_gb=1.0)
        drafter = "none" if options.strategy == "off" else "suffix"
        self.engine = Engine(model, tokenizer, drafter, options.strategy, config)
        self.engine.generate([[1, 2, 3, 4] * 4], SamplingParams(max_new_tokens=8, ignore_eos=True), 2)  # kernels compile
        self.state = RunState()

    def step(self, number: int) -> Turn:
        done: list[StepOutcome] = []
        watch = Stopwatch()
        self.state = train(self.learner, self.state, number + 1, self.options.prompts, self._collect, self._publish, done.append)
        used = watch.read()
        answers = [rollout for group in done[0].groups for rollout in group.rollouts]
        assert [len(rollout.token_ids) for rollout in answers] == self.lengths[number], "our responses have other lengths"
        phases = {phase: done[0].metrics.get(f"time/{phase}", 0.0) for phase in ("generate", "reward", "train")}
        phases["train"] += done[0].metrics.get("time/infer", 0.0)
        return Turn(used.seconds, used.cpu_seconds, sum(self.lengths[number]), phases)

    def _publish(self, learner: Learner, version: int) -> None:
        self.engine.update_weights(learner.weights(), version)

    def _collect(self, cursor: int, count: int, timer: PhaseTimer) -> list[RolloutGroup]:
        lengths, size = self.lengths[cursor // count], self.options.group
        params = SamplingParams(max_new_tokens=self.options.new_tokens, ignore_eos=True, seed=cursor)
        with timer("generate"):
            ids = [self.engine.add(prompt, params, size, f"{cursor + i}")
                   for i, prompt in enumerate(self.prompts[cursor : cursor + count])]
            found = self._until_done(dict(zip(chain.from_iterable(ids), lengths, strict=True)))
        with timer("reward"):
            for rollout in found.values():
                rollout.reward = reward(rollout.text)
        return [RolloutGroup(found[group[0]].prompt_ids, [found[i] for i in group]) for group in ids]

    def _until_done(self, lengths: dict[int, int]) -> dict[int, Rollout]:
        """Steps the engine until every request has its length and is aborted. Tokens that a draft adds beyond it are dropped."""
        drawn, found = dict.fromkeys(lengths, 0), {}
        while len(found) < len(lengths):
            result = self.engine.step()
            for request, tokens in result.tokens.items():
                drawn[request] += len(tokens)
            finished = {rollout.request_id: rollout for rollout in result.finished}
            enough = [i for i in result.tokens if drawn[i] >= lengths[i] and i not in finished]
            finished.update({rollout.request_id: rollout for rollout in self.engine.abort(enough)})
            for i, rollout in finished.items():
                rollout.token_ids, rollout.logprobs = rollout.token_ids[: lengths[i]], rollout.logprobs[: lengths[i]]
            found.update(finished)
        return found


def make_learner(options: argparse.Namespace, folder: Path, steps: int, kind: type[Learner] = Learner, device: str = "cpu",
                 compute: torch.dtype = torch.float32) -> Learner:
    model: Decoder = load_model(folder, device, "float64" if compute == torch.float64 else "float32")[0]
    config = LearnerConfig(micro_batch_tokens=options.micro_batch_tokens)
    return kind(model, make_algorithm("grpo", options.new_tokens), config, OptimizerConfig(lr=LR), steps, 1.0, compute)


# --- trainer: the learner alone


class PaddedLearner(Learner):
    """A learner without sequence packing: it trains on batches of `width` sequences that are padded to the longest one. Padding
    runs through every layer and the head, and has no weight in the loss."""

    width = 16

    def _packed(self, samples: Sequence[Sample], weights: list[float] | None = None) -> list[MicroBatch]:
        each = [1.0] * len(samples) if weights is None else weights
        parts = [range(i, min(i + self.width, len(samples))) for i in range(0, len(samples), self.width)]
        return [self._padded([samples[i] for i in part], [each[i] for i in part], part) for part in parts]

    def _padded(self, samples: list[Sample], weights: list[float], members: range) -> MicroBatch:
        longest = max(len(s.tokens) for s in samples)
        (batch,) = pack([_pad(s, longest) for s in samples], 10**9, weights, self.device)
        real = torch.cat([torch.arange(longest - s.prompt_length) < s.num_answer for s in samples]).to(self.device)
        return batch._replace(weights=batch.weights * real, members=tuple(members))


def _pad(sample: Sample, longest: int) -> Sample:
    more = longest - len(sample.tokens)
    return replace(sample, tokens=sample.tokens + [0] * more, sampled=torch.nn.functional.pad(sample.sampled, (0, more)),
                   advantages=torch.nn.functional.pad(_known(sample.advantages), (0, more)))


def trainer(options: argparse.Namespace, folder: Path, goals: list[Goal]) -> list[Message]:
    """Forward, backward and optimizer on the same long-tailed responses, in tokens per second without padding."""
    compute = torch.bfloat16 if options.dtype == "bfloat16" else torch.float32
    kinds: dict[str, type[Learner]] = {"packed": Learner, "padded": PaddedLearner}
    PaddedLearner.width = options.trainer_batch
    learners = {name: make_learner(options, folder, 1000, kind, options.device, compute) for name, kind in kinds.items()}
    samples = random_samples(options, learners["packed"].policy.model.config.vocab_size, options.trainer_samples)
    tokens = sum(len(s.tokens) for s in samples)
    norms = {name: learner.update(samples, 0)["grad_norm"] for name, learner in learners.items()}  # and warm up
    used: dict[str, list[Turn]] = {name: [] for name in learners}
    for number in range(options.rounds):
        for name in sorted(learners, reverse=number % 2 == 1):
            _settle(options.device)
            watch = Stopwatch()
            learners[name].update(samples, number)
            _settle(options.device)
            used[name].append(Turn(*watch.read(), tokens, {}))
    rows: dict[str, int] = {"padded": _rows_run(learners["padded"], samples), "packed": tokens}
    speed = spread([b.seconds / a.seconds for a, b in zip(used["packed"], used["padded"], strict=True)])
    where = f"{options.model}, {options.device}, {options.dtype}"
    records, table = [], []
    for name, mine in used.items():
        rate, cpu_rate = (spread([tokens / max(1e-9, x) for x in xs])
                          for xs in zip(*((t.seconds, t.cpu_seconds) for t in mine), strict=True))
        table.append((name, rate, cpu_rate, rows[name], speed if name == "packed" else ""))
        records.append({"model": options.model, "device": options.device, "dtype": options.dtype, "side": name, "tokens": tokens,
                        "rows_with_padding": rows[name], "grad_norm": norms[name], "tokens_per_second": rate._asdict(),
                        "tokens_per_cpu_second": cpu_rate._asdict(), "seconds": [t.seconds for t in mine]})
    goals.append(Goal(f"{where}, trainer alone, long-tailed: packed / padded tokens/s", speed.median, 2.0))
    difference = abs(norms["packed"] - norms["padded"]) / norms["packed"]
    allowed = 1e-4 if options.dtype == "float32" else 2e-2
    goals.append(Goal(f"{where}: packed and padded gradient norm, relative difference", difference, allowed, False))
    print_table(f"{where}: learner alone, {len(samples)} responses, {tokens:,} tokens; padded batches: {options.trainer_batch}",
                ("", "tokens/s", "tokens/CPU s", "rows run", "× padded"), table)
    return records


def _rows_run(learner: Learner, samples: list[Sample]) -> int:
    return sum(len(batch.tokens) for batch in learner._packed(samples))


def _settle(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _known(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


if __name__ == "__main__":
    main()
