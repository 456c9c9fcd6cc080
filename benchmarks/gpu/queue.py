"""New prompts among running requests on one GPU, against vLLM in the same run: what an arrival costs the running batch, how fast
a queue of prompts goes through a batch, and how fast a batch that starts at once is prefilled.

    python benchmarks/gpu/queue.py --model FOLDER --prompts gsm8k_train.jsonl --drafter build/drafter --vllm-path SITE

FOLDER holds Qwen2.5-1.5B (Coder, Instruct, …). Prompts are grade-school problems of about 100 tokens through the chat template,
each with a number at its beginning, so that no prefix cache helps; temperature 1, natural ends, at most `--new-tokens` tokens.
`--drafter` names a trained drafter; without it nothing speculates. Parts:

- `arrival`: one prompt arrives among 1, 8 and 32 decoding requests and asks for one token. Its cost is the time of some steps
  with it minus the time of as many steps without it just before, as milliseconds and in units of one step.
- `queue`: 12 × 8, 12 × 32, 7 × 128 and 4 × 256 prompts through a batch of 8, 32, 128 and 256, all of them added at once: tokens
  per second of off, and of `auto` with the drafter. vLLM (random weights of the same shape, max_num_seqs of the same batch) gets
  the same prompts and generates as many tokens for each as Paceline did. Answers of `auto` are compared with those of off.
- `prefill`: seconds until 64 prompts of 1,024 tokens have their first tokens, on the policy's upscaled twin with the cost of a 7B
  model (`--prefill-on policy`: on the policy itself), with and without the drafter.

Results are written after every measurement. The engines take turns, and neither computes while the other does.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.lib.models import QWEN_SHAPES
from benchmarks.lib.prompts import questions
from benchmarks.lib.queue_parts import (
    QUEUES,
    TINY_SIZES,
    Bench,
    Prompts,
    Sizes,
    measure_arrivals,
    measure_prefill,
    measure_queues,
)
from benchmarks.lib.queue_tables import goals
from benchmarks.lib.result_tables import print_result
from benchmarks.lib.results import Report
from benchmarks.lib.setup import Budget, Setting, free_memory, make_parser
from benchmarks.lib.vllm_gpu import Vllm, add_vllm_arguments
from paceline import SamplingParams
from paceline.drafters.checkpoint import load_eagle
from paceline.drafters.eagle import Eagle, EagleConfig
from paceline.models.decoder import Decoder

PARTS = ("arrival", "queue", "prefill")


def main() -> None:
    args = parse()
    setting, budget = Setting.of(args), Budget(args.minutes)
    policy, tokenizer = setting.policy(args.model)
    peers = start_peers(args, policy)
    try:
        drafter = None if args.drafter is None else load_eagle(args.drafter, policy)
        if args.tiny:
            drafter = Eagle.random(EagleConfig.for_policy(policy.config))
        params = SamplingParams(temperature=1.0, max_new_tokens=args.new_tokens, seed=11)
        report = Report(args, setting.device, new_tokens=args.new_tokens, has_drafter=drafter is not None, parts={})
        bench = Bench(setting, policy, drafter, Prompts(tokenizer, questions(args.prompts)), params,
                      TINY_SIZES if args.tiny else Sizes(), report, budget)
        ready = wait_for(peers, report, budget)
        run_parts(bench, args, ready)
        report.content["prompt_tokens"] = statistics.fmean(bench.prompts.lengths or [0])
        report.content["goals"] = [goal.record() for goal in goals(report.content["parts"])]
        report.save()
    finally:
        for peer in peers.values():
            peer.close()
    print_result(report.content)


def parse() -> Any:
    parser = make_parser(__doc__, "gpu/queue")
    parser.add_argument("--model", help="the policy: a folder or GGUF file")
    parser.add_argument("--prompts", type=Path, help="JSON lines with a question each")
    parser.add_argument("--drafter", type=Path, help="folder of a trained drafter (default: no speculation)")
    parser.add_argument("--parts", default=",".join(PARTS), help="parts to run, separated by commas")
    parser.add_argument("--batch", nargs="+", type=int, default=list(QUEUES), choices=list(QUEUES), help="batch sizes of `queue`")
    parser.add_argument("--new-tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prefill-on", choices=["twin", "policy"], default="twin")
    add_vllm_arguments(parser)
    args = parser.parse_args()
    args.parts = args.parts.split(",")
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))} is not one of {', '.join(PARTS)}")
    if not args.tiny and (args.model is None or args.prompts is None):
        parser.error("--model and --prompts are needed, unless the run is --tiny")
    if args.tiny:
        args.batch, args.new_tokens, args.rounds = [8], 6, 1
    return args


def start_peers(args: Any, policy: Decoder) -> dict[str, Vllm]:
    """vLLM with the policy's shape and with that of the prefilled model, as far as the parts need them; both start in the
    background. A smoke run takes any shape."""
    own = "0.5B" if args.tiny else next((name for name, shape in QWEN_SHAPES.items()
                                         if shape.hidden_size == policy.config.hidden_size), "")
    shapes = {"policy": own} if "queue" in args.parts else {}
    if "prefill" in args.parts:
        shapes["prefill"] = own if args.tiny or args.prefill_on == "policy" else "7B"
    if "" in shapes.values() and (args.vllm_path or args.vllm_at):
        raise SystemExit("--model: vLLM runs Qwen2.5's 0.5B, 1.5B and 7B shapes only; this policy has another one")
    made: dict[str, Vllm] = {}
    for shape in dict.fromkeys(shapes.values()):
        peer = Vllm.of(args, shape)
        made |= {name: peer for name, wanted in shapes.items() if wanted == shape and peer is not None}
    return made


def wait_for(peers: dict[str, Vllm], report: Report, budget: Budget) -> dict[str, Vllm]:
    """Those peers that answer. None of them may still be starting while something is measured."""
    answers: dict[Vllm, dict[str, Any]] = {}
    for peer in peers.values():
        if peer not in answers:
            answers[peer] = peer.wait(0.5 * budget.left)
    report.content["vllm"] = {name: answers[peer] for name, peer in peers.items()}
    for name, peer in peers.items():
        print(f"vLLM for {name}: {answers[peer]}", flush=True)
    return {name: peer for name, peer in peers.items() if "error" not in answers[peer]}


def run_parts(bench: Bench, args: Any, peers: dict[str, Vllm]) -> None:
    for part in args.parts:
        if bench.budget.left < 20:
            print(f"no time left for {part}", flush=True)
            continue
        if part == "arrival":
            measure_arrivals(bench)
        elif part == "queue":
            measure_queues(bench, args.batch, args.rounds, peers.get("policy"))
        else:
            measure_prefill(bench, args.prefill_on, peers.get("prefill"))
        free_memory()


if __name__ == "__main__":
    main()
