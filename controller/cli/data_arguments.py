"""Arguments of `areal-like data`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from areal_like.arguments import price, processes, seconds, share, whole
from controller.cli.serve_arguments import temperature
from controller.dashboard.arguments import port
from controller.runs.labels.defaults import MIN_AGREEMENT, MIN_ANSWERS, MOST

_EPILOG = """\
examples:
  areal-like data check train.jsonl
  areal-like data check train.jsonl --eval test.jsonl --json
  areal-like data clean train.jsonl -o train-clean --stages stages.yaml
  areal-like data card train-clean/rows.jsonl
  areal-like data answers train.jsonl -o answers.jsonl --base-url http://127.0.0.1:8000/v1 --model NAME
  areal-like data labels quickstart -o review.jsonl
  areal-like data relabel train.jsonl --review review.jsonl -o train-2

stages.yaml:
  columns: {prompt: task, answer: label}
  stages:
    - schema
    - {kind: language, options: {allowed: [en, de]}}
    - my_stages:no_tables
    - exact_duplicates
    - {kind: near_duplicates, options: {threshold: 0.8}}

stages (the default stages are marked with *): schema*, length*, language, unparseable_answer*, solution_disagrees*,
secrets*, personal_data*, toxic, pass_rate, contamination, exact_duplicates*, near_duplicates*. docs/cleaning.md
describes their options.
"""


def add_data(commands: Any, make: Callable[..., Any]) -> None:
    """Add the command and its parts. make: as `_command` in arguments.py."""
    data = make(
        commands, "data", "check, clean, describe or relabel data files (docs/cleaning.md)", _EPILOG,
        "Check data files for defects, write a cleaned copy, describe them, or find wrong labels. The input files are "
        "never changed.",
    )  # fmt: skip
    parts = data.add_subparsers(dest="part", required=True, metavar="PART", parser_class=type(data))
    check = make(
        parts, "check", "count the rows that `clean` would remove", _CHECK_EPILOG,
        "Run the stages on the files, and print the rows that each stage would remove, with examples. Nothing is "
        "written.",
    )  # fmt: skip
    clean = make(
        parts, "clean", "write the rows without defects to a new folder", _CLEAN_EPILOG,
        "Run the stages on the files. Write the remaining rows, the removed rows with the reasons, a manifest and a "
        "data card to a new folder.",
    )  # fmt: skip
    card = make(
        parts, "card", "describe data files: columns, lengths, languages and sources", "",
        "Print a data card of the files in Markdown.",
    )  # fmt: skip
    for part in (check, clean, card):
        part.add_argument(
            "files", nargs="+", metavar="FILE", help="data file (.jsonl, .jsonl.gz, .json or .parquet) or glob pattern"
        )
        part.add_argument(
            "--columns", action="append", default=[], metavar="ROLE=NAME",
            help="map a role (prompt, answer or solution) to a column; answer=null means that there are no answers",
        )  # fmt: skip
        part.add_argument("--json", action="store_true", help="one JSON object")
    for part in (check, clean):
        part.add_argument("--stages", metavar="FILE", help="YAML file that lists the stages (default: a built-in list)")
        part.add_argument(
            "--eval", action="append", default=[], metavar="FILE",
            help="file of evaluation rows; adds the stage `contamination`; this option can be repeated",
        )  # fmt: skip
        part.add_argument(
            "--workers", type=processes, default=0, metavar="N", help="number of processes (default: one per core)"
        )
        part.add_argument(
            "--examples", type=whole, default=3, metavar="N", help="number of examples to print per stage (default: 3)"
        )
    _add_labels(parts, make)
    clean.add_argument("-o", "--output", required=True, metavar="FOLDER", help="output folder, which must not exist")


def _add_labels(parts: Any, make: Callable[..., Any]) -> None:
    _add_answers(parts, make)
    _add_review(parts, make)
    labels = make(
        parts, "labels", "list rows whose label is probably wrong", _LABELS_EPILOG,
        "List the rows for which the generated answers agree with each other but not with the row's label. The answers "
        "come from a run or from a file.",
    )  # fmt: skip
    labels.add_argument("source", metavar="RUN|FILE", help="a run, or a file of answers in JSON Lines format (.jsonl)")
    labels.add_argument(
        "-o",
        "--output",
        default="",
        metavar="FILE",
        help="write the list to this file (.jsonl), which must not exist",
    )
    labels.add_argument(
        "--answer", default="", metavar="REGEX",
        help="regular expression with exactly one capturing group, which extracts the final answer; the last match is "
        "used (default: the rules of the scorer `math`)",
    )  # fmt: skip
    labels.add_argument(
        "--min-answers", type=processes, default=MIN_ANSWERS, metavar="N",
        help=f"minimum number of final answers per row (default: {MIN_ANSWERS})",
    )  # fmt: skip
    labels.add_argument(
        "--min-agreement", type=share, default=MIN_AGREEMENT, metavar="S",
        help=f"fraction of a row's final answers that must agree (default: {MIN_AGREEMENT:g})",
    )  # fmt: skip
    labels.add_argument(
        "--most",
        type=processes,
        default=MOST,
        metavar="N",
        help=f"use only the newest N answers of each row (default: {MOST})",
    )
    labels.add_argument(
        "--from-version",
        type=whole,
        metavar="N",
        help="use only answers of policy version N or later (default: the second half of the run's versions)",
    )
    labels.add_argument("--json", action="store_true", help="one JSON object")
    relabel = make(
        parts, "relabel", "write a copy of data files with reviewed labels", _RELABEL_EPILOG,
        "Apply the decisions of a review to data files, and write the result to a new folder. The input files are "
        "never changed.",
    )  # fmt: skip
    relabel.add_argument("files", nargs="+", metavar="FILE", help="data file or glob pattern")
    relabel.add_argument(
        "--review",
        required=True,
        metavar="FILE",
        help="output of `areal-like data labels`, with a `decision` in each line",
    )
    relabel.add_argument("-o", "--output", required=True, metavar="FOLDER", help="output folder, which must not exist")
    relabel.add_argument("--accept-all", action="store_true", help="also accept lines without a decision")
    relabel.add_argument(
        "--id-column", default="id", metavar="NAME", help="column that corresponds to `key` in the review (default: id)"
    )
    relabel.add_argument(
        "--columns",
        action="append",
        default=[],
        metavar="ROLE=NAME",
        help="map a role to a column, as in `areal-like data clean --columns`",
    )


def _add_review(parts: Any, make: Callable[..., Any]) -> None:
    review = make(
        parts, "review", "decide about wrong labels on a local page", _REVIEW_EPILOG,
        "Serve a page on which each row of a review is accepted, rejected or removed. Every decision is written to the "
        "review file at once. With data files and -o, the page can also write the new set, as `relabel` does.",
    )  # fmt: skip
    review.add_argument("review", metavar="REVIEW", help="output of `areal-like data labels -o`")
    review.add_argument("files", nargs="*", metavar="FILE", help="data file or glob pattern that the review is about")
    review.add_argument("-o", "--output", metavar="FOLDER", help="output folder, which must not exist")
    review.add_argument(
        "--id-column", default="id", metavar="NAME", help="column that corresponds to `key` in the review (default: id)"
    )
    review.add_argument(
        "--columns",
        action="append",
        default=[],
        metavar="ROLE=NAME",
        help="map a role to a column, as in `areal-like data clean --columns`",
    )
    review.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    review.add_argument("--port", type=port, default=0, help="port (default: any free port)")
    review.add_argument("--token", help="token for access to the page (default: a generated token, which is printed)")


def _add_answers(parts: Any, make: Callable[..., Any]) -> None:
    answers = make(
        parts, "answers", "generate answers with an external model", _ANSWERS_EPILOG,
        "Generate answers to each row with a model behind an OpenAI-compatible endpoint, and write them to a file, "
        "which `labels` compares with the labels and `areal-like score` scores.",
    )  # fmt: skip
    add = answers.add_argument
    add("files", nargs="+", metavar="FILE", help="data file or glob pattern")
    add("-o", "--output", required=True, metavar="FILE", help="output file (.jsonl), which must not exist")
    add("--base-url", required=True, metavar="URL", help="base URL of the API, such as http://HOST:8000/v1")
    add("--model", required=True, metavar="NAME", help="name of the model at the endpoint")
    add("--key-env", metavar="NAME", help="environment variable that contains the API key")
    add("--key-file", metavar="FILE", help="file that contains the API key")
    add("--num-answers", type=processes, default=4, metavar="N", help="number of answers per row (default: 4)")
    add("--temperature", type=temperature, default=0.7, metavar="T", help="sampling temperature (default: 0.7)")
    add("--max-tokens", type=whole, default=1024, metavar="N", help="maximum answer length in tokens (default: 1024)")
    add("--system", metavar="TEXT", help="system message")
    add("--extra-body", default="{}", metavar="JSON", help="JSON object with additional fields for each request")
    add(
        "--concurrency",
        type=processes,
        default=8,
        metavar="N",
        help="maximum number of concurrent requests (default: 8)",
    )
    add(
        "--timeout-s",
        type=seconds,
        default=120.0,
        metavar="S",
        help="time limit for all attempts of a request, in seconds (default: 120)",
    )
    add("--price-in", type=price, metavar="P", help="price per million prompt tokens")
    add("--price-out", type=price, metavar="P", help="price per million answer tokens")
    add("--max-cost", type=price, metavar="C", help="maximum total cost, in the currency of the prices")
    add("--max-tokens-total", type=whole, metavar="N", help="maximum total number of prompt and answer tokens")
    add("--records", metavar="FILE", help="file in which answers are recorded (default: OUTPUT.external.jsonl)")
    add("--replay", action="store_true", help="read all answers from the records; send no requests")
    add("--columns", action="append", default=[], metavar="ROLE=NAME", help="as for clean")


_ANSWERS_EPILOG = """\
examples:
  areal-like data answers train.jsonl -o answers.jsonl --base-url http://127.0.0.1:8000/v1 --model Qwen/Qwen3-32B
  areal-like data labels answers.jsonl -o review.jsonl
  areal-like score --scorer math --input answers.jsonl --output verdicts.jsonl

