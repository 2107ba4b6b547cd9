"""What this machine lacks for a config: model, data, folders, port, packages, devices. Looked at before any start.

Owns: the look. Refuses: contradictions inside the config (run.py), starting anything, importing torch. What
another machine may well have (a GPU, a free port) stops a start here, and is only a remark to `validate`.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import psutil

from areal_like.context_limit import context_limit
from areal_like.decoder_shape import DecoderShape
from areal_like.emulation.machines import gpu_named
from areal_like.errors import UserError
from areal_like.import_path import is_import_path
from controller.config import model_folder
from controller.config.backends import backend_of
from controller.config.engines import as_problems, engine_job, engine_of, group_problems, model_problems
from controller.config.launchers import launcher_of
from controller.config.memory.estimate import shape_of_run
from controller.config.memory.fit import fit_problems, fit_remarks, with_smallest_change
from controller.config.problems import Problem
from controller.config.run_config import RunConfig, missing, silent_endpoints
from controller.config.trainer_memory import (
    adapter_parameters,
    host_problem,
    memory_problem,
    parameters_of,
    trainer_state,
)
from controller.config.validation.lora import target_problems
from controller.config.validation.pool_sizes import fit_problem, gpus_of_run
from controller.data.forced_lengths import KEY, forced_lengths
from controller.data.gold_answers import gold_answers
from controller.data.job_rows import Tables
from controller.data.table import Table, load_demonstrations, load_eval, load_train
from controller.launch.choice import survey
from controller.preflight import chat_format, model_init, user_code
from controller.preflight.reward_services import problems_of
from controller.telemetry.sink_kinds import is_installed, sinks_of
from controller.wiring.process_specs import (
    ENGINE_CHECK,
    ENVIRONMENT_CHECK,
    OBJECTIVE_CHECK,
    SCORER_CHECK,
    WORKFLOW_CHECK,
)
from controller.wiring.scoring import sandbox_problems

MIN_WORKER_BYTES = 100_000_000
"""Memory of its own that a rollout worker takes at least, whatever the model: torch and transformers alone."""
SMI_TIMEOUT_S = 20.0
NUM_TRIED_ROWS = 2
Purpose = Literal["train", "sft", "eval", "validate", "probe"]


@dataclass
class Preflight:
    """What was found. `absent` is what only this machine lacks."""

    problems: list[Problem] = field(default_factory=list)
    absent: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    train: Table | None = None
    eval: Table | None = None
    model: dict[str, Any] | None = None
    """config.json of model.path, where it could be read."""
    seats: list[str] = field(default_factory=list)
    """Who would sit where on the cluster, a line per node."""
    device_bytes: float | None = None
    """Memory of the GPU that the config names, else of this machine's largest; None: not known."""

    @property
    def tables(self) -> Tables:
        """For the job: reading large data sets takes long, and once is enough."""
        return Tables(self.train, self.eval)


def look(config: RunConfig, purpose: Purpose) -> Preflight:
    """Check everything `purpose` needs."""
    found = Preflight()
    _look_at_model(config, found)
    if purpose != "sft":
        found.problems += chat_format.problems_of(config)
    if purpose in ("train", "validate", "probe"):
        found.train = _table("data.train", lambda: load_train(config), found, purpose)
    if purpose in ("train", "validate", "eval"):
        found.eval = _table("data.eval", lambda: load_eval(config), found, purpose)
    if purpose != "eval":
        _table("warm_start.data", lambda: load_demonstrations(_one_demonstration(config)), found, purpose)
    if purpose == "eval" and config.data.eval is None:
        found.problems.append(
            Problem(("data.eval",), "is needed to evaluate", "data.eval.path=... (or dataset, generator)")
        )
    if purpose == "sft" and config.warm_start is None:
        found.problems.append(Problem(("warm_start",), "is needed for supervised steps", "give warm_start.data"))
    try:
        forced_lengths(config)
    except UserError as mistake:
        found.problems.append(_as_problem(KEY, mistake))
    found.problems += _folders(config)
    found.problems += _packages(config)
    is_here = launcher_of(config).is_one_machine or purpose == "sft"
    engine, job = engine_of(config), engine_job(config)
    for lack in engine.environment_problems(job) if purpose != "sft" and is_here else ():
        (found.absent if lack.is_local else found.problems).extend(as_problems([lack]))
    if purpose != "sft" and not found.problems:  # a missing module is named already
        own = {
            SCORER_CHECK: _own_scorers(config),
            ENVIRONMENT_CHECK: _own_environment(config),
            WORKFLOW_CHECK: _own_workflow(config),
            ENGINE_CHECK: _own_engine(config),
            OBJECTIVE_CHECK: _own_objectives(config),
        }
        for checker, functions in own.items():
            tries = _gold(found.train) if checker == SCORER_CHECK and config.rollout.workflow == "single_turn" else []
            found.problems += user_code.problems_of(
                checker, functions, config.launch.startup_timeout_s, tries, config.reward.timeout_s
            )
    if is_here:
        found.absent += _devices(config)
        found.notes += _unused_gpus(config)
    if purpose != "sft":
        found.absent += problems_of(config)
        found.absent += [Problem((f"reward.{key}",), *words) for key, *words in silent_endpoints(config.reward)]
        found.absent += [Problem((f"reward.{key}",), *words) for key, *words in sandbox_problems(config.reward)]
    found.absent += _port(config)
    if purpose in ("train", "validate"):
        _look_at_memory(config, found, is_here)
    if is_here:
        found.absent += _room_for_workers(config)
    elif purpose == "validate":  # a run looks when it has its folder, which every node must see
        seen = survey(config)
        found.problems, found.absent, found.seats = (
            found.problems + seen.problems,
            found.absent + seen.absent,
            seen.seats,
        )
    return found


