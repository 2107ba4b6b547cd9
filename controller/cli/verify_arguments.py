"""Arguments of `areal-like verify` and `areal-like blame`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from areal_like.arguments import processes, whole
from controller.runs.verify.invariants import INVARIANTS

_VERIFY_EPILOG = """\
examples:
  areal-like verify quickstart
  areal-like verify quickstart --invariant exactly-once
  areal-like verify runs/quickstart/final
  areal-like verify quickstart --spot 20

invariants (docs/architecture.md):
  {names}

Digests are recorded while a run goes on (docs/verify.md). They find changes of what was recorded; they cannot find
those of somebody who writes all digests again. Keep the policy digest elsewhere to find these too.

exit status: 0 everything that was checked holds; 1 something differs, the first of which is named; 2 a user error.
"""
_BLAME_EPILOG = """\
examples:
  areal-like blame quickstart
  areal-like blame runs/quickstart/checkpoints/step_000020 --format json

Rows are named by the data that the run's configuration names, if it can still be read.
"""


def add_verify(commands: Any, command: Callable[..., Any], run_help: str) -> None:
    """Add the commands to the parser."""
    verify = command(
        commands, "verify", "check a run against everything that it recorded",
        _VERIFY_EPILOG.format(names="\n  ".join(INVARIANTS)),
        "Recount the invariants of a run from its ledger, and compare ledger, tokens, metrics, checkpoints and "
        "exported models with their digests. Changes nothing.",
    )  # fmt: skip
    verify.add_argument("source", metavar="RUN|FOLDER", help=f"{run_help}; or the folder of an exported model")
    verify.add_argument("--invariant", choices=INVARIANTS, metavar="NAME", help="check only this invariant")
    verify.add_argument(
        "--spot", type=processes, default=0, metavar="N",
        help="also recompute the log-probs of N random samples from checkpoints, on the CPU",
    )  # fmt: skip
    verify.add_argument("--seed", type=whole, default=0, metavar="S", help="seed of the choice of --spot (0)")
    verify.add_argument("--run", default="", metavar="RUN", help="run of an exported model that is stored elsewhere")
    verify.add_argument("--json", action="store_true", help="one JSON object")
    blame = command(
        commands, "blame", "list what a model was trained on", _BLAME_EPILOG,
        "List what went into a model: steps, samples, rows by source and how often, versions, staleness, and groups "
        "that were used again.",
    )  # fmt: skip
    blame.add_argument(
        "source", metavar="RUN|CHECKPOINT|FOLDER",
        help="a run (its newest version), a checkpoint's folder, or the folder of an exported model",
    )  # fmt: skip
    blame.add_argument("--run", default="", metavar="RUN", help="run of a model that is stored elsewhere")
    blame.add_argument("--format", choices=("text", "json"), default="text", help="output format (text)")
