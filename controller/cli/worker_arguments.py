"""Arguments of `areal-like worker`; see runs/join.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_EPILOG = """\
examples:
  areal-like worker --join RUN              its folder is on shared storage
  areal-like worker --join invitation.json  a copy of RUN/keys/invitation.json,
                                            with mode 600

SIGTERM or Ctrl-C drains the worker: its running samples continue on other
workers. The run must listen on an address that this machine reaches
(launch.host), and pass weights with trainer.weights.kind=stream, or through a
folder that both see. See docs/operations.md.

exit status: 0 the worker has left, or the run is over; 1 the worker failed;
2 this machine cannot join the run.
"""


def add_worker(commands: Any, command: Callable[..., Any]) -> None:
    """Add the command."""
    worker = command(
        commands, "worker", "start a rollout worker on this machine for a run in progress", _EPILOG,
        "Start a rollout worker on this machine for a run in progress, on this machine or another. It receives its "
        "settings, keys and weights from the run, and may leave at any time.",
    )  # fmt: skip
    worker.add_argument(
        "--join", required=True, metavar="RUN",
        help="a run's folder, its name in runs/, or a copy of its file keys/invitation.json",
    )  # fmt: skip
    worker.add_argument(
        "--device", default="", metavar="D", help="device of the engine: cpu, cuda or cuda:N (default: as in the run)"
    )
    worker.add_argument(
        "--model", default="", metavar="FOLDER",
        help="a copy of the run's model folder, if the run's own is not visible on this machine",
    )  # fmt: skip
