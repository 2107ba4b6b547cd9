"""Settings of the trainer package. Imports no torch."""

from __future__ import annotations

import difflib
from typing import Any, Literal

from pydantic import Field, field_validator

from areal_like import limits
from areal_like.config import DEFAULT_TRANSFER, Threads
from areal_like.device_names import AUTO
from areal_like.metric_settings import BestSettings
from areal_like.settings import Settings
from areal_like.weights.payload_layout import StoreKind
from areal_like.weights.registry import find_transfer
from areal_like.weights.transfer import TransferDescriptor
from trainer.staleness_config import GradientCosineSettings, LrByEssSettings, VersionLogprobsSettings

ALL_LINEAR = "all-linear"
"""Value of `trainer.lora.targets` for every linear module except the head."""


class OptimizerSettings(Settings):
    """AdamW and its schedule."""

    lr: float = Field(1e-5, ge=0)
    """Peak learning rate."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW beta 1."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW beta 2."""
    eps: float = Field(1e-8, gt=0)
    """AdamW epsilon."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay (not on biases and norms)."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradient norm above which the gradient is scaled down."""
    warmup_steps: int = Field(0, ge=0, le=limits.STEPS)
    """Linear warm-up, in steps."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up over num_steps."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Learning rate at the end as a share of lr."""


class WeightClip(Settings):
    """The off-policy correction weight w = exp(p - b) (architecture: the objective)."""

    mode: Literal["exact", "truncate", "mask", "off"] = "truncate"
    """`exact`: eq. 5 of arXiv 2505.24298; `truncate`: min(w, max); `mask`: 0 outside [low, max]; `off`: w = 1."""
    max: float = Field(5.0, gt=0)
    """Upper bound for `truncate` and `mask`."""
    low: float = Field(0.0, ge=0)
    """Lower bound for `mask`."""
    log_clamp: float = Field(20.0, gt=0)
    """|p - b| is clamped to this before exp."""


class CorrectionSettings(Settings):
    """A mask or weight on the loss of each token, on top of `weight`."""

    kind: str
    """Name of a correction (docs/algorithms.md), or `module:function` of your own (docs/extending.md)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the correction; keyword arguments of a function of your own."""
    part: Literal["both", "mismatch", "staleness"] = "both"
    """The part of the ratio that is used: `mismatch`: trainer against engine at the version that sampled; `staleness`:
    the start of the step against that version, in the trainer. These two require trainer.version_logprobs."""


