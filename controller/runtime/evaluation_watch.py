"""Keeps the best checkpoint of a run in RUN/best, and ends the run early, according to its evaluations.

The rules are in telemetry/watched_metric.py. The coordinator evaluates, and the trainer's retention removes other
checkpoints.

The best checkpoint is kept by hard links to its files. They remain when the trainer removes its folder, and take no
space as long as that folder exists. An evaluation may end before or after the checkpoint of its version is written;
the later of the two events causes the checkpoint to be kept.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from areal_like.metric_settings import BestSettings
from controller.config.early_stop_settings import EarlyStopSettings
from controller.run_folder.run_folder import BEST_FOLDER
from controller.telemetry.watched_metric import EarlyStop, is_better

log = logging.getLogger(__name__)

RECORD = "best.json"


class EvaluationWatch:
    """Receives events through `evaluated` and `saved`. `take_stop` says when to end; `facts` go into the summary."""

    def __init__(
        self,
        root: Path | None = None,
        *,
        best: BestSettings | None = None,
        early_stop: EarlyStopSettings | None = None,
        say: Callable[[str], None] = lambda words: None,
    ) -> None:
        """root: folder of the run; None: no checkpoint is kept."""
        self._best, self._say = (best if root is not None else None), say
        self._folder = root / BEST_FOLDER if root is not None else Path(BEST_FOLDER)
        self._stop = EarlyStop(early_stop) if early_stop is not None else None
        self._reason = self._stop_reason = ""
        self._values: dict[int, float] = {}
        """Values of the best checkpoint's metric by version, for versions that may still be kept."""
        self._paths: dict[int, Path] = {}
        """Checkpoints that have not been evaluated yet."""
        self._kept: dict[str, Any] = {}

    def restore(self, evaluations: Mapping[int, Mapping[str, float]]) -> None:
        """Restore the state of earlier sessions. evaluations: metrics by version, up to the version from which the run
        continues."""
        for version in sorted(evaluations):
            if self._stop is not None:
                self._stop.take(version, evaluations[version].get(self._stop.settings.metric))
        if self._best is None:
            return
        kept = read_best(self._folder)
        if kept and kept["metric"] == self._best.metric and kept["version"] in evaluations:
            self._kept = kept
        elif kept:
            log.info(
                "removing the best checkpoint kept so far, because it was chosen by a different metric, or by an "
                "evaluation that is no longer part of the run: %s",
                kept,
            )
            shutil.rmtree(self._folder, ignore_errors=True)

    def evaluated(self, version: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a complete evaluation."""
        if self._stop is not None and not self._stop_reason:
            self._reason = self._stop_reason = self._stop.take(version, metrics.get(self._stop.settings.metric))
        if self._best is not None and self._best.metric in metrics and version > 0:
            self._values[version] = metrics[self._best.metric]
            self._consider(version)

    def saved(self, version: int, path: Path) -> None:
        """Take the path of a complete checkpoint."""
        if self._best is not None:
            self._paths[version] = path
            self._consider(version)

    def take_stop(self) -> str:
        """Why the run should end now; empty if it should not. Returned once."""
        reason, self._reason = self._reason, ""
        return reason

    def facts(self) -> dict[str, Any]:
        """Entries of the summary: the best checkpoint, and why the run ended early."""
        best = {"best": dict(self._kept)} if self._kept else {}
        return best | ({"early_stop": self._stop_reason} if self._stop_reason else {})

    def _consider(self, version: int) -> None:
        """Keep the checkpoint of a version if it exists, is evaluated, and is better than the one kept."""
        if self._best is None or version not in self._values or version not in self._paths:
            return
        value, path = self._values.pop(version), self._paths.pop(version)
        for older in [one for one in self._paths if one < version]:
            del self._paths[older]
        if self._kept and not is_better(value, self._kept["value"], self._best.mode):
            return
        target = self._folder / path.name
        facts = {"version": version, "metric": self._best.metric, "value": value, "path": str(target)}
        try:
            keep_checkpoint(path, target, facts)
        except OSError as error:
            reason = error.strerror or error
            self._say(f"the checkpoint of version {version}, which is the best so far, cannot be kept: {reason}")
            return
        self._kept = facts
        self._say(f"version {version} is the best so far ({self._best.metric} {value:.4g}); its checkpoint is kept")


def keep_checkpoint(path: Path, target: Path, facts: Mapping[str, Any]) -> None:
    """Link a checkpoint's files into `target`, and remove the checkpoint kept before. Raises OSError."""
    target.parent.mkdir(exist_ok=True)
    fresh = target.with_name(f".{target.name}.partial")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        shutil.copytree(path, fresh, copy_function=os.link)
    except (OSError, shutil.Error) as error:
        shutil.rmtree(fresh, ignore_errors=True)
        raise (
            error
            if not isinstance(error, shutil.Error)
            else OSError("the files of the checkpoint changed in the meantime")
        ) from error
    shutil.rmtree(target, ignore_errors=True)
    fresh.replace(target)
    record = target.parent / f".{RECORD}.partial"
    record.write_text(json.dumps(dict(facts), indent=1))
    record.replace(target.parent / RECORD)
    for other in target.parent.iterdir():
        if other.is_dir() and other != target:
            shutil.rmtree(other, ignore_errors=True)


def read_best(folder: Path) -> dict[str, Any]:
    """Read the record of the checkpoint in RUN/best; empty if there is none."""
    try:
        found = json.loads((folder / RECORD).read_text())
        is_there = isinstance(found["version"], int) and (folder / Path(found["path"]).name).is_dir()
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return dict(found) if is_there else {}
