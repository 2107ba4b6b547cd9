"""RunConfig: all settings of a job, composed from the settings of each package.

Defines the top-level keys, the sections that only the controller reads, and derived numbers as properties with their
formulas. Files are read in loading.py, combinations checked in validation/run.py. torch is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from areal_like import limits
from areal_like.config import ModelSettings, SamplingSettings, StalenessSettings, number_as_text
from areal_like.device_names import AUTO, index_of, resolved
from areal_like.emulation.settings import EmulationSettings
from areal_like.encryption.settings import EncryptionSettings
from areal_like.settings import Settings
from areal_like.staleness import MODE_STALENESS, Mode
from areal_like.weights.registry import BETWEEN_HOSTS
from areal_like.wire.messages import Sampling
from controller.config.auto_devices import choose_devices, first_gpus
from controller.config.data_settings import DataSettings as DataSettings
from controller.config.data_settings import DataSource as DataSource
from controller.config.dynamic_batch_settings import DynamicBatchSettings
from controller.config.early_stop_settings import EarlyStopSettings
from controller.config.engines import engine_of, written_devices_per_worker
from controller.config.hardware_settings import HardwareSettings
from controller.config.launch_settings import LaunchSettings
from controller.config.launchers import launcher_of, written_launcher
from controller.config.replay_buffer_settings import ReplayBufferSettings
from rollout.config import BUILT_IN_WORKFLOWS as BUILT_IN_WORKFLOWS
from rollout.config import CalledModelSettings as CalledModelSettings
from rollout.config import RolloutSettings
from rollout.config import by_engine as by_engine
from services.reward.config import RewardSettings
from services.reward.config import contradictions as contradictions
from services.reward.config import missing as missing
from services.reward.config import scorer_names as scorer_names
from services.reward.config import silent_endpoints as silent_endpoints
from services.reward.config import soft_zones as soft_zones
from services.reward.scorer_registry import SCORERS as SCORERS
from trainer.config import ALL_LINEAR as ALL_LINEAR
from trainer.config import AdapterSettings as AdapterSettings
from trainer.config import SftSettings, TrainerSettings

BUILT_IN_GENERATORS = ("running_sum", "tool_sum", "guess_number", "reasoning_gym", "episodes", "traffic")
"""Built-in generators of rows; others are given as `module:function`."""


class WarmStartSettings(Settings):
    """Supervised steps before RL; the result is cached in runs_dir by its settings."""

    data: DataSource
    """Rows with a `prompt` and a `response` (or the generator's demonstrations)."""
    sft: SftSettings = SftSettings()
    """Settings of the supervised steps."""


class EvalSettings(Settings):
    """Scoring of data.eval at one pinned version, without stopping rollouts."""

    at_start: bool = True
    """Score the initial policy (`accuracy_before` of the summary), on the rows of the final evaluation."""
    every_steps: int = Field(0, ge=0, le=limits.STEPS)
    """Steps between periodic evaluations; 0: none."""
    num_prompts: int | None = Field(200, gt=0, le=limits.ROWS)
    """Rows of a periodic evaluation, the first of data.eval; null: all."""
    final_prompts: int | None = Field(None, gt=0, le=limits.ROWS)
    """Rows of the evaluations before and after; null: all."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling (top-p)."""
    top_k: int = Field(0, ge=0, le=limits.TOKENS)
    """Keep the k most likely tokens; 0: off."""
    max_new_tokens: int | None = Field(None, gt=0, le=limits.TOKENS)
    """Longest answer, in tokens; null: sampling.max_new_tokens."""
    num_samples: int = Field(1, gt=0, le=limits.GROUP_SIZE)
    """Answers per row. With several, `accuracy` is their mean, and `pass_at_K` is the probability that one of K
    answers solves the row (arXiv 2107.03374)."""
    solved_value: float = 1.0
    """An answer of at least this value solves its row, for `pass_at_K` and `slices`."""
    slices: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Properties of rows by which evaluations are compared in parts: columns, `prompt_length`, `answer_length`,
    `source`, `language`, or `auto`: all of these but the language."""


class LedgerSettings(Settings):
    """The run's persistent record: ledger.sqlite, and token payloads in segment files next to it."""

    segment_mb: float = Field(64.0, gt=0, le=limits.FILE_MEGABYTES)
    """Size at which a segment file is closed and the next one started, MB."""
    keep_mb: float | None = Field(2048.0, ge=0, le=limits.FILE_MEGABYTES)
    """Token payloads of used samples kept on disk, MB, once a checkpoint covers them; null: keep all, so that
    `areal-like replay` can start at step 1 (`areal-like validate` gives their size)."""
    fsync: bool = False
    """Call fsync for every transaction, so that the ledger also survives a power loss. Without it, it survives the end
    of any process at any time; after a power loss the run may have to be started again."""


class WandbSettings(Settings):
    """Weights & Biases, in addition to metrics.jsonl (extra `[wandb]`)."""

    project: str = Field("areal-like", min_length=1)
    """Project the run belongs to."""
    mode: Literal["offline", "online"] = "offline"
    """`offline`: into <run>/wandb, to be sent later with `wandb sync`; `online`: sent immediately."""
    entity: str | None = None
    """User or team; null: the account's own."""
    group: str | None = None
    """Runs that belong together; null: none."""
    tags: tuple[str, ...] = ()
    """Tags of the run."""


class MlflowSettings(Settings):
    """MLflow, alongside metrics.jsonl (extra `[mlflow]`)."""

    experiment: str = Field("areal-like", min_length=1)
    """Experiment the run belongs to."""
    uri: str | None = Field(None, min_length=1)
    """Store: `file:FOLDER`, `sqlite:///FILE`, or a server; null: <run>/mlflow.db, with artifacts in <run>/mlflow."""


class TrackioSettings(Settings):
    """Trackio, alongside metrics.jsonl (extra `[trackio]`)."""

    project: str = Field("areal-like", min_length=1)
    """Project the run belongs to."""
    dir: str | None = Field(None, min_length=1)
    """Folder of its database; null: <run>/trackio, or the environment variable TRACKIO_DIR."""
    space: str | None = Field(None, min_length=1)
    """Space on Hugging Face to send to, such as `user/name`; null: nothing is sent."""


class PrometheusSettings(Settings):
    """An endpoint that Prometheus scrapes while the run lasts (extra `[prometheus]`)."""

    port: int = Field(9464, ge=0, le=65535)
    """Port of http://host:port/metrics; 0: any free one, which is shown."""
    host: str = Field("127.0.0.1", min_length=1)
    """Address it listens on. Default: loopback; anyone who can reach another address can read the metrics."""


class OpenLineageSettings(Settings):
    """OpenLineage events of a run: data sets as inputs, checkpoints and the final model as outputs."""

    url: str | None = Field(None, min_length=1)
    """Base address of an OpenLineage API, such as `http://marquez:5000`; null: events are written to `file`."""
    file: str | None = Field(None, min_length=1)
    """File with one event a line, to which the events are appended; null: <run>/openlineage.jsonl."""
    namespace: str = Field("areal-like", min_length=1)
    """Namespace of the run's job."""
    key_env: str | None = Field(None, min_length=1)
    """Name of the environment variable with the key of the API; null: no key is sent."""

    @model_validator(mode="after")
    def _check_url(self) -> OpenLineageSettings:
        if self.url is None:
            if self.key_env is not None:
                raise ValueError("`key_env` has no effect without `url`: set `url`, or remove `key_env`")
            return self
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("`url` must be an address such as http://marquez:5000")
        if parts.username is not None or parts.password is not None or parts.query:
            raise ValueError("`url` must not contain a key: name an environment variable in `key_env`")
        if self.file is not None:
            raise ValueError("`url` and `file` are mutually exclusive: set one of them")
        return self


class SinkSettings(Settings):
    """Additional destinations of metrics. metrics.jsonl is always written. A sink that is down, slow or broken never
    delays or ends the run; records that it misses are counted.
    """

    tensorboard: bool | str = False
    """Write event files for TensorBoard (extra `[tensorboard]`): true: into <run>/tensorboard; or a folder, in which
    each run has a subfolder of its name.
    """
    wandb: WandbSettings | None = None
    """Weights & Biases; `{}`: the defaults; null: none."""
    mlflow: MlflowSettings | None = None
    """MLflow; `{}`: the defaults; null: none."""
    trackio: TrackioSettings | None = None
    """Trackio; `{}`: the defaults; null: none."""
    prometheus: PrometheusSettings | None = None
    """Prometheus endpoint; `{}`: the defaults; null: none."""
    openlineage: OpenLineageSettings | None = None
    """OpenLineage events; `{}`: the defaults; null: none."""
    report: bool = True
    """Draw report.html and report.png when the run ends, which takes a few seconds; `areal-like report RUN`
    does so at any time."""
    dashboard: bool = False
    """Serve the live page of runs_dir while the run is in progress, as `areal-like dashboard` does, and print its
    address and token. It is a separate process; if it cannot start, the run continues."""
    dashboard_port: int = Field(8787, ge=0, le=65535)
    """Port of `dashboard` on 127.0.0.1; 0: any free one."""
    display: Literal["auto", "live", "plain"] = "auto"
    """`auto`: a live table on a terminal, plain lines otherwise."""


class MetricsSettings(SinkSettings):
    """Metrics, trace and display of a run. metrics.jsonl is always written. A sink that is down, slow or broken never
    delays or ends the run; records that it misses are counted.
    """

    trace: bool = True
    """Write trace.json (Chrome trace events; opens in Perfetto)."""
    max_trace_events: int = Field(200_000, gt=0, le=limits.ROWS)
    """Maximum number of events that a process records. In longer runs individual samples are recorded for every N-th
    group only; events beyond the limit are counted, not kept.
    """
    trace_samples_per_step: int | None = Field(64, gt=0, le=limits.GROUPS)
    """Samples of a step that are recorded individually, in whole groups, so that the cost of tracing does not grow with
    the batch. null: all.
    """


class RunConfig(Settings):
    """One job."""

    name: str = Field("run", min_length=1)
    """Name of the run folder in runs_dir; -2, -3, ... is appended if it is taken."""
    seed: int = Field(1, ge=0, lt=2**63)
    """Seed of all random numbers."""
    mode: Mode = "async"
    """`async`: generation and training run at the same time; `one_step_off`: batch n+1 is generated completely while
    the trainer uses batch n; `sync`: generation and training alternate."""
    placement: Literal["disaggregated", "colocated"] = "disaggregated"
    """`disaggregated`: engines and trainer have separate devices; `colocated`: they share devices in turns, and each
    releases its memory while the other works (`mode: sync` only)."""
    notes: str = Field("", max_length=10_000)
    """What the run is for: shown by `areal-like ps`, the report and the dashboard. `areal-like note RUN TEXT` changes
    it."""
    tags: tuple[Annotated[str, Field(min_length=1, max_length=64)], ...] = Field((), max_length=32)
    """Tags of the run, shown with the notes and also sent to W&B."""
    runs_dir: str = "runs"
    """Folder that contains the run folders."""
    out: str | None = None
    """Folder that `areal-like sft` writes its model to; null: the run folder."""
    model: ModelSettings = ModelSettings()
    """The policy."""
    warm_start: WarmStartSettings | None = None
    """Supervised steps before RL; null: none."""
    data: DataSettings
    """What the policy is trained and evaluated on."""
    staleness: StalenessSettings = StalenessSettings()
    """How stale samples may be."""
    groups_per_step: int = Field(32, gt=0, le=limits.GROUPS)
    """Groups (prompts) of one batch; a step consumes one batch."""
    group_size: int = Field(8, gt=0, le=limits.GROUP_SIZE)
    """Samples of one prompt; advantages are normalised among them."""
    num_steps: int = Field(100, gt=0, le=limits.STEPS)
    """Steps of the run; step n turns policy version n-1 into version n."""
    sampling: SamplingSettings = SamplingSettings()
    """How training samples are drawn."""
    rollout: RolloutSettings = RolloutSettings()
    """The rollout workers."""
    reward: RewardSettings = RewardSettings()
    """The reward service."""
    trainer: TrainerSettings = TrainerSettings()
    """The trainer."""
    eval: EvalSettings = EvalSettings()
    """Evaluation."""
    early_stop: EarlyStopSettings | None = None
    """End the run as finished when a metric of the evaluations stops improving; `{}`: use the accuracy; null: never."""
    emulation: EmulationSettings | None = None
    """Instead of computing, rollout workers and trainer simulate the time that a GPU would take; null: use real
    devices."""
    hardware: HardwareSettings = HardwareSettings()
    """The machines for which the config is intended."""
    filter_zero_signal: bool = False
    """Leave out groups whose rewards are all equal (zero advantage) and draw others instead."""
    max_filtered_batches: int = Field(10, gt=0, le=limits.STEPS)
    """The run stops, with advice, if this many batches' worth of consecutive groups were filtered and none was kept."""
    dynamic_batch: DynamicBatchSettings | None = None
    """With filter_zero_signal: limit on the groups tried for a step, after which the step uses fewer groups; null: a
    step waits until groups_per_step groups carry a signal."""
    replay_buffer: ReplayBufferSettings | None = None
    """Groups of earlier steps, up to a maximum age, on which each step trains again; null: each group is used in only
    one step."""
    launch: LaunchSettings = LaunchSettings()
    """Processes."""
    ledger: LedgerSettings = LedgerSettings()
    """The ledger, the run's persistent record."""
    metrics: MetricsSettings = MetricsSettings()
    """Metrics, trace and display."""
    encryption: EncryptionSettings | None = None
    """Encrypt the data of the run at rest (docs/encryption.md); null: only access rights of the files protect it."""
    callbacks: tuple[str, ...] = ()
    """Your own classes as `module:CLASS`, which receive the metric rows of the run and may add numbers; see
    docs/extending.md."""
    callback_timeout_s: float = Field(10.0, gt=0, le=limits.SECONDS)
    """Longest call of a callback; a callback that takes longer is disabled, while the run continues."""

    @field_validator("name", mode="before")
    @classmethod
    def _name_may_look_like_a_number(cls, value: Any) -> Any:
        return number_as_text(value)

    @model_validator(mode="before")
    @classmethod
    def _mode_sets_what_was_left_open(cls, data: Any) -> Any:
        """Set keys that the mode determines: `sync` and `one_step_off` fix the bound, `one_step_off` drains.
        Conflicting values of the user are reported by validation. Between hosts weights are streamed.
        """
        if not isinstance(data, Mapping):
            return data
        mode, filled = data.get("mode"), dict(data)
        if isinstance(mode, str) and mode in MODE_STALENESS:
            filled["staleness"] = _filled(data.get("staleness"), "max_staleness", MODE_STALENESS[mode])
        if mode == "one_step_off":
            filled["rollout"] = _filled(data.get("rollout"), "interruption", "drain")
        if not written_launcher(data.get("launch"))[0].is_one_machine:
            trainer = data.get("trainer")
            weights = trainer.weights if isinstance(trainer, TrainerSettings) else _get(trainer, "weights")
            filled["trainer"] = _replaced(trainer, "weights", _filled(weights, "kind", BETWEEN_HOSTS))
        return filled

    @model_validator(mode="before")
    @classmethod
    def _pool_sets_its_workers(cls, data: Any) -> Any:
        """Set the number of workers from the pool's size in GPUs or CPUs. A conflicting number is reported by
        validation.
        """
        rollout = data.get("rollout") if isinstance(data, Mapping) else None
        if not isinstance(rollout, Mapping):
            return data
        _, reserved = written_launcher(data.get("launch"))
        gpus, cpus = (reserved.gpus, reserved.cpus) if reserved else (None, None)
        for key, each in (
            ("pool_gpus", written_devices_per_worker(rollout.get("engine", {})) if gpus is None else gpus),
            ("pool_cpus", rollout.get("threads", 1) if cpus is None else cpus),
        ):
            size, each = rollout.get(key), 1 if each == "auto" else each
            if isinstance(size, int) and isinstance(each, int | float) and each > 0 and size >= each:
                return {**data, "rollout": _filled(rollout, "num_workers", int(size // each))}
        return data

    @model_validator(mode="after")
    def _auto_becomes_a_device(self) -> Self:
        """Replace `device: auto`, so that no code that reads a RunConfig sees it."""
        chosen = choose_devices(self)
        replaced: dict[str, Settings] = {}
        if self.trainer.device != chosen.trainer:
            replaced["trainer"] = self.trainer.model_copy(update={"device": chosen.trainer})
        if self.rollout.engine.device != chosen.engine:
            engine = self.rollout.engine.model_copy(update={"device": chosen.engine})
            replaced["rollout"] = self.rollout.model_copy(update={"engine": engine})
        start = self.warm_start
        if start is not None and start.sft.device == AUTO:
            sft = start.sft.model_copy(update={"device": chosen.trainer})
            replaced["warm_start"] = start.model_copy(update={"sft": sft})
        for section, settings in replaced.items():
            object.__setattr__(self, section, settings)  # immutable for everybody else
        return self

    @property
    def is_colocated(self) -> bool:
        """placement: colocated"""
        return self.placement == "colocated"

    @property
    def samples_per_step(self) -> int:
        """groups_per_step * group_size"""
        return self.groups_per_step * self.group_size

    @property
    def trained_groups_per_step(self) -> int:
        """groups_per_step + replay_buffer.groups_per_step"""
        return self.groups_per_step + (0 if self.replay_buffer is None else self.replay_buffer.groups_per_step)

    @property
    def num_updates(self) -> int:
        """num_steps * trainer.passes_per_batch * trainer.mini_batches"""
        return self.num_steps * self.trainer.passes_per_batch * self.trainer.mini_batches

    @property
    def num_groups(self) -> int:
        """num_steps * groups_per_step"""
        return self.num_steps * self.groups_per_step

    @property
    def max_groups_in_flight(self) -> int | None:
        """(max_staleness + 1) * groups_per_step; None when unbounded"""
        bound = self.staleness.bound
        return None if bound is None else (bound + 1) * self.groups_per_step

    @property
    def max_samples_in_flight(self) -> int | None:
        """(max_staleness + 1) * groups_per_step * group_size; None when unbounded"""
        groups = self.max_groups_in_flight
        return None if groups is None else groups * self.group_size

    @property
    def num_slots(self) -> int:
        """rollout.num_workers * rollout.engine.num_slots"""
        return self.rollout.num_workers * self.rollout.engine.num_slots

    @property
    def worker_capacity(self) -> int:
        """engine.num_slots + queue_samples (as many as slots when 0): samples one worker holds"""
        return self.rollout.capacity_of(self.rollout.engine.num_slots)

    @property
    def max_sampled_tokens_per_step(self) -> int:
        """groups_per_step * group_size * sampling.max_new_tokens"""
        return self.samples_per_step * self.sampling.max_new_tokens

    @property
    def max_trained_tokens_per_step(self) -> int:
        """groups_per_step * group_size * rollout.engine.max_context"""
        return self.samples_per_step * self.rollout.engine.max_context

    @property
    def data_seed(self) -> int:
        """data.seed, or the run's seed"""
        return self.seed if self.data.seed is None else self.data.seed

    @property
    def rollout_devices(self) -> tuple[str, ...]:
        """Device of each rollout worker: plain `cuda` and several workers mean one GPU each (or as many
        in a row as its engine takes, named by the first), without the trainer's GPUs unless they are shared."""
        engine, count = self.rollout.engine, self.rollout.num_workers
        device = resolved(engine.device)
        if launcher_of(self).chooses_gpus:
            return (device,) * count
        width = engine_of(self).devices_per_worker(engine)
        if device != "cuda" or count * width == 1:
            return (device,) * count
        others = () if self.is_colocated else self.trainer_devices
        taken = {index for other in others if (index := index_of(other)) is not None}
        return tuple(f"cuda:{index}" for index in first_gpus(count, width, taken))

    @property
    def trainer_devices(self) -> tuple[str, ...]:
        """Device of each rank of the trainer: one GPU each, from trainer.device upwards."""
        first = index_of(self.trainer.device)
        if first is None or launcher_of(self).chooses_gpus:
            return (self.trainer.device,) * self.trainer.ranks
        return tuple(f"cuda:{first + rank}" for rank in range(self.trainer.ranks))

    @property
    def held_out_scorers(self) -> list[str]:
        """names of the scorers with `held_out: true`"""
        scorers = self.reward.scorers
        return [name for name, scorer in zip(scorer_names(scorers), scorers, strict=True) if scorer.held_out]

    @property
    def client_addresses(self) -> dict[str, str]:
        """Addresses of clients by rollout worker, where samples are their conversations (workflow `traffic`); else
        empty"""
        options = self.rollout.workflow_options
        port, host = options.get("port"), str(options.get("host", "127.0.0.1"))
        if self.rollout.workflow != "traffic" or not isinstance(port, int):
            return {}
        host = f"[{host}]" if ":" in host else host
        return {f"rollout-{index}": f"http://{host}:{port + index}" for index in range(self.rollout.num_workers)}

    @property
    def train_sampling(self) -> Sampling:
        """`sampling` in the form sent with a task"""
        return task_sampling(self.sampling.model_copy(update={"stop": self._stop}))

    @property
    def eval_sampling(self) -> Sampling:
        """`eval` in the form sent with a task: its own temperature, top_p and top_k; stop settings of `sampling`"""
        return Sampling(
            temperature=self.eval.temperature,
            top_p=self.eval.top_p,
            top_k=self.eval.top_k,
            max_new_tokens=self.eval.max_new_tokens or self.sampling.max_new_tokens,
            stop_token_ids=self.sampling.stop_token_ids,
            stop=self._stop,
        )

    @property
    def _stop(self) -> tuple[str, ...]:
        """Emulated devices write no text that could be looked at."""
        return () if self.emulation is not None else self.sampling.stop


def task_sampling(settings: SamplingSettings) -> Sampling:
    """The section `sampling` in the form sent with a task of training."""
    fields = settings.model_dump(exclude={"forced_lengths", "stop"})
    is_forced = settings.forced_lengths is not None
    return Sampling(**fields, stop=() if is_forced else settings.stop, ignore_eos=is_forced)


def _filled(section: Any, key: str, value: object) -> Any:
    """Return the section with `key` set to `value` unless the user has set it."""
    if section is None:
        return {key: value}
    if isinstance(section, Settings):
        return section if key in section.model_fields_set else section.model_copy(update={key: value})
    return {key: value, **section} if isinstance(section, Mapping) else section


def _replaced(section: Any, key: str, value: object) -> Any:
    """Return the section with `key` set to `value`, replacing any value."""
    if isinstance(section, Settings):
        return section.model_copy(update={key: value})
    return {**(section or {}), key: value} if section is None or isinstance(section, Mapping) else section


def _get(section: Any, key: str) -> Any:
    return section.get(key) if isinstance(section, Mapping) else None
