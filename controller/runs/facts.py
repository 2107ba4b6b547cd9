"""Reads the status of a run from its files: status, metrics, summary, rates.

Damaged files raise no exception; the damage is listed in `problems`. The layout is in status_view.py.

Rates of a process are computed from two readings of its counters, both from the same incarnation: the newest
(status.json) and one about RATE_WINDOW_S older (a pulse of metrics.jsonl, or an earlier reading of `--watch`).
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil

from areal_like.encryption.texts import Texts
from controller.run_folder.owner_host import Whereabouts, whereabouts, whereabouts_if_known
from controller.run_folder.run_folder import RunFolder

STATUS_FORMAT = 1
TAIL_BYTES = 1 << 20
"""Bytes read from the end of metrics.jsonl: minutes of pulses, independent of the run's age."""
RATE_WINDOW_S = 10.0
SILENT_S = 10.0
"""A running controller that has written no status for so long has a problem: it writes about once a second."""
_SHAPES = {
    "status": str,
    "preparing": str,
    "waits": list,
    "counts": dict,
    "processes": dict,
    "last_step": dict,
    "accuracy": dict,
}
WORK = {"rollout": "tokens", "trainer": "tokens", "reward": "scored"}
"""The counter that measures the work of each role."""


@dataclass(frozen=True)
class Rate:
    """Recent activity of one process: work per second, and the share of time that it worked (None: not known)."""

    per_s: float | None
    busy: float | None


@dataclass
class Facts:
    """Everything that `status` and `ps` show of a run."""

    folder: RunFolder
    where: Whereabouts
    status: dict[str, Any] = field(default_factory=dict)
    """status.json; {} if there is none."""
    summary: dict[str, Any] = field(default_factory=dict)
    rates: dict[str, Rate] = field(default_factory=dict)
    last_step: dict[str, Any] = field(default_factory=dict)
    accuracy: dict[int, float] = field(default_factory=dict)
    """By version."""
    step_s: float | None = None
    """Usual time of a step: the median of the last steps."""
    controller: dict[str, Any] = field(default_factory=dict)
    """The controller's own process, if it runs on this machine: rss_mb, is_suspended."""
    problems: list[str] = field(default_factory=list)

    @property
    def age_s(self) -> float | None:
        """Age of status.json by the time stamp in it."""
        written_s = self.status.get("time_s")
        return time.time() - written_s if isinstance(written_s, int | float) else None

    @property
    def num_steps(self) -> int | None:
        """Configured steps of the run."""
        return _whole(self.status.get("num_steps"))

    @property
    def step(self) -> int | None:
        """Steps done."""
        for found in (self.status.get("step"), self.last_step.get("step"), self.summary.get("steps")):
            if (step := _whole(found)) is not None:
                return step
        return None

    @property
    def processes(self) -> dict[str, dict[str, Any]]:
        """The processes of the run as last reported, by name."""
        found = self.status.get("processes")
        return {name: row for name, row in found.items() if isinstance(row, dict)} if isinstance(found, dict) else {}


@dataclass
class Memory:
    """State kept between two readings of the same run (`--watch`)."""

    readings: list[dict[str, Any]] = field(default_factory=list)


def read_facts(folder: RunFolder, memory: Memory | None = None, *, whole: bool = True) -> Facts:
    """Read the status of a run. whole=False does not read the tail of metrics.jsonl (for `ps`).

    Raises UserError if the state file is of a newer version, and with whole=False also if it is damaged.
    """
    facts = Facts(folder, whereabouts_if_known(folder) if whole else whereabouts(folder))
    facts.status = _status(folder, facts.problems)
    facts.summary = Texts.to_show(folder.root).opened_row(_json(folder.summary, facts.problems))
    rows = tail_rows(folder.metrics) if whole else []
    _take_steps(facts, rows)
    facts.accuracy = _accuracy(facts, rows)
    if facts.where.is_running:
        facts.controller = _controller(facts.where.pid)
        if whole:
            readings = [row for row in rows if row.get("kind") == "pulse"] + (memory.readings if memory else [])
            facts.rates = _rates(facts.status, readings)
    if memory is not None and facts.status:
        now_s = facts.status.get("time_s", 0.0)
        memory.readings = [row for row in memory.readings if now_s - row["time_s"] < 2 * RATE_WINDOW_S]
        if not memory.readings or memory.readings[-1]["time_s"] < now_s:
            memory.readings.append(facts.status)
    return facts


