"""Run by vLLM's own Python: generates greedily with a drafter and prints tokens and acceptance as JSON.

python vllm_greedy.py POLICY DRAFTER METHOD DEPTH PROMPTS.json MAX_TOKENS"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams


def main(policy: str, drafter: str, method: str, depth: str, prompts: str, max_tokens: str) -> None:
    llm = LLM(model=policy, dtype="float32", skip_tokenizer_init=True, enforce_eager=True, max_model_len=512, max_num_seqs=8,
              disable_log_stats=False, enable_prefix_caching=False, gpu_memory_utilization=0.1,
              speculative_config={"method": method, "model": drafter, "num_speculative_tokens": int(depth)})
    wanted = [{"prompt_token_ids": ids} for ids in json.loads(Path(prompts).read_text())]
    outputs = llm.generate(wanted, SamplingParams(temperature=0.0, max_tokens=int(max_tokens), ignore_eos=True), use_tqdm=False)
    found = {metric.name: getattr(metric, "value", getattr(metric, "values", None)) for metric in llm.get_metrics()
             if "spec_decode" in metric.name}
    accepted, drafts = found["vllm:spec_decode_num_accepted_tokens"], found["vllm:spec_decode_num_drafts"]
    print("RESULT " + json.dumps({"tokens": [list(output.outputs[0].token_ids) for output in outputs],
                                  "accept_length": 1 + accepted / drafts}))


if __name__ == "__main__":
    main(*sys.argv[1:])
