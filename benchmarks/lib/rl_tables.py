"""Tables of the benchmarks of RL steps."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

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


def gpu_rl_step(content: Content, _: str) -> Table:
    rows: list[Sequence[object]] = [
        (name, f"{side['rollout_seconds']:.1f}", f"{side['update_seconds']:.1f}", f"{side['seconds']:.1f}",
         f"{side['steps'][0]['seconds']:.1f}", f"{side['accept_length']:.2f}") for name, side in content["sides"].items()]
    if "vllm_step_seconds" in content:
        rows.append(("vLLM", f"{content['vllm']['rollout_seconds']:.1f}", "", f"{content['vllm_step_seconds']:.1f}", "", ""))
    faster = " and ".join(f"{times(ratio['rollout'])} the rollout and {times(ratio['step'])} the whole step of "
                          f"{'vLLM with the same trainer' if name == 'vllm' else name}"
                          for name, ratio in content["auto_over"].items())
    sentence = f"{content['answers']} answers of up to {content['max_length']:,} tokens with long-tailed lengths"
    repeated = [step["share_repeated"] for step in content["sides"]["auto"]["steps"] if "share_repeated" in step]
    if repeated:
        sentence += f" ({median(repeated):.0%} of the tokens repeat 32 of the same answer)"
    sentence += f": `auto` has {faster}" if faster else ""
    sentence += f". The update runs at {content['training_share']:.0%} of the measured rate of a large matrix product"
    if "first_over_later" in content:
        sentence += f"; the first step takes {times(content['first_over_later'])} the time of a later one"
    return Table("Whole GRPO steps on a GPU", sentence + ".",
                 ("generation", "rollout s", "update s", "step s", "first step s", "accept length"), rows)
