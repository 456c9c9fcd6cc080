"""Goals and tables of benchmarks/gpu/queue.py and serve.py."""

from __future__ import annotations

from benchmarks.lib.figures import Goal
from benchmarks.lib.table import Content, Table, number, range_of, times

ARRIVAL_STEPS = 1.5
"""Most that an arrival may cost, in steps."""
RATIOS = {"off": {"8": 1.3, "32": 1.5, "128": 1.3, "256": 1.3}, "auto": {"8": 2.5, "32": 2.2, "128": 1.4, "256": 1.2}}
"""Least tokens per second of a queue as a multiple of vLLM's, by strategy and batch size."""


def goals(parts: Content) -> list[Goal]:
    """The goals of what was measured."""
    found = [Goal(f"arrival among {batch}, {name}: steps", cell["extra_steps"], ARRIVAL_STEPS, at_least=False)
             for name, cells in parts.get("arrival", {}).items() for batch, cell in cells.items()]
    for batch, cell in parts.get("queue", {}).items():
        found += [Goal(f"queue through {batch}, {name}: × vLLM", cell[name]["ratio_to_vllm"], RATIOS[name][batch])
                  for name in RATIOS if "ratio_to_vllm" in cell.get(name, {})]
        if "auto" in cell:
            found.append(Goal(f"queue through {batch}: answers that differ", cell["flips"]["flips"], 0, at_least=False))
    return found


def gpu_queue(content: Content, _: str) -> Table:
    """The queues as the first table; arrivals below."""
    parts = content["parts"]
    queues = sorted(parts.get("queue", {}).items(), key=lambda queue: int(queue[0]))
    title = "New prompts among running requests on a GPU" + (", with a learned drafter" if content["has_drafter"] else "")
    return Table(title, " ".join(_sentences(content)),
                 ("batch", "prompts", "off, tokens/s", "vLLM, tokens/s", "off × vLLM", "auto × vLLM", "auto × off",
                  "accept length of auto"), [_queue_row(batch, cell) for batch, cell in queues], _arrivals(parts))


def _queue_row(batch: str, cell: Content) -> tuple[object, ...]:
    auto = cell.get("auto", {})
    return (batch, cell["prompts"], number(cell["off"]["tokens_per_s"]),
            number(cell["vllm"]["tokens_per_s"]) if "vllm" in cell else "–", times(cell["off"].get("ratio_to_vllm")),
            times(auto.get("ratio_to_vllm")), times(auto.get("ratio_to_off")),
            f"{auto['accept_length']:.2f}" if auto else "–")


def _sentences(content: Content) -> list[str]:
    parts = content["parts"]
    told = [f"Prompts of about {content['prompt_tokens']:.0f} tokens that no prefix cache knows, natural ends, at most "
            f"{content['new_tokens']} tokens."] if "prompt_tokens" in content else []
    cells = parts.get("queue", {}).values()
    for name in ("off", "auto"):
        if ratios := [cell[name]["ratio_to_vllm"] for cell in cells if "ratio_to_vllm" in cell.get(name, {})]:
            told.append(f"A queue of prompts goes through a batch at {range_of(ratios)} vLLM's tokens per second with `{name}`.")
    if any("auto" in cell for cell in cells):
        flips, compared = (sum(cell["flips"][key] for cell in cells) for key in ("flips", "tokens_compared"))
        told.append(f"Answers of `auto` that differ from those of off: {flips} (of {number(compared)} tokens compared).")
    if arrivals := [cell["extra_steps"] for cells in parts.get("arrival", {}).values() for cell in cells.values()]:
        told.append(f"A prompt of about 100 tokens that arrives costs the running requests {min(arrivals):.2f} to "
                    f"{max(arrivals):.2f} steps' time.")
    if prefill := parts.get("prefill"):
        model = "a model with the cost of 7B" if prefill["on"] == "twin" else "the policy"
        told.append(f"{prefill['prompts']} prompts of {prefill['prompt_tokens']:,} tokens that arrive at once have their first "
                    f"tokens after {prefill['off']['seconds']:.2f} s on {model}"
                    + (f" (vLLM: {prefill['vllm']['seconds']:.2f} s)." if "vllm" in prefill else "."))
    return told


def _arrivals(parts: Content) -> Table | None:
    rows = [(batch, cell["strategy"], f"{cell['step_ms']:.2f}", f"{cell['extra_ms']:.2f}", f"{cell['extra_steps']:.2f}",
             f"{cell['first_token_ms']:.2f}", f"{cell['add_ms']:.2f}")
            for cells in parts.get("arrival", {}).values() for batch, cell in cells.items()]
    if not rows:
        return None
    return Table("An arrival", "What one prompt of about 100 tokens costs the requests that decode meanwhile (median).",
                 ("running requests", "strategy", "step ms", "extra ms", "extra steps", "first token ms", "Engine.add ms"), rows)


def gpu_serve(content: Content, _: str) -> Table:
    rows = [(shown, f"{run['median_ms']:.1f}", f"{run['p95_ms']:.1f}", f"{run['at_once_median_ms']:.1f}")
            for name, shown in (("paceline", "`paceline serve`"), ("vllm", "vLLM"))
            if "median_ms" in (run := content["servers"].get(name, {}))]
    ratio = "".join(f"; Paceline's is {goal['value']:.2f} of vLLM's" for goal in content["goals"])
    return Table("Time to first token over HTTP", f"{content['streams']} concurrent streams, prompts that no prefix cache knows, "
                 f"at most {content['new_tokens']} tokens: the time until the first token of a prompt that arrives among running "
                 f"requests{ratio}.", ("server", "median ms", "95 % ms", "all at once, median ms"), rows)
