"""The commands `serve`, `export` and `push` and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.log import report_start
from paceline.cli.options import Device, Drafter, Dtype, KvMemory, MaxBatch, Model, TensorParallel, Threads, check_positive


def add_deploy_commands(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command()(serve)
    app.command()(export)
    app.command()(push)


def serve(
    model: Model,
    drafter: Drafter = "suffix",
    strategy: Annotated[str, typer.Option(
        help="off, auto, beg, or a fixed one like suffix:d8w2v16 or eagle:d6w4v32. Changes no token.")] = "auto",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any that is free.")] = 8000,
    api_key: Annotated[str | None, typer.Option(envvar="PACELINE_API_KEY", help="Key that requests must carry.")] = None,
    served_name: Annotated[str | None, typer.Option(help="Name of the model in requests (default: as given by --model).")] = None,
    max_pending: Annotated[int | None, typer.Option(min=1, help="Maximum number of answers that wait or are generated; further "
                                                                "requests get status 429 (default: 1024).")] = None,
    timeout_s: Annotated[float | None, typer.Option(help="Maximum number of seconds for one request (default: 600).")] = None,
    max_body_bytes: Annotated[int | None, typer.Option(min=1, help="Maximum size of a request (default: 4194304).")] = None,
    max_connections: Annotated[int | None, typer.Option(min=1, help="Maximum number of connections (default: 1024).")] = None,
    rl: Annotated[bool, typer.Option("--rl", help="Let trainers replace the weights, pause generation and take token ids, by the "
                                                  "paths of vLLM and SGLang. Needs --api-key beyond this machine.")] = False,
    rl_weights_dir: Annotated[Path | None, typer.Option(help="Folder below which trainers may name folders with weights "
                                                             "(default: none).")] = None,
    logprobs_mode: Annotated[str | None, typer.Option(help="raw_logprobs (plain softmax) or processed_logprobs (the distribution "
                                                           "that was sampled from; default with --rl).")] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    max_batch: MaxBatch = None,
    max_context: Annotated[int | None, typer.Option(
        min=2, help="Maximum number of prompt and answer tokens of one request (default: the model's).")] = None,
    kv_memory_gb: KvMemory = None,
    tensor_parallel: TensorParallel = None,
    suffix_memory_gb: Annotated[float | None, typer.Option(
        help="Memory for the history of the suffix drafter in GiB (default: 0.25).")] = None,
    warm_up: Annotated[bool, typer.Option(help="Measure step times and capture CUDA graphs while there is no request; otherwise "
                                               "the first requests wait for it.")] = True,
    threads: Threads = None,
) -> int:
    """Serve a policy with the OpenAI API."""
    report_start()
    from paceline.cli.serve import ServeOptions
    from paceline.cli.serve import serve as run

    for option, value in (("--kv-memory-gb", kv_memory_gb), ("--suffix-memory-gb", suffix_memory_gb), ("--timeout-s", timeout_s)):
        check_positive(option, value)
    sizes = {"max_batch": max_batch, "max_context": max_context, "kv_memory_gb": kv_memory_gb,
             "suffix_memory_gb": suffix_memory_gb, "tensor_parallel": tensor_parallel}
    limits = {"model_name": served_name, "api_key": api_key, "max_pending": max_pending, "timeout_s": timeout_s,
              "max_body_bytes": max_body_bytes, "max_connections": max_connections, "warm_up": warm_up, "rl": rl,
              "rl_weights_dir": rl_weights_dir, "logprobs_mode": logprobs_mode}
    engine, server = ({name: value for name, value in given.items() if value is not None} for given in (sizes, limits))
    return run(ServeOptions(model, drafter, strategy, dtype, device, threads, host, port, engine, server))


def export(
    source: Annotated[Path, typer.Argument(help="Run folder, one of its checkpoints, or the folder of a drafter.")],
    to: Annotated[str, typer.Option(help="vllm, sglang or speculators: the drafter; hf: the run's policy.")],
    out: Annotated[Path, typer.Option(help="Folder to write; it must not exist, or be empty.")],
    model: Annotated[str | None, typer.Option(help="The policy of a drafter that is exported on its own: Hugging Face folder, "
                                                   "hub id, GGUF file, or default.")] = None,
    step: Annotated[int | None, typer.Option(help="Step of the run's checkpoint; without it, its last one.")] = None,
    merge_lora: Annotated[bool, typer.Option(
        "--merge-lora", help="With hf, write the whole policy instead of its LoRA adapters.")] = False,
    force: Annotated[bool, typer.Option(
        "--force", help="Export the drafter although it was trained for other weights of the policy's shape.")] = False,
    dtype: Dtype = "auto",
) -> int:
    """Write a learned drafter or a policy in the format of another engine."""
    from paceline.cli.export import ExportOptions
    from paceline.cli.export import export as run

    return run(ExportOptions(source, to, out, model, step, merge_lora, force, dtype))


def push(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    repo: Annotated[str, typer.Option(help="Repository of the policy, such as user/name; the drafter's is user/name-drafter.")],
    step: Annotated[int | None, typer.Option(help="Step of the run's checkpoint; without it, its last one.")] = None,
    public: Annotated[bool, typer.Option("--public", help="Make new repositories public; they are private otherwise.")] = False,
) -> int:
    """Upload a run's policy and learned drafter to the Hugging Face hub, with model cards that hold its figures."""
    report_start()
    from paceline.cli.log import clear_progress
    from paceline.trainer.hub import check_push_to_hub, push_to_hub

    check_push_to_hub(repo)
    addresses = push_to_hub(run, repo, step=step, private=not public)
    clear_progress()
    print("\n".join(addresses))
    return 0
