"""GRPO runs on one GPU with long-tailed answers, everything counted: with a drafter that begins with random weights, with one
that was trained before, without speculation, and with vLLM's rollouts and the same trainer.

    python benchmarks/gpu/headline.py --model FOLDER --prompts gsm8k_test.jsonl --train-prompts gsm8k_train.jsonl \\
        --lengths deepseek_r1_output_lengths.csv --drafter build/drafter --vllm-path SITE
    python benchmarks/gpu/headline.py … --sides new --continue benchmarks/results/gpu/headline.json       # part by part
    python benchmarks/gpu/headline.py … --cost 7B --steps 2                                       # results/gpu/headline-7B.json

Steps are those of `paceline train`: 32 prompts × 8 answers, one update per batch, all weights trained, the drafter trained while
that pays (`new` and `ready`). What is imposed: answers end at drawn lengths (quantiles of --lengths, scaled so that the longest
is --max-length), which the engine does not know, and not before, because end tokens are not sampled. Prompts have as many
grade-school problems as their answers have room for. The reward is real: the share of the problems whose result the answer
names. All sides start from the same weights and have the same prompts, lengths and seeds. `--run-steps` is the length of the run
that the trainer is told, for which it plans the drafter's warm-up. `--cost 7B` runs the policy's upscaled twin
(benchmarks/lib/upscale.py).

vLLM runs in a process of its own that ends before the others start. It generates with random weights of that shape, as its speed
does not depend on them; its start and handing it weights count nothing, and the rest of its steps takes what it takes without
speculation. The sides `code` and `choice` are short runs with natural ends: HumanEval (--humaneval), and multiple choice
(--choice in the form of ARC; default: made of --prompts), with the drafter that was trained before and without speculation.

Goals: rollouts 2.2 times as fast as vLLM's at 1.5B and 8,192 tokens, 2.5 times at 7B and 16,384; steps 1.6 and 1.8 times; a run
from nothing overtakes one without speculation within 10 steps, and has 1.4 times its rollouts by then.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.lib import drafter as trained_drafter
from benchmarks.lib.figures import Goal, print_goals, print_table
from benchmarks.lib.gpu_check.rl import write_tiny_model
from benchmarks.lib.headline import TwinTrainer, compose_graded, graded_problems, write_choices
from benchmarks.lib.headline_figures import OURS, PARTS, conclusions, domain_conclusions
from benchmarks.lib.long_tail import shortened
from benchmarks.lib.models import QWEN_7B, TINY_TWIN, write_shape
from benchmarks.lib.prompts import chat, long_tailed_lengths
from benchmarks.lib.results import Report
from benchmarks.lib.rl_run import EndlessTrainer, GivenLengthsTask, MeasuredTrainer, matrix_rate, run_steps
from benchmarks.lib.setup import Budget, Setting, make_parser
from benchmarks.lib.upscale import twin_config, upscale, upscale_drafter
from benchmarks.lib.vllm_gpu import Vllm, add_vllm_arguments
from paceline.drafters.checkpoint import load_eagle, save_eagle
from paceline.models.weights import load_model, open_checkpoint
from paceline.trainer import TrainConfig

DOMAINS = ("code", "choice")
_DOMAIN_TOKENS = 1024
_SAME = ("revision", "cost", "answers", "group", "max_length", "run_steps", "micro_batch_tokens")
"""What must not differ between the parts of a result."""


def main() -> None:
    args = parse()
    setting, budget = Setting.of(args), Budget(args.minutes)
    report = Report(args, setting.device, variant="" if args.cost == "1.5B" else args.cost, cost=args.cost, group=args.group,
                    answers=args.prompts_per_step * args.group, max_length=args.max_length, run_steps=args.run_steps,
                    micro_batch_tokens=args.micro_batch_tokens, sides={}, domains={}, commands=[])
    take_over(args.continue_from, report)
    with tempfile.TemporaryDirectory() as scratch:
        run = HeadlineRun(args, setting, Path(scratch))
        peer = Vllm.of(args, args.cost, max_context=args.max_length + args.prompt_room, kv_gb=args.kv_gb) \
            if "vllm" in args.sides and not args.tiny else None  # starts in the background
        prepare(run, report, budget)
        steps = step_inputs(args)
        report.content["tokens_per_step"] = sum(sum(group) for group in steps[0].lengths)
        for side in args.sides:
            if budget.left <= 0:
                print(f"no time left for {side}", flush=True)
            elif side == "vllm":
                measure_vllm(peer, args, steps, report, budget)
            elif side in DOMAINS:
                report.content["domains"][side] = measure_domain(side, run, budget)
            else:
                report.content["sides"][side] = measure(side, run, steps, budget)
            save(report, setting, budget)
    show(report.content)


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__, "gpu/headline", minutes=9.0)
    trained_drafter.add_arguments(parser)
    parser.add_argument("--sides", nargs="+", choices=[*OURS, "vllm", *DOMAINS], default=["vllm", "new", "ready", "off"])
    parser.add_argument("--continue", dest="continue_from", type=Path, metavar="FILE",
                        help="a result of the same settings: keep what it has of other sides")
    parser.add_argument("--cost", choices=["1.5B", "7B"], default="1.5B", help="7B: the twin of the policy at that cost")
    parser.add_argument("--lengths", type=Path, help="CSV with output_tokens and probability (default: a made-up heavy tail)")
    parser.add_argument("--max-length", type=int, help="longest answer (default: 8192, at 7B cost 16384)")
    parser.add_argument("--prompts-per-step", type=int, default=32)
    parser.add_argument("--group", type=int, default=8, help="number of answers per prompt")
    parser.add_argument("--steps", type=int, default=10, help="number of steps of each side")
    parser.add_argument("--off-steps", type=int, help="number of steps without speculation (default: --steps)")
    parser.add_argument("--run-steps", type=int, default=100, help="number of steps that the run is planned for")
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--kv-gb", type=float, default=30.0)
    parser.add_argument("--prompt-room", type=int, default=4096, help="longest prompt, in tokens")
    parser.add_argument("--humaneval", type=Path, help="HumanEval.jsonl.gz, for the side `code`")
    parser.add_argument("--choice", type=Path, help="JSON lines in the form of ARC, for the side `choice`")
    parser.add_argument("--domain-steps", type=int, default=4)
    add_vllm_arguments(parser)
    args = parser.parse_args()
    args.max_length = args.max_length or (8192 if args.cost == "1.5B" else 16384)
    if args.tiny:
        args.prompts_per_step, args.group, args.max_length, args.steps, args.prompt_room = 2, 4, 24, 2, 448
        args.micro_batch_tokens, args.domain_steps = 64, 2
    return args


def take_over(file: Path | None, report: Report) -> None:
    """Takes over the sides of an earlier part of the same result. SystemExit says which setting differs."""
    earlier: dict[str, Any] = {} if file is None else json.loads(file.read_text(encoding="utf-8"))
    for key in _SAME if earlier else ():
        if earlier[key] != report.content[key]:
            raise SystemExit(f"--continue: {key} was {earlier[key]}, and is {report.content[key]} now")
    kept = ("sides", "domains", "commands", "drafter", "matrix_tflops")
    report.content |= {key: earlier[key] for key in kept if key in earlier}
    report.content["commands"] = [*report.content["commands"], report.content["command"]]


class HeadlineRun(NamedTuple):
    """What all sides have in common."""

    args: argparse.Namespace
    setting: Setting
    scratch: Path

    @property
    def is_twin(self) -> bool:
        return self.args.cost != "1.5B"

    @property
    def twin_shape(self) -> Any:
        """The shape at whose cost the twin runs."""
        shape = TINY_TWIN if self.args.tiny else QWEN_7B
        return twin_config(open_checkpoint(self.args.model).config, shape)

    def config(self, side: str) -> TrainConfig:
        """The configuration of a run whose answers have given lengths."""
        args = self.args
        model = str(write_shape(self.twin_shape, self.scratch / "twin")) if self.is_twin else str(args.model)
        rollout = {"prompts": args.prompts_per_step, "group_size": args.group, "max_new_tokens": args.max_length}
        large = {"kind": "adamw_8bit"} if self.is_twin and not args.tiny else {}
        return self.shared(side, rollout, args.max_length + args.prompt_room, model=model, task="given lengths",
                           steps=args.run_steps, drafter={"new": "learned", "off": "none"}.get(side, self.drafter),
                           drafter_budget={"warm_up_s": 1.0} if args.tiny else {},
                           sleep_during_update=self.is_twin and not args.tiny, optimizer={"lr": 1e-6, **large},
                           learner={"micro_batch_tokens": args.micro_batch_tokens, "gradient_checkpointing": self.is_twin})

    @property
    def drafter(self) -> str:
        """Folder of the drafter that was trained before."""
        return str(self.scratch / "twin-drafter" if self.is_twin else self.args.drafter)

    def shared(self, side: str, rollout: dict[str, Any], max_context: int, **fields: Any) -> TrainConfig:
        args, tiny = self.args, self.args.tiny
        engine: dict[str, Any] = {"max_batch": args.prompts_per_step * args.group, "max_context": max_context}
        engine |= {"kernels": "torch", "kv_tokens": 4096, "profile": False} if tiny else {"kv_memory_gb": args.kv_gb}
        fields = {"reward": {"workers": 0}, "steps": args.run_steps} | fields
        return TrainConfig(**fields, out=str(self.scratch / "runs" / side), strategy="off" if side == "off" else "auto",
                           checkpoint_every=100000, dtype="float32" if tiny else "bfloat16", device=self.setting.device.type,
                           rollout=rollout, engine=engine, threads=1 if tiny else None)

    def trainer(self, side: str, task: GivenLengthsTask) -> MeasuredTrainer:
        if not self.is_twin:
            return EndlessTrainer(self.config(side), task=task, progress=False)
        trainer = TwinTrainer(self.config(side), task=task, progress=False)
        trainer.source, trainer.shape = str(self.args.model), self.twin_shape
        return trainer


def prepare(run: HeadlineRun, report: Report, budget: Budget) -> None:
    """Afterwards `args.model` is a folder, and where a side needs it, there is a drafter that was trained before. One that is not
    there yet is trained now; a smoke run makes both."""
    args, setting = run.args, run.setting
    needs_drafter = not {"ready", *DOMAINS}.isdisjoint(args.sides)
    there = args.drafter is not None and (args.drafter / "model.safetensors").is_file()
    if args.tiny or (needs_drafter and not there):
        policy, tokenizer = setting.policy(args.model)
        made = trained_drafter.obtain(setting, policy, tokenizer, trained_drafter.split_questions(args)[1], args, report, budget)
        if args.drafter is None:
            args.drafter = run.scratch / "drafter"
            save_eagle(made, args.drafter)
        if args.tiny:
            args.model = str(run.scratch / "model")
            write_tiny_model(policy, Path(args.model))
        del policy, made
    if run.is_twin and needs_drafter:
        small, _ = load_model(args.model, setting.device, None if args.tiny else "bfloat16")
        twin = upscale(small, run.twin_shape)
        save_eagle(upscale_drafter(load_eagle(args.drafter, small), twin.config), Path(run.drafter))
        del small, twin
    setting.free()


class StepInput(NamedTuple):
    """What a step is given."""

    texts: list[str]
    lengths: list[list[int]]
    """Lengths of the answers to each prompt."""
    results: list[list[str]]
    """The right results in each prompt."""


def step_inputs(args: argparse.Namespace) -> list[StepInput]:
    """Prompts and lengths of every step, which are the same for all sides: answers of similar length form a group."""
    problems = graded_problems(args.prompts)
    drawn = sorted(long_tailed_lengths(args.lengths, args.prompts_per_step * args.group, args.max_length))
    found = []
    for number in range(args.steps):
        groups = [drawn[i : i + args.group] for i in range(0, len(drawn), args.group)]
        draw = random.Random(number)
        draw.shuffle(groups)
        for group in groups:
            draw.shuffle(group)
        most = 2 if args.tiny else args.prompt_room // 100
        prompts = compose_graded(problems, [max(group) for group in groups], number, most)
        found.append(StepInput([prompt.text for prompt in prompts], groups, [prompt.results for prompt in prompts]))
    return found


def measure(side: str, run: HeadlineRun, steps: Sequence[StepInput], budget: Budget) -> dict[str, Any]:
    """Steps of one side, from the policy's first weights on."""
    prompts: list[Any] = [text if run.args.tiny else [{"role": "user", "content": text}] for step in steps for text in step.texts]
    task = GivenLengthsTask(prompts, [group for step in steps for group in step.lengths],
                            [results for step in steps for results in step.results])
    count = run.args.off_steps or run.args.steps if side == "off" else run.args.steps
    recorder = run_steps(run.trainer(side, task), count, budget)
    return {"warm_up_seconds": recorder.warm_up_s, "notes": recorder.notes, "steps": recorder.steps}


