"""Draws the report at the end of a run, in a separate process with a deadline, so that a failure cannot affect the
run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from areal_like.guard import tied

REPORT_S = 120.0
"""Deadline. A report of a hundred steps takes a few seconds."""
_HOME = Path(__file__).resolve().parents[2]


def draw_report(run_dir: Path) -> str:
    """Draw <run_dir>/report.html and report.png; return one line for the terminal. A failure raises no exception."""
    again = f"areal-like report {run_dir}"
    command = tied([sys.executable, "-P", "-m", "controller", "report", str(run_dir)])
    path = os.pathsep.join([str(_HOME), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=REPORT_S, check=False, stdin=subprocess.DEVNULL,
            env=dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1"),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no report was written, because it took longer than {REPORT_S:.0f} s; to try again: {again}"
    except OSError as error:
        return f"no report: {error}; retry with: {again}"
    if done.returncode != 0:
        words = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").splitlines()[-1]
        return f"no report: {words}; retry with: {again}"
    return f"report: {run_dir / 'report.html'}"
