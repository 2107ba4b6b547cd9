"""Converts one RunConfig to the specs of its processes and the settings of the coordinator.

Processes are started in cli/jobs.py and launch/. This module and controller/config/run_config.py are the only
controller modules that import the middle layer, and only its torch-free parts.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from areal_like.config import ModelSettings, ProcessSpec, TraceSettings
from areal_like.external.records import records_file
from areal_like.settings import DType
from areal_like.trace import DETAIL_SHARE
from areal_like.transport.credentials import process_folder
from controller.config.launchers import launcher_of
from controller.config.run_config import RunConfig
from controller.run_folder.run_folder import RunFolder
from trainer.prepare_spec import PrepareSpec

Role = Literal["rollout", "trainer", "reward"]
MODULES: dict[Role, str] = {"rollout": "rollout", "trainer": "trainer", "reward": "services.reward"}
"""`python -m` name of each role."""
PREPARATION = "trainer.prepare"
FORKED = frozenset({*MODULES.values(), PREPARATION})
"""Modules whose imports take a second of a core or more: torch and transformers, or pydantic and asyncio's servers."""
SCORER_CHECK = "services.reward.check_functions"
ENVIRONMENT_CHECK = "services.environment.check_environment"
WORKFLOW_CHECK = "rollout.check_workflow"
ENGINE_CHECK = "rollout.check_engine"
OBJECTIVE_CHECK = "trainer.check_objectives"
"""`python -m` names of the processes that test the import of the user's scorers, environment, workflow, engine, loss
and advantages.
"""
SERVER = "rollout.serve"
"""`python -m` name of the server that `areal-like serve` executes."""
PROBE_ANSWERS, TRY_ANSWERS, PROBE_LOGPROBS = (
    "rollout.probe_answers",
    "services.reward.try_answers",
    "trainer.probe_logprobs",
)
"""`python -m` names of the processes of `areal-like probe`, in addition to PREPARATION."""
SPOT_LOGPROBS = "trainer.spot_logprobs"
"""`python -m` name of the process of `areal-like verify --spot`."""
EVENTS_PER_SAMPLE = 4
"""Trace events of a sample in a rollout worker: its slot, generation, score, and the start of its arrow."""
SCORE_EVENTS_PER_SAMPLE = 2
"""Trace events of a sample in the reward service."""


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Addresses:
    """Addresses of the processes of a run."""

    hub: str
    rewards: tuple[str, ...]
    """The run's own reward services, in the order of `reward_names`; empty if it uses shared ones."""
    weight_dir: Path
    keys: Path
    """Folder of the run's credentials; each process has its own subfolder."""
    ranks: str = ""
    """Where the trainer's ranks meet."""


def worker_names(config: RunConfig) -> list[str]:
    """Names of the rollout workers."""
    return [f"rollout-{index}" for index in range(config.rollout.num_workers)]


def reward_names(config: RunConfig) -> list[str]:
    """Names of the reward services that the run starts: none if it uses shared ones, or needs none."""
    if config.reward.addresses or not config.reward.is_needed:
        return []
    count = config.reward.num_services
    return ["reward"] if count == 1 else [f"reward-{index}" for index in range(count)]


def worker_number(name: str) -> int:
    """The number at the end of a rollout worker's name."""
    return int(name.rpartition("-")[2])


def new_worker_name(taken: Collection[str]) -> str:
    """The name with the lowest number that is not used by a rollout worker."""
    return next(name for name in (f"rollout-{index}" for index in itertools.count()) if name not in taken)


def trainer_names(config: RunConfig) -> list[str]:
    """Names of the trainer's ranks, in order: the first communicates with the controller, the others follow it."""
    return ["trainer", *(f"trainer-{rank}" for rank in range(1, config.trainer.ranks))]


