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
  areal-like lineage quickstart --sample 12.3 --svg sample.svg
  areal-like lineage runs/quickstart/checkpoints/step_000020
  areal-like lineage runs/quickstart/final

A row is named by file and line, also those of the file that a cleaned set was made from, or by a column and its value.
`--row` names every version, checkpoint and exported model that used the row (docs/verify.md).

exit status: 0 done; 1 links of the run are missing, which are named; 2 a user error.
"""


def add_lineage(commands: Any, command: Callable[..., Any], run_help: str) -> None:
    """Add the command to the parser."""
    lineage = command(
        commands, "lineage", "show what a row, sample, step or model came from and went into", _EPILOG,
        "Show lineage in both directions: file, row, sample, step, version, checkpoint, exported model. Without an "
        "option: that of a run's newest version, and whether any link is missing. Changes nothing.",
    )  # fmt: skip
    lineage.add_argument(
        "source", metavar="RUN|CHECKPOINT|FOLDER",
        help=f"{run_help}; a checkpoint's folder; or the folder of an exported model",
    )  # fmt: skip
    what = lineage.add_mutually_exclusive_group()
    what.add_argument("--row", metavar="ROW", help="a row: FILE:LINE, or COLUMN=VALUE")
    what.add_argument("--sample", type=sample_name, metavar="NAME", help="a sample as GROUP.SAMPLE; GROUP: its samples")
    what.add_argument("--batch", type=whole, metavar="N", help="the batch of step N")
    what.add_argument("--version", type=whole, metavar="N", help="version N of the policy")
    lineage.add_argument("--run", default="", metavar="RUN", help="run of a model that is stored elsewhere")
    lineage.add_argument("--json", action="store_true", help="one JSON object with nodes and edges")
    lineage.add_argument("--svg", default="", metavar="FILE", help="also write a picture to this file")
