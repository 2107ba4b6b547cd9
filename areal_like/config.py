"""Base of every settings class, and the few settings that more than one package must know.

Owns: `Settings`, the shared sections, `StartSpec` and `ProcessSpec` (what a process is started with).
Refuses: reading YAML, composing sections (controller/config/run_config.py), torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
import yaml
from pydantic import Field, field_validator

from areal_like import limits
from areal_like.emulation.settings import EmulationSettings
from areal_like.errors import UserError
from areal_like.settings import DType, Settings
from areal_like.staleness import OVER_AGE, Mode, OnStale, OverAgePolicy

AddBos = Literal["auto", "always", "never"]
Threads = Annotated[int, Field(gt=0, le=limits.THREADS)] | Literal["auto"]
"""Compute threads of a process, or `auto`."""
DEFAULT_TRANSFER = "shm"
"""How versions travel unless the configuration says otherwise (areal_like/weights/registry.py)."""
BUILT_IN_CHAT_TOKENIZERS = ("chat:tool_sum",)
"""Those among BUILT_IN_TOKENIZERS that have a chat template."""
BUILT_IN_TOKENIZERS = (
    "characters:running_sum", "characters:tool_sum", "characters:guess_number", "bytes", *BUILT_IN_CHAT_TOKENIZERS,
)  # fmt: skip
"""Tokenizers that are made in code; preparing a model saves them alongside it."""


def number_as_text(value: Any) -> Any:
    """For text that may look like a number, which YAML and overrides read as one."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


class ModelSettings(Settings):
    """Which language model is trained: a Hugging Face folder, or one made from a config on the spot."""

    path: str | None = None
    """Folder (or hub name where there is a hub) with config.json, weights and tokenizer."""
    init: dict[str, Any] | None = None
    """Instead of `path`: a transformers config as a dict with `model_type`; weights are drawn from the run's seed."""
    tokenizer: str = "from_model"
    """`from_model`, a tokenizer folder, or `characters:running_sum` / `characters:tool_sum` /
    `characters:guess_number` / `bytes` / `chat:tool_sum` for those built in code."""
    dtype: DType = "float32"
    """Parameter dtype of the published weights and of the engine."""


class SamplingSettings(Settings):
    """How rollout workers sample. One meaning of log-prob: log_softmax(logits / temperature), before cuts."""

    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; the trainer divides logits by the same number."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus cut; training refuses anything below 1 (the sampled support is not recorded)."""
    top_k: int = Field(0, ge=0, le=limits.TOKENS)
    """Keep the k likeliest tokens; 0 is off; training refuses anything above 0."""
    max_new_tokens: int = Field(1024, gt=0, le=limits.TOKENS)
    """Longest answer, in tokens."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...] = ()
    """Ids that end an answer, alongside the model's own end-of-sequence ids."""
    stop: tuple[Annotated[str, Field(min_length=1, max_length=limits.STOP_CHARACTERS)], ...] = Field(
        (), max_length=limits.STOP_STRINGS
    )
    """Texts that end an answer, wherever the borders of its tokens are. The answer ends with the token that completes
    one: the text stays in it, is trained on and scored, and the finish reason is `stop`. They hold for evaluation
    too."""
    forced_lengths: str | None = None
    """For benchmarks: training answers end at lengths drawn from this and nowhere else. `thinking@MEAN`, `MEAN`,
    `MEAN:CV`, or a JSON file of groups, as `areal-like simulate --lengths`; max_new_tokens cuts them. No answer counts
    as ended by itself then, so scorers that ask for an end give none a reward."""

    @field_validator("forced_lengths", mode="before")
    @classmethod
    def _lengths_may_look_like_a_number(cls, value: Any) -> Any:
        return number_as_text(value)


class StalenessSettings(Settings):
    """How far behind the trained policy a sample may be (arXiv 2505.24298, section 5.1)."""

    max_staleness: Annotated[int, Field(ge=0, le=limits.STEPS)] | Literal["unbounded"] = 4
    """Largest allowed (step - 1) - first version of a group; 0 is synchronous, `unbounded` switches the bound off."""
    on_stale: OnStale = "wait"
    """`wait`: strict and lossless; `drop`: strict, over-age groups go; `keep`: admission only, as AReaL does. `drop`
    loses the groups that take longest, so training sees shorter answers than the policy gives (docs/staleness.md)."""
    group_timeout_s: float = Field(1800.0, gt=0, le=limits.SECONDS)
    """Wall-clock deadline of a group from its first lease; past it the group is dropped with reason `timeout`. Meant
    for groups that hang: one that long answers reach shortens what training sees, as `on_stale: drop` does."""

    @property
    def over_age(self) -> OverAgePolicy:
        """What happens to groups past their deadline."""
        return OVER_AGE[self.on_stale]

    @property
    def bound(self) -> int | None:
        """max_staleness as the rules of staleness take it: None where it is unbounded."""
        return None if self.max_staleness == "unbounded" else self.max_staleness


