"""The command line. Arguments in, exit code out; torch and the engine are imported by the commands that need them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from paceline.types import SamplingParams

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
                  help="Fast rollouts for reinforcement learning of language models; tokens never depend on the drafter.")

drafter_app = typer.Typer(no_args_is_help=True, help="Learned drafters: train one for a policy, see what it is worth.")
app.add_typer(drafter_app, name="drafter")
bench_app = typer.Typer(no_args_is_help=True, help="Measurements on this machine.")
app.add_typer(bench_app, name="bench")

_DEFAULT = SamplingParams()
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # its home differs between versions of typer


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Whatever is wrong with the input is one line on stderr and exit code 2."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        code = app(args=args, standalone_mode=False, prog_name="paceline")
    except _UsageError as error:
        code = _fail(error.format_message())  # type: ignore[attr-defined]
    except (ValueError, OSError) as error:
        code = _fail(error)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    sys.exit(code)


def _fail(error: object) -> int:
    print("paceline:", " ".join(str(error).split()) or type(error).__name__, file=sys.stderr)
    return 2


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


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
    model: Annotated[str, typer.Option(help="Hugging Face folder, hub id or GGUF file.")],
    prompts: Annotated[str, typer.Option(help="JSON lines: prompt, messages or token_ids, optional id, seed; - is stdin.")],
    out: Annotated[Path, typer.Option(help="JSON lines, one a rollout. Run again, only the rest is done.")],
    n: Annotated[int, typer.Option(min=1, help="Answers per prompt.")] = 1,
    seed: Annotated[int, typer.Option(help="Rollouts' seeds derive from this, id or prompt, and sample.")] = _DEFAULT.seed,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = _DEFAULT.temperature,
    top_p: Annotated[float, typer.Option(help="1 keeps all.")] = _DEFAULT.top_p,
    top_k: Annotated[int, typer.Option(help="0 keeps all.")] = _DEFAULT.top_k,
    min_p: Annotated[float, typer.Option(help="0 keeps all.")] = _DEFAULT.min_p,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.")] = _DEFAULT.max_new_tokens,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends the answer; may be given several times.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's end-of-text tokens.")] = False,
    raw_logprobs: Annotated[bool, typer.Option("--raw-logprobs", help="Also those of the unfiltered distribution.")] = False,
    strategy: Annotated[str, typer.Option(help="off, auto, model, beg, or like suffix:d8w2v16, eagle:d6w4v32, both:d6w4v32: "
                                               "depth, children per node, nodes verified. Changes no token.")] = "auto",
    drafter: Annotated[str, typer.Option(help="suffix, none, or a learned drafter's folder.")] = "suffix",
    dtype: Annotated[str, typer.Option(help="auto, float64, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    max_batch: Annotated[int | None, typer.Option(min=1, help="Answers that run at once [engine's default].")] = None,
    kv_memory_gb: Annotated[float | None, typer.Option(help="Memory of the cache [engine's default].")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads [torch's default].")] = None,
) -> int:
    """Rollouts of a file of prompts."""
    from paceline.commands.generate import GenerateOptions
    from paceline.commands.generate import generate as run

    if kv_memory_gb is not None and not kv_memory_gb > 0:
        raise ValueError(f"--kv-memory-gb: {kv_memory_gb} is not > 0")
    sizes = {"max_batch": max_batch, "kv_memory_gb": kv_memory_gb}
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, max_new_tokens=max_new_tokens,
                            seed=seed, stop=tuple(stop or ()), ignore_eos=ignore_eos, raw_logprobs=raw_logprobs)
    return run(GenerateOptions(model, prompts, out, n, params, strategy, drafter, dtype, device, threads,
                               {name: size for name, size in sizes.items() if size is not None}))


@app.command()
def train(
    config: Annotated[Path | None, typer.Argument(help="TOML file; without one, a small policy that comes with the package "
                                                       "learns on two CPU cores in minutes.")] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE over the file, like optimizer.lr=1e-5; may be "
                                                                    "given several times.")] = None,
    resume: Annotated[Path | None, typer.Option(help="A run folder: continue it from its last checkpoint.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved configuration and stop.")] = False,
) -> int:
    """Reinforcement learning with fast rollouts."""
    from paceline.commands.settings import dump, free_folder, read_resolved, read_settings

    if resume is not None and config is not None:
        raise ValueError("--resume: the run folder has its own configuration; give no other")
    changed = changes or []
    resolved = read_settings(config, changed) if resume is None else read_resolved(resume, [*changed, f'out="{resume}"'])
    if resume is None and config is None and not any(change.startswith("out=") for change in changed):
        resolved = resolved.model_copy(update={"out": free_folder(resolved.out)})
    if dry_run:
        print(dump(resolved), end="")
        return 0
    from paceline.commands.train import train as run

    return run(resolved, resume is not None)


@app.command()
def demo(
    model: Annotated[str, typer.Option(help="Hugging Face folder, hub id or GGUF file.")],
    out: Annotated[Path, typer.Option(help="Folder for summary.json.")] = Path("runs/demo"),
    n: Annotated[int, typer.Option(min=1, help="Answers per prompt.")] = 4,
    seed: Annotated[int, typer.Option(help="Of all rollouts.")] = 7,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.3,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 96,
    dtype: Annotated[str, typer.Option(help="auto, float64, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads [torch's default].")] = None,
) -> int:
    """A dozen prompts with and without speculation: the same tokens, and what each took."""
    from paceline.commands.demo import DemoOptions
    from paceline.commands.demo import demo as run

    params = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
    try:
        return run(DemoOptions(model, out, n, params, dtype, device, threads))
    except KeyboardInterrupt:
        print("paceline: interrupted; nothing was written, run it again", file=sys.stderr)
        return 130


@drafter_app.command("train")
def drafter_train(
    model: Annotated[str, typer.Option(help="The policy: Hugging Face folder, hub id, GGUF file, or default, the small one that "
                                            "comes with the package.")],
    prompts: Annotated[str, typer.Option(help="JSON lines: prompt, messages, token_ids or question; or task:NAME.")],
    out: Annotated[Path, typer.Option(help="Folder of the drafter. Run again, the same command goes on.")],
    form: Annotated[str, typer.Option(help="eagle, hass or eagle3.")] = "hass",
    objective: Annotated[str, typer.Option(help="agreement or cross_entropy.")] = "agreement",
    answers: Annotated[int, typer.Option(min=8, help="Answers to learn from; every eighth prompt's are held out.")] = 512,
    seconds: Annotated[float | None, typer.Option(min=0, help="Of training [120, unless --steps is given].")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps, instead of --seconds.")] = None,
    n: Annotated[int, typer.Option(min=1, help="Answers to a prompt before the next is asked.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 1024,
    temperature: Annotated[float, typer.Option(help="That the drafter will be used at.")] = _DEFAULT.temperature,
    draft_vocab: Annotated[int, typer.Option(min=0, help="Tokens it can guess: the most frequent; 0: all.")] = 0,
    seed: Annotated[int, typer.Option(help="Of answers and training.")] = _DEFAULT.seed,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="auto, float64, float32, bfloat16 or float16.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads [torch's default].")] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE of the training's settings, like lr=1e-3; may be "
                                                                    "given several times.")] = None,
    report_every: Annotated[float, typer.Option(min=0.1, help="Seconds of training between reports.")] = 15.0,
    checkpoint_every: Annotated[float | None, typer.Option(min=0, help="Seconds between checkpoints [0 on a CPU: as often as "
                                                                       "they can be written; 5 on a GPU].")] = None,
    memory_gb: Annotated[float, typer.Option(help="Of answers' features in memory; all of them are on disk.")] = 4.0,
    disk_gb: Annotated[float, typer.Option(help="Of answers' features on disk; no more are asked for then.")] = 64.0,
    kv_memory_gb: Annotated[float | None, typer.Option(help="Memory of the cache [engine's default; 16 on a GPU].")] = None,
) -> int:
    """Answers of the policy, and a drafter trained on them; engines take the folder."""
    from paceline.commands.drafter_train import DrafterTrainOptions, spot_config, train_drafter

    spot = spot_config(changes or [], form=form, objective=objective, temperature=temperature or 1.0, seed=seed)
    params = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
    seconds = 120.0 if seconds is None and steps is None else seconds
    return train_drafter(DrafterTrainOptions(model, prompts, out, answers, n, params, spot, seconds, steps, draft_vocab, device,
                                             dtype, threads, report_every, checkpoint_every, memory_gb, disk_gb, kv_memory_gb))


@drafter_app.command("eval")
def drafter_eval(
    model: Annotated[str, typer.Option(help="The policy: Hugging Face folder, hub id, GGUF file, or default.")],
    drafter: Annotated[Path, typer.Option(help="The drafter's folder.")],
    prompts: Annotated[str | None, typer.Option(help="JSON lines: prompt, messages, token_ids or question; or "
                                                     "task:NAME.")] = None,
    records: Annotated[Path | None, typer.Option(help="A folder that drafter train left: what it held out, nothing is "
                                                      "generated.")] = None,
    answers: Annotated[int, typer.Option(min=1, help="At most so many.")] = 64,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 1024,
    temperature: Annotated[float, typer.Option(help="That answers are drawn at.")] = _DEFAULT.temperature,
    tau: Annotated[str, typer.Option(help="One or several, like 0,0.35,1: how much of the shared noise is believed.")] = "0.35",
    depth: Annotated[int, typer.Option(min=1, max=16, help="Tokens ahead.")] = 6,
    widths: Annotated[str, typer.Option(help="First guesses that count, like 1,2,4.")] = "1,2,4",
    strategy: Annotated[str, typer.Option(help="That answers are generated with, to measure.")] = "eagle:d6w4v32",
    seed: Annotated[int, typer.Option(help="Of the answers.")] = 1,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="auto, float64, float32, bfloat16 or float16.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads [torch's default].")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures there.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Draw them there; .svg: only how they decay.")] = None,
) -> int:
    """How often a drafter's guesses hold: by depth, along the answer, by policy version."""
    from paceline.commands.drafter_eval import DrafterEvalOptions, eval_drafter

    params = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
    taus = tuple(_numbers("--tau", tau, float, 0.0, 1.0))
    chosen = tuple(sorted({int(k) for k in _numbers("--widths", widths, int, 1, 64)}))
    return eval_drafter(DrafterEvalOptions(model, drafter, prompts, records, answers, params, taus, depth, chosen, strategy,
                                           device, dtype, threads, json_file, html_file))