def _one_demonstration(config: RunConfig) -> RunConfig:
    """The config with one generated demonstration instead of all: enough to see that they can be made."""
    start = config.warm_start
    if start is None or start.data.generator is None:
        return config
    data = start.data.model_copy(update={"limit": 1})
    return config.model_copy(update={"warm_start": start.model_copy(update={"data": data})})


def _as_problem(key: str, error: UserError) -> Problem:
    what = error.what if error.where.startswith(key) or not error.where else f"{error.where}: {error.what}"
    if error.where.startswith(f"{key}: "):
        what = f"{error.where.removeprefix(f'{key}: ')}: {error.what}"
    return Problem((key,), what, error.remedy)


def _table(key: str, load: Callable[[], Table | None], found: Preflight, purpose: Purpose) -> Table | None:
    try:
        table = load()
    except UserError as error:
        problem = _as_problem(key, error)
        if key == "data.eval" and purpose != "eval":
            problem = replace(problem, remedy=f"{problem.remedy}; data.eval=null disables evaluation")
        found.problems.append(problem)
        return None
    if table is not None and table.skipped:
        found.notes.append(f"{key}: {len(table.skipped)} rows skipped, the first because: {table.skipped[0]}")
    return table


def _look_at_model(config: RunConfig, found: Preflight) -> None:
    path = config.model.path
    if path is None:
        found.problems += model_init.problems_of(config.model.init or {})
        tokenizer = config.model.tokenizer
        if tokenizer not in ("bytes", "from_model") and ":" not in tokenizer:
            found.problems += _faults_of_tokenizer(tokenizer)
        return
    errors, found.model, is_here = model_folder.problems_of(path, config.model.tokenizer)
    found.problems += [_as_problem("model.path", error) for error in errors]
    if not is_here:
        found.notes.append(f"model.path: {path} is not on this machine and will be downloaded from the hub")
    if not errors and (config.trainer.lora is not None or config.warm_start is not None):
        found.problems += target_problems(config, model_folder.tensor_shapes(path))
    if found.model:
        found.problems += model_problems(config, found.model)
        if config.trainer.weights.transfer.needs_process_group:
            found.problems += group_problems(config, found.model)
    limit = context_limit(found.model or {})
    if limit is not None and (excess := limit.excess(config.rollout.engine.max_context)):
        found.problems.append(Problem(("rollout.engine.max_context",), excess, limit.remedy))


def _faults_of_tokenizer(name: str) -> Iterator[Problem]:
    try:
        model_folder.check_tokenizer(Path(name).expanduser())
    except UserError as error:
        yield _as_problem("model.tokenizer", error)


def _folders(config: RunConfig) -> Iterator[Problem]:
    for key, name in (("runs_dir", config.runs_dir), ("out", config.out)):
        if name is None:
            continue
        fault = _cannot_write(Path(name).expanduser())
        if fault:
            yield Problem(
                (key,), f"`{name}` cannot be written ({fault})", f"make it writable, or name another: {key}=..."
            )


def _cannot_write(folder: Path) -> str:
    """Why nothing can be made in a folder that may not exist yet; empty if it can."""
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        return f"{folder} is a file"
    try:
        with tempfile.TemporaryDirectory(prefix=".areal_like-", dir=folder):
            return ""
    except OSError as error:
        return f"{folder}: {error.strerror}"


