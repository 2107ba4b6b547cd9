"""Arguments of `areal-like data`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from areal_like.arguments import processes, whole

_EPILOG = """\
examples:
  areal-like data check train.jsonl
  areal-like data check train.jsonl --eval test.jsonl --json
  areal-like data clean train.jsonl -o train-clean --stages stages.yaml
  areal-like data card train-clean/rows.jsonl

stages.yaml:
  columns: {prompt: task, answer: label}
  stages:
    - schema
    - {kind: language, options: {allowed: [en, de]}}
    - my_stages:no_tables
    - exact_duplicates
    - {kind: near_duplicates, options: {threshold: 0.8}}

stages, with the default ones marked by *: schema*, length*, language, unparseable_answer*, solution_disagrees*,
secrets*, personal_data*, toxic, pass_rate, contamination, exact_duplicates*, near_duplicates*. Their options are in
docs/cleaning.md.
"""


def add_data(commands: Any, make: Callable[..., Any]) -> None:
    """Add the command and its three parts. make: as `_command` in arguments.py."""
    data = make(
        commands, "data", "check, clean or describe a file of rows (docs/cleaning.md)", _EPILOG,
        "Check files of rows for faults, write a cleaned copy, or describe them. The files are never changed.",
    )  # fmt: skip
    parts = data.add_subparsers(dest="part", required=True, metavar="PART", parser_class=type(data))
    check = make(
        parts, "check", "count the rows that `clean` would remove", _CHECK_EPILOG,
        "Run the stages over the files, and print what each would remove, with examples. Writes nothing.",
    )  # fmt: skip
    clean = make(
        parts, "clean", "write the rows without faults to a new folder", _CLEAN_EPILOG,
        "Run the stages over the files, and write the kept rows, the removed rows with their reasons, a manifest and a "
        "card to a new folder.",
    )  # fmt: skip
    card = make(
        parts, "card", "describe rows: columns, lengths, languages, sources", "",
        "Print a card of the files in Markdown.",
    )  # fmt: skip
    for part in (check, clean, card):
        part.add_argument(
            "files", nargs="+", metavar="FILE", help="rows (.jsonl, .jsonl.gz, .json, .parquet), or a pattern"
        )
        part.add_argument(
            "--columns", action="append", default=[], metavar="ROLE=NAME",
            help="column of the prompt, answer or solution; answer=null: there are no answers",
        )  # fmt: skip
        part.add_argument("--json", action="store_true", help="one JSON object")
    for part in (check, clean):
        part.add_argument("--stages", metavar="FILE", help="YAML file with the stages (if omitted, the default stages)")
        part.add_argument(
            "--eval", action="append", default=[], metavar="FILE",
            help="evaluation rows: adds the stage `contamination`; may be given several times",
        )  # fmt: skip
        part.add_argument("--workers", type=processes, default=0, metavar="N", help="processes (one for each core)")
        part.add_argument("--examples", type=whole, default=3, metavar="N", help="examples of each stage (3)")
    clean.add_argument("-o", "--output", required=True, metavar="FOLDER", help="the new folder; must not exist")


_CHECK_EPILOG = """\
exit status: 0 no row would be removed; 1 some would; 2 a user error; 130 interrupted.
"""
_CLEAN_EPILOG = """\
The folder has rows.jsonl, removed.jsonl, manifest.json, card.md, card.json and croissant.json. It appears when all rows
are written: an interrupted command leaves nothing, and is run again.

exit status: 0 done; 1 failed; 2 a user error; 130 interrupted.
"""
