"""Episodes with an environment on one GPU, against vLLM with the same environments in the same run.

    python benchmarks/gpu/episodes.py --model FOLDER --prompts gsm8k_train.jsonl --drafter build/drafter --vllm-path SITE

FOLDER holds Qwen2.5-1.5B (Coder, Instruct, …). An episode has four turns of 300 tokens each (no natural ends, so that both
engines do the same work), temperature 1; after each turn but the last the environment takes 0 to 2 s (log-normal: most replies
are quick, some are not) and replies with another problem, about 100 tokens. 64 episodes are under way at once; when one ends, the
next begins. Everything about the environment is drawn beforehand, and is the same for all. Measured are seconds and tokens per
second, and how much of the time in which a request can run the GPU computes (NVML, every 50 ms, if pynvml is installed).

Paceline runs without speculation and, with `--drafter`, with `auto`; tokens are compared. vLLM (random weights of the same shape)
gets all of an episode so far as the prompt of its next turn and finds it in its prefix cache.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.lib.episodes import Drawn, Outcome, draw_episodes, run_episodes
from benchmarks.lib.figures import Goal, rotated
from benchmarks.lib.models import QWEN_SHAPES
from benchmarks.lib.prompts import questions
from benchmarks.lib.queue_parts import POLICY_KV_GB, Prompts
from benchmarks.lib.result_tables import print_result
from benchmarks.lib.results import Report
from benchmarks.lib.setup import Budget, Setting, free_memory, freeze_memory, make_parser
from benchmarks.lib.vllm_gpu import Vllm, add_vllm_arguments
from paceline import Engine, SamplingParams
from paceline.drafters.checkpoint import load_eagle
from paceline.drafters.eagle import Eagle, EagleConfig
from paceline.models.decoder import Decoder


def main() -> None:
    args = parse()
    setting, budget = Setting.of(args), Budget(args.minutes)
    policy, tokenizer = setting.policy(args.model)
    peer = start_peer(args, policy)
    try:
        drafter = None if args.drafter is None else load_eagle(args.drafter, policy)
        if args.tiny:
            drafter = Eagle.random(EagleConfig.for_policy(policy.config))
        report = Report(args, setting.device, episodes=args.episodes, live=args.live, turns=args.turns,
                        turn_tokens=args.turn_tokens, max_latency_s=args.latency, has_drafter=drafter is not None)
        prompts = Prompts(tokenizer, questions(args.prompts))
        episodes = draw_episodes(prompts.take, args.episodes, args.turns, args.turn_tokens, args.latency)
        ready = None if peer is None else peer.wait(0.5 * budget.left)
        report.content["vllm"] = ready
        measure(args, setting, policy, drafter, episodes, peer if ready and "error" not in ready else None, report, budget)
    finally:
        if peer is not None:
            peer.close()
    print_result(report.content)


def parse() -> Any:
    parser = make_parser(__doc__, "gpu/episodes")
    parser.add_argument("--model", help="the policy: a folder or GGUF file")
    parser.add_argument("--prompts", type=Path, help="JSON lines with a question each")
    parser.add_argument("--drafter", type=Path, help="folder of a trained drafter (default: no speculation)")
    parser.add_argument("--episodes", type=int, default=192)
    parser.add_argument("--live", type=int, default=64, help="episodes under way at once")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--turn-tokens", type=int, default=300)
    parser.add_argument("--latency", type=float, default=2.0, help="longest time of a reply in seconds")
    parser.add_argument("--rounds", type=int, default=2)
    add_vllm_arguments(parser)
    args = parser.parse_args()
    if not args.tiny and (args.model is None or args.prompts is None):
        parser.error("--model and --prompts are needed, unless the run is --tiny")
    if args.tiny:
        args.episodes, args.live, args.turns, args.turn_tokens, args.latency, args.rounds = 6, 4, 3, 5, 0.02, 1
    return args


def start_peer(args: Any, policy: Decoder) -> Vllm | None:
    """vLLM with the policy's shape, which starts in the background. A smoke run takes any shape."""
    shape = "0.5B" if args.tiny else next((name for name, shape in QWEN_SHAPES.items()
                                           if shape.hidden_size == policy.config.hidden_size), "")
    if not shape and (args.vllm_path or args.vllm_at):
        raise SystemExit("--model: vLLM runs Qwen2.5's 0.5B, 1.5B and 7B shapes only; this policy has another one")
    return Vllm.of(args, shape) if shape else None


def measure(args: Any, setting: Setting, policy: Decoder, drafter: Eagle | None, episodes: list[Drawn], peer: Vllm | None,
            report: Report, budget: Budget) -> None:
    """Runs all episodes with each engine in turns, and saves after every one."""
    engines = make_engines(args, setting, policy, drafter)
    longest = max(sum(turn.num_tokens + len(turn.reply) for turn in episode.turns) for episode in episodes)
    params = SamplingParams(temperature=1.0, max_new_tokens=longest + 1, max_turn_tokens=args.turn_tokens, pauses=True,
                            ignore_eos=True, seed=11)
    for engine in engines.values():
        run_episodes(engine, episodes[: args.live // 4], params, args.live)
    if peer is not None:
        peer.episodes([episode.as_job() for episode in episodes[: args.live // 4]], args.live)
    freeze_memory()
    found: dict[str, list[dict[str, Any]]] = {}
    tokens: dict[str, list[list[int]]] = {}
    for round_number in range(args.rounds):
        for name in rotated([*engines, *(["vllm"] if peer is not None else [])], round_number):
            if budget.left < 10:
                break
            if name == "vllm":
                assert peer is not None
                seconds = peer.episodes([episode.as_job() for episode in episodes], args.live)
                outcome = Outcome(seconds, sum(turn.num_tokens for episode in episodes for turn in episode.turns), None, [])
            else:
                outcome = run_episodes(engines[name], episodes, params, args.live)
                tokens[name] = outcome.tokens
            found.setdefault(name, []).append(outcome.record())
            report.content["runs"], report.content["seconds"] = found, budget.used
            if len(tokens) > 1:
                report.content["differing_episodes"] = sum(a != b for a, b in zip(*tokens.values(), strict=True))
            report.content["goals"] = [goal.record() for goal in goals(found)]
            report.save()
            print(f"{name}: {outcome.record()}", flush=True)
    engines.clear()
    free_memory()


def make_engines(args: Any, setting: Setting, policy: Decoder, drafter: Eagle | None) -> dict[str, Engine]:
    made = {"off": setting.engine(policy, None, args.live, kv_gb=POLICY_KV_GB)}
    if drafter is not None:
        made["auto"] = setting.engine(policy, drafter, args.live, kv_gb=POLICY_KV_GB, strategy="auto")
    for engine in made.values():
        engine.warm_up()
    return made


def goals(found: dict[str, list[dict[str, Any]]]) -> list[Goal]:
    """The goals that can be judged by now, each by the best run."""
    best = {name: max(run["tokens_per_s"] for run in runs) for name, runs in found.items()}
    own = {name: value for name, value in best.items() if name != "vllm"}
    made = []
    if own and "vllm" in best:
        made.append(Goal("episodes: best of ours / vLLM", max(own.values()) / best["vllm"], 1.5, True))
    busy = [run["gpu_busy"] for name in own for run in found[name] if run["gpu_busy"] is not None]
    return [*made, Goal("GPU busy while a request can run", max(busy), 0.9, True)] if busy else made


if __name__ == "__main__":
    main()