def _packages(config: RunConfig) -> Iterator[Problem]:
    if config.trainer.attention == "flash_attn" and find_spec("flash_attn") is None:
        yield Problem(
            ("trainer.attention",),
            "flash_attn is not installed",
            "pip install 'areal-like[flash-attn]', or trainer.attention: auto (torch's own kernel)",
        )
    for required in backend_of(config).packages:
        if find_spec(required.module) is None:
            yield Problem(("trainer.backend",), f"{required.module} is not installed", required.remedy)
    package = launcher_of(config).package
    if package and find_spec(package) is None:
        remedy = f"pip install 'areal-like[{package}]', or kind: local"
        yield Problem(("launch.kind",), f"{package} is not installed", remedy)
    for sink in sinks_of(config.metrics):
        if not is_installed(sink.package):
            yield Problem((sink.key,), f"{sink.package} is not installed", sink.remedy)
    for key, what, remedy in missing(config.reward):
        yield Problem((f"reward.{key}",), what, remedy)
    named = [(f"reward.scorers.{index}.kind", scorer.kind) for index, scorer in enumerate(config.reward.scorers)]
    named.append(("rollout.workflow", config.rollout.workflow))
    if config.reward.environment is not None:
        named.append(("reward.environment.kind", config.reward.environment.kind))
    for key, name in named:
        module, colon, _ = name.partition(":")
        if colon and PathFinder.find_spec(module.partition(".")[0], [str(Path.cwd()), *sys.path]) is None:
            yield Problem((key,), f"there is no module `{module}`", "put it in the current folder, or install it")


def _gold(table: Table | None) -> list[tuple[dict[str, Any], str]]:
    """The first rows with their gold answers, in the forms that a model may write."""
    rows = [dict(table[index]) for index in range(min(len(table), NUM_TRIED_ROWS))] if table is not None else []
    return [(rows[row], response) for row, column, response in gold_answers(rows) if column == "answer"]


def _own_scorers(config: RunConfig) -> dict[str, tuple[str, dict[str, Any]]]:
    """The user's functions that this run's own services will call, by key."""
    scorers = () if config.reward.addresses else config.reward.scorers
    return {
        f"reward.scorers.{index}.kind": (scorer.kind, scorer.options)
        for index, scorer in enumerate(scorers)
        if ":" in scorer.kind
    }


def _own_environment(config: RunConfig) -> dict[str, tuple[str, dict[str, Any]]]:
    """The user's environment, or options of a built-in one, where this run's own services run it."""
    environment = None if config.reward.addresses else config.reward.environment
    if environment is None or not (":" in environment.kind or environment.options):
        return {}
    return {"reward.environment": (environment.kind, environment.options)}


def _own_workflow(config: RunConfig) -> dict[str, tuple[str, dict[str, Any]]]:
    name = config.rollout.workflow
    has_options = bool(config.rollout.workflow_options)
    return {"rollout.workflow": (name, config.rollout.workflow_options)} if ":" in name or has_options else {}


def _own_engine(config: RunConfig) -> dict[str, tuple[str, dict[str, Any]]]:
    engine = config.rollout.engine
    return {"rollout.engine.kind": (engine.kind, {})} if is_import_path(engine.kind) else {}


def _own_objectives(config: RunConfig) -> dict[str, tuple[str, dict[str, Any]]]:
    """The user's loss and advantages, with their whole sections."""
    loss, advantage = config.trainer.loss, config.trainer.advantage
    has_critic = config.trainer.critic is not None
    found = {}
    if names := [kind for kind in (loss.kind, *(one.kind for one in loss.corrections)) if ":" in kind]:
        key = "trainer.loss.kind" if names[0] == loss.kind else "trainer.loss.corrections"
        found[key] = (", ".join(names), {"of": "loss", "has_critic": has_critic, **loss.model_dump(mode="json")})
    if ":" in advantage.kind:
        section = {"of": "advantage", "has_critic": has_critic, **advantage.model_dump(mode="json")}
        found["trainer.advantage.kind"] = (advantage.kind, section)
    return found


def _devices(config: RunConfig) -> Iterator[Problem]:
    keys = {"rollout.engine.device": config.rollout.engine.device, "trainer.device": config.trainer.device}
    wanted = [key for key, device in keys.items() if device.startswith("cuda")]
    if not wanted:
        return
    try:
        build = version("torch")
    except PackageNotFoundError:
        build = ""
    if build.endswith("+cpu"):
        yield Problem(
            tuple(wanted), f"needs CUDA, but the torch installed here ({build}) is the CPU build", "device: cpu"
        )
    num_gpus = _num_gpus()
    if num_gpus == 0:
        yield Problem(tuple(wanted), "needs CUDA, but there is no NVIDIA GPU on this machine", "device: cpu")
        return
    if (problem := fit_problem(config, num_gpus)) is not None:
        yield problem
        return
    for device in dict.fromkeys([*config.rollout_devices, *config.trainer_devices]):
        index = int(device.partition(":")[2] or 0) if device.startswith("cuda") else 0
        if index >= num_gpus:
            what = f"{device} is asked for, and this machine has {num_gpus} GPU{'s' if num_gpus > 1 else ''}"
            yield Problem(tuple(wanted), what, f"rollout.num_workers: {max(1, num_gpus - 1)}, or device: cuda:N")


