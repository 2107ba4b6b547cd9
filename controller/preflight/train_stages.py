"""Runs the stages of data.train before a run starts, with the code of `areal-like data clean`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_like.errors import OperationError, UserError
from controller.config.run_config import RunConfig
from controller.data.cleaned_rows import cleaned_folder
from controller.preflight.dataset.cleaning import CleaningJob, Report
from controller.preflight.dataset.registry import Plan, StageSpec, make_stages
from controller.wiring.process_specs import num_cores

KEY = "data.train.stages"
NUM_EXAMPLES = 3


class CleanedTrain:
    """The cleaned rows of data.train in a temporary folder, which is removed with this object unless it was moved."""

    def __init__(self, config: RunConfig) -> None:
        """Run the stages. Raises UserError, OperationError."""
        self._place = tempfile.TemporaryDirectory(prefix="areal-like-data-")
        self.folder = Path(self._place.name) / "train"
        self.report = clean_train(config, self.folder)

    def move_to(self, root: Path) -> Path:
        """Move the set into a run's folder and return its place. Raises OSError."""
        target = cleaned_folder(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(self.folder, target)
        self._place.cleanup()
        return target


def clean_train(config: RunConfig, target: Path) -> Report:
    """Write the rows of data.train that no stage removes to a new folder. Raises UserError (no rows are left, too),
    OperationError.
    """
    source = config.data.train
    assert source.path is not None
    plan = Plan(_specs(config), _columns(source.columns))
    make_stages(plan.stages)  # a wrong name is found before files are read
    try:
        report = CleaningJob([source.path], plan, num_cores(), NUM_EXAMPLES).clean(target)
    except OSError as error:
        raise OperationError(
            f"{error.filename or source.path} cannot be read or written: {error.strerror or error}"
        ) from error
    if report.num_out == 0:
        most = max(report.stages, key=lambda stage: stage.num_removed)
        what = (
            f"the stages removed all {report.num_in:,} rows; the stage {most.kind} removed {most.num_removed:,} of them"
        )
        raise UserError(what, where=KEY, remedy=f"run areal-like data check {source.path} to see the reasons")
    return report


def _specs(config: RunConfig) -> tuple[StageSpec, ...]:
    return tuple(
        StageSpec(stage.kind, stage.options, f"{KEY}.{number}") for number, stage in enumerate(config.data.train.stages)
    )


def _columns(columns: Mapping[str, str | None]) -> dict[str, str | None]:
    """Columns of a source by the roles that stages have."""
    found = {role: name for role, name in columns.items() if role in ("prompt", "answer", "solution")}
    if "messages" in columns:
        found.setdefault("prompt", columns["messages"])
    return found


def words(report: Report) -> str:
    """What was removed, in one sentence."""
    removed = ", ".join(f"{one.kind} {one.num_removed:,}" for one in report.stages)
    return f"data.train.stages removed {report.num_removed:,} of {report.num_in:,} rows ({removed})"


def counts(report: Report) -> dict[str, Any]:
    """For state.json and the report of a run."""
    return {
        "rows_in": report.num_in, "rows_out": report.num_out,
        "stages": [{"kind": one.kind, "removed": one.num_removed} for one in report.stages],
    }  # fmt: skip
