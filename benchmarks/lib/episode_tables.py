"""Tables of the benchmarks of environments."""

from __future__ import annotations

from benchmarks.lib.table import Content, Table, number, times


def gpu_episodes(content: Content, _: str) -> Table:
    best = {name: max(runs, key=lambda run: run["tokens_per_s"]) for name, runs in content["runs"].items()}
    peer = best.get("vllm")
    rows = []
    for name, run in best.items():
        busy = "–" if run["gpu_busy"] is None else f"{run['gpu_busy']:.0%}"
        ratio = None if peer is None else run["tokens_per_s"] / peer["tokens_per_s"]
        shown = "vLLM" if name == "vllm" else name
        rows.append((shown, f"{run['seconds']:.1f}", number(run["tokens_per_s"]), busy, times(ratio)))
    sentence = (f"{content['episodes']} episodes of {content['turns']} turns, {content['turn_tokens']} tokens each, "
                f"{content['live']} at once; replies take up to {content['max_latency_s']:g} s.")
    if "differing_episodes" in content:
        sentence += f" {content['differing_episodes']} episodes differ with speculation."
    return Table("Episodes with an environment", sentence, ("engine", "seconds", "tokens/s", "GPU busy", "× vLLM"), rows)


def cpu_episodes(content: Content, _: str) -> Table:
    rows = [(each["task"], f"{each['plain_s']:.3f}", f"{each['episodes_s']:.3f}", f"{each['step_s']:.3f}",
             f"{100 * each['overhead']:.1f} %") for each in content["runs"]]
    worst = max(each["overhead"] for each in content["runs"])
    return Table("One-turn tasks as environments",
                 f"Collecting the same answers as episodes takes at most {100 * worst:.1f} % of a step longer than as answers of "
                 "a task.", ("task", "collecting answers, s", "collecting episodes, s", "whole step, s", "overhead"), rows)
