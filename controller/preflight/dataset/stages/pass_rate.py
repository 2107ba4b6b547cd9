"""Stage `pass_rate`: rows that a model never or always solves, by verdicts on its answers.

The verdicts are the output of `areal-like score` on several answers to each row, with the row's `id` in each.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import Field, model_validator

from areal_like.errors import UserError
from areal_like.regular_file import check_regular
from areal_like.settings import Settings
from controller.preflight.dataset.port import Finding, Row, RowStage


class PassRateOptions(Settings):
    """Options of stage `pass_rate`."""

    verdicts: str
    """File of verdicts (JSON Lines with `id` and `value`)."""
    id_column: str = "id"
    """Column of the rows with the `id` of the verdicts."""
    solved_value: float = 1.0
    """A verdict with at least this value counts as solved."""
    min_answers: int = Field(2, ge=1)
    """A row with fewer scored answers is kept."""
    above: float = Field(0.0, ge=0.0, le=1.0)
    """A row is kept only if its pass rate is above this: rows that are never solved are removed."""
    below: float = Field(1.0, ge=0.0, le=1.0)
    """A row is kept only if its pass rate is below this: rows that are always solved are removed."""

    @model_validator(mode="after")
    def _are_ordered(self) -> PassRateOptions:
        if self.above >= self.below:
            raise ValueError("`above` must be less than `below`")
        return self


class PassRate(RowStage[PassRateOptions]):
    """See the module."""

    name = "pass_rate"
    Options = PassRateOptions

    def prepare(self) -> None:
        self._counts = _read_verdicts(Path(self.options.verdicts).expanduser(), self.options.solved_value)

    def check(self, row: Row) -> Finding | None:
        key = row.columns.value(row.fields, self.options.id_column)
        num_solved, num_answers = (0, 0) if key is None else self._counts.get(str(key), (0, 0))
        if num_answers < self.options.min_answers:
            return None
        rate = num_solved / num_answers
        evidence = f"{num_solved} of {num_answers} answers are correct"
        if rate <= self.options.above:
            return Finding("too hard", evidence)
        return Finding("too easy", evidence) if rate >= self.options.below else None


def _read_verdicts(path: Path, solved_value: float) -> dict[str, tuple[int, int]]:
    """(solved, scored) answers by id. Raises UserError."""
    check_regular(path, where=f"pass_rate: verdicts: {path}")
    counts: dict[str, tuple[int, int]] = {}
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                where = f"pass_rate: {path}:{number}"
                try:
                    verdict = json.loads(line)
                    key, value = verdict["id"], verdict["value"]
                except (ValueError, KeyError, TypeError, RecursionError) as error:
                    remedy = "specify the output file of `areal-like score`"
                    raise UserError(
                        "the line is not a JSON object with `id` and `value`", where=where, remedy=remedy
                    ) from error
                if key is not None and isinstance(value, int | float):
                    solved, scored = counts.get(str(key), (0, 0))
                    counts[str(key)] = solved + (value >= solved_value), scored + 1
    except OSError as error:
        raise UserError(
            f"the file cannot be read ({error.strerror})",
            where=f"pass_rate: verdicts: {path}",
            remedy="check the path and its permissions",
        ) from error
    except UnicodeDecodeError as error:
        where = f"pass_rate: verdicts: {path}"
        raise UserError(
            "the file is not UTF-8 text", where=where, remedy="specify the output file of `areal-like score`"
        ) from error
    if not counts:
        raise UserError(
            "the file contains no scored answers",
            where=f"pass_rate: verdicts: {path}",
            remedy="specify the output file of `areal-like score`",
        )
    return counts