def threads_for(config: RunConfig, role: Role) -> int:
    """Compute threads of a process: as configured, else one; all cores for engine and trainer (its ranks share them) in
    `mode: sync`."""
    configured = {"rollout": config.rollout.threads, "trainer": config.trainer.threads, "reward": 1}[role]
    if isinstance(configured, int):
        return configured
    if config.mode != "sync":
        return 1
    return max(1, num_cores() // config.trainer.ranks) if role == "trainer" else num_cores()


def process_spec(
    config: RunConfig,
    folder: RunFolder,
    addresses: Addresses,
    *,
    run_id: str,
    role: Role,
    name: str,
    model_dir: Path,
    lineage: str,
    resume_from: Path | None = None,
) -> ProcessSpec:
    """Spec of the process `name`."""
    return ProcessSpec(
        role=role,
        name=name,
        run_id=run_id,
        run_dir=str(folder.root),
        hub_address=addresses.hub,
        reward_addresses=config.reward.addresses or addresses.rewards,
        are_rewards_shared=bool(config.reward.addresses),
        reward_curve_dir=str(config.reward.keys_dir) if config.reward.addresses else None,
        reward_scorer=config.reward.ask_for or "",
        bind_address=addresses.rewards[reward_names(config).index(name)] if role == "reward" else None,
        curve_dir=str(process_folder(addresses.keys, name)),
        parent_pid=os.getpid(),
        seed=config.seed,
        num_threads=threads_for(config, role),
        heartbeat_s=config.launch.heartbeat_s,
        silence_s=config.launch.silence_s,
        controller_silence_s=config.launch.controller_silence_s,
        startup_timeout_s=config.launch.startup_timeout_s,
        mode=config.mode,
        is_colocated=config.is_colocated,
        model=_prepared(config.model, model_dir),
        sampling=config.sampling,
        max_context=config.rollout.engine.max_context,
        staleness=config.staleness,
        groups_per_step=config.trained_groups_per_step,
        group_size=config.group_size,
        num_steps=config.num_steps,
        weight_dir=str(addresses.weight_dir),
        weight_transfer=config.trainer.weights.kind,
        weight_options=config.trainer.weights.options,
        merges_adapters=config.trainer.lora is not None and config.trainer.lora.publish == "adapter",
        teacher_model=config.trainer.teacher_model,
        lineage=lineage,
        resume_from=str(resume_from) if resume_from else None,
        has_own_gpus=launcher_of(config).chooses_gpus,
        rank=trainer_names(config).index(name) if role == "trainer" else 0,
        num_ranks=config.trainer.ranks if role == "trainer" else 1,
        ranks_address=addresses.ranks if role == "trainer" else "",
        trace=trace_settings(config),
        emulation=config.emulation,
        settings=_section(config, folder, role, name),
    )


def trace_settings(config: RunConfig) -> TraceSettings:
    """Trace settings of each process of the run, including the controller."""
    if not config.metrics.trace:
        return TraceSettings()
    max_events = config.metrics.max_trace_events
    num_samples = config.num_steps * config.samples_per_step
    busiest = num_samples * max(EVENTS_PER_SAMPLE / config.rollout.num_workers, SCORE_EVENTS_PER_SAMPLE)
    per_step = config.metrics.trace_samples_per_step or config.samples_per_step
    every_group = max(1.0, busiest / (DETAIL_SHARE * max_events), config.samples_per_step / per_step)
    return TraceSettings(max_events=max_events, every_group=math.ceil(every_group))


def _prepared(model: ModelSettings, model_dir: Path) -> ModelSettings:
    return model.model_copy(update={"path": str(model_dir), "init": None, "tokenizer": "from_model"})


def _section(config: RunConfig, folder: RunFolder, role: Role, name: str) -> dict[str, object]:
    if role == "trainer":
        section = config.trainer.model_dump(mode="json")
        if config.encryption is not None:  # parts of ranks are read at random places, which encrypted files lack
            section["checkpoint"]["parts"] = "rank_0"
        return section
    if role == "reward":
        return config.reward.model_dump(mode="json")
    section = config.rollout.model_dump(mode="json")
    devices = config.rollout_devices  # a worker added during the run uses the device of a configured one
    section["engine"]["device"] = devices[worker_number(name) % len(devices)]
    for model in section["models"]:
        model["path"] = model["path"] and str(Path(model["path"]).expanduser().resolve())
        if (endpoint := model["endpoint"]) is not None and endpoint["records"] is None:
            endpoint["records"] = str(records_file(folder.root, f"model-{model['name']}"))
    return section


def prepare_spec(
    config: RunConfig, *, out_dir: Path, sft_rows: Path | None, status_path: Path, publish_to: Path | None = None
) -> PrepareSpec:
    """Spec of the preparation of the starting model."""
    sft = config.warm_start.sft if config.warm_start and sft_rows else None
    threads = sft.threads if sft and isinstance(sft.threads, int) else num_cores()
    return PrepareSpec(
        run_id=f"prepare-{os.getpid()}",
        parent_pid=os.getpid(),
        seed=config.seed,
        model=config.model,
        out_dir=str(out_dir),
        sft_rows=str(sft_rows) if sft_rows else None,
        sft=sft,
        num_threads=threads,
        status_path=str(status_path),
        publish_to=str(publish_to) if publish_to else None,
        publish_kind=config.trainer.weights.layout,
        prompt_template=config.rollout.prompt_template,
        add_bos=config.rollout.add_bos,
    )


def pinned_facts(config: RunConfig) -> dict[str, object]:
    """The settings that the prepared model depends on; equal facts mean an equal model (the cache key)."""
    return {
        "seed": config.seed,
        "data_seed": config.data_seed,
        "model": config.model.model_dump(mode="json"),
        "warm_start": config.warm_start.model_dump(mode="json", exclude={"sft": {"threads", "log_every"}})
        if config.warm_start
        else None,
        "prompt": [config.rollout.prompt_template, config.rollout.add_bos] if config.warm_start else None,
    }


def serve_spec(model: str, *, dtype: DType, out_dir: Path, publish_to: Path) -> PrepareSpec:
    """Spec of the preparation of a model for serving: no run, no supervised steps."""
    return PrepareSpec(
        run_id=f"serve-{os.getpid()}",
        parent_pid=os.getpid(),
        seed=0,
        model=ModelSettings(path=model, dtype=dtype),
        out_dir=str(out_dir),
        num_threads=num_cores(),
        publish_to=str(publish_to),
        publish_kind="disk",
    )
