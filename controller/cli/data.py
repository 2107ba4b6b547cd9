"""`areal-like data`: check, clean or describe files of rows.

The work is done in controller/preflight/dataset/; this module reads the arguments and prints the results.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_like.errors import OperationError, UserError
from areal_like.plain_text import one_line
from controller.config.yaml_document import parse_value
from controller.preflight.dataset.card import CardMaker
from controller.preflight.dataset.cleaning import CleaningJob, Report, opened
from controller.preflight.dataset.port import Row
from controller.preflight.dataset.reading import find_sources, parse
from controller.preflight.dataset.registry import Plan, default_plan, read_plan, with_evaluation
from controller.wiring.process_specs import num_cores

_BODY_REMEDY = """write, for example, '{"top_p": 0.9}'"""
SHOW_EVERY_S = 5.0
"""Seconds between two lines of progress."""


def data(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status. Raises UserError, OperationError."""
    if arguments.part == "card":
        return _card(arguments)
    if arguments.part == "review":
        return _review(arguments)
    if arguments.part in ("labels", "relabel"):
        return _labels(arguments)
    if arguments.part == "answers":
        return _answers(arguments)
    job = CleaningJob(
        arguments.files, _plan(arguments), arguments.workers or num_cores(), arguments.examples, _Progress().show
    )
    try:
        if arguments.part == "check":
            report = job.check()
            sys.stdout.write(_page(report, arguments.json))
            return int(report.num_removed > 0)
        target = Path(arguments.output).expanduser()
        report = job.clean(target)
    except OSError as error:
        raise OperationError(
            f"{error.filename or arguments.files[0]} cannot be read or written: {error.strerror or error}; "
            "no output was saved"
        ) from error
    sys.stdout.write(_page(report, arguments.json) + ("" if arguments.json else f"written to {target}\n"))
    return 0


def _labels(arguments: argparse.Namespace) -> int:
    from controller.runs.labels.command import labels_command, relabel_command

    if arguments.part == "relabel":
        return relabel_command(
            arguments.files, review=arguments.review, output=arguments.output, columns=_columns(arguments),
            id_column=arguments.id_column, accepts_all=arguments.accept_all,
        )  # fmt: skip
    return labels_command(
        arguments.source, out=arguments.output, pattern=arguments.answer, min_answers=arguments.min_answers,
        min_agreement=arguments.min_agreement, most=arguments.most, from_version=arguments.from_version,
        as_json=arguments.json,
    )  # fmt: skip


def _review(arguments: argparse.Namespace) -> int:
    from controller.dashboard.review import Target, review_command

    if bool(arguments.files) != bool(arguments.output):
        what = "the data files and the output folder must be specified together"
        raise UserError(what, where="-o", remedy="specify both the data files and -o FOLDER, or neither of them")
    target = None
    if arguments.files:
        folder = Path(arguments.output).expanduser()
        target = Target(arguments.files, folder, _columns(arguments), arguments.id_column)
    return review_command(
        arguments.review, host=arguments.host, port=arguments.port, token=arguments.token, target=target
    )


def _answers(arguments: argparse.Namespace) -> int:
    import pydantic

    from areal_like.external.settings import ExternalModelOptions
    from controller.runs.labels.asking import Asking
    from controller.runs.labels.command import answers_command

    target = Path(arguments.output).expanduser()
    names = (
        "base_url", "model", "key_env", "key_file", "system", "max_cost", "max_tokens_total", "price_in", "price_out",
    )  # fmt: skip
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    given |= {"records": arguments.records or f"{target}.external.jsonl", "max_concurrency": arguments.concurrency}
    given |= {"record": "replay"} if arguments.replay else {}
    given |= {"total_timeout_s": arguments.timeout_s, "extra_body": _json_object(arguments.extra_body)}
    try:
        options = ExternalModelOptions.model_validate(given)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = "--" + "-".join(str(part) for part in first["loc"]).replace("_", "-") if first["loc"] else "options"
        raise UserError(first["msg"].removeprefix("Value error, "), where=where) from error
    return answers_command(
        Asking(
            arguments.files, target, options, _columns(arguments), arguments.num_answers, arguments.temperature,
            arguments.max_tokens,
        )
    )  # fmt: skip


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UserError(f"the value is not valid JSON ({error})", where="--extra-body", remedy=_BODY_REMEDY) from error
    if not isinstance(found, dict):
        raise UserError("the value is not a JSON object", where="--extra-body", remedy=_BODY_REMEDY)
    return found


