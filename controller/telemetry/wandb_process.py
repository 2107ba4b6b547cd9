"""`python -m controller.telemetry.wandb_process`: writes rows to one run of Weights & Biases, and sets the axes.

Input and output are handled in tracker_process.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from controller.telemetry.scalars import AXIS_OF_PREFIX
from controller.telemetry.tracker_process import run_process


class WandbRun:
    """See Tracker."""

    def __init__(self, run: Any, make_table: Any) -> None:
        self._run, self._make_table = run, make_table

    def log(self, row: Mapping[str, Any]) -> None:
        """See Tracker."""
        self._run.log(dict(row))

    def table(self, table: Mapping[str, Any]) -> None:
        """See Tracker."""
        made = self._make_table(columns=table["columns"], data=table["data"])
        self._run.log({"version": table["version"], table["name"]: made})

    def finish(self) -> None:
        """See Tracker."""
        self._run.finish()


def begin(start: dict[str, Any]) -> WandbRun:
    """Start the wandb run, or continue it."""
    import wandb

    settings = wandb.Settings(console="off", disable_git=True, save_code=False, silent=True)
    run = wandb.init(
        project=start["project"], entity=start["entity"], group=start["group"], tags=start["tags"], mode=start["mode"],
        name=start["name"], id=start["id"], resume="allow", dir=start["dir"], config=start["config"], settings=settings,
        notes=start.get("notes") or None,
    )  # fmt: skip
    for prefix, axis in AXIS_OF_PREFIX.items():
        run.define_metric(axis, hidden=True)
        run.define_metric(f"{prefix}/*", step_metric=axis)
    return WandbRun(run, wandb.Table)


if __name__ == "__main__":
    run_process(begin)
