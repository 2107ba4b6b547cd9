"""The commands that run a job: train, resume, sft, evaluate.

Creates the run folder and checks on resume that its data has not changed. The run itself is in runtime/session.py.

state.json of a run contains the command that created the folder, the folder in which it was started (`resume` resolves
relative paths of the config and the user's modules there as well) and fingerprints of its data.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import shutil
import sys
from collections.abc import Coroutine, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from areal_like import __version__
from areal_like.config import dump_yaml
from areal_like.encryption.files import read_text, write_text
from areal_like.encryption.run_key import MARKER, check_key, encrypt_folder, encrypted_root, run_key_of
from areal_like.errors import UserError
from areal_like.plain_folder import protect_process
from areal_like.process import private_files
from controller.config.earlier_versions import upgrade
from controller.config.launchers import launcher_of
from controller.config.loading import build
from controller.config.offline_config import OfflineConfig
from controller.config.run_config import RunConfig
from controller.data.cleaned_rows import as_recorded
from controller.data.job_rows import JobRows, Tables, refuse_changed
from controller.data.origins import record_data
from controller.launch.local import LocalLauncher
from controller.ledger.run_lock import lock_folder
from controller.preflight.machine import unused_gpus
from controller.preflight.train_stages import CleanedTrain, counts
from controller.report.slices import as_text
from controller.run_folder.registry import enlist
from controller.run_folder.run_folder import FOLDER_FILE, RunFolder, Status
from controller.run_folder.run_notes import write_notes
from controller.runtime.model_preparation import prepare, prepare_process
from controller.runtime.outcome import as_operation
from controller.runtime.session import RunSession
from controller.runtime.signals import Signals
from controller.telemetry.display import Display
from controller.telemetry.journal import newest_row
from controller.telemetry.status import StatusFile
from controller.telemetry.watched_metric import EARLY_STOP

INTERRUPTED = 130
SFT_GRACE_S = 2.0


@private_files()
def train(
    config: RunConfig, *, source: str = "", tables: Tables | None = None, cleaned: CleanedTrain | None = None
) -> int:
    """Run a job in a new folder; return the exit status. Raises UserError, OperationError.

    tables: its rows, if they were already read. cleaned: what its stages kept, if they were already run.
    """
    if config.data.train.stages:
        folder, rows = _start_cleaned(config, source, tables, cleaned)
    else:
        rows = JobRows.load(config, tables=tables)
        folder = new_folder(config, config.name, "train", rows.fingerprints, source=source)
    record_data(as_recorded(config, folder.root), folder.root)
    rows.record_epochs(folder.root)
    return run_to_end(RunSession(config, folder, rows).run())


def _start_cleaned(
    config: RunConfig, source: str, tables: Tables | None, cleaned: CleanedTrain | None
) -> tuple[RunFolder, JobRows]:
    """Make the folder of a run with stages, with the rows that they keep, and read these rows."""
    cleaned = cleaned or CleanedTrain(config)
    folder = new_folder(config, config.name, "train", {}, source=source)
    cleaned.move_to(folder.root)
    rows = JobRows.load(as_recorded(config, folder.root), tables=Tables(eval=tables.eval if tables else None))
    folder.write_state("running", data=rows.fingerprints, cleaning=counts(cleaned.report))
    return folder, rows


@private_files()
def resume(run: Path, *, accept_loss: bool = False, past_early_stop: bool = False) -> int:
    """Continue an interrupted or crashed run from its last checkpoint and ledger; return the exit status.

    past_early_stop: continue also a run that early_stop has ended, without that rule.

    accept_loss: continue even if files of the run are missing or older than others, from the newest state they share.
    """
    folder = RunFolder.find(run)
    folder.refuse_if_running()
    state = folder.read_state()
    if (command := state.get("command", "train")) != "train":
        raise UserError(
            f"the folder was created by `areal-like {command}`, which cannot be resumed",
            where=str(folder.root),
            remedy=f"run `areal-like {command}` again",
        )
    has_stopped_early = str(state.get("reason", "")).startswith(EARLY_STOP)
    if state.get("status") == "finished" and has_stopped_early and not past_early_stop:
        remedy = f"run areal-like resume --past-early-stop {folder.root} to continue without early stopping"
        raise UserError(f"the run is finished ({state['reason']})", where=str(folder.root), remedy=remedy)
    if state.get("status") == "finished" and not has_stopped_early:
        raise UserError(
            "the run is finished", where=str(folder.root), remedy="start a new run with more steps (num_steps=...)"
        )
    if run_key_of(folder.root) is not None:
        protect_process(folder.root)
    if (home := Path(state.get("started_in", "."))).is_dir():
        os.chdir(home)
    # Prepared models are next to the run, even if the folder of runs was moved.
    config = read_config(folder).model_copy(update={"runs_dir": str(folder.root.parent)})
    if config.encryption is not None and encrypted_root(folder.root) is None:
        what = f"the run is not encrypted ({MARKER} is missing), and a run cannot be encrypted after its start"
        remedy = f"remove encryption from {folder.config}, or start a new run; restore {MARKER} if it was removed"
        raise UserError(what, where="encryption", remedy=remedy)
    if past_early_stop or state.get("past_early_stop"):
        config = config.model_copy(update={"early_stop": None})
    rows = JobRows.load(as_recorded(config, folder.root), root=folder.root)
    _refuse_other_data(state.get("data"), rows, folder)
    rows.record_epochs(folder.root)
    if past_early_stop:
        folder.write_state("stopped", past_early_stop=True)
    if (mode := folder.make_private()) is not None:
        what = f"{folder.root} was accessible to other users (mode {mode:o})"
        print(f"warning: {what}; its permissions were changed so that only you can access it", file=sys.stderr)
    for note in unused_gpus(config) if launcher_of(config).is_one_machine else ():
        print(f"note: {note}", file=sys.stderr)
    enlist(folder)
    announce(folder)
    return run_to_end(RunSession(config, folder, rows, is_resume=True, accept_loss=accept_loss).run())


@private_files()
def evaluate(config: RunConfig, *, tables: Tables | None = None) -> int:
    """Score the model on data.eval and print the accuracy; return the exit status.

    A model given by model.path is scored unchanged: warm_start is ignored.
    """
    if config.model.path is not None and config.warm_start is not None:
        print(f"evaluating {config.model.path} without a warm start: warm_start is ignored")
        config = config.model_copy(update={"warm_start": None})
    rows = JobRows.load(config, needs_train=False, tables=tables)
    if rows.eval_table is None:
        raise UserError(
            "there is no evaluation data",
            where="data.eval",
            remedy="specify a data set, for example data.eval.path=test.jsonl",
        )
    folder = new_folder(config, f"{config.name}-eval", "eval", rows.fingerprints)
    config = config.model_copy(update={"num_steps": 0, "eval": config.eval.model_copy(update={"at_start": True})})
    status = run_to_end(RunSession(config, folder, rows, is_evaluation=True).run())
    if config.eval.slices and (found := newest_row(folder.metrics, "slices")) is not None:
        print(f"\n{as_text(found)}", end="")
    return status


@private_files()
def sft(config: RunConfig) -> int:
    """Run only the supervised warm start and write the model to `out` (or the run folder); return the exit status."""
    if config.warm_start is None:
        raise UserError(
            "the config has no supervised warm start",
            where="warm_start",
            remedy="set warm_start.data and warm_start.sft",
        )
    out_dir = Path(config.out).expanduser().resolve() if config.out else None
    if out_dir is not None and out_dir.exists() and not (out_dir.is_dir() and not any(out_dir.iterdir())):
        raise UserError("already exists", where=f"out: {out_dir}", remedy="choose a new folder")
    folder = new_folder(config, f"{config.name}-sft", "sft", {})
    out_dir = out_dir or folder.final
    if not run_to_end(_supervise(config, folder, out_dir)):
        print("the command was stopped, and no model was written")
        return INTERRUPTED
    Console(soft_wrap=True, highlight=False, markup=False).print(f"model: {out_dir}")
    return 0


def read_config(folder: RunFolder) -> RunConfig:
    """Read the resolved configuration of a run, also of a run that an earlier version started. Raises UserError if it
    is damaged.
    """
    check_key(folder.root)
    try:
        data = yaml.safe_load(read_text(folder.config))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(
            f"the file cannot be read ({error})",
            where=str(folder.config),
            remedy="restore the file from a backup, or start a new run",
        ) from error
    config, problems = build(upgrade(data) if isinstance(data, dict) else {})
    if config is None or problems:
        raise UserError("; ".join(str(problem) for problem in problems), where=str(folder.config))
    return config


def new_folder(
    config: RunConfig | OfflineConfig,
    name: str,
    command: str,
    data: Mapping[str, str],
    *,
    source: str = "",
    **facts: str,
) -> RunFolder:
    """Create the folder of a new run, with its resolved configuration and state.json.

    Args:
        config: configuration of the job.
        name: name of the folder in runs_dir; a number is appended if it is taken.
        command: the command that creates it.
        data: fingerprints of its rows by key.
        source: file of the configuration.
        facts: additional entries of state.json.

    Raises:
        UserError: the folder cannot be created.
    """
    folder = RunFolder.create(Path(config.runs_dir).expanduser(), name)
    if isinstance(config, RunConfig) and config.encryption is not None:
        try:
            encrypt_folder(folder.root, config.encryption)
        except UserError:
            shutil.rmtree(folder.root)
            raise
        protect_process(folder.root)
    if isinstance(config, RunConfig) and (config.notes or config.tags):
        write_notes(folder.root, config.notes, config.tags)
    write_text(folder.config, (f"# resolved from {source}\n" if source else "") + dump_yaml(config))
    folder.write_state(
        "running", command=command, started_in=str(Path.cwd()), data=dict(data), **facts, **_environment()
    )
    enlist(folder)
    announce(folder)
    return folder


def announce(folder: RunFolder) -> None:
    """Report the run's folder to the process that started this one, if it requested it. Processes of the run do not
    inherit the variable.
    """
    if target := os.environ.pop(FOLDER_FILE, ""):
        fresh = Path(f"{target}.tmp")
        fresh.write_text(str(folder.root))
        fresh.replace(target)


def _environment() -> dict[str, object]:
    """Versions and hardware of the run's environment, for its report."""
    versions = {"areal_like": __version__}
    for name in ("torch", "transformers", "numpy", "pyzmq"):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {"python": platform.python_version(), "platform": platform.platform(), "versions": versions}


