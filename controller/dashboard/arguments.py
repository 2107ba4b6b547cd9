"""Arguments of `areal-like dashboard`. The command is in command.py. aiohttp is not imported."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from areal_like.arguments import whole

_EPILOG = """\
examples:
  areal-like dashboard                          the runs in runs/, on http://127.0.0.1:8787
  areal-like dashboard /data/runs --port 0      a different folder, any free port
  ssh -L 8787:127.0.0.1:8787 HOST               from another machine, then open the same address there
  areal-like dashboard --host 0.0.0.0           open to the network: prints an address with a token

The pages are read-only except for four actions, which require the printed token. On a loopback address, every user of
this machine can read them unless a token is set. To keep the token out of the process list, set
AREAL_LIKE_DASHBOARD_TOKEN instead.
"""


def add_dashboard(commands: Any, make: Callable[..., Any]) -> None:
    """Add the command; `make` creates its parser."""
    command = make(
        commands, "dashboard", "show the runs in a folder on a live web page", _EPILOG,
        "Serve a live web page of all runs in a folder: curves, throughput, staleness, timeline, samples, events and "
        "logs. The server only reads files, and only while a page is open.",
    )  # fmt: skip
    command.add_argument(
        "runs_dir", nargs="?", default="runs", metavar="RUNS_DIR", help="folder that contains the runs (default: runs)"
    )
    command.add_argument("--host", default="127.0.0.1", metavar="H", help="address to listen on (default: 127.0.0.1)")
    command.add_argument(
        "--port",
        type=port,
        default=8787,
        metavar="N",
        help="port to listen on (default: 8787); 0 chooses any free port",
    )
    command.add_argument(
        "--token",
        metavar="T",
        help="token that is required for reading and for actions (default: the value of AREAL_LIKE_DASHBOARD_TOKEN, or "
        "a generated token; on a loopback address, a generated token is required only for actions)",
    )


def port(text: str) -> int:
    """Parse the number of a port. Raises ArgumentTypeError."""
    number = whole(text)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port number (0 to 65535)")
    return number