class LossSettings(Settings):
    """The loss of a token, with its weights, averaging, KL and entropy terms."""

    kind: str = "decoupled_ppo"
    """Name of a loss (docs/algorithms.md lists all), or `module:function`: a loss of your own (docs/extending.md)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the loss, if it has any; keyword arguments of a loss of your own."""
    proximal: Literal["recompute", "interpolate", "behaviour", "version"] = "recompute"
    """How p is obtained: recomputed at the start of the step; log-linear interpolation (A-3PO, arXiv 2512.06547);
    the behaviour log-prob itself (ordinary PPO); or the version that sampled the token, recomputed in the trainer
    (arXiv 2605.12070; requires trainer.version_logprobs)."""
    weight: WeightClip = WeightClip()
    """Off-policy correction."""
    corrections: tuple[CorrectionSettings, ...] = ()
    """Masks and weights in addition to `weight`; all are multiplied."""
    eps_low: float = Field(0.2, ge=0, lt=1)
    """Trust region 1 - eps_low."""
    eps_high: float = Field(0.2, ge=0)
    """Trust region 1 + eps_high (clip-higher when larger)."""
    dual_clip: float | None = Field(None, gt=1)
    """Where the advantage is negative, a ratio above this one counts as this one and has no gradient (dual-clip PPO,
    arXiv 1912.09729, eq. 5); 3 is usual. null: standard PPO, whose trust region has no bound on that side."""
    aggregation: Literal["token_mean", "sequence_mean", "group_mean", "constant"] = "token_mean"
    """What has equal weight in a step: `token_mean`: every token; `sequence_mean`: every sample; `group_mean`: every
    group; `constant`: every token, divided by samples * constant_divisor (Dr. GRPO, arXiv 2503.20783). Counted over
    the whole step: how it is split into mini-batches, micro-batches and ranks changes no weight, nor does the number of
    trajectories of a sample."""
    constant_divisor: float = Field(1.0, gt=0)
    """Tokens per sample assumed by `constant` (Dr. GRPO)."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of KL(policy || reference); 0: no reference model is loaded."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL from sampled tokens: `k1`: c - r; `k2`: (c - r)^2 / 2; `k3`: exp(r - c) - (r - c) - 1."""
    kl_in: Literal["loss", "reward"] = "loss"
    """`loss`: the KL is added to the loss of each token; `reward`: the KL of the policy that sampled is subtracted from
    the reward before advantages are computed."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""


class AdvantageSettings(Settings):
    """How advantages are computed from rewards, by group id."""

    kind: str = "grpo"
    """Name of an estimator (docs/algorithms.md lists all). `grpo`: (r - mean) / (std + eps) within the group;
    `global_norm`: normalised over the whole batch, as in the paper; `gae`: from the values of `trainer.critic`; or
    `module:function` of your own (docs/extending.md)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the kind, if it has any; keyword arguments of a function of your own."""
    std_eps: float = Field(1e-4, gt=0)
    """Added to the standard deviation."""
    reward_scale: float = 1.0
    """Rewards are (r + bias) * scale, then clipped."""
    reward_bias: float = 0.0
    """See reward_scale."""
    reward_clip: float | None = Field(None, gt=0)
    """Bound on |reward| after scale and bias."""


class CriticSettings(Settings):
    """A critic: a second model, created from the starting model with a head of one number, the value of a state."""

    optimizer: OptimizerSettings = OptimizerSettings()
    """AdamW of the critic."""
    value_clip: float | None = Field(0.2, gt=0)
    """The value loss is clipped at this distance from the value at the start of the step; null: the plain squared
    error."""
    warmup_steps: int = Field(0, ge=0, le=limits.STEPS)
    """Steps at the start of the run in which only the critic is trained and the policy does not change."""


class AdapterSettings(Settings):
    """A low-rank adapter (LoRA, arXiv 2106.09685): each target computes W x + (alpha / rank) B A x, and only A [rank,
    in] and B [out, rank] are trained. There is no dropout, because a token's log-prob must equal the engine's."""

    rank: int = Field(16, gt=0, le=65536)
    """Rows of A and columns of B."""
    alpha: float = Field(32.0, gt=0)
    """The product B A is scaled by alpha / rank."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Names of the linear modules that get an adapter, or ends of names, such as `q_proj`; `all-linear`: every linear
    module except the head."""
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """Initial values of A, as in peft: uniform in +-1 / sqrt(in), or normal with standard deviation 1 / rank. B starts
    at 0, so that training starts from the base."""

    @property
    def scale(self) -> float:
        """alpha / rank"""
        return self.alpha / self.rank


class TeacherSettings(Settings):
    """A model whose log-probs the policy is trained towards: exactly one of the keys."""

    path: str | None = Field(None, min_length=1)
    """Hugging Face folder of a model with the policy's tokenizer. Every trainer rank holds it."""
    model: str | None = Field(None, min_length=1)
    """Name of an entry of `rollout.models` with separate weights. The rollout workers hold it, and compute log-probs of
    each training sample when it has ended."""


class LoraSettings(AdapterSettings):
    """The policy is an adapter on the starting model, which does not change and is also the reference model."""

    publish: Literal["merged", "adapter"] = "merged"
    """What is published for each version. `merged`: full versions, with W + (alpha / rank) B A in place of W;
    `adapter`: only A and B, which each worker merges into the starting model that it reads from its own folder."""


