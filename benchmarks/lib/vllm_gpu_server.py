"""A server process around vLLM with random weights on a GPU: it waits for jobs at a socket and ends when its standard input
closes. `benchmarks.lib.vllm_gpu.Vllm` starts it; it imports nothing of Paceline.

A job is a dictionary: `prompts`, `new_tokens` (one number per prompt), and optionally `max_batch` (vLLM's max_num_seqs for this
job, at most that of the start)."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from multiprocessing.connection import Listener
from typing import Any

del sys.path[0]  # this folder: its modules must not shadow those that vLLM imports


def main() -> None:
    settings = json.loads(sys.argv[1])
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    serve(settings)


def serve(settings: dict[str, Any]) -> None:
    import vllm
    from vllm import LLM, SamplingParams

    began = time.perf_counter()
    llm = LLM(model=settings["folder"], load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
              max_model_len=settings["max_context"], max_num_seqs=settings["max_batch"], gpu_memory_utilization=0.1,
              kv_cache_memory_bytes=int(settings["kv_gb"] * 2**30))
    start_seconds = time.perf_counter() - began

    # The engine core runs in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0); its scheduler reads the limit in every step.
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    most = scheduler.max_num_running_reqs

    def sampling(count: int) -> SamplingParams:
        return SamplingParams(temperature=1.0, max_tokens=count, ignore_eos=True, detokenize=False)

    def generate(prompts: list[list[int]], new_tokens: list[int]) -> int:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], list(map(sampling, new_tokens)), use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def run(job: dict[str, Any]) -> dict[str, Any]:
        prompts, new_tokens = job["prompts"], job["new_tokens"]
        scheduler.max_num_running_reqs = min(job.get("max_batch") or most, most)
        began = time.perf_counter()
        return {"tokens": generate(prompts, new_tokens), "seconds": time.perf_counter() - began}

    generate([[1, 2, 3, 4]] * 4, [8] * 4)
    with Listener(settings["socket"]) as listener:
        while True:
            with listener.accept() as client:
                try:
                    client.send({"version": vllm.__version__, "start_seconds": start_seconds})
                    while True:
                        client.send(run(client.recv()))
                except (EOFError, OSError):  # the client disconnected, perhaps while it waited
                    continue


def _exit_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
