"""The commands and their options. Each command imports what it needs when it runs, so that `--help` does not wait for PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from paceline.cli.deploy import add_deploy_commands
from paceline.cli.drafter_commands import drafter_app
from paceline.cli.init import add_init_command
from paceline.cli.log import clear_progress, report_start, say, stderr_log
from paceline.cli.options import (
    DEFAULT_PARAMS,
    HELP_OPTIONS,
    Device,
    Drafter,
    Dtype,
    JsonFile,
    KvMemory,
    MaxBatch,
    Model,
    TensorParallel,
    Threads,
    check_outputs,
    check_positive,
    complete_setting,
    numbers,
)
from paceline.cli.stop_signal import INTERRUPTED, InterruptHandler
from paceline.cli.supervisor import Supervisor
from paceline.cli.usage import usage_message
from paceline.types import EngineStalledError, SamplingParams, WorkersLost


class _Commands(TyperGroup):
    """All commands. Those that do not say themselves that they were interrupted have it said here."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            say("interrupted")
            raise


app = typer.Typer(cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False, context_settings=HELP_OPTIONS,
                  help="Fast rollouts for reinforcement learning of language models; tokens never depend on the drafter.")

app.add_typer(drafter_app, name="drafter")
bench_app = typer.Typer(no_args_is_help=True, context_settings=HELP_OPTIONS, help="Measurements on this machine.")
app.add_typer(bench_app, name="bench")
add_deploy_commands(app)
add_init_command(app)

_DEFECT = 1
"""Exit code of a command that ends with a traceback."""
WRONG_INPUT = 2
"""Exit code of a command that cannot do what it was asked to."""
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # its module differs between versions of typer


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Runs one command and exits with its code (docs/command-line.md). Wrong input is one line on stderr and exit code 2."""
    InterruptHandler()
    supervisor, code = Supervisor(INTERRUPTED) if args is None else None, _DEFECT
    try:
        code = _run(args, supervisor)
    finally:
        if supervisor is not None:
            supervisor.end(code)
    sys.exit(code)


def _run(args: Sequence[str] | None, supervisor: Supervisor | None) -> int:
    with stderr_log() as log:
        try:
            code = app(args=args, standalone_mode=False, prog_name="paceline", obj=supervisor)
        except _UsageError as error:
            code = WRONG_INPUT
            if type(error).__name__ != "NoArgsIsHelpError":  # the help has been printed
                log.print(usage_message(error))
        except (ValueError, OSError, EngineStalledError, WorkersLost) as error:
            code = WRONG_INPUT
            log.print(_one_line(error))
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            code = WRONG_INPUT
            log.print("out of memory; lower the size of the KV cache (kv_memory_gb, kv_tokens), of the batch (max_batch, "
                      "rollout.prompts) or of micro-batches (learner.micro_batch_tokens)")
        except (KeyboardInterrupt, typer.Abort):
            code = INTERRUPTED
    return code or 0


def _is_out_of_memory(error: Exception) -> bool:
    """PyTorch has an exception of its own for GPUs, and only a message for CPUs."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "allocate memory" in str(error)


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"paceline {version('paceline')}")
        except PackageNotFoundError:  # run from a checkout that is not installed
            from paceline import __version__

            print(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def _common(version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True,
                                                  help="Print the version and exit.")] = False) -> None:
    pass