class CheckpointSettings(Settings):
    """When checkpoints are written and which are kept. They are written while training continues; there is always one
    at the end, and `areal-like checkpoint RUN` requests one."""

    every_steps: int = Field(20, ge=0, le=limits.STEPS)
    """Steps between checkpoints; 0: not by steps."""
    every_s: float | None = Field(None, gt=0, le=limits.SECONDS)
    """Also write a checkpoint after the step in which this many seconds have passed since the last one; null: not by
    time."""
    keep: int = Field(2, gt=0, le=limits.STEPS)
    """Number of newest checkpoints kept."""
    keep_every_s: float | None = Field(None, gt=0, le=limits.SECONDS)
    """Of the older checkpoints, one per this many seconds is also kept; null: none."""
    best: BestSettings | None = None
    """Also keep, in RUN/best, the checkpoint of the version with the best value of an evaluation metric; `{}`: use the
    accuracy; null: none."""


class PolicyCheckpointSettings(CheckpointSettings):
    """Checkpoints of the trainer of a run."""

    parts: Literal["every_rank", "rank_0"] = "every_rank"
    """With several ranks. `every_rank`: each rank writes its own part into a file of its own; the run's folder must be
    on storage that all ranks share. `rank_0`: the parts are sent to rank 0, which writes one Hugging Face folder;
    adapters, and models whose tensors transformers converts, are always written in this way. Both resume with any
    number of ranks."""


class DeltaSettings(Settings):
    """Between full versions only the items whose bits changed are sent, without loss."""

    full_every: int = Field(16, gt=1, le=limits.STEPS)
    """Versions from one full version to the next."""
    level: int = Field(1, ge=1, le=19)
    """Compression effort (zstd level)."""


class GroupSettings(Settings):
    """`kind: distributed`: the process group of trainer and engines. It is not encrypted, as between ranks."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """`auto`: nccl if trainer and engines are all on separate GPUs, else gloo."""
    bucket_mb: float = Field(64.0, gt=0, le=limits.MEGABYTES)
    """Tensors are sent together in messages of about this size, MB."""
    gather_s: float = Field(3.0, gt=0, le=limits.SECONDS)
    """Longest wait for a worker that took part before; a worker that is later receives the version as a stream."""
    transfer_s: float = Field(60.0, gt=0, le=limits.SECONDS)
    """Deadline for joining and for the transfer, during which generation pauses; after the deadline, the version is
    sent as a stream."""

    @property
    def bucket_bytes(self) -> int:
        """bucket_mb in bytes"""
        return max(1, int(self.bucket_mb * 1e6))


class WeightStoreSettings(Settings):
    """How a version reaches the engines."""

    kind: str = DEFAULT_TRANSFER
    """`shm`: flat file in shared memory; `disk`: safetensors in the run folder or in shared_dir; `stream`: through
    sockets, in chunks, for hosts without a shared file system; `distributed`: by a process group of torch (nccl or
    gloo) to all workers at once, while they pause; a worker that misses it uses the stream. Or `module:DESCRIPTOR`: a
    transfer of your own (docs/extending.md)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of a transfer of your own."""
    keep: int = Field(3, ge=2, le=limits.STEPS)
    """Versions kept; older ones are deleted."""
    shared_dir: str | None = None
    """`disk`: a folder on a file system of all hosts, in which the run creates its own; null: the run folder."""
    delta: DeltaSettings | None = None
    """Send only what changed between full versions; `{}` uses the defaults; null: every version is sent in full."""
    swap: Literal["together", "rolling"] = "together"
    """`together`: each worker swaps as soon as it has a version; `rolling`: one worker after another."""
    deadline_s: float = Field(120.0, gt=0, le=limits.SECONDS)
    """A worker that has not received, or not loaded, an announced version within this time is quarantined; it returns
    when it has caught up."""
    chunk_kb: int = Field(1024, ge=16, le=65536)
    """`stream`: size of a chunk, KiB."""
    fan_out: int = Field(2, ge=1, le=limits.PROCESSES)
    """`stream`: workers that fetch from the trainer; the others fetch from workers, with the same number each."""
    group: GroupSettings = GroupSettings()
    """`distributed`: its process group."""

    @property
    def transfer(self) -> TransferDescriptor:
        """The transfer that `kind` names. Raises UserError if it does not exist."""
        return find_transfer(self.kind)

    @property
    def layout(self) -> StoreKind:
        """Format of the payload: the transfer's, or safetensors if deltas are used."""
        return self.transfer.layout if self.delta is None else "disk"

    @property
    def place(self) -> StoreKind:
        """Location of the trainer's files: on disk, or in shared memory."""
        return self.transfer.place


