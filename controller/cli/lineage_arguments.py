"""Arguments of `areal-like lineage`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from areal_like.arguments import sample_name, whole

_EPILOG = """\
examples:
  areal-like lineage quickstart
  areal-like lineage quickstart --row train.jsonl:12
  areal-like lineage quickstart --row id=gsm-0042 --json
  areal-like lineage quickstart --row train.jsonl:12 --erase
  areal-like lineage quickstart --sample 12.3 --svg sample.svg
  areal-like lineage runs/quickstart/checkpoints/step_000020
  areal-like lineage runs/quickstart/final

Specify a row by file and line, or by a column and its value. The file may also be the one from which a cleaned data set
was made. `--row` lists every version, checkpoint and exported model that used the row (docs/verify.md).

exit status: 0 done; 1 links of the run are missing and are listed; 2 a user error.
"""


def add_lineage(commands: Any, command: Callable[..., Any], run_help: str) -> None:
    """Add the command to the parser."""
    lineage = command(
        commands, "lineage", "show what a row, sample, step or model was created from and used for", _EPILOG,
        "Show lineage in both directions between files, rows, samples, steps, versions, checkpoints and exported "
        "models. Without options, show the lineage of the newest version of a run and report missing links. Nothing is "
        "changed without --erase --yes.",
    )  # fmt: skip
    lineage.add_argument(
        "source", metavar="RUN|CHECKPOINT|FOLDER",
        help=f"{run_help}; the folder of a checkpoint; or the folder of an exported model",
    )  # fmt: skip
    what = lineage.add_mutually_exclusive_group()
    what.add_argument("--row", metavar="ROW", help="show the lineage of a row, specified as FILE:LINE or COLUMN=VALUE")
    what.add_argument(
        "--sample",
        type=sample_name,
        metavar="NAME",
        help="show the lineage of one sample (GROUP.SAMPLE), or of all samples of one group (GROUP)",
    )
    what.add_argument("--batch", type=whole, metavar="N", help="show the lineage of the batch of step N")
    what.add_argument("--version", type=whole, metavar="N", help="show the lineage of policy version N")
    lineage.add_argument(
        "--run",
        default="",
        metavar="RUN",
        help="the run that trained the model, if the model is stored outside the run's folder",
    )
    lineage.add_argument(
        "--erase",
        action="store_true",
        help="with --row: show what erasing the row from the run's folder would do, and which models used it; with "
        "--yes, erase it",
    )
    lineage.add_argument(
        "--yes", action="store_true", help="with --erase: erase the row instead of only showing the effects"
    )
    lineage.add_argument("--json", action="store_true", help="print one JSON object with nodes and edges")
    lineage.add_argument("--svg", default="", metavar="FILE", help="also write the lineage graph to this SVG file")
