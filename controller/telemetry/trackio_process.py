"""`python -m controller.telemetry.trackio_process`: writes rows to one run of Trackio.

Input and output are handled in tracker_process.py. Uses only Trackio's documented interface. Tests use a module
that records calls; run with 0.43.0 once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from controller.telemetry.tracker_process import place_of, run_process


class TrackioRun:
    """See Tracker."""

    def __init__(self, package: Any) -> None:
        self._package = package

    def log(self, row: Mapping[str, Any]) -> None:
        """See Tracker. Trackio has one axis, called step; another axis of the row is logged as a number."""
        numbers = {name: value for name, value in row.items() if name not in ("_timestamp", "step")}
        self._package.log(numbers, step=place_of(row))

    def table(self, table: Mapping[str, Any]) -> None:
        """See Tracker."""
        import pandas  # a dependency of Trackio

        frame = pandas.DataFrame(table["data"], columns=table["columns"])
        self._package.log({table["name"]: self._package.Table(dataframe=frame)}, step=table["version"])

    def finish(self) -> None:
        """See Tracker."""
        self._package.finish()


def begin(start: dict[str, Any]) -> TrackioRun:
    """Start the run of Trackio, or continue it."""
    os.environ.setdefault("TRACKIO_DIR", start["dir"])  # Trackio reads it when it is imported
    import trackio

    space = {"space_id": start["space"]} if start["space"] else {}
    trackio.init(project=start["project"], name=start["name"], config=start["config"], resume="allow", **space)
    return TrackioRun(trackio)


if __name__ == "__main__":
    run_process(begin)