DEFAULT_BACKEND = "torch"
OURS_TO_DECIDE = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "optimizer", "scheduler", "fp16", "bf16", "amp", "torch_autocast", "tensor_parallel", "pipeline",
)  # fmt: skip
"""Keys of DeepSpeed's configuration that follow from this program's settings, or that it does not support."""
PASSED_ON = (
    "zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "communication_data_type",
    "seq_parallel_communication_data_type", "data_types", "prescale_gradients", "gradient_predivide_factor",
    "sparse_gradients", "disable_allgather", "steps_per_print", "wall_clock_breakdown", "memory_breakdown",
    "dump_state", "timers", "comms_logger", "flops_profiler", "tensorboard", "wandb", "comet", "csv_monitor", "aio",
    "compile", "activation_checkpointing",
)  # fmt: skip
"""Other allowed keys; DeepSpeed silently ignores unknown ones."""


class FsdpSettings(Settings):
    """`backend: fsdp`: FSDP2 shards parameters, gradients and AdamW's state over the ranks."""

    replicas: int = Field(1, gt=0, le=limits.PROCESSES)
    """HSDP: number of copies of the model, each sharded over an equal group of consecutive ranks; must divide the
    number of ranks. Layers are gathered inside a group only; gradients are added over all ranks. Several nodes: one
    replica per node."""
    reshard_after_forward: bool = True
    """Release a layer's gathered parameters after its forward pass and gather them again for the backward pass; false
    keeps them: more memory, less communication."""
    cpu_offload: bool = False
    """Keep shards, gradients and AdamW's state in host memory, and update there."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the sum of gradients over ranks if precision is bfloat16."""


class ZeroSettings(Settings):
    """`backend: deepspeed`: ZeRO. Buckets are in elements; null uses DeepSpeed's default."""

    stage: Literal[1, 2, 3] = 2
    """What is sharded over ranks: 1: AdamW's state; 2: gradients too; 3: parameters too."""
    offload_optimizer: bool = False
    """Keep AdamW's state in host memory, and update there."""
    offload_param: bool = False
    """Stage 3: keep the shards of parameters in host memory."""
    overlap_comm: bool | None = None
    """Reduce gradients during the backward pass."""
    contiguous_gradients: bool = True
    """Copy gradients into one buffer as they are computed."""
    reduce_bucket_size: int | None = Field(None, gt=0, le=limits.ELEMENTS)
    """Elements reduced at once."""
    allgather_bucket_size: int | None = Field(None, gt=0, le=limits.ELEMENTS)
    """Stages 1 and 2: elements gathered at once."""
    prefetch_bucket_size: int | None = Field(None, ge=0, le=limits.ELEMENTS)
    """Stage 3: elements gathered ahead of use."""
    param_persistence_threshold: int | None = Field(None, ge=0, le=limits.ELEMENTS)
    """Stage 3: smaller parameters are kept unsharded on every rank."""
    max_live_parameters: int | None = Field(None, gt=0, le=limits.ELEMENTS)
    """Stage 3: gathered elements kept at once."""
    max_reuse_distance: int | None = Field(None, ge=0, le=limits.ELEMENTS)
    """Stage 3: a parameter needed again within this many elements is not released."""
    raw: dict[str, Any] = Field(default_factory=dict)
    """Merged into DeepSpeed's configuration, such as {zero_optimization: {round_robin_gradients: true}}; keys that this
    program must set itself are refused."""

    @field_validator("raw")
    @classmethod
    def _raw_keys_are_known(cls, raw: dict[str, Any]) -> dict[str, Any]:
        for key in raw:
            if key in OURS_TO_DECIDE:
                raise ValueError(f"{key} is derived from the trainer's other settings and must be removed")
            if key not in PASSED_ON:
                near = difflib.get_close_matches(str(key), PASSED_ON, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(PASSED_ON)}"
                raise ValueError(f"DeepSpeed's configuration has no key {key}; {hint}")
        zero = raw.get("zero_optimization", {})
        if not isinstance(zero, dict) or "stage" in zero:
            raise ValueError("zero_optimization must be a mapping without `stage`; set trainer.deepspeed.stage instead")
        return raw