Every answer is recorded when it arrives. An interrupted command, or one whose budget is used up, leaves no output; the
same command continues and asks only for what is missing.

exit status: 0 done; 1 requests had no answer; 2 a user error, such as a budget that is used up; 130 interrupted.
"""
_LABELS_EPILOG = """\
examples:
  areal-like data labels quickstart
  areal-like data labels quickstart -o review.jsonl
  areal-like data labels answers.jsonl --answer 'ANSWER: (\\w+)' --json

format of a line in a file of answers: {"id": 7, "response": "so \\\\boxed{42}", "gold": "41", "prompt": "..."}

exit status: 0 done; 2 a user error.
"""
_REVIEW_EPILOG = """\
examples:
  areal-like data labels quickstart -o review.jsonl
  areal-like data review review.jsonl
  areal-like data review review.jsonl train.jsonl -o train-2

exit status: 0 ended by Ctrl-C; 2 a user error.
"""
_RELABEL_EPILOG = """\
decisions: accept (the answer replaces the label), reject (the label is kept), remove (the row is removed), null (no
decision)

exit status: 0 done; 1 failed; 2 a user error.
"""
_CHECK_EPILOG = """\
exit status: 0 no row would be removed; 1 some rows would be removed; 2 a user error; 130 interrupted.
"""
_CLEAN_EPILOG = """\
The folder has rows.jsonl, removed.jsonl, manifest.json, card.md, card.json and croissant.json. It is created after all
rows have been written: if the command is interrupted, run it again.

exit status: 0 done; 1 failed; 2 a user error; 130 interrupted.
"""
