"""Notes about reward hacking while a run goes on. The rules are in report/hacking.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from controller.report.data import RunData, with_values
from controller.report.hacking import HELD_OUT_ERROR, KINDS, find
from controller.report.paired import HELD_OUT, as_arrays
from controller.run_folder.run_folder import RunFolder

_STEP = ("step", "reward_mean", "response_len_mean", "length_reward_correlation", "repeated_share", "symbol_share",
         "forged_share")  # fmt: skip
_KEYS = {"step": "step", "eval": "version", "eval_values": "version"}
_EVAL = ("version", "accuracy", "num_scored", "num_rows")
LOOKS = 50
"""After n steps a run is looked at every n / LOOKS steps, so that the time does not grow with the square of the steps;
and after each evaluation."""


class HackingWatch:
    """A listener of the journal that receives step and evaluation rows. `say(kind, words)` is called once for each kind
    of warning; remarks are only in the diagnosis.
    """

    def __init__(self, folder: RunFolder, say: Callable[[str, str], None], *, eval_every_steps: int = 0) -> None:
        """eval_every_steps: `eval.every_steps`."""
        self._folder, self._say = folder, say
        self._config = {"eval": {"every_steps": eval_every_steps}}
        self._steps: list[dict[str, Any]] = []
        self._evals: list[dict[str, Any]] = []
        self._values: dict[int, Mapping[str, Any]] = {}
        self._said: set[str] = set()

    def restore(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Continue after earlier sessions. rows: of kinds `step`, `eval`, `eval_values` and `note`, in the order
        of metrics.jsonl."""
        for row in rows:
            if row.get("kind") == "note" and row.get("note") in KINDS:
                self._said.add(row["note"])
            elif isinstance(row.get(_KEYS.get(str(row.get("kind")), "")), int):
                self._keep(row)

    def offer(self, record: Mapping[str, Any]) -> None:
        """Take a row of metrics.jsonl."""
        if record["kind"] == "step":
            self._keep(record)
            if len(self._steps) % max(1, len(self._steps) // LOOKS) == 0:
                self._look()
        elif record["kind"] == "eval_values":  # before the row of its evaluation
            self._keep(record)
        elif record["kind"] == "eval":
            self._keep(record)
            self._look()

    def _keep(self, record: Mapping[str, Any]) -> None:
        """Add a row. A repeated step or version invalidates what an earlier session recorded after it."""
        if record["kind"] == "step":
            if self._steps and record["step"] <= self._steps[-1]["step"]:
                self._steps = [row for row in self._steps if row["step"] < record["step"]]
                self._evals = [row for row in self._evals if row["version"] < record["step"]]
            self._steps.append(
                {key: record[key] for key in record if key in _STEP or key.startswith((HELD_OUT, HELD_OUT_ERROR))}
            )
        elif record["kind"] == "eval_values":
            self._values = {version: row for version, row in self._values.items() if version < record["version"]}
            self._values[record["version"]] = as_arrays(dict(record))
        else:
            self._evals = [row for row in self._evals if row["version"] < record["version"]]
            self._evals.append({key: record[key] for key in _EVAL if key in record})

    def _look(self) -> None:
        evals = with_values(self._evals, [dict(row) for row in self._values.values()])
        data = RunData(self._folder, {}, self._config, None, None, steps=self._steps, evals=evals)
        for rated in find(data):
            if rated.finding.severity != "info" and rated.finding.kind not in self._said:
                self._said.add(rated.finding.kind)
                self._say(rated.finding.kind, rated.finding.title)