class TrainerSettings(Settings):
    """The trainer: one process, or several ranks that train together."""

    backend: str = DEFAULT_BACKEND
    """`torch`: one process; `fsdp`, `deepspeed`: the model is distributed over the ranks; `auto`: by the model's size,
    the ranks and the available memory (the log and trainer.json give the choice and the reason). Or
    `module:DESCRIPTOR`: a backend of your own (docs/extending.md)."""
    backend_options: dict[str, Any] = Field(default_factory=dict)
    """Options of a backend of your own."""
    ranks: int = Field(1, gt=0, le=limits.PROCESSES)
    """Processes of the trainer, one device each."""
    sequence_parallel: int = Field(1, gt=0, le=limits.PROCESSES)
    """For long sequences: this many ranks share each micro-batch, each with an equal part of its tokens (Ulysses). It
    must divide `ranks` and the model's attention heads; needs `backend: fsdp`."""
    tensor_parallel: int = Field(1, gt=0, le=limits.PROCESSES)
    """This many consecutive ranks split the matrices of each layer (transformers' plan of the model) and share each
    micro-batch. It must divide `ranks`, the model's heads, also those of keys and values, and its feed-forward width;
    needs `backend: fsdp`, which shards over the other ranks."""
    router_replay: bool = False
    """Mixture-of-experts models: route each token to the experts that the engine used, instead of those that the
    trainer's routers choose; needs `rollout.engine.sglang.routed_experts`."""
    rank_timeout_s: float = Field(600.0, gt=0, le=limits.SECONDS)
    """The trainer is terminated if a rank makes the others wait for longer."""
    fsdp: FsdpSettings = FsdpSettings()
    """For `backend: fsdp`."""
    deepspeed: ZeroSettings = ZeroSettings()
    """For `backend: deepspeed` (extra `[deepspeed]`)."""
    device: str = AUTO
    """`cpu`, `cuda` or `cuda:N`: ranks take one GPU each, from this one upwards; `auto`: GPUs if there are enough for
    all ranks, else `cpu`. On a cluster: if `launch.ray.trainer.gpus` reserves them."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Compute precision; parameters and optimizer state stay float32."""
    attention: Literal["auto", "flash_attn", "varlen", "sdpa"] = "auto"
    """Kernel for packed sequences; on a CPU SDPA, sequence by sequence. `auto` on CUDA with bfloat16: `varlen` (part of
    torch), else `flash_attn`, else `sdpa`. A named kernel that is not available is an error. The choice is shown at the
    start and recorded in trainer.json."""
    mini_batches: int = Field(1, gt=0, le=limits.GROUPS)
    """Optimizer updates per pass over a batch: per step, unless passes_per_batch says otherwise."""
    passes_per_batch: int = Field(1, gt=0, le=64)
    """Number of passes of a step over its batch. Each sample is still used in one step only; the ledger records the
    passes."""
    micro_batch_tokens: int = Field(16384, gt=0, le=limits.TOKENS)
    """Token budget of one packed micro-batch (Algorithm 1), on one rank or on those that share it."""
    bucket_mb: float = Field(64.0, gt=0, le=limits.MEGABYTES)
    """Maximum size, in MB, of the model parts that a rank holds in addition to its own part while several ranks load,
    publish, save or export the model, which they do in pieces of this size."""
    logprob_chunk_tokens: int = Field(1024, gt=0, le=limits.TOKENS)
    """Tokens whose logits are in memory at once."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """AdamW."""
    lr_by_ess: LrByEssSettings | None = None
    """Learning rate of the policy by the effective sample size of each update; `{}` uses the defaults; null: only by
    the schedule."""
    version_logprobs: VersionLogprobsSettings | None = None
    """Recompute each token's log-prob under the version that sampled it, which separates the mismatch of engine and
    trainer from staleness; `{}` uses the defaults; null: off."""
    gradient_cosine: GradientCosineSettings | None = None
    """Measure the cosine between the gradients of consecutive updates, an early sign of stale data; `{}` uses the
    defaults; null: off."""
    loss: LossSettings = LossSettings()
    """Decoupled PPO."""
    advantage: AdvantageSettings = AdvantageSettings()
    """How advantages are computed from rewards."""
    critic: CriticSettings | None = None
    """For `advantage.kind: gae`, and losses or advantages of your own that need values; `{}` uses the defaults; null:
    no critic."""
    teacher: TeacherSettings | None = None
    """For `advantage.kind: distillation`; null: no teacher."""
    lora: LoraSettings | None = None
    """Train an adapter (LoRA) instead of the full model; `{}` uses the defaults; null: the full model."""
    checkpoint: PolicyCheckpointSettings = PolicyCheckpointSettings()
    """Checkpoints."""
    weights: WeightStoreSettings = WeightStoreSettings()
    """Weight store."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    threads: Threads = "auto"
    """Compute threads of a rank; auto: 1, or in `mode: sync` all cores, shared by the ranks."""
    max_batch_wait_s: float = Field(1800.0, gt=0, le=limits.SECONDS)
    """The trainer fails if no batch arrives for this long."""
    max_restarts: int = Field(3, ge=0, le=limits.STEPS)
    """Number of times that a failed trainer (one or all of its ranks) is restarted from its last checkpoint."""

    @property
    def bucket_bytes(self) -> int:
        """bucket_mb in bytes"""
        return max(1, int(self.bucket_mb * 1e6))

    @property
    def teacher_model(self) -> str:
        """The entry of `rollout.models` that is the teacher; empty: none is."""
        return "" if self.teacher is None or self.teacher.model is None else self.teacher.model


