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

Digests are recorded during a run (docs/verify.md). They detect later changes of the records, unless all digests were
rewritten as well. To detect that too, keep a copy of the policy digest in a different place.

exit status: 0 all checks passed; 1 a check failed (the first failure is printed); 2 a user error.
"""
_BLAME_EPILOG = """\
examples:
  areal-like blame quickstart
  areal-like blame runs/quickstart/checkpoints/step_000020 --format json

Rows are identified from the data files in the run's configuration, if these can still be read.
"""


def add_verify(commands: Any, command: Callable[..., Any], run_help: str) -> None:
    """Add the commands to the parser."""
    verify = command(
        commands, "verify", "check that the records of a run are consistent and unchanged",
        _VERIFY_EPILOG.format(names="\n  ".join(INVARIANTS)),
        "Check the invariants of a run from its ledger, and compare the ledger, tokens, metrics, checkpoints and "
        "exported models with their recorded digests. Nothing is changed.",
    )  # fmt: skip
    verify.add_argument("source", metavar="RUN|FOLDER", help=f"{run_help}; or the folder of an exported model")
    verify.add_argument("--invariant", choices=INVARIANTS, metavar="NAME", help="check only this invariant")
    verify.add_argument(
        "--spot", type=processes, default=0, metavar="N",
        help="also recompute the log-probs of N random samples on the CPU, from checkpoints",
    )  # fmt: skip
    verify.add_argument("--seed", type=whole, default=0, metavar="S", help="random seed for --spot (default: 0)")
    verify.add_argument(
        "--run",
        default="",
        metavar="RUN",
        help="the run that trained the exported model, if the model is stored outside the run's folder",
    )
    verify.add_argument("--json", action="store_true", help="one JSON object")
    blame = command(
        commands, "blame", "list the data that a model was trained on", _BLAME_EPILOG,
        "List what a model was trained on: steps, samples, rows with their source and number of uses, versions, "
        "staleness, and reused groups.",
    )  # fmt: skip
    blame.add_argument(
        "source", metavar="RUN|CHECKPOINT|FOLDER",
        help="a run (its newest version is used), the folder of a checkpoint, or the folder of an exported model",
    )  # fmt: skip
    blame.add_argument(
        "--run",
        default="",
        metavar="RUN",
        help="the run that trained the model, if the model is stored outside the run's folder",
    )
    blame.add_argument("--format", choices=("text", "json"), default="text", help="output format (default: text)")
