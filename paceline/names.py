"""Names that TRL, vLLM, Hugging Face and others use for our settings, and suggestions for names that do not exist. Imports
nothing else of Paceline."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

ALIASES = {
    # sampling
    "num_generations": "group_size n", "num_return_sequences": "group_size n", "num_samples": "group_size n", "n": "group_size",
    "max_tokens": "max_new_tokens", "max_completion_length": "max_new_tokens", "max_response_length": "max_new_tokens",
    "max_length": "max_new_tokens", "max_output_tokens": "max_new_tokens", "stop_strings": "stop", "stop_sequences": "stop",
    "do_sample": "temperature", "eos_token_id": "stop_token_ids", "num_prompts": "prompts", "train_batch_size": "prompts",
    "generation_batch_size": "prompts",
    # training
    "learning_rate": "lr", "adam_epsilon": "eps", "adam_beta1": "betas", "adam_beta2": "betas", "clip_grad": "max_grad_norm",
    "grad_clip": "max_grad_norm", "gradient_clipping": "max_grad_norm", "lr_scheduler_type": "schedule",
    "lr_scheduler": "schedule", "lr_warmup_steps": "warmup_steps", "max_steps": "steps", "num_steps": "steps",
    "total_training_steps": "steps", "num_train_epochs": "epochs", "total_epochs": "epochs", "num_iterations": "learner.epochs",
    "ppo_epochs": "learner.epochs", "steps_per_generation": "minibatches", "num_mini_batches": "minibatches",
    "per_device_train_batch_size": "micro_batch_tokens", "gradient_accumulation_steps": "micro_batch_tokens",
    "ppo_max_token_len_per_gpu": "micro_batch_tokens", "lora_r": "lora_rank", "target_modules": "lora_targets",
    "lora_target_modules": "lora_targets", "loss_type": "algorithm", "adv_estimator": "algorithm",
    "beta": "algorithm_options.kl", "kl_coef": "algorithm_options.kl", "kl_loss_coef": "algorithm_options.kl",
    "epsilon": "algorithm_options.clip_low", "cliprange": "algorithm_options.clip_low",
    "clip_ratio": "algorithm_options.clip_low", "clip_ratio_low": "algorithm_options.clip_low",
    "epsilon_high": "algorithm_options.clip_high", "clip_ratio_high": "algorithm_options.clip_high",
    "filter_groups": "algorithm_options.dynamic_sampling",
    # the run
    "model_name_or_path": "model", "model_path": "model", "model_name": "model", "model_id": "model", "tokenizer": "model",
    "output_dir": "out", "output": "out", "default_local_dir": "out", "save_steps": "checkpoint_every",
    "save_freq": "checkpoint_every", "save_total_limit": "keep_checkpoints", "report_to": "wandb", "run_name": "out",
    "project_name": "wandb", "bf16": "dtype", "fp16": "dtype", "torch_dtype": "dtype", "dataset": "task",
    "dataset_name": "task", "train_dataset": "task", "train_files": "task_options.data", "reward_funcs": "functions task",
    "reward_fn": "functions task", "eval_steps": "evaluation.every",
    "test_freq": "evaluation.every", "mask_truncated_completions": "algorithm_options.mask_truncated",
     "num_workers": "workers", "num_proc": "workers", "carry_over": "max_staleness", "max_head_offpolicyness": "max_staleness",
    "max_off_policy_steps": "max_staleness", "async_level": "max_staleness", "staleness_threshold": "max_staleness",
    # the engine
    "max_num_seqs": "max_batch", "max_running_requests": "max_batch", "batch_size": "max_batch batch",
    "max_num_batched_tokens": "max_rows", "chunked_prefill_size": "max_rows", "gpu_memory_utilization": "kv_memory_gb",
    "mem_fraction_static": "kv_memory_gb", "swap_space": "kv_memory_gb", "block_size": "page_size",
    "max_model_len": "max_context", "context_length": "max_context", "max_seq_len": "max_context",
    "tensor_parallel_size": "tensor_parallel", "tp_size": "tensor_parallel", "tensor_model_parallel_size": "tensor_parallel",
    "enforce_eager": "cuda_graphs", "disable_cuda_graph": "cuda_graphs", "enable_deterministic_inference": "deterministic",
    # speculation
    "num_speculative_tokens": "strategy", "speculative_num_steps": "strategy", "speculative_num_draft_tokens": "strategy",
    "speculative_eagle_topk": "strategy", "speculative_algorithm": "strategy", "speculative_config": "strategy",
    "speculative_model": "drafter", "speculative_draft_model_path": "drafter", "draft_model": "drafter",
}
"""Names of other libraries and the last part of ours, with a dot where that alone would be ambiguous. Of several, separated by
spaces, the first that exists is meant."""

_NOTES = {
    "gpu_memory_utilization": "an amount for the KV cache in GiB, not a share", "mem_fraction_static": "an amount in GiB",
    "enforce_eager": "with the opposite value", "disable_cuda_graph": "with the opposite value",
    "num_speculative_tokens": "its depth is the d of suffix:d8w2v16",
    "speculative_num_steps": "its depth is the d of suffix:d8w2v16",
    "speculative_eagle_topk": "its width is the w of eagle:d6w4v32",
    "speculative_num_draft_tokens": "its budget is the v of eagle:d6w4v32",
    "per_device_train_batch_size": "counted in tokens; it changes no result",
    "gradient_accumulation_steps": "counted in tokens; it changes no result",
    "bf16": "for example bfloat16", "fp16": "for example bfloat16", "do_sample": "0 is greedy",
    "generation_batch_size": "prompts per step, not answers", "report_to": "the name of a W&B project",
    "tokenizer": "the tokenizer is loaded with it",
}
"""What is different about our setting."""

_MISSING = {
    "trust_remote_code": "code of model folders is never run", "use_vllm": "the engine is built in",
    "enable_prefix_caching": "it is always on", "enable_chunked_prefill": "it is always on",
    "quantization": "only GGUF files are read quantised", "load_in_4bit": "only GGUF files are read quantised",
    "num_beams": "there is no beam search", "n": "the number of answers is an argument of Engine.generate",
    "logprobs": "they are always returned", "best_of": "there is no best-of sampling",
}
"""Settings of other libraries that have no counterpart, and why."""


def suggest(name: str, known: Iterable[str]) -> str:
    """What a user who wrote `name` may have meant, as the end of a sentence such as `no such key`; empty if nothing is near.

    `known` are the names that exist, with dots between the tables that they are in.

    >>> suggest("num_generations", ["steps", "rollout.group_size"])
    '; it is called rollout.group_size here'
    """
    names = {_plain(each): each for each in known}
    plain = _plain(name)
    table, _, last = plain.rpartition(".")
    found = _ending_in(ALIASES.get(last, last), names)
    if last in ALIASES and found:
        note = f" ({_NOTES[last]})" if last in _NOTES else ""
        return f"; it is called {names.get(found[0], found[0])} here{note}"
    if last in _MISSING:
        return f"; {_MISSING[last]}"
    near = found or _near(last, [each for each in names if each.rpartition(".")[0] == table], 0.6) or _near(last, names, 0.75)
    return f"; did you mean {names.get(near[0], near[0])}?" if near else ""


def _plain(name: str) -> str:
    """An option as a setting: `--max-new-tokens` is `max_new_tokens`."""
    return name.lstrip("-").lower().replace("-", "_")


def _ending_in(parts: str, names: Iterable[str]) -> list[str]:
    """Names that end in one of these parts. A part with a dot also matches below a table whose keys are not known, such as
    `algorithm_options`."""
    found: list[str] = []
    for part in parts.split():
        table, _, last = part.rpartition(".")
        found += [part] if table in names else []
        for end in (part, last):
            found += sorted((name for name in names if f".{name}".endswith(f".{end}")), key=len)
    return found


def _near(last: str, names: Iterable[str], cutoff: float) -> list[str]:
    """The name whose last part is nearest to this one, if it is near enough."""
    by_part = {name.rpartition(".")[2]: name for name in sorted(names, key=len, reverse=True)}
    return [by_part[part] for part in difflib.get_close_matches(last, by_part, n=1, cutoff=cutoff)]