@bench_app.callback()
def _bench() -> None:
    """A group, though there is one."""


@bench_app.command("selection")
def bench_selection(
    model: Annotated[str, typer.Option(help="Hugging Face folder, hub id, GGUF file, or default, the small policy that comes "
                                            "with the package.")],
    drafter: Annotated[str, typer.Option(help="suffix, none, or a learned drafter's folder.")] = "suffix",
    prompts: Annotated[str | None, typer.Option(help="JSON lines: prompt, messages, token_ids or question; or task:NAME [a dozen "
                                                     "of its own; task:collatz for the default policy].")] = None,
    batch: Annotated[str, typer.Option(help="Requests that run at once, like 1,4,16.")] = "1,4,16",
    new_tokens: Annotated[int, typer.Option(min=8, help="Longest answer, and tokens that are measured for each request.")] = 72,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = _DEFAULT.temperature,
    rounds: Annotated[int, typer.Option(min=1, help="In each, every strategy has its turn.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the answers.")] = _DEFAULT.seed,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="auto, float64, float32, bfloat16 or float16.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads [torch's default].")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures there.")] = None,
) -> int:
    """By batch size: off, fixed strategies, what auto chose, what it expected, and why speculation pays or does not."""
    from paceline.commands.bench_selection import BenchOptions
    from paceline.commands.bench_selection import bench_selection as run

    params = SamplingParams(temperature=temperature, max_new_tokens=new_tokens, seed=seed)
    batches = tuple(sorted({int(size) for size in _numbers("--batch", batch, int, 1, 1024)}))
    return run(BenchOptions(model, drafter, prompts, batches, params, rounds, device, dtype, threads, json_file))


def _numbers(name: str, text: str, kind: type[int] | type[float], low: float, high: float) -> list[float]:
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name} {text}: not numbers with commas between them") from None
    if not all(low <= value <= high for value in found):
        raise ValueError(f"{name} {text}: not all in {low:g}..{high:g}")
    return list(found)


if __name__ == "__main__":
    main()
