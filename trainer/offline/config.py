"""Settings of training from files. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from areal_like import limits
from areal_like.config import AddBos, Threads
from areal_like.device_names import AUTO
from areal_like.settings import Settings
from trainer.config import AdapterSettings, CheckpointSettings, FsdpSettings, OptimizerSettings

Objective = Literal["sft", "dpo", "reward_model"]
"""The kind of training; each has its own command."""


class OfflineDataSettings(Settings):
    """JSONL files of rows, in the formats of TRL's data sets (docs/offline.md)."""

    train: str
    """File with the rows that are trained on; relative to the current folder."""
    eval: str | None = None
    """File with held-out rows; null: no evaluation."""
    max_tokens: int = Field(2048, gt=1, le=limits.TOKENS)
    """Longest sequence, in tokens; at most the number of the model's positions."""
    on_long: Literal["drop", "stop"] = "drop"
    """What to do with a row that has a longer sequence: drop the row (dropped rows are counted and reported), or stop
    before the first step. Rows are never truncated."""
    prompt_template: str | None = None
    """Text with {prompt} around each text prompt; null: the tokenizer's chat template, if it has one."""
    add_bos: AddBos = "auto"
    """Whether a prompt begins with the BOS token; `auto`: as the tokenizer does it."""


class DpoSettings(Settings):
    """`areal-like dpo`: direct preference optimisation. The starting model is the reference."""

    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """`sigmoid`: DPO (arXiv 2305.18290); `ipo`: the squared loss of IPO on log-probs per token (arXiv 2310.12036)."""
    beta: float = Field(0.1, gt=0)
    """Strength with which the policy is kept close to the reference; `ipo`: the target margin is 1 / (2 beta)."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """`sigmoid`: probability that the answers of a pair are swapped (conservative DPO)."""


class OfflineLoraSettings(AdapterSettings):
    """Only an adapter on the starting model is trained, and the head of a reward model. For `dpo` the policy without
    its adapter is the reference."""

    export: Literal["merged", "adapter"] = "merged"
    """Contents of RUN/final. `merged`: a full model, with W + (alpha / rank) B A in place of W; `adapter`: only the
    adapter, for peft, SGLang and vLLM."""


class OfflineTrainerSettings(Settings):
    """The process that trains."""

    backend: Literal["auto", "torch", "fsdp"] = "auto"
    """`torch`: one process; `fsdp`: the model is distributed over the ranks; `auto`: by the number of ranks, the size
    of the model and the available memory."""
    ranks: int = Field(1, gt=0, le=limits.PROCESSES)
    """Processes that train together, one device each. All are on this machine."""
    rank_timeout_s: float = Field(600.0, gt=0, le=limits.SECONDS)
    """The run is terminated if a rank makes the others wait for longer."""
    fsdp: FsdpSettings = FsdpSettings()
    """For `backend: fsdp`."""
    device: str = AUTO
    """`cpu`, `cuda` or `cuda:N`; `auto`: `cuda` if there is a GPU for each rank, else `cpu`. Ranks take one GPU each,
    from this one upwards."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Compute precision; parameters and optimizer state stay float32."""
    attention: Literal["auto", "flash_attn", "varlen", "sdpa"] = "auto"
    """Kernel for packed sequences, as in a run with rollouts."""
    micro_batch_tokens: int = Field(16384, gt=0, le=limits.TOKENS)
    """Token budget of one packed micro-batch of a rank; a longer row has one of its own."""
    logprob_chunk_tokens: int = Field(1024, gt=0, le=limits.TOKENS)
    """Tokens whose logits are in memory at once."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """AdamW and its schedule, over all steps of the run."""
    lora: OfflineLoraSettings | None = None
    """Train an adapter instead of the whole model; null: the whole model."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """Checkpoints. They are written between two steps."""
    threads: Threads = "auto"
    """Compute threads of a rank; auto: all cores, shared by the ranks (no other process of the run needs them)."""


class OfflineEvalSettings(Settings):
    """Evaluation on `data.eval`. The last step is always evaluated."""

    at_start: bool = True
    """Evaluate the starting model."""
    every_steps: int = Field(0, ge=0, le=limits.STEPS)
    """Steps between evaluations; 0: none in between."""
