"""Notes about reward hacking while a run goes on. The rules are in report/hacking.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from controller.report.data import RunData
from controller.report.hacking import HELD_OUT, find
from controller.run_folder.run_folder import RunFolder

_STEP = ("step", "reward_mean", "response_len_mean", "length_reward_correlation", "repeated_share", "symbol_share",
         "forged_share")  # fmt: skip
_EVAL = ("version", "accuracy", "num_scored")
LOOKS = 50
"""After n steps a run is looked at every n / LOOKS steps, so that the time does not grow with the square of the steps;
and after each evaluation."""


class HackingWatch:
    """A listener of the journal that receives step and evaluation rows. `say(kind, words)` is called once for each kind
    of finding.
    """

    def __init__(self, folder: RunFolder, say: Callable[[str, str], None]) -> None:
        self._folder, self._say = folder, say
        self._steps: list[dict[str, Any]] = []
        self._evals: list[dict[str, Any]] = []
        self._said: set[str] = set()

    def offer(self, record: Mapping[str, Any]) -> None:
        """Take a row of metrics.jsonl."""
        if record["kind"] == "step":
            self._steps.append({key: record[key] for key in record if key in _STEP or key.startswith(HELD_OUT)})
            if len(self._steps) % max(1, len(self._steps) // LOOKS) == 0:
                self._look()
        elif record["kind"] == "eval":
            self._evals.append({key: record[key] for key in _EVAL if key in record})
            self._look()

    def _look(self) -> None:
        data = RunData(self._folder, {}, {}, None, None, steps=self._steps, evals=self._evals)
        for rated in find(data):
            if rated.finding.kind not in self._said:
                self._said.add(rated.finding.kind)
                self._say(rated.finding.kind, rated.finding.title)
