"""Whole GRPO steps on one GPU (rollout, reward, update, new weights in the engine) whose answers have long-tailed lengths: with
`auto` and a trained drafter, with off, and with vLLM's generation and the same trainer.

    python benchmarks/gpu/rl_step.py --model FOLDER --prompts gsm8k_test.jsonl --train-prompts gsm8k_train.jsonl \\
        --lengths deepseek_r1_output_lengths.csv --drafter build/drafter --vllm-path SITE

Steps are those of `paceline train` (32 prompts × 8 answers, one update per batch, all weights trained). Lengths are quantiles of
the distribution, scaled so that the longest is `--max-length`; answers of similar length form a group, and a prompt contains as
many grade-school problems as they have room for. Every answer ends at its length, which the engine does not know beforehand, and
not before: end tokens are not sampled, as with `min_tokens` (if the policy's head is not its embedding). Each side starts from
the same weights. The drafter stays as it is unless `--train-drafter` is given.

vLLM runs first, in a process of its own that ends before the others start. It generates with random weights of the 1.5B shape, as
its speed does not depend on them; its step is its rollout and what a step of ours takes besides the rollout, but nothing for new
weights. The training share is the rate of the update's matrix products over that of a large product measured in the same run.

Goals: the rollout twice as fast as vLLM's, the whole step 1.6 times; a training share of 40 %; the first step within 1.3 times
the time of a later one.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.lib import drafter as trained_drafter
from benchmarks.lib.figures import Goal, print_goals, print_table
from benchmarks.lib.gpu_check.rl import write_tiny_model
from benchmarks.lib.long_tail import compose, shortened
from benchmarks.lib.prompts import chat, long_tailed_lengths
from benchmarks.lib.results import Report
from benchmarks.lib.rl_run import EndlessTrainer, GivenLengthsTask, StepRecorder, matrix_rate, run_steps
from benchmarks.lib.setup import Budget, Setting, make_parser
from benchmarks.lib.vllm_gpu import Vllm, add_vllm_arguments
from paceline.drafters.checkpoint import save_eagle
from paceline.models.weights import open_checkpoint
from paceline.trainer import TrainConfig

SIDES = ("auto", "off")


def main() -> None:
    args = parse()
    setting, budget = Setting.of(args), Budget(args.minutes)
    report = Report(args, setting.device, answers=args.prompts_per_step * args.group, group=args.group,
                    max_length=args.max_length, micro_batch_tokens=args.micro_batch_tokens, train_drafter=args.train_drafter)
    with tempfile.TemporaryDirectory() as scratch:
        peer = None if args.tiny else Vllm.of(args, "1.5B", max_context=args.max_length + args.prompt_room, kv_gb=24.0)
        prepare(args, setting, report, budget, Path(scratch))
        steps = tasks(args)
        report.content["tokens"] = sum(sum(map(sum, lengths)) for _, lengths in steps[:1])
        if peer is not None:
            measure_vllm(peer, args, steps, report, budget)
        report.content["matrix_tflops"] = matrix_rate(setting.device, *((256, 0.05) if args.tiny else (8192, 1.0))) / 1e12
        report.content["sides"], first_answers = {}, []
        for side in SIDES:
            if report.content["sides"] and budget.left <= 0:
                print(f"no time left for {side}", flush=True)
                continue
            recorder = measure(side, args, setting, steps, budget, Path(scratch) / side)
            setting.free()
            first_answers.append(recorder.first_answers)
            report.content["sides"][side] = {"steps": recorder.steps}
            report.content |= conclusions(report.content) | {"seconds": budget.used}
            report.save()
        if len(first_answers) == len(SIDES):
            equal = [a == b for a, b in zip(*first_answers, strict=True)]
            report.content["identical_answers"] = sum(equal) / len(equal)
            report.save()
    show(report.content)


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__, "gpu/rl_step", minutes=4.0)
    trained_drafter.add_arguments(parser)
    parser.add_argument("--lengths", type=Path, help="CSV with output_tokens and probability (default: a made-up heavy tail)")
    parser.add_argument("--max-length", type=int, default=8192)
    parser.add_argument("--prompts-per-step", type=int, default=32)
    parser.add_argument("--group", type=int, default=8, help="number of answers per prompt")
    parser.add_argument("--steps", type=int, default=5, help="number of steps with auto; off has at most two")
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--kv-gb", type=float, default=30.0)
    parser.add_argument("--prompt-room", type=int, default=4096, help="longest prompt, in tokens")
    parser.add_argument("--train-drafter", action="store_true", help="train the drafter further in every step")
    add_vllm_arguments(parser)
    args = parser.parse_args()
    if args.tiny:
        args.prompts_per_step, args.group, args.max_length, args.steps, args.prompt_room = 2, 4, 24, 2, 256
        args.micro_batch_tokens = 64
    return args


def prepare(args: argparse.Namespace, setting: Setting, report: Report, budget: Budget, scratch: Path) -> None:
    """Afterwards `args.model` and `args.drafter` are folders of a policy and its drafter. A drafter that is not there yet is
    trained; a smoke run makes both."""
    if not args.tiny and args.model is not None and args.drafter is not None and (args.drafter / "model.safetensors").is_file():
        report.content["drafter"] = {"loaded": True}
        return
    policy, tokenizer = setting.policy(args.model)
    training = trained_drafter.split_questions(args)[1]
    made = trained_drafter.obtain(setting, policy, tokenizer, training, args, report, budget)
    if args.drafter is None:
        args.drafter = scratch / "drafter"
        save_eagle(made, args.drafter)
    if args.tiny:
        args.model = str(scratch / "model")
        write_tiny_model(policy, Path(args.model))


StepInput = tuple[list[str], list[list[int]]]
"""Texts of a step's prompts, and the lengths of the answers to each."""


