"""The set of rows that a run cleaned at its start (`data.train.stages`): RUN/data/train.

Stages are run in controller/preflight/train_stages.py. A resume reads the recorded set and does not clean again.
"""

from __future__ import annotations

from pathlib import Path

from areal_like.errors import UserError
from controller.config.run_config import RunConfig
from controller.data.origins import ROWS

FOLDER = Path("data") / "train"


def cleaned_folder(root: Path) -> Path:
    """Folder of the cleaned set of a run."""
    return root / FOLDER


def reading_cleaned(config: RunConfig, folder: Path) -> RunConfig:
    """The configuration whose data.train are the rows of a cleaned set instead of the files it was made from."""
    source = config.data.train.model_copy(update={"path": str(folder / ROWS), "stages": ()})
    return config.model_copy(update={"data": config.data.model_copy(update={"train": source})})


def as_recorded(config: RunConfig, root: Path) -> RunConfig:
    """The configuration of an existing run, reading the set that it cleaned; unchanged without stages. Raises
    UserError if the set is gone.
    """
    if not config.data.train.stages:
        return config
    folder = cleaned_folder(root)
    if not (folder / ROWS).is_file():
        remedy = "restore the file from a backup, or start a new run"
        raise UserError(
            "the file with the cleaned rows of this run is missing", where=str(folder / ROWS), remedy=remedy
        )
    return reading_cleaned(config, folder)
