"""One table and one sentence with the main figures for each kind of result file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any

from benchmarks.lib.cluster_tables import cluster_asynchronous, cluster_reallocation, cluster_rollout, cluster_train
from benchmarks.lib.episode_tables import cpu_episodes, gpu_episodes
from benchmarks.lib.figures import Goal, print_goals, print_table
from benchmarks.lib.gpu_check.verdict import ratios
from benchmarks.lib.queue_tables import gpu_queue, gpu_serve
from benchmarks.lib.rl_tables import gpu_exact_logprobs, gpu_headline, gpu_memory
from benchmarks.lib.table import Content, Table
from benchmarks.lib.table import number as _number
from benchmarks.lib.table import range_of as _range
from benchmarks.lib.table import times as _times


def make_table(content: Content) -> Table:
    """The table of a result file. A KeyError means that its benchmark has no table yet: add it to `TABLES`."""
    folder, name = content["benchmark"].split("/")
    render = TABLES.get(content["benchmark"]) or TABLES[name]
    return render(content, folder.upper())


def print_result(content: Content) -> None:
    """Print the tables of a result file with their sentences, and its goals."""
    table: Table | None = make_table(content)
    while table is not None:
        print_table(table.title, table.columns, table.rows)
        print(table.sentence)
        table = table.more
    if "goals" in content:
        print_goals([Goal(each["what"], each["value"], each["target"], each["at_least"]) for each in content["goals"]])


# --- the check of a revision


def gpu_check(content: Content, _: str) -> Table:
    parts = content["parts"]
    cells = parts.get("speculate", {}).get("batches", {})
    rows = []
    for each in sorted(ratios(parts), key=lambda each: int(each.where.split()[-1]) if each.where[-1].isdigit() else 10**6):
        cell = cells.get(each.where.removeprefix("batch "), {}).get("strategies") or parts["long_tail"]["rollout"]
        best = cell[each.best]["tokens_per_s"] / cell["off"]["tokens_per_s"]
        rows.append((each.where, _number(cell["off"]["tokens_per_s"]), _times(each.to_off), each.best, _times(best),
                     _times(each.to_best), f"{_share_off(cell['auto']['steps']):.0%}",
                     f"{cell['auto']['tokens_per_verification']:.2f}"))
    return Table("The GPU check", " ".join(_check_sentences(content)),
                 ("where", "off, tokens/s", "auto × off", "best fixed strategy", "it × off", "auto × best", "steps of auto off",
                  "tokens/verification of auto"), rows, _check_rl(parts.get("rl", {})))


def _check_sentences(content: Content) -> Iterator[str]:
    parts, failed = content["parts"], content["failures"]
    yield "The check passes." if content["passed"] else f"The check fails: {'; '.join(failed)}."
    if left_out := content.get("skipped"):
        yield f"This run left out: {', '.join(left_out)}."
    if earlier := content.get("earlier_parts"):
        yield f"Of revision {next(iter(earlier.values()))[:7]}, with the same sources: {', '.join(earlier)}."
    for name, why in content.get("apart", {}).items():
        yield f"Part {name} was measured in a process of its own, because {why}."
    if "tests" in parts:
        yield f"{parts['tests']['passed']} tests pass on the GPU."
    rates = {batch: cell["tokens_per_s"] for batch, cell in parts.get("decode", {}).get("batches", {}).items()}
    if rates:
        yield (f"Without speculation the policy decodes {' / '.join(map(_number, rates.values()))} tokens/s at batch "
               f"{' / '.join(rates)}.")
    if "ratio_to_vllm" in parts.get("long_tail", {}):
        ratio = parts["long_tail"]["ratio_to_vllm"]["auto"]
        yield f"In the long tail `auto`, which is told all lengths, is {_times(ratio)} as fast as vLLM."
    if parts.get("speculate", {}).get("batches"):
        yield (f"The table is of the {parts['speculate']['model']}, with a drafter trained for "
               f"{parts['drafter']['train_seconds']:.0f} s in the same process.")
    if full := parts.get("drafter", {}).get("full_tree_tokens_per_verification"):
        width = max(full, key=int)
        yield f"Full trees of depth 6 with {width} children would give it {full[width]:.2f} tokens per verification (held out)."


def _check_rl(rl: Content) -> Table | None:
    if not rl.get("steps"):
        return None
    rows = [(number, _number(step["tokens_per_s"]), f"{step['accept_length']:.2f}", f"{step['share_off']:.0%}",
             f"{step['generate_seconds']:.1f}", f"{step['seconds']:.1f}") for number, step in enumerate(rl["steps"], start=1)]
    return Table("RL steps", "GRPO on the policy with the same drafter, through the trainer library.",
                 ("step", "tokens/s", "accept length", "engine steps off", "generation s", "step s"), rows)


def _share_off(steps: dict[str, int]) -> float:
    return steps.get("off", 0) / max(1, sum(steps.values()))


# --- engines against other engines


def cpu_decode(content: Content, _: str) -> Table:
    cells = [cell for cell in content["throughput"] if cell["engine"].startswith("paceline")]
    plain = [cell for cell in cells if len(cell["engine"].split()) == 2]  # "paceline KERNELS"; a third word names a strategy
    rows = [(cell["model"], cell["dtype"], cell["batch"], cell["engine"].removeprefix("paceline "),
             _number(cell["tokens_per_second"]["median"]), _number(cell["tokens_per_cpu_second"]["median"]),
             *(_times(cell["speedup"].get(peer, {}).get("median")) for peer in ("transformers", "vllm compiled", "vllm eager")))
            for cell in plain]
    models = " and ".join(dict.fromkeys(cell["model"] for cell in cells))
    sentence = (f"{models}: Paceline decodes at {_range(_speedups(plain, 'transformers'))} the tokens per second of transformers "
                "`generate`")
    if found := _speedups(plain, "vllm compiled"):
        sentence += f" and {_range(found)} those of vLLM's compiled CPU build"
    return Table("Decoding without speculation on a CPU", sentence + ".",
                 ("model", "dtype", "batch", "Paceline", "tokens/s", "tokens/CPU s", "× transformers", "× vLLM compiled",
                  "× vLLM eager"), rows)


def _speedups(cells: Sequence[Content], peer: str) -> list[float]:
    return [cell["speedup"][peer]["median"] for cell in cells if peer in cell["speedup"]]


def gpu_decode(content: Content, _: str) -> Table:
    batches = _batches(cell["batches"] for cell in content["shapes"].values())
    rows, ratios = [], []
    for shape, cell in content["shapes"].items():
        found = [cell["batches"].get(batch) for batch in batches]
        ratios += [each["ratio_to_vllm"] for each in found if each and "ratio_to_vllm" in each]
        if any(each and "ratio_to_vllm" in each for each in found):
            rows.append((f"{shape}: × vLLM", *(_times(each and each.get("ratio_to_vllm")) for each in found)))
        rows.append((f"{shape}: ms per step", *(f"{each['paceline']['ms_per_step']:.2f}" if each else "–" for each in found)))
    return Table("Decoding without speculation on a GPU",
                 f"Random weights in bfloat16, {content['prompt_tokens']}-token prompts, {content['new_tokens']} new tokens: "
                 + (f"Paceline's tokens per second are {_range(ratios)} those of vLLM." if ratios else "Paceline alone."),
                 ("shape", *(f"batch {batch}" for batch in batches)), rows)


# --- speculation


def speculate(content: Content, _: str) -> Table:
    batches = _batches(model["batches"] for model in content["models"].values())
    rows, autos = [], []
    for name, model in content["models"].items():
        cells = [model["batches"].get(batch) for batch in batches]
        found = [cell and cell["strategies"]["auto"] for cell in cells]
        autos += [(cell["ratio_to_off"], f"{name}, batch {batch}") for cell, batch in zip(found, batches, strict=True) if cell]
        rows.append((f"{name}: auto", *(_times(cell and cell["ratio_to_off"]) for cell in found)))
        rows.append((f"{name}: best fixed strategy", *(_times(cell and cell["best_fixed_ratio"]) for cell in cells)))
        rows.append((f"{name}: tokens/verification of auto",
                     *(f"{cell['tokens_per_verification']:.2f}" if cell else "–" for cell in found)))
    (worst, worst_at), (best, best_at) = min(autos), max(autos)
    return Table("Speculative decoding by batch size on a GPU",
                 f"Speedup of `auto` over off between {_times(worst)} ({worst_at}) and {_times(best)} ({best_at}); `policy` is "
                 "Qwen2.5-Coder-1.5B on GSM8K at temperature 1, `twin` the same function at the cost of a 7B model.",
                 ("speedup over off", *(f"batch {batch}" for batch in batches)), rows)


def selection(content: Content, _: str) -> Table:
    cells = content["models"]["h200"]["workloads"]
    rows = [(name, cell["best_fixed"], _times(cell["auto_vs_off"]), _times(cell["auto_vs_best_fixed"]))
            for name, cell in cells.items()]
    to_off, to_best = (_range([cell[key] for cell in cells.values()]) for key in ("auto_vs_off", "auto_vs_best_fixed"))
    return Table(f"Choosing strategies in simulation, setting {content['setting']}",
                 f"`auto` is {to_off} as fast as off and {to_best} as fast as each workload's best fixed strategy.",
                 ("workload", "best fixed strategy", "auto × off", "auto × best fixed"), rows)


def suffix_vs_arctic(content: Content, _: str) -> Table:
    rows = [(stream, name, f"{cell['accepted_per_draft']:.2f}", f"{cell['drafted_per_draft']:.2f}", f"{cell['draft_us']:.1f}",
             f"{cell['extend_us']:.1f}") for stream, found in content["streams"].items()
            for name, cell in found["drafters"].items()]
    accepted = [(stream, *(f"{found['drafters'][name]['accepted_per_draft']:.2f}" for name in (
        "ours tree, noise, shared history", "arctic tree", "ours tree, noise"))) for stream, found in content["streams"].items()]
    parts = [f"{shared} against {arctic} on `{stream}` ({own})" for stream, shared, arctic, own in accepted]
    return Table("The suffix drafter against arctic-inference's suffix decoding",
                 f"Accepted draft tokens per draft, both with a history of all responses: {', '.join(parts)}; in brackets ours "
                 f"with one history per prompt, its default. At most {content['budget']} draft tokens for one request at a time.",
                 ("responses", "drafter", "accepted per draft", "drafted", "µs per draft", "µs to append"), rows)


# --- drafters


def drafter_training(content: Content, device: str) -> Table:
    marks = sorted({mark for form in content["forms"].values() for mark in form["marks"]}, key=float)
    rows, best = [], (0.0, "", "")
    for name, form in content["forms"].items():
        found = {mark: next(iter(cell["measured"].values())) for mark, cell in form["marks"].items()}
        rows.append((name, *(f"{found[mark]:.2f}" if mark in found else "–" for mark in marks),
                     _number(next(reversed(form["marks"].values()))["tokens_per_s"])))
        best = max(best, *((value, name, mark) for mark, value in found.items()))
    strategy = next(iter(next(iter(next(iter(content["forms"].values()))["marks"].values()))["measured"]))
    more = ""
    if "packing" in content:
        more = f" Packing trains {_times(content['packing']['ratio'])} as many responses per second as padding."
    if "checkpoints" in content:
        more += f" A checkpoint stops training for {content['checkpoints']['selective_async_ms']:.1f} ms."
    sentence = (f"The best drafter, {best[1]} after {best[2]} s, gives {best[0]:.2f} tokens per verification with {strategy} at "
                f"temperature 1.{more}")
    return Table(f"Drafter training on a {device}", sentence, ("form", *(f"{mark} s" for mark in marks), "tokens/s"), rows)


def frozen_vs_adaptive(content: Content, device: str) -> Table:
    quarter = max(1, len(content["frozen"]) // 4)
    waited = content.get("drafter_s", content["trained_s"])  # older files have the training alone
    rows = [(name, f"{fmean(content[name][:quarter]):.2f}", f"{fmean(content[name][-quarter:]):.2f}",
             f"{sum(content[f'generate_s_{name}']):.1f}", *((f"{sum(waited):.1f}", f"{sum(content['trained_s']):.1f}")
                                                            if name == "adaptive" else ("0", "0")))
            for name in ("frozen", "adaptive")]
    saved = sum(content["generate_s_frozen"]) - sum(content["generate_s_adaptive"]) - sum(waited)
    paid = (f"With the seconds that the run waited for its training, it {'saves' if saved > 0 else 'costs'} {abs(saved):.1f} s."
            if sum(content["trained_s"]) else "It was not trained: what trials may take did not suffice for one.")
    return Table(f"Frozen against adaptive drafter over an RL run on a {device}",
                 f"In the last quarter of {len(content['frozen'])} steps the adaptive drafter gives "
                 f"{content['adaptive_at_end']:.2f} tokens per verification and the frozen one {content['frozen_at_end']:.2f}, "
                 f"on the same {content['rollouts']:,} rollouts. {paid}",
                 ("drafter", "tokens/verification, first quarter", "last quarter", "generation s", "waited for its training, s",
                  "of which training s"), rows)


# --- overheads


def host_overhead(content: Content, _: str) -> Table:
    batches = sorted({batch for case in content["us_per_request"].values() for batch in case}, key=int)
    rows = [(name, *(f"{case[batch]['mean']:.2f} ({case[batch]['p10']:.2f})" for batch in batches))
            for name, case in content["us_per_request"].items()]
    every = [cell["mean"] for case in content["us_per_request"].values() for cell in case.values()]
    sentence = (f"Python takes {min(every):.1f} to {max(every):.1f} µs of CPU time per request and step (mean; 10th percentile "
                "in brackets).")
    return Table("Host overhead of a step", sentence, ("drafter, strategy", *(f"{batch} requests" for batch in batches)), rows)


def cpu_tensor_parallel(content: Content, _: str) -> Table:
    found = content["tokens_per_s"]
    rows = [(batch, *(f"{cell[name]:.2f}" for name in ("one process", "shares", "ranks")),
             _times(cell["ranks"] / cell["one process"])) for batch, cell in found.items()]
    gains = ", ".join(f"{_times(cell['ranks'] / cell['one process'])} at batch {batch}" for batch, cell in found.items())
    return Table("Tensor parallelism on a CPU", f"Two ranks of one thread generate {gains} as fast as one process with two "
                 f"threads ({content['shape']} shape, float32).",
                 ("batch", "one process, tokens/s", "with the ranks' sums", "two ranks", "ranks × one process"), rows)


def cold_start(content: Content, _: str) -> Table:
    rows = [(shape, name, *(f"{found[key]:.1f}" for key in ("imports", "engine", "first_token", "warm")),
             f"{found['tokens_per_s_1'] / found['tokens_per_s_2']:.2f}×")
            for shape, cell in content["shapes"].items() for name, found in cell.items()]
    shape, cell = next(iter(content["shapes"].items()))
    each = ", ".join(f"{found['first_token']:.0f} s with {name}" for name, found in cell.items())
    return Table("Cold start on a GPU", f"From the start of a process to its first token of the {shape} shape: {each}.",
                 ("shape", "caches", "imports, s", "engine, s", "first token, s", "captured, s", "first batch × second"), rows)


def cpu_speculation(content: Content, _: str) -> Table:
    rows, gains = [], []
    for batch, cell in content["speedup"].items():
        found = cell["strategies"]
        best = max((name for name in found if name not in ("auto", "beg")), key=lambda name: found[name]["speedup"])
        gains.append(f"{_times(found['auto']['speedup'])} at batch {batch}")
        rows.append((batch, _times(found["auto"]["speedup"]), f"{found['auto']['accept_length']:.2f}", best,
                     _times(found[best]["speedup"]), f"{found[best]['accept_length']:.2f}", cell["differing_answers"]))
    fixed = content["price"]["fixed"]
    sentence = (f"With a learned drafter `auto` generates {', '.join(gains)} as fast as off. " if gains else "")
    sentence += (f"A step with one draft token takes {fixed['eagle']['ms']:.2f} ms more than one with another request's row if "
                 f"the learned drafter proposes it, {fixed['suffix']['ms']:.2f} ms more if the suffix drafter does.")
    columns = ("batch", "auto × off", "tokens/verification", "best fixed strategy", "it × off", "tokens/verification",
               "answers that differ")
    return Table("Speculation on a CPU", sentence, columns, rows)


TABLES: dict[str, Callable[[Content, str], Table]] = {
    "gpu/check": gpu_check,
    "cpu/decode": cpu_decode, "gpu/decode": gpu_decode, "gpu/headline": gpu_headline,
    "gpu/speculate": speculate, "selection": selection, "cpu/speculation": cpu_speculation,
    "cpu/suffix_vs_arctic": suffix_vs_arctic, "drafter_training": drafter_training, "frozen_vs_adaptive": frozen_vs_adaptive,
    "cluster/rollout": cluster_rollout, "cluster/train": cluster_train, "cluster/reallocation": cluster_reallocation,
    "cluster/asynchronous": cluster_asynchronous,
    "cpu/host_overhead": host_overhead, "cpu/episodes": cpu_episodes, "gpu/episodes": gpu_episodes,
    "cpu/tensor_parallel": cpu_tensor_parallel,
    "gpu/cold_start": cold_start, "gpu/memory": gpu_memory, "gpu/queue": gpu_queue, "gpu/serve": gpu_serve,
    "gpu/exact_logprobs": gpu_exact_logprobs,
}


def _batches(cells: Any) -> list[str]:
    return sorted({batch for cell in cells for batch in cell}, key=int)