class SftOptimizerSettings(OptimizerSettings):
    """AdamW and its schedule, for supervised training. A section that sets one key keeps the other defaults."""

    lr: float = Field(2e-3, ge=0)
    """Peak learning rate."""
    warmup_steps: int = Field(20, ge=0, le=limits.STEPS)
    """Linear warm-up, in steps."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape after warm-up over num_steps."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Learning rate at the end as a share of lr."""


class SftSettings(Settings):
    """Supervised warm start."""

    steps: int = Field(400, gt=0, le=limits.STEPS)
    """Optimizer updates."""
    batch_size: int = Field(64, gt=0, le=limits.GROUPS)
    """Sequences per update."""
    optimizer: SftOptimizerSettings = SftOptimizerSettings()
    """AdamW, with defaults for supervised training of small models."""
    lora: AdapterSettings | None = None
    """Train an adapter (LoRA), which is merged into the model at the end; null: train the full model."""
    device: str = AUTO
    """`cpu`, `cuda` or `cuda:N`; `auto`: the trainer's first."""
    threads: Threads = "auto"
    """Compute threads; auto: all cores (no other process of the run needs them)."""
    max_tokens: int = Field(2048, gt=1, le=limits.TOKENS)
    """Longer sequences are refused."""
    micro_batch_tokens: int = Field(16384, gt=0, le=limits.TOKENS)
    """Token budget of one packed micro-batch."""
    log_every: int = Field(50, gt=0, le=limits.STEPS)
    """Steps between progress lines."""
