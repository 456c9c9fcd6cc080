"""Tables of the benchmarks of RL steps."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from benchmarks.lib.headline_figures import PARTS
from benchmarks.lib.table import Content, Table, times


def gpu_memory(content: Content, _: str) -> Table:
    rows = [(case, phase, *(f"{found[key]:.1f}" for key in ("planned_gib", "peak_gib", "reserved_gib")))
            for case, run in content["cases"].items() for phase, found in run["phases"].items()
            if phase in ("generate", "train", "publish")]
    told = [f"{case}: out of memory" if "error" in run else
            f"{case}: {len(run['steps'])} steps, {run['phases']['train']['peak_gib']:.0f} GiB in the update (planned "
            f"{run['phases']['train']['planned_gib']:.0f}), KV cache {run['kv_gib']:.0f} GiB"
            + (f", longest answer generated {run['longest_generated']:,}" if "longest_generated" in run else "")
            for case, run in content["cases"].items()]
    sentence = (f"RL with memory for answers of {content['max_new_tokens']:,} tokens on one GPU with "
                f"{content['capacity_gib']:.0f} GiB. {'; '.join(told)}")
    return Table("The largest runs on one GPU", sentence + ".",
                 ("run", "phase", "planned GiB", "peak of tensors GiB", "reserved GiB"), rows)


def gpu_exact_logprobs(content: Content, _: str) -> Table:
    rows = [(shape, name, *(f"{figures[key]:.3f}" for key in ("forward_seconds", "seconds")), f"{figures['peak_gib']:.1f}",
             *(f"{figures[f'logprob_difference_{key}']:.2g}" for key in ("mean", "max")))
            for shape, found in content["shapes"].items() for name, figures in found["learners"].items()]
    prices = "; ".join(f"{shape}: {times(found['price'])} the time of an ordinary forward and backward pass, "
                       f"{times(found['price_recomputing'])} that of gradient checkpointing"
                       + (f" (products in one pass over K cost the ordinary learner {times(found['price_one_pass'])})"
                          if "price_one_pass" in found else "")
                       for shape, found in content["shapes"].items())
    return Table("Log-probabilities with the engine's bits", f"`learner.exact_logprobs` takes {prices}.",
                 ("shape", "learner", "forward s", "forward and backward s", "peak GiB", "mean difference to the engine",
                  "largest difference"), rows)


def gpu_headline(content: Content, _: str) -> Table:
    found, against = content["conclusions"], [(other, what) for other in ("off", "vllm") for what in ("rollout", "step", "run")]
    rows: list[Sequence[object]] = []
    for name, totals in found["totals"].items():
        over = found["over"].get(name, {})
        lengths = [step["accept_length"] for step in content["sides"][name].get("steps", [])[: found["steps"]]]
        rows.append((_SIDES[name], *(f"{totals[part]:.1f}" for part in PARTS), f"{sum(totals.values()):.1f}",
                     f"{fmean(lengths):.2f}" if lengths else "–",
                     *(times(over[other][what]) if other in over else "–" for other, what in against)))
    cost = content["cost"] + (" cost" if content["cost"] != "1.5B" else "")
    return Table(f"GRPO on one GPU, everything counted, {cost}", _headline_sentence(content),
                 ("drafter", *(f"{part.replace('_', '-')} s" for part in PARTS), "in all s", "accept length",
                  *(f"{what}s × {other.replace('vllm', 'vLLM')}" for other, what in against)), rows,
                 _domains_table(content["domains"]) if content["domains"] else None)


_SIDES = {"new": "from nothing", "ready": "trained before", "off": "none", "vllm": "vLLM, our trainer"}


def _headline_sentence(content: Content) -> str:
    """What is imposed, then what was found."""
    found, prepared = content["conclusions"], content.get("drafter", {})
    said = [f"{found['steps']} steps with {content['answers']} answers of up to {content['max_length']:,} tokens; imposed: "
            "answers end at drawn, long-tailed lengths, which the engine does not know, and end tokens are not sampled. The "
            "reward is the share of right results"]
    if content["cost"] != "1.5B":
        said.append(f"The policy of 1.5B runs as its twin at {content['cost']} cost, with 8-bit AdamW")
    said += [f"A drafter {_SIDES[name]} gives {times(ratio['rollout'])} the rollouts and {times(ratio['step'])} the steps of "
             f"{'vLLM with the same trainer' if other == 'vllm' else 'no speculation'}"
             for name, over in found["over"].items() for other, ratio in over.items()]
    if "overtakes_after" in found:
        when = f"after {found['overtakes_after']} steps" if found["overtakes_after"] else "not yet"
        said.append(f"With its warm-up and training counted, the run from nothing has overtaken one without speculation {when}; "
                    f"its last rollouts are {times(found['last_rollouts'])} as fast")
    if "identical_answers" in found:
        said.append(f"{found['identical_answers']:.1%} of the answers are the same with and without speculation, and so is the "
                    f"reward of {found['identical_rewards']:.0%} of the steps")
    if "train_seconds" in prepared:
        seconds = prepared["capture_seconds"] + prepared["train_seconds"]
        said.append(f"Training the drafter before took {seconds:.0f} s, which are not part of its run")
    return ". ".join([*said, "vLLM's start and its weight updates count nothing"]) + "."


def _domains_table(domains: Content) -> Table:
    names = {"code": "code (HumanEval)", "choice": "multiple choice"}
    rows = [(names[name] + (" (made of grade-school problems)" if cell["is_made"] else ""), f"{cell['accept_length']:.2f}",
             times(cell["rollout_over_off"]), f"{cell['tokens_per_answer']:.0f}", f"{cell['reward']:.2f}")
            for name, cell in domains.items()]
    return Table("Other kinds of prompts",
                 "Natural ends, the task's own reward, a drafter that was trained on grade-school problems.",
                 ("prompts", "accept length", "rollouts × off", "tokens per answer", "reward"), rows)
