"""Settings that more than one package uses, and the specs that processes are started with.

The configuration of a run is composed in controller/config/run_config.py. This module does not import torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
import yaml
from pydantic import Field, field_validator

from areal_like import limits
from areal_like.emulation.settings import EmulationSettings
from areal_like.encryption.files import read_text, write_text
from areal_like.errors import UserError
from areal_like.settings import DType, Settings
from areal_like.staleness import OVER_AGE, Mode, OnStale, OverAgePolicy

AddBos = Literal["auto", "always", "never"]
Threads = Annotated[int, Field(gt=0, le=limits.THREADS)] | Literal["auto"]
"""Compute threads of a process, or `auto`."""
DEFAULT_TRANSFER = "shm"
"""Default weight transfer (areal_like/weights/registry.py)."""
BUILT_IN_CHAT_TOKENIZERS = ("chat:tool_sum",)
"""Built-in tokenizers that have a chat template."""
BUILT_IN_TOKENIZERS = (
    "characters:running_sum", "characters:tool_sum", "characters:guess_number", "bytes", *BUILT_IN_CHAT_TOKENIZERS,
)  # fmt: skip
"""Tokenizers that are built in code; `trainer.prepare` saves them with the model."""


def number_as_text(value: Any) -> Any:
    """Convert a number to text, for text settings that YAML and overrides may parse as a number."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


class ModelSettings(Settings):
    """Which language model is trained: a Hugging Face folder, or a new model created from a config."""

    path: str | None = None
    """Folder (or Hugging Face Hub name) with config.json, weights and tokenizer."""
    init: dict[str, Any] | None = None
    """Instead of `path`: a transformers config as a dict with `model_type`; weights are drawn from the run's seed."""
    tokenizer: str = "from_model"
    """`from_model`, a tokenizer folder, or `characters:running_sum` / `characters:tool_sum` /
    `characters:guess_number` / `bytes` / `chat:tool_sum` for built-in tokenizers."""
    dtype: DType = "float32"
    """Parameter dtype of the published weights and of the engine."""


class SamplingSettings(Settings):
    """How rollout workers sample. A log-prob is log_softmax(logits / temperature), before top-p and top-k."""

    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; the trainer divides logits by the same number."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling. Training requires 1, because the set of tokens that could be sampled is not recorded."""
    top_k: int = Field(0, ge=0, le=limits.TOKENS)
    """Sample from the k most likely tokens; 0: off. Training requires 0."""
    max_new_tokens: int = Field(1024, gt=0, le=limits.TOKENS)
    """Longest answer, in tokens."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...] = ()
    """Ids that end an answer, alongside the model's own end-of-sequence ids."""
    stop: tuple[Annotated[str, Field(min_length=1, max_length=limits.STOP_CHARACTERS)], ...] = Field(
        (), max_length=limits.STOP_STRINGS
    )
    """Strings that end an answer, regardless of token boundaries. The answer ends with the token that completes a
    string; the string remains part of the answer, is trained on and scored, and the finish reason is `stop`. The
    strings also apply to evaluations."""
    forced_lengths: str | None = None
    """For benchmarks: each training answer ends at a length drawn from this distribution, and at no other token.
    `thinking@MEAN`, `MEAN`, `MEAN:CV`, or a JSON file of groups, as `areal-like simulate --lengths`; max_new_tokens
    bounds them. Every answer then has the finish reason `length`, so scorers that require a finished answer give no
    reward."""

    @field_validator("forced_lengths", mode="before")
    @classmethod
    def _lengths_may_look_like_a_number(cls, value: Any) -> Any:
        return number_as_text(value)


class StalenessSettings(Settings):
    """How far behind the trained policy a sample may be (arXiv 2505.24298, section 5.1)."""

    max_staleness: Annotated[int, Field(ge=0, le=limits.STEPS)] | Literal["unbounded"] = 4
    """Largest allowed (step - 1) - first version of a group; 0 is synchronous, `unbounded` switches the bound off."""
    on_stale: OnStale = "wait"
    """`wait`: the bound holds and no group is lost; `drop`: the bound holds, groups past it are dropped; `keep`: the
    bound applies to admission only, as in AReaL. `drop` loses the groups that take longest, so training uses shorter
    answers than the policy generates (docs/staleness.md)."""
    group_timeout_s: float = Field(1800.0, gt=0, le=limits.SECONDS)
    """Wall-clock deadline of a group from its first lease; past it the group is dropped with reason `timeout`. It is
    meant for groups that hang. If long answers reach it, training uses shorter answers, as with `on_stale: drop`."""

    @property
    def over_age(self) -> OverAgePolicy:
        """Policy for groups past their deadline."""
        return OVER_AGE[self.on_stale]

    @property
    def bound(self) -> int | None:
        """max_staleness as a number of versions; None if it is unbounded."""
        return None if self.max_staleness == "unbounded" else self.max_staleness