def _refuse_other_data(recorded: object, rows: JobRows, folder: RunFolder) -> None:
    """Raise UserError if the data has changed: draws are row numbers, so the ledger would refer to other prompts."""
    if not isinstance(recorded, dict) or not recorded:
        raise UserError(
            "the file does not record the data that the run was started with",
            where=str(folder.state),
            remedy="restore the file from a backup, or start a new run",
        )
    found = rows.fingerprints
    changed = [key for key, fingerprint in recorded.items() if found.get(key) != fingerprint]
    refuse_changed(changed)


def run_to_end(work: Coroutine[Any, Any, int]) -> int:
    """Call asyncio.run and convert errors of the operating system to OperationError or UserError."""
    try:
        return asyncio.run(work)
    except OSError as error:
        raise as_operation(error) from error


async def _supervise(config: RunConfig, folder: RunFolder, out_dir: Path) -> int:
    """Run the supervised steps; return 1 when they are done, 0 when stopped."""
    launcher = LocalLauncher(folder.logs)
    status = StatusFile(folder.status, run=folder.name, num_steps=0)
    lock = lock_folder(folder.root)
    with Signals() as stop, Display(config.metrics.display) as display:
        try:
            async with status.preparing(lambda: display.progress_text, lambda: prepare_process(launcher)):
                prepared = await stop.unless_asked(prepare(config, folder, launcher, display, out_dir=out_dir))
        except BaseException as error:
            status.end("failed")
            folder.write_state("failed", reason=str(error))
            raise
        finally:
            await launcher.stop_all(SFT_GRACE_S)
            os.close(lock)
    end: Status = "finished" if prepared else "stopped"
    status.end(end)
    folder.write_state(end)
    return int(prepared is not None)
