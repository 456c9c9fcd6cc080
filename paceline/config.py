"""Configuration: frozen, validated, unknown keys are errors, every default written once."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

DrafterMode = Literal["between", "beside", "stream"]


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineConfig(Config):
    """How much an engine may hold and how it steps. Nothing here changes a token."""

    max_batch: int | None = Field(None, ge=1)
    """Requests that run at once; None: 64 on a CPU, 256 on a GPU."""
    max_rows: int | None = Field(None, ge=1)
    """Rows of one step: roots, drafted nodes and prompt chunks together; None: 512 on a CPU, 8192 on a GPU."""
    page_size: int = Field(16, ge=1)
    """Tokens per cache page."""
    kv_tokens: int | None = Field(None, ge=1)
    """Tokens the cache holds; None: as many as fit `kv_memory_gb`."""
    kv_memory_gb: float | None = Field(None, gt=0)
    """None: 2 on a CPU, 85 % of what is free on a GPU."""
    max_context: int | None = Field(None, ge=2)
    """Longest prompt and answer together; None: the model's own."""
    row_sizes: tuple[int, ...] = ()
    """Row counts that decode rows are padded to (for captured graphs); empty: none."""
    capture: tuple[int, ...] = ()
    """Layers whose hidden states are kept with each rollout: i is the input of layer i, -1 the final norm's output."""
    on_update: Literal["continue", "recompute"] = "continue"
    """What requests in flight do after a weight update: go on with the keys and values they have, or prefill again."""
    profile: bool = True
    """Measure what steps cost before the first one whose strategy is predicted (`auto`, `model`): about two seconds, kept for the
    next start in the user's cache folder."""
    kernels: Literal["auto", "portable", "torch"] = "auto"
    """Which kernels compute: the fastest for the device, those that run on every CPU, or the plain torch reference. The
    environment variable PACELINE_KERNELS overrides "auto"."""
    deterministic: bool = False
    """Take sums in an order that depends neither on the batch nor on the strategy, so that tokens do not either, in any dtype on
    any device. Without it a rare near-tie may fall the other way."""
    cuda_graphs: bool = True
    """On a GPU, capture decoding steps and replay them."""
    pack_weights: bool = True
    """On a CPU, keep a second copy of the matrices in the layout that its kernels read: much faster, twice the memory."""
    tau: float = Field(0.35, ge=0, le=1)
    """How much the learned drafter's own spread is believed when it guesses with the shared noise; 0: plain top-k."""
    suffix_tau: float = Field(1.0, ge=0, le=1)
    """Likewise for the suffix drafter's counts."""
    suffix_tokens: int = Field(4_000_000, ge=1)
    """Tokens of history the suffix drafter remembers."""
    suffix_scope: Literal["prompt", "all"] = "prompt"
    """Where it looks: the prompt and its answers, earlier ones too; or every answer to any prompt (the last 262,144 tokens), for
    tasks whose answers resemble each other."""


class RolloutConfig(Config):
    """What one training step asks of the policy."""

    prompts: int = Field(8, ge=1)
    """Prompts per step …"""
    group_size: int = Field(8, ge=1)
    """… and answers to each."""
    temperature: float = Field(1.0, gt=0)
    """Greedy answers of one group would be equal: nothing to learn from."""
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    max_new_tokens: int = Field(512, ge=1)
    stop: tuple[str, ...] = ()


class OptimizerConfig(Config):
    """AdamW, and how its rate moves."""

    lr: float = Field(1e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up, down to `min_lr_ratio` at the last step (linear, cosine)."""
    warmup_steps: int = Field(0, ge=0)
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    critic_lr: float | None = Field(None, gt=0)
    """The critic's own rate; None: the policy's."""


class LearnerConfig(Config):
    """How a batch of answers becomes new weights. None of the sizes changes what is learned."""

    micro_batch_tokens: int = Field(8192, ge=1)
    """Answers are packed side by side up to this many tokens per forward pass; a longer one goes alone."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps per pass over the batch."""
    epochs: int = Field(1, ge=1)
    """Passes over the batch."""
    old_logprobs: Literal["trainer", "engine"] = "trainer"
    """What ratios are taken against: the trainer's own log-probabilities before its first update (then an update does not
    depend on how the engine rounds, bit for bit), or those the engine drew with (exact importance weights)."""
    gradient_checkpointing: bool = False
    lora_rank: int = Field(0, ge=0)
    """0: all weights are trained."""
    lora_alpha: int = Field(32, gt=0)
    lora_targets: tuple[str, ...] = ("qkv", "o", "gate_up", "down")


class RewardConfig(Config):
    """Grading, in processes of its own while other answers still generate."""

    workers: int = Field(1, ge=0)
    """0: in the training process."""
    timeout_s: float = Field(10.0, gt=0)


class TrainConfig(Config):
    """One run. Written to its folder, resolved, before the first step."""

    model: str = "default"
    """Hugging Face folder, hub id, GGUF file, or `default`: the small policy that comes with the package."""
    task: str = "collatz"
    """See docs/tasks.md; `reasoning-gym:NAME` is any of its generators."""
    task_options: dict[str, Any] = Field(default_factory=dict)
    algorithm: str = "grpo"
    """grpo, dr_grpo, dapo, rloo or ppo."""
    algorithm_options: dict[str, Any] = Field(default_factory=dict)
    steps: int = Field(30, ge=1)
    epochs: int | None = Field(None, ge=1)
    """Passes over the task's problems before the run ends; None: as many as the steps need."""
    seed: int = 0
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """What generation and the forward pass compute in; weights are kept and updated in float32 at least."""
    device: str = "cpu"
    threads: int | None = Field(None, ge=1)
    out: str = "runs/default"
    """The run folder."""
    strategy: str = "auto"
    """off, auto, model, beg, or like suffix:d8w2v16 (docs/selection.md). Changes no token."""
    drafter: str = "suffix"
    """suffix; none; a learned drafter's folder; or `learned`: one that begins with nothing."""
    drafter_follow: bool = True
    """A learned drafter is trained on the way, while that pays; false: it stays as it was in its folder."""
    drafter_mode: DrafterMode = "between"
    """When it is trained: between generation and the policy's update; beside generation, in a process of its own on idle cores
    (`threads` says how many generation takes); stream: in a thread while a step's last answers decode, on a GPU on a stream of
    low priority."""
    drafter_pace: dict[str, Any] = Field(default_factory=dict)
    """For how long: fields of `spot.pays.PaceConfig`."""
    drafter_alarms: dict[str, Any] = Field(default_factory=dict)
    """When to warn that it no longer fits: fields of `spot.alarms.AlarmConfig`."""
    spot: dict[str, Any] = Field(default_factory=dict)
    """How a drafter is trained: fields of `spot.SpotConfig`."""
    reward_model: str | None = None
    """Folder of a sequence classifier with one output; its score is added to the task's reward."""
    reward_model_weight: float = 1.0
    compare_off: bool = False
    """Also generate every batch without speculation, and compare tokens and time."""
    checkpoint_every: int = Field(10, ge=1)
    keep_checkpoints: int = Field(2, ge=1)
    wandb: str | None = None
    """Project to log to, if wandb is installed."""
    rollout: RolloutConfig = RolloutConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    learner: LearnerConfig = LearnerConfig()
    reward: RewardConfig = RewardConfig()
    engine: EngineConfig = EngineConfig()
