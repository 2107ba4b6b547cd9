"""Output of `areal-like data labels` and `areal-like data relabel`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from areal_like.errors import OperationError, UserError
from areal_like.plain_text import one_line
from controller.preflight.dataset.text import excerpt
from controller.run_folder.locate import find_run_to_read
from controller.runs.labels.answers import answers_of_file, answers_of_run, reader_of
from controller.runs.labels.asking import Asking, write_answers
from controller.runs.labels.disputed import Found, find_disputed
from controller.runs.labels.relabel import relabel

MAX_SHOWN = 20


def labels_command(
    source: str, *, out: str, pattern: str, min_answers: int, min_agreement: float, most: int, from_version: int | None,
    as_json: bool,
) -> int:  # fmt: skip
    """List rows whose label is likely wrong; return the exit status, 0. Raises UserError."""
    read, notes = reader_of(pattern), []
    path = Path(source).expanduser()
    if path.is_file():
        if from_version is not None:
            what, remedy = "a file of answers has no policy versions", "remove --from-version, or specify a run"
            raise UserError(what, where="--from-version", remedy=remedy)
        rows = answers_of_file(path, read, most=most)
    else:
        rows, first, num_gone = answers_of_run(
            find_run_to_read(source), read, from_version=from_version, most=most
        )  # fmt: skip
        notes.append(f"answers that were started with version {first} or later are counted")
        notes += [f"{num_gone:,} answers are no longer stored (ledger.keep_mb)"] if num_gone else []
    found = find_disputed(rows, min_answers=min_answers, min_agreement=min_agreement)
    if found.num_judged == 0:
        raise UserError(
            f"no row has at least {min_answers} final answers",
            where=source,
            remedy="reduce --min-answers, or specify the pattern of final answers with --answer",
        )
    if found.num_agreeing < found.num_judged / 2:
        notes.append(
            f"the answers agree with the label of only {found.num_agreeing:,} of {found.num_judged:,} rows, so the "
            "list is not reliable"
        )
    if out:
        _write(Path(out).expanduser(), found)
    if as_json:
        page = {
            "rows": found.num_rows, "judged": found.num_judged, "agreeing": found.num_agreeing,
            "listed": [one.as_dict() for one in found.disputed], "notes": notes,
        }  # fmt: skip
        print(json.dumps(page))
        return 0
    _print(found, notes)
    if out:
        print(
            f"the labels were written to {out}; set `decision` in each line, then run areal-like data "
            f"relabel FILE --review {out} -o "
            "NEW"
        )
    return 0


def _write(path: Path, found: Found) -> None:
    """Write the list, one row in a line. A review is never overwritten."""
    try:
        with path.open("x", encoding="utf-8") as file:
            for one in found.disputed:
                file.write(json.dumps(one.as_dict()) + "\n")
    except FileExistsError as error:
        remedy = "choose a different name; an existing review is never overwritten"
        raise UserError("the file already exists", where=str(path), remedy=remedy) from error
    except OSError as error:
        raise UserError(
            f"the file cannot be written ({error.strerror})", where=str(path), remedy="choose a different file"
        ) from error


def _print(found: Found, notes: list[str]) -> None:
    print(
        f"{len(found.disputed):,} labels are probably wrong, out of {found.num_judged:,} rows with enough answers "
        f"({found.num_rows:,} rows have answers)"
    )
    for one in found.disputed[:MAX_SHOWN]:
        place = one.where or one.key or excerpt(one.prompt, 40)
        print(one_line(
            f"  {place}  label {excerpt(one.label, 40)}, {one.num_agree} of {one.num_answers} answers "
            f"{excerpt(one.answer, 40)}  {excerpt(one.prompt, 60)}"
        ))  # fmt: skip
    if len(found.disputed) > MAX_SHOWN:
        print(f"  and {len(found.disputed) - MAX_SHOWN:,} more")
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def answers_command(asking: Asking) -> int:
    """Ask an external model about rows; return the exit status, 1 if requests had no answer. Raises UserError,
    OperationError.
    """
    done, counters = write_answers(asking)
    paid = f"{counters['requests']:,.0f} requested, {counters['recorded']:,.0f} taken from the record"
    tokens = f"{counters['tokens_in'] + counters['tokens_out']:,.0f} tokens"
    cost = f", cost {counters['cost']:.4g}" if counters["cost"] else ""
    print(
        f"{done.num_answers:,} answers to {done.num_rows:,} rows ({paid}; {tokens}{cost}) were written to "
        f"{asking.target}"
    )
    if done.num_failed:
        print(
            f"{done.num_failed:,} requests were not answered; the first failure: {done.first_failure}", file=sys.stderr
        )
    return int(done.num_failed > 0)


def relabel_command(
    files: list[str], *, review: str, output: str, columns: Mapping[str, str | None], id_column: str, accepts_all: bool
) -> int:
    """Write a set with corrected labels; return the exit status, 0. Raises UserError, OperationError."""
    target = Path(output).expanduser()
    try:
        done = relabel(
            files, Path(review).expanduser(), target, columns=columns, id_column=id_column, accepts_all=accepts_all
        )
    except OSError as error:
        raise OperationError(
            f"{error.filename or output} cannot be read or written: {error.strerror or error}; no output was saved"
        ) from error
    decided = ", ".join(f"{name} {count:,}" for name, count in sorted(done.counts.items()))
    print(f"{done.num_rows:,} rows, {len(done.changes):,} with a new label ({decided}), were written to {target}")
    return 0