def measure_vllm(peer: Vllm | None, args: argparse.Namespace, steps: Sequence[StepInput], report: Report, budget: Budget) -> None:
    """Seconds of vLLM's rollouts of the first steps' prompts and lengths; afterwards its process has ended."""
    if peer is None:
        return
    found: dict[str, Any] = peer.wait(0.5 * budget.left)
    report.content["sides"]["vllm"] = found
    if "error" not in found:
        tokenizer = open_checkpoint(args.model).tokenizer()
        prompts, lengths = _by_answer(chat(tokenizer, steps[-1].texts), steps[-1].lengths)
        peer.seconds(prompts, shortened(lengths))
        found["rollout_seconds"] = []
        for step in steps[:2]:
            found["rollout_seconds"].append(peer.seconds(*_by_answer(chat(tokenizer, step.texts), step.lengths)))
            print(f"vllm: rollout {found['rollout_seconds'][-1]:.2f} s", flush=True)
    peer.close()


def _by_answer(prompts: Sequence[list[int]], lengths: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[int]]:
    """One prompt and one length for each answer."""
    pairs = [(prompt, length) for prompt, group in zip(prompts, lengths, strict=True) for length in group]
    return [prompt for prompt, _ in pairs], [length for _, length in pairs]


def measure_domain(domain: str, run: HeadlineRun, budget: Budget) -> dict[str, Any]:
    """Short runs on another kind of prompts, with natural ends and the task's own reward."""
    args = run.args
    options: dict[str, Any] = {}
    if domain == "code":
        options = {"data": str(args.humaneval)} if args.humaneval is not None else {}
        if args.tiny:
            options = {"data": str(write_tiny_code(run.scratch / "code.jsonl")), "chat": False, "instruction": ""}
    else:
        file = args.choice or run.scratch / "choice.jsonl"
        if args.choice is None:
            write_choices(graded_problems(args.prompts), file)
        options = {"data": str(file), **({"chat": False, "instruction": ""} if args.tiny else {})}
    tokens = 12 if args.tiny else _DOMAIN_TOKENS
    rollout = {"prompts": args.prompts_per_step, "group_size": args.group, "max_new_tokens": tokens}
    cell: dict[str, Any] = {"answers": args.prompts_per_step * args.group, "is_made": domain == "choice" and args.choice is None}
    for side in ("ready", "off"):
        config = run.shared(side, rollout, tokens + (args.prompt_room if args.tiny else 2048), model=str(args.model),
                            task={"code": "humaneval", "choice": "arc"}[domain], task_options=options,
                            drafter="none" if side == "off" else str(args.drafter), optimizer={"lr": 1e-6},
                            learner={"micro_batch_tokens": args.micro_batch_tokens}, reward={"workers": 0 if args.tiny else 4})
        config = config.model_copy(update={"out": str(run.scratch / "runs" / f"{domain}-{side}")})
        recorder = run_steps(MeasuredTrainer(config, progress=False), args.domain_steps, budget)
        cell[side] = {"warm_up_seconds": recorder.warm_up_s, "steps": recorder.steps}
        run.setting.free()
    return cell | domain_conclusions(cell)


