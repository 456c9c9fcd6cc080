"""One command that says whether this revision is as fast on a GPU as it should be, in at most eight minutes:

    make gpu-check CHECK="--model FOLDER --prompts gsm8k_test.jsonl --train-prompts gsm8k_train.jsonl"

FOLDER holds Qwen2.5-1.5B (Coder, Instruct, …), and the prompts are those of GSM8K with their answers. The parts: `drafter`
(trained here for 120 s on responses of the policy), `decode` (tokens per second without speculation), `speculate` (auto, off and
fixed strategies at batch 1 to 256, on the policy's upscaled twin with the cost of a 7B model), `long_tail` (a whole rollout of
256 responses; with `--vllm-at`, which takes half a minute more, also by vLLM), `rl` (three steps of GRPO on the policy with that
drafter), `tests` (tests/gpu, without clusters of processes). Each has a share of `--minutes` and may use what earlier ones left;
what no time was left for is listed as skipped. That is to be expected of the first check on a machine, which has to compile all
kernels: give it eleven minutes, or run it twice.

The exit status is 1 where a test fails, a part fails or is skipped (unless `--partial`), or `auto` has less than 0.97 of the
speed of off or 0.93 of that of the best fixed strategy; one line says why. benchmarks/results/gpu_check.json has the figures, the
revision and a hash of the sources that they depend on. Run it after every change of `paceline/engine`, `strategy`, `kernels`,
`drafters`, `models` or `cache`, and commit that file and `make results`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.lib import drafter as trained_drafter
from benchmarks.lib.gpu_check.parts import MINUTES, GpuCheck
from benchmarks.lib.gpu_check.verdict import LIMITS, failures
from benchmarks.lib.result_tables import print_result
from benchmarks.lib.results import RESULTS, SMOKE_RESULTS, Report
from benchmarks.lib.setup import Setting, make_parser
from benchmarks.lib.sources import sources_hash
from benchmarks.lib.vllm_gpu import add_vllm_arguments
from paceline.trainer.standalone_drafter import DEFAULT_ANSWERS, DEFAULT_SECONDS


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    setting = Setting.of(args)
    report = Report(args, setting.device, sources=sources_hash(), limits=LIMITS)
    with tempfile.TemporaryDirectory() as scratch:
        GpuCheck(args, setting, report, Path(scratch)).run()
    failed = failures(report.content, args.partial, args.tiny)
    report.content |= {"failures": failed, "passed": not failed}
    report.save()
    show(report)
    if failed:
        raise SystemExit(1)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, "gpu/check", 8.0)
    trained_drafter.add_arguments(parser, can_load=False)
    parser.set_defaults(answers=DEFAULT_ANSWERS["cuda"], train_seconds=DEFAULT_SECONDS)
    add_vllm_arguments(parser, can_start=False)
    parser.add_argument("--lengths", type=Path, help="CSV with output_tokens and probability (default: a made-up heavy tail)")
    parser.add_argument("--speculate-on", choices=["twin", "policy"], default="twin", help="model of speculate and long_tail")
    parser.add_argument("--parts", nargs="+", choices=list(MINUTES), default=list(MINUTES), help="parts to run (default: all)")
    parser.add_argument("--keep-drafter", type=Path, metavar="FOLDER",
                        help="keep the trained drafter here, for other benchmarks and for --continue")
    parser.add_argument("--continue", dest="earlier", type=Path, metavar="FILE",
                        help="result of an earlier check of the same sources, whose parts count where they are not run again")
    parser.add_argument("--partial", action="store_true", help="parts that are skipped are no failure")
    args = parser.parse_args(arguments)
    if not args.tiny and (args.model is None or args.prompts is None):
        parser.error("--model and --prompts are needed, unless the run is --tiny")
    if args.earlier is not None and json.loads(args.earlier.read_text())["sources"] != sources_hash():
        parser.error(f"{args.earlier} was measured with other sources")
    args.out = args.out or (SMOKE_RESULTS if args.tiny else RESULTS) / "gpu_check.json"
    return args


def show(report: Report) -> None:
    print_result(report.content)
    for line in report.content["failures"]:
        print(f"FAILED: {line}")
    print("passed" if report.content["passed"] else "not passed", flush=True)


if __name__ == "__main__":
    main()
