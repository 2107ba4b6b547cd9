"""Samples by prompt: the list of groups, and all answers of one group.

Samples are defined in sample_rows.py. Unlike `read_samples` these queries never count a whole table, because they are
repeated while a run is in progress.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from areal_like.errors import UserError
from controller.ledger.read_only import check_schema, open_ledger
from controller.run_folder.run_folder import NO_LEDGER, RunFolder
from controller.runs.sample_rows import SAMPLE_COLUMNS, Sample, samples_of
from controller.runs.tokens import TokenText

MAX_GROUPS = 60
MAX_ANSWERS = 64
NEWEST = 2000
"""Number of the newest groups that are read if no step is given."""


@dataclass(frozen=True)
class GroupRow:
    """One prompt. The rewards are those of its scored samples; None if none is scored."""

    group_id: int
    step: int | None
    """The step that used it."""
    fate: str
    num_samples: int
    mean: float | None
    lowest: float | None
    highest: float | None
    is_stored: bool
    """Whether tokens of a sample are still stored."""


@dataclass
class GroupReader:
    """Reads the groups of one run. The tokenizer is kept, because it takes longest to load."""

    folder: RunFolder
    _text: TokenText | None = field(default=None, repr=False)

    def groups(self, step: int | None = None) -> list[GroupRow]:
        """The newest groups with a finished sample, or the groups of a step; at most MAX_GROUPS, newest first.

        Raises UserError if there is no ledger yet, or it cannot be read.
        """
        if step is None:
            condition, values = "group_id > (SELECT MAX(group_id) FROM groups) - ?", [NEWEST]
        else:
            condition, values = "groups.fate = 'consumed' AND groups.step = ?", [step]
        query = (
            "SELECT group_id, step, fate, COUNT(*), AVG(value), MIN(value), MAX(value), SUM(file IS NOT NULL) "
            f"FROM groups JOIN samples USING (group_id) WHERE {condition} "
            "GROUP BY group_id ORDER BY group_id DESC LIMIT ?"
        )
        with self._ledger() as db:
            rows = db.execute(query, [*values, MAX_GROUPS]).fetchall()
        return [
            GroupRow(group_id, used if fate == "consumed" else None, fate, count, mean, low, high, bool(num_stored))
            for group_id, used, fate, count, mean, low, high, num_stored in rows
        ]

    def answers(self, group_id: int) -> Sequence[Sample]:
        """All finished samples of a group, at most MAX_ANSWERS. Raises UserError."""
        query = (
            f"SELECT {SAMPLE_COLUMNS} FROM samples JOIN groups USING (group_id) WHERE group_id = ? "
            "ORDER BY sample_index LIMIT ?"
        )
        if self._text is None:
            self._text = TokenText.of(self.folder)
        with self._ledger() as db:
            found = list(samples_of(db.execute(query, [group_id, MAX_ANSWERS]), self.folder, self._text))
        if not found:
            raise UserError(
                f"group {group_id} has no finished sample",
                where=self.folder.name,
                remedy="select a group from the list",
            )
        return found

    @property
    def problems(self) -> list[str]:
        """Reasons why texts are incomplete."""
        return list(self._text.problems) if self._text else []

    @contextmanager
    def _ledger(self) -> Iterator[sqlite3.Connection]:
        path = self.folder.ledger
        if not path.is_file():
            raise UserError(
                NO_LEDGER,
                where=self.folder.name,
                remedy="wait until the run has generated samples, or specify a run that was started with "
                "`areal-like train`",
            )
        try:
            db, _ = open_ledger(self.folder)
            try:
                check_schema(db, self.folder)
                yield db
            finally:
                db.close()
        except (sqlite3.Error, ValueError, KeyError, TypeError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"the file cannot be read ({error})", where=str(path), remedy="restore the file from a backup"
            ) from error