def tasks(args: argparse.Namespace) -> list[StepInput]:
    """Prompts and lengths of every step, which are the same for all sides."""
    asked = trained_drafter.split_questions(args)[0]
    drawn = sorted(long_tailed_lengths(args.lengths, args.prompts_per_step * args.group, args.max_length))
    found = []
    for number in range(args.steps):
        groups = [drawn[i : i + args.group] for i in range(0, len(drawn), args.group)]
        draw = random.Random(number)
        draw.shuffle(groups)
        for group in groups:
            draw.shuffle(group)
        most = 2 if args.tiny else args.prompt_room // 100
        found.append((compose(asked, [max(group) for group in groups], number, most), groups))
    return found


def measure_vllm(peer: Vllm, args: argparse.Namespace, steps: Sequence[StepInput], report: Report, budget: Budget) -> None:
    """Seconds of vLLM's rollouts of the first step's prompts and lengths; afterwards its process has ended."""
    tokenizer = open_checkpoint(args.model).tokenizer()
    found = report.content["vllm"] = peer.wait(0.5 * budget.left)
    if "error" not in found:
        prompts, lengths = _by_answer(chat(tokenizer, steps[-1][0]), steps[-1][1])
        peer.seconds(prompts, shortened(lengths))
        found["rollout_seconds"] = peer.seconds(*_by_answer(chat(tokenizer, steps[0][0]), steps[0][1]))
        print(f"vllm: rollout {found['rollout_seconds']:.2f} s", flush=True)
    peer.close()


def _by_answer(prompts: Sequence[list[int]], lengths: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[int]]:
    """One prompt and one length for each answer."""
    pairs = [(prompt, length) for prompt, group in zip(prompts, lengths, strict=True) for length in group]
    return [prompt for prompt, _ in pairs], [length for _, length in pairs]


def measure(side: str, args: argparse.Namespace, setting: Setting, steps: Sequence[StepInput], budget: Budget,
            out: Path) -> StepRecorder:
    """Steps of one side, from the policy's first weights on."""
    texts = [text for texts, _ in steps for text in texts]
    prompts: list[Any] = texts if args.tiny else [[{"role": "user", "content": text}] for text in texts]
    task = GivenLengthsTask(prompts, [group for _, groups in steps for group in groups])
    trainer = EndlessTrainer(train_config(side, args, setting, out), task=task)
    return run_steps(trainer, args.steps if side == "auto" else min(args.steps, 2), budget)


