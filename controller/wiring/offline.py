"""Converts an OfflineConfig to the spec of its process, and checks its rows before a run starts. torch is not imported.

The process is started in runtime/offline_session.py.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from areal_like.errors import UserError
from controller.config.offline_config import Objective, OfflineConfig
from controller.data.job_rows import refuse_changed
from controller.run_folder.run_folder import RunFolder
from controller.wiring.process_specs import num_cores
from trainer.offline.rows import check_file, objective_of
from trainer.offline.spec import OfflineSpec

OFFLINE = "trainer.offline"
"""`python -m` name of the process."""


def rank_names(config: OfflineConfig) -> list[str]:
    """Names of the processes of a run from files, by rank."""
    return ["trainer", *(f"trainer-{rank}" for rank in range(1, config.trainer.ranks))]


def offline_spec(
    config: OfflineConfig, folder: RunFolder, objective: Objective, run_id: str, *, rank: int = 0, address: str = ""
) -> OfflineSpec:
    """Spec of a process of a run from files. address: where its ranks meet."""
    threads = config.trainer.threads
    files = {"train": _absolute(config.data.train)}
    if config.data.eval is not None:
        files["eval"] = _absolute(config.data.eval)
    return OfflineSpec(
        name=rank_names(config)[rank],
        rank=rank,
        num_ranks=config.trainer.ranks,
        ranks_address=address,
        run_id=run_id,
        parent_pid=os.getpid(),
        seed=config.seed,
        num_threads=threads if isinstance(threads, int) else max(1, num_cores() // config.trainer.ranks),
        run_dir=str(folder.root),
        objective=objective,
        model=config.model,
        data=config.data.model_copy(update=files),
        epochs=config.epochs,
        max_steps=config.max_steps,
        batch_size=config.batch_size,
        dpo=config.dpo,
        trainer=config.trainer,
        eval=config.eval,
    )


def check_rows(config: OfflineConfig, objective: Objective) -> dict[str, str]:
    """Check every row; return the sha256 of each file by its key. Raises UserError naming the invalid line."""
    if objective == "reward_model" and (config.data.prompt_template is not None or config.data.add_bos != "auto"):
        what = "a reward model reads prompt and answer in the format of the scorer `reward_model`"
        raise UserError(what, where="data.prompt_template, data.add_bos", remedy="remove both settings")
    found = {}
    for key, file in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        if file is not None:
            path = Path(file).expanduser()
            check_file(objective, path)
            found[key] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def check_rows_alone(config: OfflineConfig) -> None:
    """Check every row when the objective is not known: it follows from the columns. Raises UserError."""
    check_rows(config, objective_of(Path(config.data.train).expanduser()))


def refuse_other_rows(config: OfflineConfig, recorded: object, objective: Objective) -> None:
    """Raise UserError if the files differ from those that the run was started with: steps refer to row numbers."""
    found = check_rows(config, objective)
    known = recorded if isinstance(recorded, dict) else {}
    changed = [key for key, digest in found.items() if known.get(key) != digest]
    refuse_changed(changed)


def _absolute(file: str) -> str:
    return str(Path(file).expanduser().resolve())