@app.command()
def generate(
    model: Model,
    prompts: Annotated[str | None, typer.Option(
        help="JSON lines with prompt, messages or token_ids, and optionally id and seed; a file .txt with a prompt per line; "
             "- is stdin.")] = None,
    out: Annotated[Path | None, typer.Option(
        help="JSON lines, one per rollout. Running again generates only what is missing.")] = None,
    prompt: Annotated[list[str] | None, typer.Option(
        help="A prompt as text, instead of --prompts and --out: its answers are printed; may be given several times.")] = None,
    n: Annotated[int, typer.Option(min=1, help="Number of answers per prompt.")] = 1,
    seed: Annotated[int, typer.Option(
        help="The seeds of rollouts derive from this, the id or prompt, and the sample.")] = DEFAULT_PARAMS.seed,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = DEFAULT_PARAMS.temperature,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling; 1 keeps all tokens.")] = DEFAULT_PARAMS.top_p,
    top_k: Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0 keeps all.")] = DEFAULT_PARAMS.top_k,
    min_p: Annotated[float, typer.Option(
        help="Least probability relative to the most likely token; 0 keeps all.")] = DEFAULT_PARAMS.min_p,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum number of tokens per answer.")] = DEFAULT_PARAMS.max_new_tokens,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends an answer; may be given several times.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Do not stop at the model's end-of-text tokens.")] = False,
    raw_logprobs: Annotated[bool, typer.Option(
        "--raw-logprobs", help="Also write log-probabilities of the unfiltered distribution.")] = False,
    strategy: Annotated[str, typer.Option(
        help="off, auto, beg, or a fixed one like suffix:d8w2v16 or eagle:d6w4v32: depth, children per "
             "node, nodes verified. Changes no token.")] = "auto",
    drafter: Drafter = "suffix",
    dtype: Dtype = "auto",
    device: Device = "auto",
    max_batch: MaxBatch = None,
    kv_memory_gb: KvMemory = None,
    tensor_parallel: TensorParallel = None,
    threads: Threads = None,
) -> int:
    """Generate rollouts for a file of prompts, or print answers to a prompt."""
    report_start()
    from paceline.cli.generate import generate as run
    from paceline.cli.generate import print_answers
    from paceline.generation import GenerationOptions

    if bool(prompt) == bool(prompts) or bool(prompts) != bool(out):
        raise ValueError("--prompt, --prompts: give either prompts as text (--prompt), or a file of prompts and a file for the "
                         "rollouts (--prompts and --out)")

    check_positive("--kv-memory-gb", kv_memory_gb)
    sizes = {"max_batch": max_batch, "kv_memory_gb": kv_memory_gb, "tensor_parallel": tensor_parallel}
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, max_new_tokens=max_new_tokens,
                            seed=seed, stop=tuple(stop or ()), ignore_eos=ignore_eos, raw_logprobs=raw_logprobs)
    options = GenerationOptions(model, prompts or "", out or Path(), n, params, strategy, drafter, dtype, device, threads,
                                {name: size for name, size in sizes.items() if size is not None})
    return print_answers(options, prompt) if prompt else run(options)


