"""A worker process that generates with vLLM's CPU build. It runs in vLLM's own virtual environment, without Paceline."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.lib.workers import Message, Stopwatch, serve


def make(settings: Message) -> Callable[[Message], Message]:
    """Loads the engine. settings: model (a folder), dtype, eager, threads, max_batch, max_context."""
    set_environment(settings["threads"])
    from vllm import LLM, SamplingParams  # reads the environment

    engine = LLM(model=settings["model"], dtype=settings["dtype"], enforce_eager=settings["eager"], skip_tokenizer_init=True,
                 max_model_len=settings["max_context"], max_num_seqs=settings["max_batch"], seed=0)

    def handle(run: Message) -> Message:
        """Generates once. run: prompts (token ids), new_tokens, temperature."""
        params = SamplingParams(temperature=run["temperature"], max_tokens=run["new_tokens"], ignore_eos=True,
                                detokenize=False)
        prompts = [{"prompt_token_ids": ids} for ids in run["prompts"]]
        watch = Stopwatch()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        used = watch.read()
        return used._asdict() | {"tokens": sum(len(output.outputs[0].token_ids) for output in outputs)}

    return handle


def set_environment(threads: int) -> None:
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}" if threads > 1 else "0"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process: its CPU time and memory are one figure
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    os.environ["VLLM_NO_USAGE_STATS"] = os.environ["HF_HUB_OFFLINE"] = "1"


if __name__ == "__main__":
    serve(make)