class TraceSettings(Settings):
    """What one process writes onto the timeline."""

    max_events: int = 0
    """Events at most; 0: no trace, and no file."""
    every_group: int = 1
    """Single samples are drawn of every N-th group, the same in all processes."""


class StartSpec(Settings):
    """What any process of ours is started with: a JSON file that its starter saves and the process loads."""

    name: str
    """Names the process in its log."""
    run_id: str
    parent_pid: int
    """The launcher; when it is gone the process ends itself."""
    seed: int
    num_threads: int = 1
    """Compute threads."""

    def save(self, path: Path) -> None:
        """Write as JSON, for the owner alone."""
        path.touch(mode=0o600)
        path.write_text(self.model_dump_json(indent=1))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote. Raises UserError when the file is not such a spec."""
        try:
            return cls.model_validate_json(path.read_text())
        except (OSError, pydantic.ValidationError) as error:
            what = f"not a {cls.__name__} ({error})"
            raise UserError(what, where=str(path), remedy="start jobs with areal-like") from error


class ProcessSpec(StartSpec):
    """All that one process of a run needs to start; written as JSON to <run>/processes/<name>.json by the launcher."""

    role: Literal["rollout", "trainer", "reward"]
    run_dir: str
    hub_address: str
    """The controller's ROUTER, e.g. tcp://127.0.0.1:40001."""
    reward_addresses: tuple[str, ...] = ()
    """Where the reward services listen."""
    are_rewards_shared: bool = False
    """They belong to no run (messages.SHARED_RUN), and have keys of their own."""
    reward_curve_dir: str | None = None
    """Folder with the client's credentials for shared reward services."""
    reward_scorer: str = ""
    """The scorer to ask shared services for; empty: all of theirs."""
    bind_address: str | None = None
    """For the reward service: where to bind its own ROUTER."""
    curve_dir: str = ""
    """Folder with this process's credentials (owner-only): keys of the run and tokens (credentials.py)."""
    heartbeat_s: float = 0.5
    silence_s: float = 15.0
    """A peer that sends nothing for this long counts as lost."""
    controller_silence_s: float = 60.0
    """The process ends when it receives nothing from the controller for this long."""
    startup_timeout_s: float = 180.0
    """Of this process, and of a server that it starts again."""
    mode: Mode = "async"
    is_colocated: bool = False
    """Engines and trainer share devices, and each releases its memory for the other."""
    model: ModelSettings
    sampling: SamplingSettings
    max_context: int | None = None
    """Longest sequence, prompt and answer, in tokens; None: whatever the model's positions cover."""
    staleness: StalenessSettings
    groups_per_step: int
    group_size: int
    num_steps: int
    weight_dir: str
    """Root of the weight store."""
    weight_transfer: str = DEFAULT_TRANSFER
    """`trainer.weights.kind`, for both ends."""
    weight_options: dict[str, Any] = Field(default_factory=dict)
    """`trainer.weights.options`."""
    merges_adapters: bool = False
    """Rollout worker: versions are adapters alone (`trainer.lora.publish: adapter`)."""
    lineage: str = "l0"
    resume_from: str | None = None
    """Trainer: checkpoint folder to continue from."""
    is_device_taken: bool = False
    """Trainer that starts again: engines may hold their weights on the devices it shares with them."""
    rank: int = 0
    """Trainer: place among its ranks; rank 0 talks to the controller, the others follow it."""
    num_ranks: int = 1
    """Trainer: how many ranks there are."""
    has_own_gpus: bool = False
    """The launcher shows this process its own GPUs only: `cuda` is the first of those, whatever its rank."""
    ranks_address: str = ""
    """Trainer: where its ranks meet: file:///path on one machine, tcp://host:port on several (rank 0 listens there)."""
    trace: TraceSettings = TraceSettings()
    """What it writes onto the timeline."""
    emulation: EmulationSettings | None = None
    """Take time instead of computing; None: real devices."""
    settings: dict[str, Any]
    """The package's own section, to be validated by that package."""


def dump_yaml(settings: Settings) -> str:
    """The settings as YAML text, in declaration order."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, width=100)
