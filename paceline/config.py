"""Configuration records. They are frozen and validated, unknown keys are errors, and every default is written exactly once."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from paceline.config_base import Config, ConfigError, ConfigProblem
from paceline.names import suggest

__all__ = ["LORA_TARGETS", "ClusterConfig", "Config", "ConfigError", "ConfigProblem", "EngineConfig", "EvaluationConfig",
           "LearnerConfig", "OptimizerConfig", "RewardConfig", "RolloutConfig", "TrainConfig"]

LORA_TARGETS = {
    "qkv": ("qkv",), "o": ("o",), "gate_up": ("gate_up",), "down": ("down",), "q_proj": ("qkv",), "k_proj": ("qkv",),
    "v_proj": ("qkv",), "o_proj": ("o",), "gate_proj": ("gate_up",), "up_proj": ("gate_up",), "down_proj": ("down",),
    "all-linear": ("qkv", "o", "gate_up", "down")}
"""Our projections, and Hugging Face's names of what they consist of."""


class EngineConfig(Config):
    """Sizes and options of one engine. Nothing in this class changes a generated token."""

    max_batch: int | None = Field(None, ge=1)
    """Maximum number of requests that run at the same time. None: 64 on a CPU, 256 on a GPU."""
    max_rows: int | None = Field(None, ge=1)
    """Maximum number of rows in one step: last tokens, draft tokens and prompt chunks together. None: 512 on a CPU, 8192 on a
    GPU."""
    page_size: int = Field(16, ge=1)
    """Number of tokens per KV cache page."""
    kv_tokens: int | None = Field(None, ge=1)
    """Number of tokens that the KV cache holds. None: as many as fit into `kv_memory_gb`."""
    kv_memory_gb: float | None = Field(None, gt=0)
    """Memory for the KV cache in GiB. None: 2 on a CPU, 85 % of the free memory on a GPU; in a training run what its memory plan
    leaves."""
    max_context: int | None = Field(None, ge=2)
    """Maximum number of prompt and answer tokens of one request together. None: the model's own limit."""
    row_sizes: tuple[int, ...] = ()
    """Row counts that the decode rows of a step are padded to, in ascending order, for captured CUDA graphs. Empty: a few
    sizes per doubling on a GPU, no padding on a CPU."""
    capture: tuple[int, ...] = ()
    """Layers whose hidden states are returned with each rollout: i is the input of layer i, -1 the output of the final norm."""
    on_update: Literal["continue", "recompute"] = "continue"
    """What running requests do after a weight update: `continue` keeps their KV cache, `recompute` prefills them again."""
    profile: bool = True
    """Measure the cost of steps before the first step whose strategy is predicted (`auto`). This takes about two
    seconds; the result is kept in the user's cache folder for the next start."""
    kernels: Literal["auto", "portable", "torch"] = "auto"
    """Which kernels are used: the fastest for the device (`auto`), those that run on every CPU (`portable`), or the plain PyTorch
    reference (`torch`). The environment variable PACELINE_KERNELS overrides `auto`."""
    deterministic: bool = False
    """Reduce in an order that depends neither on the batch nor on the strategy: tokens are then identical in any dtype. Without
    it a rare near-tie between two tokens may be decided differently. GPU kernels always do so; on a CPU it matters in bfloat16
    only."""
    tensor_parallel: int = Field(1, ge=1, le=64)
    """Number of processes that the policy is split over, each on a GPU of its own where there are as many; a power of two. For
    policies that do not fit on one GPU (docs/tensor-parallel.md)."""
    reduction_shares: int | None = Field(None, ge=1, le=64)
    """Number of shares of sums over ranks, a power of two: they are added up in one binary tree, so that tokens have the same
    bits for every `tensor_parallel` up to this number. None: 1 without tensor parallelism, otherwise at
    least 8."""
    rank_timeout_s: float = Field(600.0, gt=0)
    """Seconds that a rank waits for another one before the engine ends. A rank that has died is noticed at once."""
    cuda_graphs: bool = True
    """Capture decode steps as CUDA graphs and replay them (GPU only)."""
    pack_weights: bool = True
    """Keep a second copy of the weight matrices in the layout that the CPU kernels read: much faster, twice the memory (CPU
    only)."""
    tau: float = Field(0.35, ge=0, le=1)
    """Temperature of the learned drafter's distribution when it ranks draft tokens with the shared noise, for answers that are
    sampled at temperature 1; it grows with their temperature, up to 1. 0: plain top-k."""
    suffix_tau: float = Field(1.0, ge=0, le=1)
    """Temperature of the suffix drafter's counts when it ranks draft tokens with the shared noise. 0: plain top-k."""
    suffix_memory_gb: float = Field(0.25, gt=0)
    """Memory of the host, in GiB, for the history of the suffix drafter; about 8 million tokens per GiB. The oldest prompts are
    forgotten first."""
    suffix_scope: Literal["prompt", "all"] = "prompt"
    """Text that the suffix drafter searches: the prompt and its answers, including earlier ones (`prompt`), or the last 262,144
    tokens of all answers to all prompts (`all`), for tasks whose answers resemble each other."""

    @property
    def num_shares(self) -> int:
        """Number of shares of sums over ranks."""
        if self.reduction_shares is not None:
            return self.reduction_shares
        return 1 if self.tensor_parallel == 1 else max(8, self.tensor_parallel)

    @model_validator(mode="after")
    def _check_ranks(self) -> Self:
        for name, value in (("tensor_parallel", self.tensor_parallel), ("reduction_shares", self.num_shares)):
            if value & (value - 1):
                raise ValueError(f"{name}: {value} is not a power of two")
        if self.num_shares < self.tensor_parallel:
            raise ValueError(f"reduction_shares: {self.num_shares} is less than one for each of {self.tensor_parallel} ranks")
        return self

    @field_validator("row_sizes")
    @classmethod
    def _check_row_sizes(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if any(size < 1 for size in sizes) or any(a >= b for a, b in pairwise(sizes)):
            raise ValueError("must be row counts >= 1 in ascending order")
        return sizes


class RolloutConfig(Config):
    """Size of a training step's batch, and how its answers are sampled."""

    prompts: int = Field(8, ge=1)
    """Number of prompts per step."""
    group_size: int = Field(8, ge=1)
    """Number of answers per prompt."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature. It must be positive: greedy answers to one prompt are all equal and carry no training signal."""
    top_k: int = Field(0, ge=0)
    """Sample from the k most likely tokens. 0: from all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the smallest set of most likely tokens whose probability reaches this value. 1: from all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Sample from tokens that are at least this fraction as likely as the most likely one. 0: from all."""
    max_new_tokens: int = Field(512, ge=1)
    """Maximum number of tokens per answer."""
    shuffle: bool = True
    """Whether the problems are shuffled anew for every epoch. False: they come in the task's order."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables that the chat template reads when it formats a problem's messages, such as `enable_thinking = false`."""
    max_turns: int = Field(16, ge=1)
    """Maximum number of the policy's turns per episode, if the task is an environment (docs/environments.md)."""
    max_turn_tokens: int | None = Field(None, ge=1)
    """Maximum number of tokens of one turn. None: only `max_new_tokens` limits it, which all turns and replies of an episode
    share."""
    episode_timeout_s: float | None = Field(None, gt=0)
    """Maximum number of seconds of an episode, after which its present turn ends, or the reply that it waits for. None: no limit.
    With a limit, rollouts depend on the machine's speed."""
    max_staleness: int = Field(0, ge=0)
    """Asynchronous training: largest number of updates by which a token may be older than the policy that is trained on it. The
    answers of so many further steps are under way while a step waits for its own, and go on during the update and after it
    (docs/asynchronous.md). 0: every step generates its answers with the newest weights, and a run can be repeated bit for bit."""
    stale_groups: Literal["wait", "drop"] = "wait"
    """What happens to a group that would become older than `max_staleness`: the step waits for its last answer (`wait`), so that
    long answers are trained on as often as others; or steps train on the groups that finish first, and a group that has become
    too old is ended, left out and counted (`drop`)."""

    @property
    def max_live(self) -> int:
        """Largest number of answers that are under way at the same time, unless dynamic sampling asks for further ones."""
        return self.prompts * self.group_size * (1 + self.max_staleness)


class OptimizerConfig(Config):
    """AdamW and its learning-rate schedule."""

    kind: Literal["adamw", "adamw_8bit"] = "adamw"
    """AdamW with its two moments in float32 (8 bytes per trained weight), or in 8 bits (2 bytes; the extra `lowmem`). Drafters
    are always trained with the first."""
    lr: float = Field(1e-6, gt=0)
    """Base learning rate of the policy."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's weight decay, applied to matrices only."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are clipped to this norm."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule after the warm-up. `linear` and `cosine` fall to `min_lr_ratio` at the last step."""
    warmup_steps: int = Field(0, ge=0)
    """Number of steps over which the learning rate rises linearly to its base value."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Learning rate at the last step as a fraction of the base learning rate (`linear` and `cosine`)."""
    critic_lr: float | None = Field(None, gt=0)
    """Base learning rate of the critic. None: the policy's."""


class LearnerConfig(Config):
    """How a batch of answers becomes a weight update. The sizes in this class do not change the result."""

    micro_batch_tokens: int = Field(8192, ge=1)
    """Answers are packed into micro-batches of at most this many tokens. A longer answer gets a micro-batch of its own."""
    minibatches: int = Field(1, ge=1)
    """Number of optimizer steps per pass over the batch."""
    epochs: int = Field(1, ge=1)
    """Number of passes over the batch."""
    old_logprobs: Literal["trainer", "engine"] = "trainer"
    """Log-probabilities in the denominator of the importance ratio: those that the trainer computes before its first update
    (`trainer`: the update does not depend on the engine's rounding), or those that the engine sampled with (`engine`: exact
    importance weights)."""
    importance_correction: Literal["truncate", "mask", "off"] = "truncate"
    """Importance weights of tokens that were sampled from another distribution than the trainer computes, because weights were
    older (`rollout.max_staleness`) or rounding differs (bfloat16): each token's loss is multiplied by the ratio of the trainer's
    probability before the update and the one it was sampled with, limited to `importance_cap` (`truncate`, TIS), or 0 outside
    1 / importance_cap .. importance_cap (`mask`). Where they agree, nothing changes. Only with `old_logprobs` `trainer`."""
    importance_cap: float = Field(2.0, gt=1)
    """Largest importance weight of a token in `importance_correction`."""
    deterministic: bool = False
    """Bit-reproducible updates on a GPU: gradients are summed in a fixed order (`torch.use_deterministic_algorithms`), so that a
    resumed run ends with the same weights. Attention's gradient takes longer. On a CPU updates are reproducible anyway."""
    router_aux_loss: float = Field(0.0, ge=0, le=10)
    """Weight of the load-balancing loss of a mixture of experts (`router_aux_loss_coef`, usually 0.001). 0: none. How even the
    load is, is reported in any case (`router/aux_loss`, `router/max_load`, `router/unused`)."""
    exact_logprobs: bool = False
    """Compute the policy's log-probabilities with the engine's kernels: they are then equal to those that the engine sampled
    with, bit for bit, as long as the weights are (`logprob_difference` is 0). Gradients are unchanged up to rounding; those of a
    mixture of experts are of the experts that the engine's routers choose. It takes a copy of the weights in the run's data type,
    and, like `gradient_checkpointing`, which it includes, one more forward pass per update. Needs `engine.deterministic`, which
    is the default on a GPU."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of storing them: less memory, more time."""
    lora_rank: int = Field(0, ge=0, le=4096)
    """Rank of the LoRA adapters. 0: all weights are trained."""
    lora_alpha: int = Field(32, gt=0)
    """Scale of the LoRA adapters."""
    lora_targets: tuple[str, ...] = ("qkv", "o", "gate_up", "down")
    """Projections that get LoRA adapters. q, k and v are one matrix here, and so are gate and up; Hugging Face's names (such as
    `q_proj` or `all-linear`) are accepted for the matrix that they are part of."""

    @field_validator("lora_targets")
    @classmethod
    def _accept_projections(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [target for target in targets if target not in LORA_TARGETS]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is not one of {', '.join(LORA_TARGETS)}{suggest(unknown[0], LORA_TARGETS)}")
        return tuple(dict.fromkeys(name for target in targets for name in LORA_TARGETS[target]))


class RewardConfig(Config):
    """Grading of answers. Answers are graded in worker processes while others are still being generated."""

    workers: int = Field(1, ge=0)
    """Number of worker processes. 0: answers are graded in the training process."""
    concurrency: int | None = Field(None, ge=1)
    """Number of calls that one worker process runs at the same time, in threads. For environments that wait for something else,
    and whose calls are thread-safe. None: what the environment says; 1 for tasks."""
    timeout_s: float = Field(10.0, gt=0)
    """Maximum number of seconds for grading one answer, or for one call of an environment."""
    retries: int = Field(1, ge=0)
    """How often an answer is graded again after its grader raised, ran out of time or crashed. If it still fails, the answer is
    left out of the update and counted (`reward/ungraded`)."""
    functions: dict[str, float] = Field(default_factory=dict)
    """Further reward functions, as `module:function` or `path.py:function`, and the weights with which they are added to the
    task's reward. Each is logged apart (`rewards/FUNCTION`, weighted)."""
    task_weight: float = 1.0
    """Weight of the task's own reward. 0: only `functions` count, and the task does not grade."""


class EvaluationConfig(Config):
    """Evaluation during training, on problems that are not trained on."""

    every: int = Field(0, ge=0)
    """Number of steps between evaluations. The policy is also evaluated before the first and after the last step. 0: never."""
    task: str | None = None
    """Task to evaluate on. None: the run's own."""
    task_options: dict[str, Any] = Field(default_factory=dict)
    """Options of that task; for the run's own task, those that differ, such as `split = "test"`. Without a task and options of
    its own, the evaluation uses the last problems of the run's task, which are then not trained on."""
    problems: int = Field(64, ge=1)
    """Number of problems."""
    samples: int = Field(1, ge=1)
    """Number of answers per problem: the k of pass@k."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature. 0: greedy decoding."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Maximum number of tokens per answer. None: `rollout.max_new_tokens`."""
    solved_at: float = 1.0
    """Reward from which on a problem counts as solved; the reward model's score does not count for it."""

    @model_validator(mode="after")
    def _check_samples(self) -> Self:
        if self.samples > 1 and self.temperature == 0:
            raise ValueError("samples: several greedy answers to one problem are all equal; give a temperature above 0")
        return self


class ClusterConfig(Config):
    """Rollouts on several workers. Nothing in this class changes a generated token, unless training is asynchronous
    (`rollout.max_staleness`)."""

    workers: int = Field(1, ge=1)
    """Number of workers that generate, each in a process of its own. More than 1 needs Ray (`pip install '.[cluster]'`)."""
    address: str | None = None
    """Ray cluster to join: `auto`, or the address of its head node. None: Ray is started on this machine if it is needed."""
    cpus_per_worker: float = Field(0.0, ge=0)
    """CPU cores that Ray reserves for each worker. 0: none are reserved."""
    gpus_per_worker: float | None = Field(None, ge=0)
    """GPUs that Ray reserves for each worker. None: one for each of its ranks (`engine.tensor_parallel`) if the run's device is a
    GPU, otherwise 0."""
    scheduling: bool = True
    """Assign requests as workers have room, by expected length. False: all at once, the answers of a prompt to one worker."""
    reallocation: bool = True
    """Move running requests to less loaded workers."""
    spot_training: bool = True
    """Train the learned drafter on workers that have nothing to generate while others do. False: only after generation, on all of
    them, as one worker does."""
    shard_training: bool = True
    """Train the policy on all workers, each with a shard of it (FSDP2). False: train it in the process that was started; with
    `rollout.max_staleness` the workers generate meanwhile."""
    interval_s: float = Field(0.1, gt=0)
    """Least time between two decisions of the coordinator, in seconds. In large clusters it takes longer, so that the coordinator
    uses no more than a hundredth of a core."""

    @property
    def needs_ray(self) -> bool:
        """Whether the run has workers in other processes."""
        return self.workers > 1 or self.address is not None


class TrainConfig(Config):
    """Configuration of one reinforcement learning run. It is written, with all defaults filled in, to the run folder."""

    model: str = "default"
    """Policy to train: a Hugging Face folder, hub id or GGUF file, or `default` for the small policy bundled with the package."""
    task: str = "collatz"
    """Name of the task (docs/tasks.md). `reasoning-gym:NAME` is any generator of reasoning-gym, `verifiers:NAME` and
    `openenv:NAME` are environments of these packages."""
    task_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the task."""
    algorithm: str = "grpo"
    """Training algorithm: grpo, dr_grpo, dapo, gspo, cispo, rloo or ppo."""
    algorithm_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the algorithm (docs/algorithms.md)."""
    steps: int = Field(32, ge=1, le=1_000_000_000)
    """Number of training steps."""
    epochs: int | None = Field(None, ge=1)
    """Maximum number of passes over the task's problems. None: as many as `steps` requires."""
    seed: int = 0
    """Seed of the run: the order of the problems and all sampling derive from it."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Data type of generation and of the forward pass. Weights are stored and updated in float32 or better."""
    device: str = "auto"
    """Device to train on, such as `cpu` or `cuda`. `auto`: a GPU if there is one."""
    threads: int | None = Field(None, ge=1, le=1024)
    """Number of CPU threads. None: PyTorch's default."""
    out: str = "runs/default"
    """Run folder."""
    strategy: str = "auto"
    """Speculation strategy: off, auto, beg, or a fixed one such as suffix:d8w2v16 (docs/selection.md). It changes no token."""
    drafter: str = "suffix"
    """Drafter: `suffix`, `none`, the folder or hub id of a learned drafter, `learned` for a new, untrained one, or `default` for
    that of the bundled policy; with any other policy `default` is `suffix`."""
    train_drafter: bool = True
    """Train the learned drafter during the run, as long as that saves more time than it takes. False: it stays as loaded."""
    drafter_budget: dict[str, Any] = Field(default_factory=dict)
    """How long the learned drafter is trained per step: fields of `spot.budget.TrainingBudgetConfig`."""
    drafter_alarms: dict[str, Any] = Field(default_factory=dict)
    """When to warn that the learned drafter no longer fits its policy: fields of `spot.alarms.AlarmConfig`."""
    drafter_buffer_gb: float = Field(4.0, gt=0)
    """Memory of the host, in GiB, for captured answers that the learned drafter is trained on; up to twice as much while they
    are written to disk. With several workers: memory of each worker's device."""
    drafter_disk_gb: float = Field(4.0, ge=0)
    """Disk space in the run folder, in GiB, for such answers: what does not fit into memory is read from there, and a resumed run
    finds them again. 0: memory only, as it always is with several workers."""
    spot: dict[str, Any] = Field(default_factory=dict)
    """How the learned drafter is trained: fields of `spot.SpotConfig`."""
    reward_model: str | None = None
    """Folder of a reward model, a sequence classifier with one output. Its score is added to the rewards of all
    answers, also to those of evaluations."""
    reward_model_weight: float = 1.0
    """Weight of the reward model's score."""
    sleep_during_update: bool = False
    """Free the engine's memory (weights, KV cache, captured graphs) while the policy is updated: room for larger models and
    longer answers. The graphs are captured again in every step."""
    compare_off: bool = False
    """Generate every batch a second time without speculation, and compare tokens and time."""
    checkpoint_every: int = Field(10, ge=1)
    """Number of steps between checkpoints."""
    keep_checkpoints: int = Field(2, ge=1)
    """Number of most recent checkpoints to keep. A checkpoint is never removed before a step has been done from a later one, so
    with 1 there are two for a while."""
    wandb: str | None = None
    """Weights & Biases project to log metrics and tables of rollouts to, if wandb is installed."""
    push_to_hub: str | None = None
    """Repository of the Hugging Face hub, such as `user/name`, that the policy is uploaded to when the run is complete, and with
    `-drafter` added to its name the learned drafter. New repositories are private."""
    rollout: RolloutConfig = RolloutConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    learner: LearnerConfig = LearnerConfig()
    reward: RewardConfig = RewardConfig()
    engine: EngineConfig = EngineConfig()
    cluster: ClusterConfig = ClusterConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @property
    def has_learned_drafter(self) -> bool:
        """Whether the drafter is one that can be trained."""
        return self.drafter not in ("suffix", "none")

    @model_validator(mode="before")
    @classmethod
    def _default_drafter(cls, raw: Any) -> Any:
        """Only the bundled policy comes with a drafter."""
        if isinstance(raw, Mapping) and raw.get("drafter") == "default" and raw.get("model", "default") != "default":
            return {**raw, "drafter": "suffix"}
        return raw