class TraceSettings(Settings):
    """Limits on the trace events of one process."""

    max_events: int = 0
    """Maximum number of events; 0: no trace file."""
    every_group: int = 1
    """Individual samples are recorded for every N-th group, the same groups in all processes."""


class StartSpec(Settings):
    """Settings that a process is started with: a JSON file that the launcher saves and the process loads."""

    name: str
    """Name of the process in its log."""
    run_id: str
    parent_pid: int
    """Process id of the launcher. The process exits when the launcher has exited."""
    seed: int
    num_threads: int = 1
    """Compute threads."""

    def save(self, path: Path) -> None:
        """Write as JSON, readable by this user only."""
        path.touch(mode=0o600)
        write_text(path, self.model_dump_json(indent=1))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote. Raises UserError when the file is not such a spec."""
        try:
            return cls.model_validate_json(read_text(path))
        except (OSError, pydantic.ValidationError) as error:
            what = f"the file does not contain the settings of a process ({error})"
            raise UserError(
                what, where=str(path), remedy="use the `areal-like` command, which writes this file"
            ) from error


class ProcessSpec(StartSpec):
    """Settings that one process of a run is started with; written as JSON to <run>/processes/<name>.json by the
    launcher."""

    role: Literal["rollout", "trainer", "reward"]
    run_dir: str
    hub_address: str
    """Address of the controller's ROUTER socket, e.g. tcp://127.0.0.1:40001."""
    reward_addresses: tuple[str, ...] = ()
    """Addresses of the reward services."""
    are_rewards_shared: bool = False
    """The reward services are shared: they belong to no run (messages.SHARED_RUN) and have their own keys."""
    reward_curve_dir: str | None = None
    """Folder with the client's credentials for shared reward services."""
    reward_scorer: str = ""
    """Name of the scorer that shared services should use; empty: all their scorers."""
    bind_address: str | None = None
    """For the reward service: address that its ROUTER socket binds to."""
    curve_dir: str = ""
    """Folder with this process's credentials (owner-only): keys of the run and tokens (credentials.py)."""
    heartbeat_s: float = 0.5
    silence_s: float = 15.0
    """A peer that sends nothing for this long counts as lost."""
    controller_silence_s: float = 60.0
    """The process ends when it receives nothing from the controller for this long."""
    startup_timeout_s: float = 180.0
    """Longest time until this process, or a server that it restarts, is ready."""
    mode: Mode = "async"
    is_colocated: bool = False
    """Engines and trainer share devices, and each releases its memory for the other."""
    model: ModelSettings
    sampling: SamplingSettings
    max_context: int | None = None
    """Longest sequence, prompt and answer, in tokens; None: as many as the model has positions."""
    staleness: StalenessSettings
    groups_per_step: int
    group_size: int
    num_steps: int
    weight_dir: str
    """Root of the weight store."""
    weight_transfer: str = DEFAULT_TRANSFER
    """`trainer.weights.kind`, for trainer and workers."""
    weight_options: dict[str, Any] = Field(default_factory=dict)
    """`trainer.weights.options`."""
    merges_adapters: bool = False
    """Rollout worker: versions contain the adapter only (`trainer.lora.publish: adapter`)."""
    teacher_model: str = ""
    """Rollout worker: entry of `rollout.models` whose log-probs training samples get (`trainer.teacher.model`)."""
    lineage: str = "l0"
    resume_from: str | None = None
    """Trainer: checkpoint folder to continue from."""
    is_device_taken: bool = False
    """For a restarted trainer: engines may hold weights on the devices that they share with it."""
    rank: int = 0
    """Trainer: rank of this process. Rank 0 communicates with the controller, the others follow it."""
    num_ranks: int = 1
    """Trainer: number of ranks."""
    has_own_gpus: bool = False
    """Only the GPUs of this process are visible to it: `cuda` is the first of them, whatever the rank."""
    ranks_address: str = ""
    """Trainer: rendezvous address of its ranks: file:///path on one machine, tcp://host:port on several (rank 0 listens
    there)."""
    trace: TraceSettings = TraceSettings()
    """Limits on the trace events of this process."""
    emulation: EmulationSettings | None = None
    """Emulate devices: wait instead of computing. None: real devices."""
    settings: dict[str, Any]
    """The section of the process's package, which validates it."""


def dump_yaml(settings: Settings) -> str:
    """The settings as YAML text, in declaration order."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, width=100)
