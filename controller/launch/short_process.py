"""Runs a module of this program as a short-lived process with a time limit, for `probe` and `serve`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from areal_like.errors import OperationError, UserError
from areal_like.guarded_process import run_guarded
from areal_like.process import USER_MISTAKE, last_error
from controller.launch.environments import child_environment
from controller.wiring.process_specs import num_cores

LAST_CHARS = 2000


def run_module(arguments: Sequence[str], limit_s: float) -> None:
    """Run `python -m ARGUMENTS` to its end. Raises UserError with its user error, or OperationError with its last line
    of output.
    """
    environment = child_environment(num_cores(), user_path=Path.cwd())
    try:
        ended = run_guarded([sys.executable, "-P", "-m", *arguments], timeout_s=limit_s, env=environment)
    except subprocess.TimeoutExpired as error:
        raise OperationError(f"the process {arguments[0]} did not exit within {limit_s:g} s") from error
    if ended.returncode == USER_MISTAKE:
        raise UserError(last_error(ended.stderr) or f"{arguments[0]} rejected its input")
    if ended.returncode != 0:
        words = ended.stderr.strip()[-LAST_CHARS:]
        raise OperationError(f"the process {arguments[0]} exited with status {ended.returncode}: {words}")
