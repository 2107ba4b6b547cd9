"""`areal-like data relabel`: writes a new set with corrected labels. The reviewed files are not changed.

The folder has the files of `areal-like data clean` (docs/cleaning.md) and `relabelled.jsonl`: every changed row with
its old and new label. Rows without a decision, and all others, keep their bytes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from areal_like import __version__
from areal_like.errors import UserError
from areal_like.regular_file import check_regular
from controller.config.problems import nearest
from controller.data.origins import MANIFEST, ROWS, split_place
from controller.preflight.dataset.card import CardMaker
from controller.preflight.dataset.cleaning import FORMAT, opened
from controller.preflight.dataset.columns import Columns
from controller.preflight.dataset.croissant import croissant
from controller.preflight.dataset.output import OutputFolder, refuse_existing
from controller.preflight.dataset.passing import Outcome
from controller.preflight.dataset.port import Finding, Row
from controller.preflight.dataset.reading import Line, encoded, find_sources, parse

DECISIONS = ("accept", "reject", "remove")
CHANGES = "relabelled.jsonl"


@dataclass(frozen=True)
class Review:
    """One reviewed line. place: of the line, for messages."""

    place: str
    where: str
    key: str
    prompt: str
    label: str
    answer: str
    decision: str | None


@dataclass
class Relabelled:
    """What was written."""

    num_rows: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """Reviewed rows by decision; `undecided` for those without one."""
    changes: list[dict[str, Any]] = field(default_factory=list)


def read_review(path: Path) -> list[Review]:
    """The lines that `areal-like data labels` wrote, with decisions. Raises UserError with file and line."""
    check_regular(path)
    found = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    found.append(_reviewed(line, f"{path}:{number}"))
    except OSError as error:
        raise UserError(
            f"the file cannot be read ({error.strerror})", where=str(path), remedy="check the path and its permissions"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError("the file is not UTF-8 text", where=str(path), remedy="convert the file to UTF-8") from error
    if not found:
        raise UserError("the file is empty", where=str(path), remedy="create the file with areal-like data labels")
    return found


def _reviewed(line: str, place: str) -> Review:
    remedy = "specify a file that `areal-like data labels` wrote"
    try:
        fields = json.loads(line)
        texts = {name: str(fields.get(name) or "") for name in ("where", "key", "prompt", "label", "answer")}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError("the line is not a valid entry of a review file", where=place, remedy=remedy) from error
    decision = fields.get("decision")
    if decision not in (None, *DECISIONS):
        near = nearest(str(decision), DECISIONS, count=1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(DECISIONS)}, or null"
        raise UserError(f"{decision!r} is not a valid decision", where=place, remedy=hint)
    if not texts["answer"] or not texts["label"] or not (texts["where"] or texts["key"] or texts["prompt"]):
        raise UserError(
            "the line must contain a label, an answer, and one of where, key and prompt", where=place, remedy=remedy
        )
    return Review(place, **texts, decision=decision)


class _Reviews:
    """Reviews by file and line, by id, or by prompt; each is for exactly one row."""

    def __init__(self, reviews: Sequence[Review], id_column: str) -> None:
        self._id_column, self._left = id_column, {review.place: review for review in reviews}
        self._by: dict[Any, Review] = {}
        for review in reviews:
            key = (
                _key(review.where) if review.where else ("id", review.key) if review.key else ("prompt", review.prompt)
            )
            if (other := self._by.setdefault(key, review)) is not review:
                raise UserError(
                    f"this line and {other.place} refer to the same row",
                    where=review.place,
                    remedy="keep only one of the two lines",
                )

    def take(self, row: Row) -> Review | None:
        """The review of a row. Raises UserError if the row is not the one that was reviewed."""
        identity = row.columns.value(row.fields, self._id_column)
        for key in (_key(row.where), ("id", str(identity)), ("prompt", row.prompt)):
            if (review := self._by.get(key)) is not None and review.place in self._left:
                del self._left[review.place]
                if row.answer != review.label:
                    what = (
                        f"the label of the row is {row.answer!r}, but the reviewed label was {review.label!r} "
                        f"({review.place})"
                    )
                    raise UserError(what, where=row.where, remedy="run areal-like data labels again for these rows")
                return review
        return None

    def refuse_rest(self) -> None:
        """Raise UserError if a reviewed row was not in the files."""
        for review in self._left.values():
            what = f"the reviewed row ({review.where or review.key or review.prompt[:60]}) is not in the files"
            raise UserError(what, where=review.place, remedy="specify the same files as for areal-like data labels")


def _key(where: str) -> Any:
    place = split_place(where)
    return (str(Path(place[0]).expanduser().absolute()), place[1]) if place else where


def relabel(
    files: Sequence[str], review: Path, target: Path, *, columns: Mapping[str, str | None], id_column: str,
    accepts_all: bool = False,
) -> Relabelled:  # fmt: skip
    """Write the files with corrected labels to a new folder.

    Args:
        files: files of rows or patterns.
        review: what `areal-like data labels` wrote, with decisions.
        target: the new folder; must not exist.
        columns: columns by role, as for `data clean`.
        id_column: column with the `id` of rows that were reviewed without file and line.
        accepts_all: rows without a decision are accepted.

    Raises:
        UserError: nothing was written.
        OperationError: a file changed while it was read, or the folder cannot be made.
    """
    refuse_existing(target)
    reviews = _Reviews(read_review(review), id_column)
    sources = find_sources(files)
    lines, found_columns = opened(sources, columns, needs_answer=True)
    done, maker = Relabelled(), CardMaker(found_columns)
    with OutputFolder(target) as folder:
        for number, line in enumerate(lines, 1):
            fields, fault = parse(line)
            if fault:
                raise UserError(
                    fault, where=line.where, remedy="run `areal-like data clean`, which removes invalid rows"
                )
            row = Row(number, line.where, fields, found_columns)
            done.num_rows += 1
            outcome = _outcome(row, line, reviews.take(row), found_columns, done, accepts_all=accepts_all)
            folder.add(outcome, "relabel")
            if outcome.finding is None:
                maker.add(outcome.row)
        reviews.refuse_rest()
        card, written = maker.card(), folder.close_rows()
        removed = done.counts["remove"]
        manifest = {
            "format": FORMAT, "made_by": f"areal-like {__version__}",
            "sources": [{"path": str(one.path), "bytes": one.num_bytes, "sha256": one.sha256} for one in sources],
            "columns": asdict(found_columns), "rows_in": done.num_rows, "rows_out": done.num_rows - removed,
            "stages": [{
                "kind": "relabel", "options": {"review": str(review), "accepts_all": accepts_all},
                "rows_in": done.num_rows, "removed": removed, "rows_out": done.num_rows - removed,
                "reasons": dict(done.counts), "relabelled": len(done.changes), "examples": [],
            }],
            "files": written,
        }  # fmt: skip
        folder.finish({
            MANIFEST: json.dumps(manifest, indent=2, ensure_ascii=False) + "\n",
            CHANGES: "".join(json.dumps(change) + "\n" for change in done.changes),
            "card.json": card.as_json(manifest), "card.md": card.as_markdown(target.name, manifest),
            "croissant.json": croissant(target.name, card, ROWS, written[ROWS]),
        })  # fmt: skip
    return done


def _outcome(
    row: Row, line: Line, review: Review | None, columns: Columns, done: Relabelled, *, accepts_all: bool
) -> Outcome:
    if review is None:
        return Outcome(row, line)
    decision = review.decision or ("accept" if accepts_all else "undecided")
    done.counts[decision] += 1
    if decision == "remove":
        evidence = f"label {review.label}, answers {review.answer}"
        return Outcome(row, line, 0, Finding("label likely wrong", evidence))
    if decision != "accept":
        return Outcome(row, line)
    assert columns.answer is not None
    fields = _with_value(row.fields, columns.answer, review.answer)
    done.changes.append({"where": row.where, "old": review.label, "new": review.answer, "review": review.place})
    return Outcome(Row(row.number, row.where, fields, columns), Line(line.where, encoded(fields)))


def _with_value(fields: Mapping[str, Any], name: str, value: str) -> dict[str, Any]:
    """The row with another value in a column, or in a nested one by its dotted path."""
    if name in fields or "." not in name:
        return {**fields, name: value}
    first, _, rest = name.partition(".")
    inner = fields.get(first)
    return {**fields, first: _with_value(inner if isinstance(inner, Mapping) else {}, rest, value)}
