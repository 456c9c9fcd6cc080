"""The commands `drafter train` and `drafter eval` and their options."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.log import report_start
from paceline.cli.options import (
    DEFAULT_PARAMS,
    HELP_OPTIONS,
    MODEL,
    Device,
    Dtype,
    JsonFile,
    Threads,
    check_outputs,
    check_positive,
    numbers,
)
from paceline.types import SamplingParams

drafter_app = typer.Typer(no_args_is_help=True, context_settings=HELP_OPTIONS,
                          help="Learned drafters: train one for a policy, or evaluate one.")


@drafter_app.command("train")
def drafter_train(
    model: Annotated[str, typer.Option(help="The policy: " + MODEL)],
    prompts: Annotated[str, typer.Option(help="JSON lines with prompt, messages, token_ids or question; or task:NAME.")],
    out: Annotated[Path, typer.Option(help="Folder of the drafter. Running the same command again continues it.")],
    form: Annotated[str, typer.Option(help="Training form: eagle, hass or eagle3.")] = "hass",
    objective: Annotated[str, typer.Option(help="Training objective: agreement or cross_entropy.")] = "agreement",
    answers: Annotated[int | None, typer.Option(
        min=8, help="Number of answers to generate; those to every eighth prompt are held out. More of them give a better "
                    "drafter than longer training (default: 512 on a CPU, 10240 on a GPU).")] = None,
    seconds: Annotated[float | None, typer.Option(
        min=0, help="Seconds of training (default: 120, unless --steps is given).")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Number of optimizer steps, instead of --seconds.")] = None,
    n: Annotated[int, typer.Option(min=1, help="Number of answers to a prompt before the next prompt is used.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum number of tokens per answer.")] = 1024,
    temperature: Annotated[float, typer.Option(
        help="Sampling temperature that the drafter will be used at.")] = DEFAULT_PARAMS.temperature,
    draft_vocab: Annotated[int | None, typer.Option(
        min=0, help="Number of tokens that it can predict, the most frequent ones; 0: all (default: 32768 if the policy has more "
                    "than twice as many).")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the answers and of training.")] = DEFAULT_PARAMS.seed,
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = None,
    changes: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE overrides a setting of training, like lr=1e-3; "
                                                                    "may be given several times.")] = None,
    report_every: Annotated[float, typer.Option(min=0.1, help="Seconds of training between evaluations; more "
                                                                  "where these take more than a fifth of the time.")] = 15.0,
    patience: Annotated[int, typer.Option(
        min=0, help="Training ends when so many evaluations in a row were no better than an earlier one; 0: never.")] = 4,
    checkpoint_every: Annotated[float | None, typer.Option(
        min=0, help="Seconds between checkpoints (default: 0 on a CPU, as often as they can be written; 5 on a GPU).")] = None,
    memory_gb: Annotated[float, typer.Option(help="Memory for captured features in GiB; all of them are also on disk.")] = 4.0,
    disk_gb: Annotated[float, typer.Option(
        help="Disk space for captured features in GiB; no more answers are generated then.")] = 64.0,
    kv_memory_gb: Annotated[float | None, typer.Option(
        help="Memory for the KV cache in GiB (default: 2 on a CPU, 16 on a GPU).")] = None,
) -> int:
    """Generate answers of a policy and train a drafter on them."""
    report_start()
    from paceline.cli.drafter import spot_config, train_drafter
    from paceline.models.weights import resolve_device
    from paceline.trainer.standalone_drafter import DEFAULT_ANSWERS, DEFAULT_SECONDS, StandaloneDrafterOptions

    for option, value in (("--memory-gb", memory_gb), ("--disk-gb", disk_gb), ("--kv-memory-gb", kv_memory_gb),
                          ("--report-every", report_every)):
        check_positive(option, value)
    for option, value in (("--seconds", seconds), ("--checkpoint-every", checkpoint_every)):
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{option}: must be a finite number, not {value}")
    spot = spot_config(changes or [], form=form, objective=objective, temperature=temperature or 1.0, seed=seed,
                       draft_vocab=draft_vocab)
    params = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
    seconds = DEFAULT_SECONDS if seconds is None and steps is None else seconds
    answers = answers or DEFAULT_ANSWERS["cpu" if resolve_device(device) == "cpu" else "cuda"]
    return train_drafter(StandaloneDrafterOptions(
        model, prompts, out, answers, n, params, spot, seconds, steps, device, dtype, threads, report_every,
        patience, checkpoint_every, memory_gb, disk_gb, kv_memory_gb, " ".join(["paceline", *sys.argv[1:]])))


@drafter_app.command("eval")
def drafter_eval(
    model: Annotated[str, typer.Option(help="The policy: " + MODEL)],
    drafter: Annotated[Path, typer.Option(help="Folder or hub id of the drafter.")],
    prompts: Annotated[str | None, typer.Option(help="Generate answers to these: JSON lines with prompt, messages, "
                                                     "token_ids or question; or task:NAME.")] = None,
    records: Annotated[Path | None, typer.Option(help="Use the held-out answers of this folder of drafter train instead "
                                                      "of generating.")] = None,
    answers: Annotated[int, typer.Option(min=1, help="Maximum number of answers.")] = 64,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum number of tokens per answer.")] = 1024,
    temperature: Annotated[float, typer.Option(help="Sampling temperature of the answers.")] = DEFAULT_PARAMS.temperature,
    tau: Annotated[str, typer.Option(
        help="Temperature of the drafter with the shared noise, one or several like 0,0.35,1.")] = "0.35",
    depth: Annotated[int, typer.Option(min=1, max=16, help="Number of tokens drafted ahead.")] = 6,
    widths: Annotated[str, typer.Option(help="Numbers of draft tokens per position, like 1,2,4.")] = "1,2,4",
    strategy: Annotated[str, typer.Option(help="Strategy that answers are generated with.")] = "eagle:d6w4v32",
    seed: Annotated[int, typer.Option(help="Seed of the answers.")] = 1,
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = None,
    json_file: JsonFile = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write charts to this file.")] = None,
) -> int:
    """Measure how often a drafter's tokens are accepted: by depth, along the answer, by policy version."""
    report_start()
    check_outputs(json_file, html_file)
    from paceline.cli.drafter import eval_drafter
    from paceline.trainer.drafter_eval import DrafterEvalOptions

    params = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
    taus = tuple(numbers("--tau", tau, float, 0.0, 1.0))
    chosen = tuple(sorted({int(k) for k in numbers("--widths", widths, int, 1, 64)}))
    return eval_drafter(DrafterEvalOptions(model, drafter, prompts, records, answers, params, taus, depth, chosen, strategy,
                                           device, dtype, threads), json_file, html_file)
