"""Runs one part in a separate process with a deadline, and collects its rows, even if it fails.

child.py loads the part. The child writes each row to a file immediately, so that a part that is cut or dies keeps its
measurements. It stops by itself at its deadline if it can; GRACE_S later its process group is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.folders import REPOSITORY
from benchmarks.gpu_suite.parts import Part
from benchmarks.runs import environment

GRACE_S = 5.0
KILL_WAIT_S = 10.0
TAIL_LINES = 25


@dataclass
class Outcome:
    """How a part ended: `done`, `failed`, `skipped` or `cut`, with the reason if it is not `done`."""

    part: str
    status: str
    reason: str = ""
    wall_s: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    output: str = ""
    """The end of its output."""


def run_part(part: Part, options: dict[str, Any], budget_s: float, scratch: Path, shared_memory: Path) -> Outcome:
    """Run a part to its end or for `budget_s`. `options`: device, is_quick, is_tiny."""
    missing = part.missing()
    if missing:
        return Outcome(part.name, "skipped", f"not installed: pip install {' '.join(missing)}")
    return watch(part.name, command(part, options, budget_s, scratch, shared_memory), budget_s, scratch)


def command(part: Part, options: dict[str, Any], budget_s: float, scratch: Path, shared_memory: Path) -> list[str]:
    """The child's command line."""
    request = {
        **options, "module": part.module, "budget_s": budget_s, "scratch": str(scratch), "parent_pid": os.getpid(),
        "shared_memory": str(shared_memory), "rows": str(rows_file(part.name, scratch)),
    }  # fmt: skip
    return [sys.executable, "-P", "-m", "benchmarks.gpu_suite.child", json.dumps(request)]


def rows_file(name: str, scratch: Path) -> Path:
    """The file to which a part writes its rows."""
    return scratch / f"{name}.rows.jsonl"


def watch(name: str, arguments: list[str], budget_s: float, scratch: Path) -> Outcome:
    """Start `arguments`, wait at most `budget_s` and the grace period, and read the rows."""
    output = scratch / f"{name}.log"
    start_s = time.monotonic()
    with output.open("wb") as log:
        process = subprocess.Popen(
            arguments, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=REPOSITORY,
            env=environment(), start_new_session=True,
        )  # fmt: skip
    is_late = False
    try:
        process.wait(budget_s + GRACE_S)
    except subprocess.TimeoutExpired:
        is_late = True
    finally:
        kill_group(process)
    rows = read_rows(rows_file(name, scratch))
    tail = "\n".join(output.read_text(errors="replace").splitlines()[-TAIL_LINES:])
    status, reason = judge(rows, process.returncode, budget_s if is_late else None)
    return Outcome(name, status, reason, time.monotonic() - start_s, rows, tail)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its group, and wait until they have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(KILL_WAIT_S)


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The complete rows of a file; an incomplete last line is left out."""
    if not file.exists():
        return []
    rows = []
    for line in file.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def judge(rows: list[dict[str, Any]], returncode: int, late_after_s: float | None) -> tuple[str, str]:
    """Status and reason of a part: the worst of its rows and of how its process ended."""
    failed = [row for row in rows if row["status"] == "failed"]
    if failed:
        return "failed", f"{len(failed)} of {len(rows)} cases, the first: {failed[0]['case']}"
    if late_after_s is not None:
        return "cut", f"killed: still busy {GRACE_S:.0f} s after its {late_after_s:.0f} s"
    if returncode != 0:
        how = f"signal {-returncode}" if returncode < 0 else f"status {returncode}"
        return "failed", f"its process ended with {how} after {len(rows)} cases"
    cut = sum(row["status"] == "cut" for row in rows)
    if cut:
        return "cut", f"no time was left for {cut} of {len(rows)} cases"
    skipped = [row for row in rows if row["status"] == "skipped"]
    if rows and len(skipped) == len(rows):
        return "skipped", skipped[0]["reason"]
    if not rows:
        return "failed", "it measured nothing"
    return "done", f"{len(skipped)} of {len(rows)} cases skipped" if skipped else ""
