"""Display of a run from files: lines on the terminal, status.json, the summary.

The process is followed in runtime/offline_session.py; rows are written by trainer/offline/loop.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from controller.telemetry.display import Display
from controller.telemetry.progress import Pace, Progress
from controller.telemetry.pulse import ProcessNow
from controller.telemetry.sinks import SinkNews, Sinks
from controller.telemetry.status import StatusFile
from controller.telemetry.step_reporter import PACE_STEPS

PROCESS = "trainer"


class OfflineView:
    """Call `take` for every row of metrics.jsonl, and `look` often."""

    def __init__(
        self, display: Display, status: StatusFile, sinks: Sinks, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._display, self._status, self._sinks, self._clock = display, status, sinks, clock
        self._started_s = clock()
        self._opening: Mapping[str, Any] = {}
        self._evals: dict[int, Mapping[str, Any]] = {}
        self._last_step: Mapping[str, Any] = {}
        self._pace = Pace(PACE_STEPS)
        self._num_tokens = 0

    @property
    def is_complete(self) -> bool:
        """Whether the last step was processed."""
        return bool(self._opening) and self._step == self._num_steps

    def take(self, row: Mapping[str, Any]) -> None:
        """Process one row that the process has written."""
        kind = row.get("kind")
        if kind == "offline":
            self._open(row)
        elif kind == "step":
            self._take_step(row)
        elif kind == "eval":
            self._evals[int(row["version"])] = row
            self._display.note(_eval_words(row))
        elif kind == "note":
            self._display.note(str(row.get("text", "")), "warning")
        self._sinks.offer(row)

    def look(self, pid: int | None, rss_mb: float | None) -> None:
        """Write status.json if due, and print which sinks went down or recovered."""
        for news in self._sinks.news():
            self._say(news)
        if not self._status.is_due():
            return
        state = "training" if self._opening else "preparing"
        now = ProcessNow(PROCESS, state, pid, rss_mb=rss_mb)
        facts = {"processes": {PROCESS: now.row()}, "eta_s": self._eta_s(), "preparing": ""}
        self._status.write("running" if self._opening else "preparing", **facts, **self._progress())

    def summary(self, end: str) -> dict[str, Any]:
        """The summary, printed at the end and written to summary.json."""
        versions = sorted(self._evals)
        before = self._evals[versions[0]] if versions and versions[0] == 0 else {}
        after = self._evals[versions[-1]] if versions else {}
        metrics = {
            f"{name}_{when}": row.get(name)
            for name in ("accuracy", "loss", "margin")
            for when, row in (("before", before), ("after", after))
            if name in after
        }
        wall_s = self._clock() - self._started_s
        counts = {key: value for key, value in self._opening.items() if "_rows" in key}
        return {
            "status": end,
            "objective": self._opening.get("objective"),
            "steps": self._step,
            "num_steps": self._num_steps,
            "epochs": self._last_step.get("epoch"),
            **metrics,
            **counts,
            "eval_rows_scored": after.get("num_scored"),
            "wall_s": round(wall_s, 2),
            "tokens_per_s": round(self._num_tokens / wall_s, 1) if wall_s > 0 else None,
            "accuracy_by_version": {str(version): self._evals[version].get("accuracy") for version in versions},
        }

    # ------------------------------------------------------------ inside

    @property
    def _num_steps(self) -> int:
        return int(self._opening.get("num_steps", 0))

    @property
    def _step(self) -> int:
        return int(self._last_step.get("step", self._opening.get("version", 0)))

    def _open(self, row: Mapping[str, Any]) -> None:
        self._opening = row
        self._pace.at(self._clock(), self._step)
        again = f", continuing from step {row['version']}" if row["version"] else ""
        self._display.note(f"{row['train_rows']} rows, {row['num_steps']} steps{again}; {row['setup']}")

    def _take_step(self, row: Mapping[str, Any]) -> None:
        self._last_step = row
        self._num_tokens += int(row.get("tokens", 0))
        self._pace.at(self._clock(), self._step)
        self._display.progress(Progress("step", self._step, self._num_steps, self._eta_s(), _step_words(row)))

    def _progress(self) -> dict[str, Any]:
        accuracy = {str(version): row.get("accuracy") for version, row in sorted(self._evals.items())}
        found: dict[str, Any] = {"num_steps": self._num_steps}
        if self._last_step:
            found |= {"step": self._step, "version": self._step, "last_step": dict(self._last_step)}
        return found | ({"accuracy": accuracy} if accuracy else {})

    def close(self, end: str = "failed") -> None:
        """Close the sinks, and write the final state to status.json. end: status of the run."""
        self._sinks.offer({"kind": "end", "time_s": time.time(), "status": end, "reason": ""})
        for news in self._sinks.close(self._display.note):
            if news.lost:
                self._say(news)
        self._status.write("running", **self._progress())

    def _say(self, news: SinkNews) -> None:
        lost = f", {news.lost} rows lost" if news.lost else ""
        why = f" ({news.error})" if news.error else ""
        self._display.note(f"metrics sink {news.sink} is {news.event}{lost}{why}", "warning" if news.lost else "info")

    def _eta_s(self) -> float | None:
        """Estimated seconds to the last step, from the newest steps."""
        return self._pace.left_s(self._clock(), self._num_steps - self._step)


def _step_words(row: Mapping[str, Any]) -> str:
    shown = [(key, row[key]) for key in ("loss", "accuracy", "margin", "grad_norm", "lr") if key in row]
    words = "  ".join(f"{key} {value:.4g}" for key, value in shown if isinstance(value, int | float))
    return f"epoch {row['epoch']:.2f}  {words}"


def _eval_words(row: Mapping[str, Any]) -> str:
    shown = "  ".join(f"{key} {row[key]:.4g}" for key in ("accuracy", "loss", "margin") if key in row)
    return f"evaluation after step {row['version']}: {shown} on {row['num_scored']:.0f} rows"