def _plan(arguments: argparse.Namespace) -> Plan:
    plan = read_plan(Path(arguments.stages).expanduser()) if arguments.stages else default_plan()
    stages = plan.stages
    if arguments.eval:
        stages = with_evaluation(stages, arguments.eval)
    return Plan(stages, {**plan.columns, **_columns(arguments)})


def _columns(arguments: argparse.Namespace) -> Mapping[str, str | None]:
    columns: dict[str, str | None] = {}
    for pair in arguments.columns:
        role, sign, name = pair.partition("=")
        value = parse_value(name)
        if not sign or not isinstance(value, str | None):
            raise UserError(
                f"`{pair}` does not map a role to a column",
                where="--columns",
                remedy="write ROLE=NAME, for example prompt=question",
            )
        columns[role] = value
    return columns


def _card(arguments: argparse.Namespace) -> int:
    sources = find_sources(arguments.files)
    lines, columns = opened(sources, _columns(arguments), needs_answer=False)
    maker, progress = CardMaker(columns), _Progress()
    for number, line in enumerate(lines, 1):
        fields, fault = parse(line)
        if fault:
            raise UserError(fault, where=line.where, remedy="run `areal-like data clean`, which removes invalid rows")
        maker.add(Row(number, line.where, fields, columns))
        if number % 1_000 == 0:
            progress.show(number)
    manifest = {"sources": [{"path": str(one.path), "bytes": one.num_bytes, "sha256": one.sha256} for one in sources]}
    card = maker.card()
    name = ", ".join(one.path.name for one in sources)
    sys.stdout.write(card.as_json(manifest, is_ascii=True) if arguments.json else card.as_markdown(name, manifest))
    return 0


def _page(report: Report, is_json: bool) -> str:
    if is_json:
        return json.dumps({**report.as_dict(), "notes": report.notes}, indent=2) + "\n"
    lines = [f"{report.num_in:,} rows, {report.num_removed:,} with defects, {report.num_out:,} without", ""]
    lines += [f"  {one.kind:<22} {one.num_removed:>9,}  {_reasons(one.reasons)}" for one in report.stages]
    for one in report.stages:
        if one.examples:
            lines += ["", f"{one.kind}:"]
            lines += [f"  {_example(example)}" for example in one.examples]
    return "\n".join([*lines, "", *(f"note: {note}" for note in report.notes)]).rstrip() + "\n"


def _reasons(reasons: Mapping[str, int]) -> str:
    return ", ".join(
        f"{one_line(reason)} {count:,}" for reason, count in sorted(reasons.items(), key=lambda item: -item[1])
    )


def _example(example: Mapping[str, Any]) -> str:
    shown = f": {example['prompt']}" if example.get("prompt") else ""
    return one_line(f"{example['where']}: {example['reason']} ({example['evidence']}){shown}")


class _Progress:
    """A line on stderr every few seconds."""

    def __init__(self) -> None:
        self._began_s = self._shown_s = time.monotonic()

    def show(self, num_rows: int) -> None:
        """Show the number of rows; may be called at any rate."""
        now_s = time.monotonic()
        if now_s - self._shown_s >= SHOW_EVERY_S:
            self._shown_s = now_s
            rate = num_rows / (now_s - self._began_s)
            print(f"data: {num_rows:,} rows processed, {rate:,.0f} rows/s", file=sys.stderr, flush=True)
