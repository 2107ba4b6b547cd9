"""Which answer of an evaluation is whose: several sets of rows, several answers per row.

Owns: `EvalLayout`, the numbering of answers. Refuses: rows (table.py), values (telemetry/eval_results.py).

An evaluation is a list of answers by number, and a periodic one is the first of them: the periodic rows of every set
come first, then what a final evaluation adds. The answers of one row follow each other. With one set and one answer per
row, the number of an answer is that of its row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class EvalItem(NamedTuple):
    """One answer of an evaluation. row: in its set; sample: of its row, from 0."""

    set_name: str
    row: int
    sample: int


class SetSize(NamedTuple):
    """Rows of a set: all that there are, those of a final evaluation, and those of a periodic one, which are fewer."""

    num_rows: int
    num_final: int
    num_periodic: int


class EvalLayout:
    """The numbering of an evaluation's answers.

    Example:
        >>> layout = EvalLayout({"a": SetSize(9, 2, 1), "b": SetSize(9, 1, 1)}, num_samples=1)
        >>> [layout[number][:2] for number in range(layout.num_final)], layout.num_periodic
        ([('a', 0), ('b', 0), ('a', 1)], 2)
    """

    def __init__(self, sizes: Mapping[str, SetSize], *, num_samples: int = 1) -> None:
        """sizes: by name of the set; a single set has the empty name."""
        self.num_samples, self.names = num_samples, tuple(sizes)
        self._starts: dict[str, int] = {}
        start = 0
        for name, size in sizes.items():
            self._starts[name], start = start, start + size.num_rows
        rows = [(name, row) for name, size in sizes.items() for row in range(size.num_periodic)]
        self.num_periodic = len(rows) * num_samples
        rows += [(name, row) for name, size in sizes.items() for row in range(size.num_periodic, size.num_final)]
        self._rows = rows

    @property
    def num_final(self) -> int:
        """Answers of a whole evaluation."""
        return len(self._rows) * self.num_samples

    def __getitem__(self, number: int) -> EvalItem:
        place, sample = divmod(number, self.num_samples)
        return EvalItem(*self._rows[place], sample)

    def table_row(self, number: int) -> int:
        """Row of the answer in the table that has all sets, one after the other."""
        name, row, _ = self[number]
        return self._starts[name] + row

    @property
    def is_plain(self) -> bool:
        """One set, one answer per row."""
        return len(self.names) <= 1 and self.num_samples == 1
