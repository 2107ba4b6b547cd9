"""Stage `unparseable_answer`: answers that scorer `math` cannot compare with a response other than literally."""

from __future__ import annotations

from areal_like.settings import Settings
from controller.preflight.dataset.port import Finding, Row, RowStage
from controller.wiring.gold_checks import gold_fault


class UnparseableOptions(Settings):
    """Options of stage `unparseable_answer`."""

    max_words: int = 6
    """An answer in words is kept if it has at most this many."""


class UnparseableAnswer(RowStage[UnparseableOptions]):
    """See the module."""

    name = "unparseable_answer"
    Options = UnparseableOptions

    def check(self, row: Row) -> Finding | None:
        if row.columns.answer is None:
            return None
        fault = gold_fault(row.answer, max_words=self.options.max_words)
        return None if not fault else Finding(*fault)