def train_config(side: str, args: argparse.Namespace, setting: Setting, out: Path) -> TrainConfig:
    rollout = {"prompts": args.prompts_per_step, "group_size": args.group, "max_new_tokens": args.max_length}
    engine: dict[str, Any] = {"max_batch": args.prompts_per_step * args.group, "max_context": args.max_length + args.prompt_room}
    engine |= {"kernels": "torch", "kv_tokens": 4096, "profile": False} if args.tiny else {"kv_memory_gb": args.kv_gb}
    return TrainConfig(
        model=str(args.model), task="given lengths", steps=1000, checkpoint_every=1000, out=str(out), strategy=side,
        drafter="none" if side == "off" else str(args.drafter), train_drafter=args.train_drafter and side != "off",
        dtype="float32" if args.tiny else "bfloat16", device=setting.device.type, reward={"workers": 0},
        optimizer={"lr": 1e-6}, rollout=rollout, engine=engine, learner={"micro_batch_tokens": args.micro_batch_tokens},
        threads=1 if args.tiny else None)


# --- what follows


def conclusions(content: dict[str, Any]) -> dict[str, Any]:
    """Medians of each side over its later steps, and the ratios that the goals are about."""
    sides = {name: side | _medians(side["steps"]) for name, side in content["sides"].items() if side["steps"]}
    found: dict[str, Any] = {"sides": sides}
    if not sides:
        return found
    auto, rate = sides["auto"], content["matrix_tflops"] * 1e12
    found["training_share"] = auto["update_flops"] / auto["update_seconds"] / rate
    if len(auto["steps"]) > 1:
        found["first_over_later"] = auto["steps"][0]["seconds"] / auto["seconds"]
    times = {"auto": auto, **({"off": sides["off"]} if "off" in sides else {})}
    theirs = content.get("vllm", {}).get("rollout_seconds")
    if theirs is not None:
        rest = min(side["seconds"] - side["rollout_seconds"] - side["publish_seconds"] - side["drafter_seconds"]
                   for side in sides.values())
        times["vllm"] = {"rollout_seconds": theirs, "seconds": theirs + rest}
        found["vllm_step_seconds"] = theirs + rest
    found["auto_over"] = {name: {"rollout": side["rollout_seconds"] / auto["rollout_seconds"],
                                 "step": side["seconds"] / auto["seconds"]} for name, side in times.items() if name != "auto"}
    return found


def _medians(steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Median figures of all steps but the first, or of the only one."""
    later = steps[1:] or steps
    numbers = [key for key, value in steps[0].items() if isinstance(value, (int, float))]
    return {key: statistics.median(step[key] for step in later) for key in numbers}


def show(content: dict[str, Any]) -> None:
    names = ("seconds", "rollout_seconds", "update_seconds", "publish_seconds", "accept_length", "share_off")
    rows: list[Sequence[object]] = [(side, *(found[name] for name in names)) for side, found in content["sides"].items()]
    if "vllm_step_seconds" in content:
        rows.append(("vllm", content["vllm_step_seconds"], content["vllm"]["rollout_seconds"], "", "", "", ""))
    print_table(f"One GRPO step, {content['answers']} answers of at most {content['max_length']:,} tokens",
                ("side", *(name.replace("_", " ") for name in names)), rows)
    goals = [Goal("share of the measured matrix rate in training", content["training_share"], 0.4)]
    if "first_over_later" in content:
        goals.append(Goal("first step / later steps", content["first_over_later"], 1.3, at_least=False))
    for key, least in (("rollout", 2.0), ("step", 1.6)):
        if "vllm" in content["auto_over"]:
            goals.append(Goal(f"vLLM's {key} / auto's", content["auto_over"]["vllm"][key], least))
    print_goals(goals)


if __name__ == "__main__":
    main()