def tail_rows(path: Path, max_bytes: int = TAIL_BYTES) -> list[dict[str, Any]]:
    """The last complete records of a JSON Lines file; empty if there is none."""
    texts = Texts.to_show(path)
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - max_bytes))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    rows = []
    for line in lines[1:] if size > max_bytes else lines:
        try:
            row = msgspec.json.decode(line)
        except (msgspec.DecodeError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(texts.opened_row(row))
    return rows


def _json(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} cannot be read ({error})")
        return {}
    if not isinstance(data, dict):
        problems.append(f"{path.name} is damaged (not a JSON object)")
        return {}
    return data


def _status(folder: RunFolder, problems: list[str]) -> dict[str, Any]:
    path = folder.status
    status = _json(path, problems)
    found = status.get("format", STATUS_FORMAT)
    if not isinstance(found, int) or found > STATUS_FORMAT:
        problems.append(
            f"{path.name} was written by a newer version (format {found}; supported: up to {STATUS_FORMAT}): ignored"
        )
        return {}
    if status and not isinstance(status.get("time_s"), int | float):
        problems.append(f"{path.name} is damaged (it contains no time): ignored")
        return {}
    odd = [key for key, kind in _SHAPES.items() if status.get(key) is not None and not isinstance(status[key], kind)]
    if odd:
        problems.append(f"{path.name} is damaged: invalid values of {', '.join(odd)} are ignored")
    return {key: value for key, value in status.items() if key not in odd}


def _take_steps(facts: Facts, rows: list[dict[str, Any]]) -> None:
    steps = [row for row in rows if row.get("kind") == "step" and _whole(row.get("step")) is not None]
    reported = facts.status.get("last_step")
    facts.last_step = reported if isinstance(reported, dict) else steps[-1] if steps else {}
    times = [row["time_s"] for row in steps[-12:] if isinstance(row.get("time_s"), int | float)]
    gaps = sorted(b - a for a, b in itertools.pairwise(times) if b > a)
    facts.step_s = gaps[len(gaps) // 2] if gaps else None


def _accuracy(facts: Facts, rows: list[dict[str, Any]]) -> dict[int, float]:
    """The accuracy from the newest source that has it: status.json, summary.json, else the evaluations in the tail."""
    for reported in (facts.status.get("accuracy"), facts.summary.get("accuracy_by_version")):
        if isinstance(reported, dict) and reported:
            pairs = ((_whole(key), value) for key, value in reported.items())
            return {
                key: float(v) for key, v in sorted(pairs, key=str) if key is not None and isinstance(v, int | float)
            }
    evals = [row for row in rows if row.get("kind") == "eval" and _whole(row.get("version")) is not None]
    return {
        int(row["version"]): float(row["accuracy"]) for row in evals if isinstance(row.get("accuracy"), int | float)
    }


def _rates(status: Mapping[str, Any], readings: list[dict[str, Any]]) -> dict[str, Rate]:
    now_s = status.get("time_s")
    processes = status.get("processes")
    if not isinstance(now_s, int | float) or not isinstance(processes, dict):
        return {}
    rates = {}
    for name, row in processes.items():
        if not isinstance(row, dict):
            continue
        before = _earlier(readings, name, row, float(now_s))
        if before is not None:
            rates[name] = _rate(row, before[1], float(now_s) - before[0])
    return rates


def _earlier(
    readings: list[dict[str, Any]], name: str, row: Mapping[str, Any], now_s: float
) -> tuple[float, Mapping[str, Any]] | None:
    """Time and values of the counters of the same incarnation of this process about RATE_WINDOW_S ago."""
    best: tuple[float, Mapping[str, Any]] | None = None
    for reading in readings:
        then_s, processes = reading.get("time_s"), reading.get("processes")
        if not isinstance(then_s, int | float) or not isinstance(processes, dict) or now_s - then_s < 0.5:
            continue
        then = processes.get(name)
        if not isinstance(then, dict) or then.get("incarnation") != row.get("incarnation"):
            continue
        if best is None or abs(now_s - then_s - RATE_WINDOW_S) < abs(now_s - best[0] - RATE_WINDOW_S):
            best = (float(then_s), then)
    return best


def _rate(now: Mapping[str, Any], then: Mapping[str, Any], elapsed_s: float) -> Rate:
    def grown(key: str) -> float | None:
        new, old = _counter(now, key), _counter(then, key)
        return None if new is None else max(0.0, new - (old or 0.0))

    work = grown(WORK.get(str(now.get("role")), "tokens"))
    busy_s = grown("busy_s")
    share = None
    if busy_s is not None:
        spent_s = sum(grown(key) or 0.0 for key in ("busy_s", "idle_s", "paused_s", "wait_s"))
        share = min(1.0, busy_s / max(spent_s, elapsed_s))
    return Rate(work / elapsed_s if work is not None else None, share)


def _counter(row: Mapping[str, Any], key: str) -> float | None:
    counters = row.get("counters")
    value = counters.get(key) if isinstance(counters, dict) else None
    return float(value) if isinstance(value, int | float) else None


def _controller(pid: int | None) -> dict[str, Any]:
    if pid is None:
        return {}
    try:
        process = psutil.Process(pid)
        is_suspended = process.status() == psutil.STATUS_STOPPED
        return {"pid": pid, "rss_mb": process.memory_info().rss / 1e6, "is_suspended": is_suspended}
    except psutil.Error:
        return {"pid": pid}


def _whole(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    return int(value) if isinstance(value, int | float) and value == value and abs(value) < 1e15 else None
