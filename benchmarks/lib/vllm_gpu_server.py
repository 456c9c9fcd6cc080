"""A server process around vLLM with random weights on a GPU: it waits for jobs at a socket and ends when its standard input
closes. `benchmarks.lib.vllm_gpu.Vllm` starts it; it imports nothing of Paceline.

A job is a dictionary: `prompts`, `new_tokens` (one number per prompt), and optionally `max_batch` (vLLM's max_num_seqs for this
job, at most that of the start). Or it has `episodes`, of which `live` are under way at once: each has a `prompt` and `turns`,
each of these `num_tokens`, the `reply` that follows (token ids; none ends the episode) and the `latency_s` that this takes."""

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

    def episodes(jobs: list[dict[str, Any]], live: int) -> int:
        """Every turn is a request whose prompt is all of the episode so far, most of which is in the prefix cache."""
        engine, left, texts, turns = llm.llm_engine, iter(range(len(jobs))), {}, {}
        due, running, total = [], 0, 0

        def ask(number: int) -> None:
            turn = jobs[number]["turns"][turns[number]]
            engine.add_request(f"{number}/{turns[number]}", {"prompt_token_ids": texts[number]}, sampling(turn["num_tokens"]))

        def begin() -> int:
            number = next(left, None)
            if number is None:
                return 0
            texts[number], turns[number] = list(jobs[number]["prompt"]), 0
            ask(number)
            return 1

        running = sum(begin() for _ in range(live))
        while running or due:
            now = time.perf_counter()
            for entry in [entry for entry in due if entry[0] <= now]:
                due.remove(entry)
                ask(entry[1])
                running += 1
            if not running:
                time.sleep(max(0.0, min(entry[0] for entry in due) - time.perf_counter()))
                continue
            for output in engine.step():
                if not output.finished:
                    continue
                running, number = running - 1, int(output.request_id.partition("/")[0])
                turn, tokens = jobs[number]["turns"][turns[number]], list(output.outputs[0].token_ids)
                texts[number], turns[number] = texts[number] + tokens + turn["reply"], turns[number] + 1
                total += len(tokens)
                if turn["reply"]:
                    due.append((time.perf_counter() + turn["latency_s"], number))
                else:
                    running += begin()
        return total

    def run(job: dict[str, Any]) -> dict[str, Any]:
        if "episodes" in job:
            scheduler.max_num_running_reqs, began = min(job["live"], most), time.perf_counter()
            return {"tokens": episodes(job["episodes"], job["live"]), "seconds": time.perf_counter() - began}
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