@app.command()
def train(
    context: typer.Context,
    config: Annotated[Path | None, typer.Argument(help="TOML file. Without one, the small policy bundled with the package "
                                                       "is trained in minutes on two CPU cores (paceline init prints "
                                                       "that file).")] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", autocompletion=complete_setting, help="KEY=VALUE overrides the "
                                                      "file, like optimizer.lr=1e-5; may be given several times.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Run folder to continue from its last checkpoint.")] = None,
    dry_run: Annotated[bool, typer.Option(
        "--dry-run", help="Check that the run can start, print the resolved configuration and a memory plan, and exit.")] = False,
    page: Annotated[bool, typer.Option("--page/--no-page", help="Serve a live page of the run, which only this machine can "
                                                                "reach.")] = True,
    open_page: Annotated[bool, typer.Option("--open", help="Show the live page in a browser on this machine.")] = False,
) -> int:
    """Train a policy by reinforcement learning with fast rollouts."""
    report_start()
    from paceline.trainer.config_files import dump_toml, load_config, load_run_config, unused_folder

    if resume is not None and config is not None:
        raise ValueError("--resume: the run folder contains its configuration; do not give another")
    changed = changes or []
    resolved = load_config(config, changed) if resume is None else load_run_config(resume, [*changed, f'out="{resume}"'])
    if resume is None and "out" not in resolved.model_fields_set:
        resolved = resolved.model_copy(update={"out": unused_folder(resolved.out)})
    if resolved.cluster.needs_ray and not dry_run and context.obj is not None:
        context.obj.lead_in_own_process(resolved.out)
    from paceline.cli.train import train as run
    from paceline.cli.train import validate

    task = validate(resolved, resume is not None, changed, "" if config is None else str(config))
    if dry_run:
        from paceline.trainer.memory import check_memory, memory_plan

        check_memory(resolved)
        clear_progress()
        print(dump_toml(resolved), end="")
        plan = memory_plan(resolved)
        if plan is not None:
            print(plan, file=sys.stderr)
        return 0
    return run(resolved, task, resume is not None, page, open_page)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Run folder: of a run that goes on, was stopped or is complete.")],
    other: Annotated[Path | None, typer.Argument(help="A second run folder, to compare the two.")] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Show the page in a browser on this machine; while the run goes on, "
                                                           "it refreshes itself. Only this machine can reach it.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of that page; 0 is any that is free.")] = 0,
    out: Annotated[Path | None, typer.Option(help="File to write instead of one in the run folder.")] = None,
) -> int:
    """Show a training run, or two side by side, as a page: any time, also while it goes on or after it was killed."""
    from paceline.cli.report import report as write
    from paceline.cli.report import serve

    folders = [run] if other is None else [run, other]
    if not open_page:
        return write(folders, out)
    if out is not None:
        raise ValueError("--out: --open serves the page and writes no file; give one of the two")
    return serve(folders, port)


@app.command()
def demo(
    model: Model = "default",
    out: Annotated[Path, typer.Option(help="Folder for summary.json.")] = Path("runs/demo"),
    against: Annotated[str, typer.Option(help="off: the same engine without speculation; trl: TRL's generation by "
                                              "transformers.")] = "off",
    drafter: Annotated[str | None, typer.Option(help="suffix, or the folder or hub id of a learned drafter (default: with the "
                                                     "bundled policy its own learned drafter, otherwise suffix).")] = None,
    n: Annotated[int, typer.Option(min=1, help="Number of answers per prompt.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of all rollouts.")] = 7,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.3,
    max_new_tokens: Annotated[int | None, typer.Option(
        help="Maximum number of tokens per answer (default: 400 with the bundled policy, otherwise 96).")] = None,
    seconds: Annotated[float, typer.Option(min=0, help="No prompt begins after so many seconds.")] = 50.0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
) -> int:
    """Race the same prompts with and without speculation, side by side, and compare tokens and time."""
    report_start()
    from paceline.bench.demo import DemoOptions, default_max_new_tokens
    from paceline.cli.demo import demo as run

    if against not in ("off", "trl"):
        raise ValueError(f"--against {against}: not off or trl")
    params = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens or default_max_new_tokens(model), seed=seed)
    drafter = drafter or ("default" if model == "default" else "suffix")
    try:
        return run(DemoOptions(model, out, n, params, dtype, device, threads, drafter, against, seconds))
    except KeyboardInterrupt:
        say("interrupted; nothing was written, run it again")
        return INTERRUPTED


