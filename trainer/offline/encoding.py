"""Encodes the rows of a file as tokens, and drops those that are too long.

Which sequences a row has is defined by the task that encodes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from areal_like.errors import UserError
from trainer.offline.packing import Item
from trainer.sft import SequenceTooLong

LENGTH_REMEDY = "shorten the row, or increase data.max_tokens (up to the model's max_position_embeddings)"
MAX_NAMED = 5

Row = TypeVar("Row")


@dataclass(frozen=True)
class LoadedRows:
    """A file's rows, ready to train on. too_long: locations of the dropped rows."""

    file: str
    items: tuple[Item, ...]
    too_long: tuple[str, ...]

    def words(self, max_tokens: int) -> str:
        """Describe the dropped rows in one sentence; empty if there are none."""
        if not self.too_long:
            return ""
        lines = [place.rpartition(":")[2] for place in self.too_long[:MAX_NAMED]]
        more = f" and {len(self.too_long) - MAX_NAMED} more" if len(self.too_long) > MAX_NAMED else ""
        total = len(self.items) + len(self.too_long)
        return (
            f"{len(self.too_long)} of {total} rows of {self.file} are longer than {max_tokens} tokens and are "
            f"skipped: line {', '.join(lines)}{more}"
        )


def load_items(
    file: str, rows: Sequence[Row], encode: Callable[[Row], Item], *, on_long: Literal["drop", "stop"]
) -> LoadedRows:
    """Encode every row.

    Raises:
        UserError: a row that the tokenizer cannot express, a row that is too long under `stop`, or no row that fits.
    """
    items: list[Item] = []
    too_long: list[SequenceTooLong] = []
    for row in rows:
        try:
            items.append(encode(row))
        except SequenceTooLong as error:
            if on_long == "stop":
                raise
            too_long.append(error)
    if not items:
        first = too_long[0]
        raise UserError(f"all rows are too long; in the first row, {first.what}", where=file, remedy=first.remedy)
    return LoadedRows(file, tuple(items), tuple(error.where for error in too_long))
