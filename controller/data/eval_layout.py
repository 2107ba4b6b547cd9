"""The numbering of an evaluation's answers over several sets of rows and several answers per row.

Answers are numbered from 0. The periodic rows of every set come first, then the rows that only a final evaluation has,
so that a periodic evaluation is the first part of a final one. The answers of one row are consecutive. With one set and
one answer per row, the number of an answer is the number of its row. Rows are stored in table.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class EvalItem(NamedTuple):
    """One answer of an evaluation. row: index in its set; sample: index among the answers of its row, from 0."""

    set_name: str
    row: int
    sample: int


class SetSize(NamedTuple):
    """Numbers of rows of a set: all rows, those of a final evaluation, and those of a periodic one."""

    num_rows: int
    num_final: int
    num_periodic: int


class EvalLayout:
    """The numbering of an evaluation's answers. `names`: sets that count for the accuracy.

    Example:
        >>> layout = EvalLayout({"a": SetSize(9, 2, 1), "b": SetSize(9, 1, 1)}, num_samples=1)
        >>> [layout[number][:2] for number in range(layout.num_final)], layout.num_periodic
        ([('a', 0), ('b', 0), ('a', 1)], 2)
    """

    def __init__(self, sizes: Mapping[str, SetSize], *, num_samples: int = 1, red_team: str | None = None) -> None:
        """sizes: sizes by name of the set; a single set has the empty name. red_team: the set that does not count for
        the accuracy.
        """
        self.num_samples, self.names = num_samples, tuple(name for name in sizes if name != red_team)
        self._red_team = red_team
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
        """Number of answers of a final evaluation."""
        return len(self._rows) * self.num_samples

    def __getitem__(self, number: int) -> EvalItem:
        place, sample = divmod(number, self.num_samples)
        return EvalItem(*self._rows[place], sample)

    def is_red_team(self, number: int) -> bool:
        """Whether it is an answer to data.red_team."""
        return self._red_team is not None and self[number].set_name == self._red_team

    def counted(self, values: Sequence[float | None]) -> tuple[float | None, ...]:
        """The values by number of the answer, without those of data.red_team."""
        if self._red_team is None:
            return tuple(values)
        return tuple(None if self.is_red_team(number) else value for number, value in enumerate(values))

    def table_row(self, number: int) -> int:
        """Row of the answer in the table in which all sets are concatenated."""
        name, row, _ = self[number]
        return self._starts[name] + row

    @property
    def is_plain(self) -> bool:
        """Whether there is one set, with one answer per row."""
        return len(self._starts) <= 1 and self.num_samples == 1
