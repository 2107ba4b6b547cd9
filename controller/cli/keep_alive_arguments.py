"""Arguments of `train` and `resume` that resume a run whose controller died; see keep_alive.py."""

from __future__ import annotations

import argparse

from areal_like.arguments import processes

DEFAULT_FAILURES = 3


def add_keep_alive(command: argparse.ArgumentParser) -> None:
    """Add the options to a command that runs a job."""
    command.add_argument(
        "--keep-alive", action="store_true",
        help="resume the run automatically if its controller is killed, fails, or writes no status for five minutes",
    )  # fmt: skip
    command.add_argument(
        "--max-failures", type=processes, default=DEFAULT_FAILURES, metavar="N",
        help="with --keep-alive: give up after N consecutive failures without a finished step (default: "
        f"{DEFAULT_FAILURES})",
    )  # fmt: skip
