"""Reads the answers to each row: from a run's ledger, or from a file of answers (JSON Lines)."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_like.errors import UserError
from areal_like.regular_file import check_regular
from controller.data.table import final_answer
from controller.ledger.read_only import check_schema, open_ledger
from controller.ledger.schema import has_column
from controller.run_folder.run_folder import NO_LEDGER, RunFolder
from controller.runs.labels.disputed import Answers
from controller.runs.sample_rows import SAMPLE_COLUMNS, samples_of
from controller.runs.tokens import TokenText
from controller.runs.verify.damaged import DAMAGED
from controller.runs.verify.data_rows import DataRows, read_rows
from controller.wiring.gold_checks import stated_answer

LABELS = ("gold", "answer", "label", "final_answer")
"""Columns of the label in a file of answers, in this order."""
MAX_PROMPT_CHARS = 2_000


@dataclass
class _Row:
    """Answers to a row, newest first."""

    where: str
    key: str
    prompt: str
    label: str
    finals: list[str | None] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def taken(self) -> Answers:
        """As find_disputed takes it."""
        versions = (min(self.versions), max(self.versions)) if self.versions else None
        return Answers(
            self.where, self.key, self.prompt[:MAX_PROMPT_CHARS], self.label, self.finals, self.names, versions
        )


def reader_of(pattern: str) -> Callable[[str], str | None]:
    """Return what finds the final answer of an answer. pattern: a regular expression with one group, whose last match
    counts; empty: as scorer `math`. Raises UserError.
    """
    if not pattern:
        return stated_answer
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UserError(
            f"the pattern is not a valid regular expression ({error})",
            where=f"--answer {pattern}",
            remedy="correct the pattern",
        ) from error
    if compiled.groups != 1:
        what, remedy = (
            f"the pattern must have exactly one group, but has {compiled.groups}",
            r"use a pattern such as 'ANSWER: (\w+)'",
        )
        raise UserError(what, where=f"--answer {pattern}", remedy=remedy)
    return lambda text: found[-1].strip() if (found := compiled.findall(text)) else None


def answers_of_run(
    folder: RunFolder, read: Callable[[str], str | None], *, from_version: int | None, most: int
) -> tuple[list[Answers], int, int]:
    """The newest finished answers to each row of a run; with the first version that counts, and how many answers are no
    longer stored.

    Args:
        folder: the run.
        read: finds the final answer.
        from_version: answers that an earlier version began do not count; None: the second half of the versions.
        most: number of answers of a row that are taken.

    Raises:
        UserError: the ledger or the rows cannot be read.
    """
    if not folder.ledger.is_file():
        raise UserError(
            NO_LEDGER,
            where=str(folder.root),
            remedy="wait until the run has generated samples, or specify a run that was started with "
            "`areal-like train`",
        )
    rows, why = read_rows(folder)
    if rows is None:
        raise UserError(
            f"the rows of the run cannot be identified: {why}",
            where=str(folder.root),
            remedy="restore the data files of the run",
        )
    text, found, num_gone = TokenText.of(folder), dict[str, _Row](), 0
    try:
        db, _ = open_ledger(folder)
        with contextlib.closing(db):
            check_schema(db, folder)
            if from_version is None:
                from_version = (db.execute("SELECT MAX(step) FROM batches").fetchone()[0] or 0) // 2
            draw = "COALESCE(draw, group_id)" if has_column(db, "groups", "draw") else "group_id"
            draws = dict(db.execute(f"SELECT group_id, {draw} FROM groups"))
            query = (
                f"SELECT {SAMPLE_COLUMNS} FROM samples JOIN groups USING (group_id) WHERE samples.first_version >= ? "
                "ORDER BY samples.seq DESC"
            )
            for sample in samples_of(db.execute(query, (from_version,)), folder, text):
                if sample.payload != "stored":
                    num_gone += 1
                    continue
                row = _row_of(rows, draws[sample.group_id], found)
                if len(row.finals) < most:
                    row.finals.append(read(sample.answer) if sample.finish_reason == "stop" else None)
                    row.names.append(f"{sample.group_id}.{sample.sample_index}")
                    row.versions += [sample.first_version, sample.last_version]
    except DAMAGED as error:
        if isinstance(error, UserError):
            raise
        remedy = "run areal-like verify to see what is damaged"
        raise UserError(f"the file cannot be read ({error})", where=str(folder.ledger), remedy=remedy) from error
    if not found:
        remedy = "use --from-version 0 to include all versions; areal-like samples shows what is stored"
        raise UserError(f"no answer of version {from_version} or later is stored", where=folder.name, remedy=remedy)
    return [row.taken() for row in found.values() if row.label], from_version, num_gone


def _row_of(rows: DataRows, draw: int, found: dict[str, _Row]) -> _Row:
    where = rows.where(draw)
    if where not in found:
        fields = rows.table[rows.order.row_index(draw)]
        found[where] = _Row(where, str(fields.get("id", "")), _prompt(fields), _text(fields.get("answer")))
    return found[where]


def answers_of_file(path: Path, read: Callable[[str], str | None], *, most: int) -> list[Answers]:
    """The answers in a file: a line has `response`, a label (`gold`, `answer`, ...), and `id` or `prompt`, which is the
    same in all answers to a row. `where` is taken over. Raises UserError with file and line.
    """
    check_regular(path)
    found: dict[str, _Row] = {}
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    _add(found, line, f"{path}:{number}", read, most)
    except OSError as error:
        raise UserError(
            f"the file cannot be read ({error.strerror})", where=str(path), remedy="check the path and its permissions"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError("the file is not UTF-8 text", where=str(path), remedy="convert the file to UTF-8") from error
    if not found:
        raise UserError(
            "the file contains no answers", where=str(path), remedy="specify a file with one answer per line"
        )
    return [row.taken() for row in found.values()]


def _add(found: dict[str, _Row], line: str, place: str, read: Callable[[str], str | None], most: int) -> None:
    remedy = 'a line is {"id": ..., "response": "...", "gold": "..."}'
    try:
        fields = json.loads(line)
        response = fields["response"]
    except (KeyError, TypeError) as error:
        raise UserError(
            "the line is not a JSON object with the field `response`", where=place, remedy=remedy
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"the line is not JSON ({error})", where=place, remedy=remedy) from error
    label = next((_text(final_answer(fields[name])) for name in LABELS if fields.get(name) is not None), "")
    prompt = _prompt(fields)
    key = str(fields["id"]) if fields.get("id") is not None else ""
    if not label or not (key or prompt) or not isinstance(response, str):
        raise UserError(
            "the line has no label, has neither `id` nor `prompt`, or has a `response` that is not text",
            where=place,
            remedy=remedy,
        )
    row = found.setdefault(key or prompt, _Row(_text(fields.get("where")), key, prompt, label))
    if row.label != label:
        what = f"the label is {label!r}, but an earlier answer to the same row has the label {row.label!r}"
        raise UserError(what, where=place, remedy="give each row a unique `id`")
    if len(row.finals) < most:
        row.finals.append(read(response) if fields.get("finish_reason", "stop") == "stop" else None)


def _prompt(fields: Mapping[str, Any]) -> str:
    if isinstance(fields.get("prompt"), str):
        return str(fields["prompt"])
    messages = fields.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else {}
    return _text(last.get("content")) if isinstance(last, Mapping) else ""


def _text(value: Any) -> str:
    return "" if value is None or isinstance(value, dict | list) else str(value)
