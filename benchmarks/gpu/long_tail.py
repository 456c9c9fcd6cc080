"""A whole rollout with a long tail on one GPU: 256 responses whose lengths follow those of a production service, with off, auto
and fixed strategies, against vLLM on the same prompts and lengths.

    python benchmarks/gpu/long_tail.py --model FOLDER --prompts gsm8k_test.jsonl --train-prompts gsm8k_train.jsonl \\
        --lengths deepseek_r1_output_lengths.csv --drafter build/drafter --vllm-path SITE

Lengths are quantiles of the distribution, scaled so that the longest is `--max-length`; every response ends at its length. A
prompt contains as many grade-school problems as its response has room for, so that the text stays real; the share of tokens past
a first end token is reported. Paceline runs the policy's upscaled twin with the cost of a 7B model (benchmarks/lib/upscale.py),
vLLM runs random weights of the 7B shape, as its speed does not depend on them. Goal: half the time of off, and of vLLM.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.lib import drafter as trained_drafter
from benchmarks.lib.long_tail import Run, compose, conclusions, run, shortened, summary, warm_up
from benchmarks.lib.models import QWEN_7B, TINY_TWIN
from benchmarks.lib.prompts import chat, long_tailed_lengths
from benchmarks.lib.results import Report
from benchmarks.lib.setup import Budget, Setting, make_parser
from benchmarks.lib.upscale import upscale, upscale_drafter
from benchmarks.lib.vllm_gpu import Vllm, add_vllm_arguments
from paceline import Engine


def main() -> None:
    parser = make_parser(__doc__, "gpu/long_tail")
    trained_drafter.add_arguments(parser)
    parser.add_argument("--lengths", type=Path, help="CSV with output_tokens and probability (default: a made-up heavy tail)")
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--fixed", nargs="+", default=["eagle:d6w4v16", "eagle:d4w2v8", "eagle:d3w2v4"])
    parser.add_argument("--rounds", type=int, default=2)
    add_vllm_arguments(parser)
    args = parser.parse_args()
    setting, budget = Setting.of(args), Budget(args.minutes)
    if args.tiny:
        args.max_length, args.requests, args.rounds, args.fixed = 48, 8, 1, ["eagle:d3w2v4"]
    lengths = long_tailed_lengths(args.lengths, args.requests, args.max_length)
    report = Report(args, setting.device, requests=args.requests, max_length=args.max_length, tokens=sum(lengths),
                    length_quantiles={q: sorted(lengths)[int(q / 100 * (len(lengths) - 1))] for q in (10, 50, 90, 99, 100)})
    policy, tokenizer = setting.policy(args.model)
    asked, training = trained_drafter.split_questions(args)
    rounds = [chat(tokenizer, compose(asked, lengths, number)) for number in range(args.rounds)]
    context = args.max_length + max(len(prompt) for prompts in rounds for prompt in prompts) + 16
    peer = None if args.tiny else Vllm.of(args, "7B")  # starts in the background
    drafter = trained_drafter.obtain(setting, policy, tokenizer, training, args, report, budget)
    twin = upscale(policy, TINY_TWIN if args.tiny else QWEN_7B)
    learned = upscale_drafter(drafter, twin.config)
    engine = setting.engine(twin, learned, args.requests, kv_gb=50, **({} if args.tiny else {"max_context": context}))
    warm = chat(tokenizer, compose(training, lengths, 99))
    if peer is not None:
        report.content["vllm"] = peer.wait(0.5 * budget.left)
        peer = None if "error" in report.content["vllm"] else peer
    measure(engine, ["auto", "off", *args.fixed], rounds, warm, lengths, report, budget, peer)


def measure(engine: Engine, names: Sequence[str], rounds: list[list[list[int]]], warm: list[list[int]], lengths: list[int],
            report: Report, budget: Budget, peer: Vllm | None) -> None:
    """Round by round, auto first: its suffix drafter must not know the responses from the run of another strategy."""
    report.content["warm_up"] = {"graphs": (made := engine.warm_up()).num_graphs, "seconds": made.capture_seconds}
    warm_up(engine, names, warm, lengths)
    if peer is not None:
        peer.seconds(warm, shortened(lengths))
    found: dict[str, list[Run]] = {name: [] for name in names}
    for prompts in rounds:
        if peer is not None:
            report.content["vllm"].setdefault("seconds", []).append(peer.seconds(prompts, lengths))
            print(f"vllm: {report.content['vllm']['seconds'][-1]:.2f} s", flush=True)
        for name in names:
            longest = max((r.seconds for runs in found.values() for r in runs), default=0.0)
            if budget.left < longest:
                print(f"no time left for {name}", flush=True)
                continue
            found[name].append(run(engine, name, prompts, lengths))
            report.content["rollout"] = {n: summary(runs) for n, runs in found.items() if runs}
            report.content |= conclusions(report.content, names)
            report.content["seconds"] = budget.used
            report.save()
            print(f"{name}: {found[name][-1].seconds:.2f} s", flush=True)
    shown = ("best_fixed", "ratio_to_off", "ratio_to_vllm")
    print({key: report.content[key] for key in shown if key in report.content}, flush=True)


if __name__ == "__main__":
    main()