def _unused_gpus(config: RunConfig) -> Iterator[str]:
    """A GPU here that the run leaves alone, which is easily overlooked: `device` is `cpu` unless it is set."""
    num_gpus, used = _num_gpus(), gpus_of_run(config)
    if config.emulation is not None or used >= num_gpus:
        return
    remedy = "" if used else "; rollout.engine.device: cuda and trainer.device: cuda use them"
    yield f"GPUs: this machine has {num_gpus}, and the run uses {used:g}{remedy}"


def _look_at_memory(config: RunConfig, found: Preflight, is_here: bool) -> None:
    """Of the trainer's devices: what none can hold is a problem, what those of this machine cannot hold is absent."""
    parameters = parameters_of(config, found.model)
    if parameters is None:
        return
    shape = shape_of_run(config, found.model)
    state = trainer_state(config, parameters, adapter_parameters(config, shape))
    named_bytes = None if config.hardware.gpu is None else gpu_named(config.hardware.gpu).memory
    gpu_bytes = _gpu_bytes() if is_here else 0.0
    if (problem := memory_problem(config, state, named_bytes)) is not None:
        found.problems.append(with_smallest_change(config, shape, named_bytes, problem))
    elif gpu_bytes and (problem := memory_problem(config, state, gpu_bytes)) is not None:
        found.absent.append(with_smallest_change(config, shape, gpu_bytes, problem))
    elif shape is not None:
        _look_at_estimate(config, shape, found, named_bytes, gpu_bytes)
    if is_here and (problem := host_problem(config, state, psutil.virtual_memory().total)) is not None:
        found.absent.append(problem)


def _look_at_estimate(
    config: RunConfig, shape: DecoderShape, found: Preflight, named_bytes: float | None, gpu_bytes: float
) -> None:
    """What does not fit by the estimate: on the GPU that the config names, or on those here."""
    found.device_bytes = named_bytes or gpu_bytes or None
    if named_bytes:
        found.problems += fit_problems(config, shape, named_bytes)
        found.notes += fit_remarks(config, shape, named_bytes)
    if gpu_bytes and gpu_bytes != named_bytes:
        found.absent += fit_problems(config, shape, gpu_bytes)
        found.notes += fit_remarks(config, shape, gpu_bytes)


def _gpu_bytes() -> float:
    """Memory of this machine's largest GPU; 0 where there is none or the driver does not say."""
    command = shutil.which("nvidia-smi")
    if not _num_gpus() or command is None:
        return 0.0
    arguments = [command, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(arguments, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=True).stdout
        return max(float(line) for line in said.splitlines()) * 2**20
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0.0


def _room_for_workers(config: RunConfig) -> Iterator[Problem]:
    """A slip of the hand (1000 workers) must not bring the machine down."""
    num_workers, total_bytes = config.rollout.num_workers, psutil.virtual_memory().total
    most = total_bytes // MIN_WORKER_BYTES
    if num_workers > most:
        what = f"{num_workers:,} rollout workers do not fit into the {total_bytes / 1e9:.0f} GB of this machine"
        yield Problem(("rollout.num_workers",), what, f"at most {most}; more workers than cores or GPUs bring no gain")


def _num_gpus() -> int:
    """NVIDIA GPUs that CUDA would show us, without asking torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = len([path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])
    return present if visible is None else min(present, len([part for part in visible.split(",") if part.strip()]))


def _port(config: RunConfig) -> Iterator[Problem]:
    launcher = launcher_of(config)
    host = launcher.host(config.launch)
    wanted = [(launcher.host_key, "launch.port", host, config.launch.port)] if host else []
    if (endpoint := config.metrics.prometheus) is not None:
        wanted.append(("metrics.prometheus.host", "metrics.prometheus.port", endpoint.host, endpoint.port))
    key, ports = engine_of(config).server_ports(engine_job(config))
    if launcher.is_one_machine:
        wanted += [(key, key, "127.0.0.1", port) for port in ports]
    for host_key, port_key, host, port in wanted:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
        except (OSError, OverflowError, ValueError) as error:  # ValueError: a name that cannot be a host's
            reason = getattr(error, "strerror", None) or str(error)
            key = port_key if "in use" in reason else host_key
            hint = launcher.host_hint if host_key == launcher.host_key else "127.0.0.1"
            remedy = f"{key}: 0 takes any free one" if key == port_key else f"{key}: {hint}"
            yield Problem((key,), f"{host}:{port} cannot be bound ({reason})", remedy)