@app.command()
def simulate(
    lengths: Annotated[Path | None, typer.Option(help="Answer lengths: a CSV file with output_tokens and probability, or one "
                                                      "length per line (default: log-normal, median 1,500 tokens).")] = None,
    curve: Annotated[Path | None, typer.Option(help="Cost curve of a worker, as Engine.profile writes it (docs/cluster.md; "
                                                    "default: that of a 7B policy on an H200, and a drafter for it).")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Number of workers.")] = 64,
    requests: Annotated[int, typer.Option(min=1, help="Number of answers.")] = 16384,
    group_size: Annotated[int, typer.Option(min=1, help="Number of answers per prompt.")] = 16,
    correlation: Annotated[float, typer.Option(help="How alike the lengths of a prompt's answers are, 0 to 1.")] = 0.8,
    drafter: Annotated[Path | None, typer.Option(help="Coverage of a drafter by its training time, as JSON; without it, a "
                                                      "--curve is simulated without speculation.")] = None,
    trained_s: Annotated[float, typer.Option(help="Seconds that the drafter was trained before.")] = 30.0,
    trainers: Annotated[int, typer.Option(min=0, help="Largest number of idle workers that train the drafter at once.")] = 8,
    max_batch: Annotated[int, typer.Option(min=1, help="Maximum number of requests that a worker runs at the same time.")] = 64,
    kv_tokens: Annotated[int, typer.Option(min=1, help="Number of tokens that a worker's KV cache holds.")] = 1_500_000,
    seed: Annotated[int, typer.Option(help="Seed of the lengths.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Number of training steps, each with so many answers. With several, whole "
                                                   "steps are compared by rollout.max_staleness.")] = 1,
    update_s: Annotated[float, typer.Option(min=0, help="Seconds of an update of the policy, with several steps.")] = 30.0,
    updates_on_workers: Annotated[bool, typer.Option(help="Whether the workers compute the updates, and generate nothing "
                                                          "meanwhile.")] = False,
    json_file: JsonFile = None,
) -> int:
    """Simulate a rollout batch on many workers, or several training steps, with the scheduling policy of a real cluster."""
    check_outputs(json_file)
    from paceline.bundled import simulation_file
    from paceline.cli.simulate import simulate as run
    from paceline.sim import SimConfig, read_lengths, sample_workload

    if curve is None:
        curve, drafter = simulation_file("h200-7b.json"), drafter or simulation_file("h200-drafter.json")
    distribution = read_lengths(lengths or simulation_file("lengths.csv"))
    workload = sample_workload(*distribution, steps * requests, group_size, correlation, seed)
    config = SimConfig(workers, max_batch=max_batch, kv_tokens=kv_tokens, trained_s=trained_s, steps=steps,
                       update_s=update_s if steps > 1 else 0.0, updates_on_workers=updates_on_workers)
    return run(workload, curve, drafter, config, trainers, json_file)


@app.command()
def doctor(
    compile_kernels: Annotated[str, typer.Option(
        "--compile", help="Compile the CPU kernels now for these data types, like float32,bfloat16.")] = "",
) -> int:
    """Say what this machine has and which kernels are used on it, and why."""
    from paceline.cli.doctor import compile_cpu_kernels, describe_machine

    if compile_kernels:
        return compile_cpu_kernels(compile_kernels.split(","))
    return describe_machine()


@bench_app.callback()
def _bench() -> None:
    """Makes `bench` a group of commands although it has only one."""


@bench_app.command("selection")
def bench_selection(
    model: Model,
    drafter: Drafter = "suffix",
    prompts: Annotated[str | None, typer.Option(help="JSON lines with prompt, messages, token_ids or question; or task:NAME "
                                                     "(default: a dozen built-in prompts, or task:collatz for the default "
                                                     "policy).")] = None,
    batch: Annotated[str, typer.Option(help="Batch sizes, like 1,4,16.")] = "1,4,16",
    new_tokens: Annotated[int, typer.Option(min=8, help="Maximum tokens per answer, and tokens measured per request.")] = 72,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = DEFAULT_PARAMS.temperature,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds; in each, every strategy runs once.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the answers.")] = DEFAULT_PARAMS.seed,
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = None,
    json_file: JsonFile = None,
) -> int:
    """Compare off, fixed strategies and auto at several batch sizes, and say why speculation pays or does not."""
    report_start()
    check_outputs(json_file)
    from paceline.bench.selection import SelectionOptions
    from paceline.cli.bench import bench_selection as run

    params = SamplingParams(temperature=temperature, max_new_tokens=new_tokens, seed=seed)
    batches = tuple(sorted({int(size) for size in numbers("--batch", batch, int, 1, 1024)}))
    return run(SelectionOptions(model, drafter, prompts, batches, params, rounds, device, dtype, threads), json_file)