def write_tiny_code(file: Path) -> Path:
    """Programming problems in the form of HumanEval, for smoke runs."""
    rows = [{"task_id": f"Tiny/{i}", "prompt": f"def add_{i}(a):\n    return", "entry_point": f"add_{i}",
             "canonical_solution": f" a + {i}\n", "test": f"def check(f):\n    assert f(1) == {1 + i}\n"} for i in range(8)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def save(report: Report, setting: Setting, budget: Budget) -> None:
    setting.free()
    content = report.content
    if "matrix_tflops" not in content:
        content["matrix_tflops"] = matrix_rate(setting.device, *((256, 0.05) if setting.tiny else (8192, 1.0))) / 1e12
    content["conclusions"] = conclusions(content["sides"])
    content["seconds"] = budget.used
    report.save()


def show(content: dict[str, Any]) -> None:
    found = content["conclusions"]
    rows = [(name, *(totals[part] for part in PARTS), sum(totals.values())) for name, totals in found.get("totals", {}).items()]
    print_table(f"{found.get('steps', 0)} GRPO steps, {content['answers']} answers of at most {content['max_length']:,} tokens, "
                "seconds", ("side", *(part.replace("_", "-") for part in PARTS), "all"), rows)
    for name, cell in content["domains"].items():
        print(f"{name}: {cell['accept_length']:.2f} tokens per verification, rollouts {cell['rollout_over_off']:.2f} x off")
    large = content["cost"] != "1.5B"
    goals = [Goal(f"vLLM's {what} / {name}'s", ratios["vllm"][what], least) for name, ratios in found.get("over", {}).items()
             if "vllm" in ratios for what, least in (("rollout", 2.5 if large else 2.2), ("step", 1.8 if large else 1.6))]
    if "last_rollouts" in found:
        goals.append(Goal("off's last rollouts / those of the drafter from nothing", found["last_rollouts"], 1.4))
        print(f"the run from nothing has overtaken off after {found['overtakes_after']} steps")
    print_goals(goals)


if __name__ == "__main__":
    main()
