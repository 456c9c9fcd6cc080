"""Decoding without speculation on one GPU: Paceline beside vLLM and the memory-bandwidth floor, in one run.

    python benchmarks/gpu_decode.py --out benchmarks/results/gpu_decode.json                    ours alone
    python benchmarks/gpu_decode.py --vllm-path SITE --out benchmarks/results/gpu_decode.json   SITE: a folder with vLLM in it

Random weights in bfloat16, prompts of 128 tokens, temperature 1, whole-engine figures: scheduler, prefill and results included.
Each engine runs in a process of its own, one after the other for every shape, so that neither holds the other's memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SHAPES = {
    "0.5B": (896, 4864, 24, 14, 2, 64, True), "1.5B": (1536, 8960, 28, 12, 2, 128, True),
    "7B": (3584, 18944, 28, 28, 4, 128, False),
}
"""hidden, intermediate, layers, heads, kv heads, head size, tied head: Qwen2.5's."""
VOCAB = 152064
PROMPT_TOKENS = 128
BANDWIDTH = 4.22e12
"""Bytes per second read on an H200 (measured)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--vllm-path", type=Path)
    parser.add_argument("--deterministic", action="store_true", help="also time ours in deterministic mode")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/gpu_decode.json")
    parser.add_argument("--worker", choices=["paceline", "deterministic", "vllm"])
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    if args.worker:
        work = vllm_worker if args.worker == "vllm" else paceline_worker
        print("RESULT " + json.dumps(work(args)), flush=True)
        return
    engines = ["paceline", *(["deterministic"] if args.deterministic else []), *(["vllm"] if args.vllm_path else [])]
    results: dict[str, Any] = {"command": " ".join(sys.argv), "date": time.strftime("%Y-%m-%d"), "shapes": {}}
    for shape in args.shapes:
        with tempfile.TemporaryDirectory() as folder:
            write_config(Path(folder), shape)
            cell = {engine: run_worker(engine, shape, Path(folder), args) for engine in engines}
        cell["floor_ms"] = parameter_bytes(shape) / BANDWIDTH * 1e3
        results["shapes"][shape] = cell
        show(shape, cell, args.batch)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1))


def hf_config(shape: str) -> dict[str, Any]:
    hidden, inter, layers, heads, kv_heads, head_dim, tied = SHAPES[shape]
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": VOCAB, "hidden_size": hidden,
            "intermediate_size": inter, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "head_dim": head_dim, "tie_word_embeddings": tied, "rms_norm_eps": 1e-6,
            "rope_theta": 1e6, "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "hidden_act": "silu",
            "eos_token_id": 151643, "bos_token_id": 151643}


def write_config(folder: Path, shape: str) -> None:
    (folder / "config.json").write_text(json.dumps(hf_config(shape)))


def parameter_bytes(shape: str) -> int:
    """Read once per step: all matrices, the embedding only where it is the head too."""
    hidden, inter, layers, heads, kv_heads, head_dim, _ = SHAPES[shape]
    layer = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * inter
    return 2 * (layers * layer + VOCAB * hidden)


def run_worker(engine: str, shape: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--worker", engine, "--shapes", shape, "--folder", str(folder), "--new-tokens",
               str(args.new_tokens), "--rounds", str(args.rounds), "--batch", *map(str, args.batch)]
    env = dict(os.environ)
    if engine == "vllm":
        env |= {"PYTHONPATH": str(args.vllm_path), "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        return {"error": (done.stdout + done.stderr)[-1500:]}
    return json.loads(lines[-1][len("RESULT "):])


def prompts(batch: int, salt: int) -> list[list[int]]:
    """No two alike: no prefix cache helps."""
    return [[(7919 * (i + 1) + 104729 * salt + 31 * j) % 150000 for j in range(PROMPT_TOKENS)] for i in range(batch)]


def timed(generate: Any, args: argparse.Namespace) -> dict[str, float]:
    """Batch -> tokens/s, the best of the rounds (a first one warms up: compiles, captures)."""
    rates = {}
    for batch in args.batch:
        generate(prompts(batch, 0), 24)
        best = 0.0
        for salt in range(1, args.rounds + 1):
            began = time.perf_counter()
            count = generate(prompts(batch, salt), args.new_tokens)
            best = max(best, count / (time.perf_counter() - began))
        rates[str(batch)] = best
    return rates


def paceline_worker(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from paceline import Engine, SamplingParams
    from paceline.config import EngineConfig
    from paceline.models.config import ModelConfig
    from paceline.models.decoder import Decoder

    config = ModelConfig.from_hf(hf_config(args.shapes[0]))
    model = Decoder.random(config, dtype=torch.bfloat16, device="cuda")
    engine = Engine(model, drafter=None, strategy="off", config=EngineConfig(
        max_batch=max(args.batch), kv_memory_gb=40, deterministic=args.worker == "deterministic"))

    def generate(batch: list[list[int]], new_tokens: int) -> int:
        params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
        return sum(len(r.token_ids) for group in engine.generate(batch, params) for r in group.rollouts)

    rates = timed(generate, args)
    graphs = engine.runner.graphs
    assert graphs is not None
    return {"tokens_per_s": rates, "torch": torch.__version__, "device": torch.cuda.get_device_name(),
            "graph_mib": graphs.num_bytes / 2**20, "graphs": len(graphs.sizes), "capture_s": graphs.capture_seconds,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30}


def vllm_worker(args: argparse.Namespace) -> dict[str, Any]:
    import vllm
    from vllm import LLM, SamplingParams

    began = time.perf_counter()
    llm = LLM(model=str(args.folder), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=2048,
              max_num_seqs=max(args.batch), gpu_memory_utilization=0.6)
    start_s = time.perf_counter() - began

    def generate(batch: list[list[int]], new_tokens: int) -> int:
        params = SamplingParams(temperature=1.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in batch], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return {"tokens_per_s": timed(generate, args), "vllm": vllm.__version__, "start_s": start_s}


def show(shape: str, cell: dict[str, Any], batches: list[int]) -> None:
    print(f"\n{shape}: floor {cell['floor_ms']:.2f} ms a step")
    for engine, result in cell.items():
        if isinstance(result, dict):
            rates = result.get("tokens_per_s", {})
            cells = [f"{b}: {rates[str(b)]:.0f} tok/s {b / rates[str(b)] * 1e3:.2f} ms" for b in batches if str(b) in rates]
            print(f"  {engine}: " + (result.get("error") or "  ".join(cells)))
    if "tokens_per_s" in cell.get("vllm", {}) and "tokens_per_s" in cell["paceline"]:
        ours, theirs = cell["paceline"]["tokens_per_s"], cell["vllm"]["tokens_per_s"]
        print("  ratio: " + "  ".join(f"{b}: {ours[str(b)] / theirs[str(b)]:.2f}x" for b in batches), flush=True)


if __name__ == "__main__":
    main()
