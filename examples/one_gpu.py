"""Train a 0.5B model from the hub on one GPU: it learns sums of reasoning-gym. Every batch is generated twice, to
compare speculation with none.

    pip install '.[gpu,reasoning-gym]'
    python examples/one_gpu.py

docs/quickstart-gpu.md says what to set if memory runs out.
"""

from __future__ import annotations

from typing import Any

from paceline.trainer import ReportWriter, TrainConfig, Trainer, TrainResult, unused_folder


def main(**changes: Any) -> TrainResult:
    settings = {"model": "Qwen/Qwen2.5-0.5B-Instruct", "task": "reasoning-gym:chain_sum", "task_options": {"size": 4000},
                "device": "cuda", "dtype": "bfloat16", "steps": 50, "out": unused_folder("runs/one-gpu"), "compare_off": True,
                "rollout": {"prompts": 32, "group_size": 8, "max_new_tokens": 512}, "optimizer": {"lr": 2e-6, "warmup_steps": 2},
                "reward": {"workers": 4}, "engine": {"max_batch": 256, "kv_memory_gb": 8, "max_context": 2048}}
    result = Trainer(TrainConfig(**{**settings, **changes}), callbacks=[ReportWriter()]).run()
    print(f"rollouts {result.summary['rollout_speedup']:.2f}× as fast as without speculation; see {result.folder}/report.html")
    return result


if __name__ == "__main__":  # rewards are computed in worker processes, which import this file
    main()
