"""vLLM with random weights on a GPU: runs the jobs of a file and prints the seconds of each. Started by `gpu_common.run_vllm`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    print("RESULT " + json.dumps(run(settings)), flush=True)


def run(settings: dict[str, Any]) -> dict[str, Any]:
    import vllm
    from vllm import LLM, SamplingParams

    began = time.perf_counter()
    llm = LLM(model=settings["folder"], load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
              max_model_len=settings["max_context"], max_num_seqs=settings["max_batch"], gpu_memory_utilization=0.6)
    start_seconds = time.perf_counter() - began

    def generate(prompts: list[list[int]], new_tokens: list[int]) -> int:
        params = [SamplingParams(temperature=1.0, max_tokens=count, ignore_eos=True, detokenize=False) for count in new_tokens]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    generate([[1, 2, 3, 4]] * 4, [8] * 4)
    seconds: dict[str, list[float]] = {}
    tokens: dict[str, int] = {}
    for job in settings["jobs"]:
        began = time.perf_counter()
        tokens[job["name"]] = generate(job["prompts"], job["new_tokens"])
        seconds.setdefault(job["name"], []).append(time.perf_counter() - began)
    return {"version": vllm.__version__, "start_seconds": start_seconds, "seconds": seconds, "tokens": tokens}


if __name__ == "__main__":
    main()
