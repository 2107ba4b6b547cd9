"""Adapts the spec of an external worker to the machine on which it is started, and checks what this machine lacks.

The spec comes from the run's controller, with paths of the controller's machine. Each problem is a UserError of one
sentence. The connection and the process are in join.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pydantic

from areal_like.config import ProcessSpec, TraceSettings
from areal_like.device_names import names_cpu
from areal_like.errors import UserError
from areal_like.store_owner import OWNER_FILE
from areal_like.transport.credentials import write_credentials
from areal_like.transport.sockets import is_reachable
from areal_like.weights.registry import find_transfer
from areal_like.wire.messages import JoinOffer
from controller.config.engines import reads_weights, worker_problems
from controller.config.machine_gpus import usable_gpus
from controller.config.model_folder import weight_bytes
from controller.run_folder.run_folder import DamagedState, RunFolder
from controller.wiring.process_specs import num_cores

MODEL_OPTION = "give a copy of the model's folder on this machine with --model FOLDER"


@dataclass(frozen=True)
class Machine:
    """This machine, for one worker. folder: private folder for its files.

    device, model: as given on the command line; empty: as in the run. is_controllers: the controller runs here too.
    """

    folder: Path
    device: str = ""
    model: str = ""
    is_controllers: bool = False


def localized(offer: JoinOffer, machine: Machine) -> ProcessSpec:
    """The spec with which the worker is started here. Raises UserError if this machine cannot run it."""
    try:
        spec = ProcessSpec.model_validate_json(offer.spec)
    except pydantic.ValidationError as error:
        what = f"the run sent settings that this version of areal_like does not know ({error.error_count()} problems)"
        raise UserError(what, remedy="install the version of areal_like that the run uses") from error
    is_shared = sees_run(spec)
    run_dir = Path(spec.run_dir) if is_shared else machine.folder
    (run_dir / "logs").mkdir(exist_ok=True)
    settings = _settings(spec, run_dir, machine)
    changes: dict[str, Any] = {
        "parent_pid": os.getpid(),
        "run_dir": str(run_dir),
        "curve_dir": str(write_credentials(machine.folder / "keys", offer.keys)),
        "settings": settings,
        "trace": spec.trace if is_shared else TraceSettings(),
        "num_threads": num_cores() if spec.mode == "sync" and settings["threads"] == "auto" else spec.num_threads,
    }
    if offer.reward_keys:
        changes["reward_curve_dir"] = str(write_credentials(machine.folder / "reward-keys", offer.reward_keys))
    spec = spec.model_copy(update=changes)
    _check_addresses(spec, machine)
    _check_transfer(spec)
    _check_engine(spec)
    model_dir = _model_folder(spec, offer.model_files, machine)
    return spec.model_copy(update={"model": spec.model.model_copy(update={"path": str(model_dir)})})


def sees_run(spec: ProcessSpec) -> bool:
    """Return whether this machine sees the folder of the run, and not another one at the same path."""
    try:
        return bool(RunFolder(Path(spec.run_dir)).read_state().get("run_id") == spec.run_id)
    except (DamagedState, UserError, OSError):
        return False


def _settings(spec: ProcessSpec, run_dir: Path, machine: Machine) -> dict[str, Any]:
    """The section `rollout`, with a device and paths of this machine."""
    settings = {**spec.settings, "engine": {**spec.settings["engine"]}}
    device = str(settings["engine"]["device"])
    settings["engine"]["device"] = machine.device or (device if names_cpu(device) else "cuda")
    if not names_cpu(settings["engine"]["device"]) and spec.emulation is None and not usable_gpus():
        raise UserError(
            f"the engine uses a GPU ({settings['engine']['device']}), and this machine has none that torch can use",
            where="rollout.engine.device",
            remedy="start the worker on a machine with a GPU, or with --device cpu",
        )
    settings["models"] = [_called_model(model, Path(spec.run_dir), run_dir) for model in settings["models"]]
    return settings


def _called_model(model: Mapping[str, Any], theirs: Path, ours: Path) -> dict[str, Any]:
    if model["path"] and not Path(model["path"]).is_dir():
        raise UserError(
            f"the model {model['name']} is in {model['path']}, which is not on this machine",
            where="rollout.models",
            remedy="put a copy at the same path",
        )
    endpoint = model["endpoint"]
    if endpoint is None or not endpoint["records"] or not Path(endpoint["records"]).is_relative_to(theirs):
        return dict(model)
    records = ours / Path(endpoint["records"]).relative_to(theirs)
    return {**model, "endpoint": {**endpoint, "records": str(records)}}


def _check_addresses(spec: ProcessSpec, machine: Machine) -> None:
    """Raise UserError if reward services listen on an address that this machine cannot reach."""
    hidden = [
        address for address in spec.reward_addresses if not is_reachable(urlsplit(address).hostname or "127.0.0.1")
    ]
    if hidden and not machine.is_controllers:
        raise UserError(
            f"the run's reward service listens on {hidden[0]}, which only processes of its own machine reach",
            where="reward.addresses" if spec.are_rewards_shared else "launch.host",
            remedy="start the run with an IPv4 address that this machine reaches",
        )


def _check_transfer(spec: ProcessSpec) -> None:
    """Raise UserError if versions are files that this machine does not see."""
    transfer = find_transfer(spec.weight_transfer)
    if not transfer.scheme and not (Path(spec.weight_dir) / OWNER_FILE).is_file():
        raise UserError(
            f"the run passes weights through {spec.weight_dir}, which this machine does not see",
            where="trainer.weights.kind",
            remedy="start the run with trainer.weights.kind=stream, or with kind=disk and a shared_dir that both see",
        )


def _check_engine(spec: ProcessSpec) -> None:
    for problem in worker_problems(spec):
        raise UserError(problem.what, where=problem.keys[0], remedy=problem.remedy)


def _model_folder(spec: ProcessSpec, files: Mapping[str, bytes], machine: Machine) -> Path:
    """Folder with the model's config and tokenizer, and with its weights where they are needed.

    The run's own folder if this machine sees the same one, the given one, or a new one with the files that were sent.
    """
    theirs, has_files = Path(str(spec.model.path)), bool(files)
    given = Path(machine.model).expanduser().resolve() if machine.model else theirs
    if machine.model and (differing := _differing(given, files)):
        what = f"{differing} is missing or differs from the run's"
        raise UserError(what, where=f"--model {machine.model}", remedy="use a copy of the run's own model folder")
    if (given / "config.json").is_file() and not _differing(given, files):
        if not reads_weights(spec) or weight_bytes(given):
            return given
        what = "the folder has no weights, and the engine reads them when it starts"
        raise UserError(what, where=str(given), remedy=MODEL_OPTION)
    if reads_weights(spec) or not has_files:
        what = f"the model is in {theirs}, which is not on this machine, and the worker needs its files"
        raise UserError(what, where="model.path", remedy=MODEL_OPTION)
    folder = machine.folder / "model"
    folder.mkdir()
    for name, content in files.items():
        (folder / os.path.basename(name)).write_bytes(content)
    return folder


def _differing(folder: Path, files: Mapping[str, bytes]) -> str:
    """Name of the first file whose content in the folder is not that of the run; empty if all are the same."""
    for name, content in files.items():
        try:
            if (folder / name).read_bytes() != content:
                return name
        except OSError:
            return name
    return ""
