r"""Stage `solution_disagrees`: the solution's own final result is not the answer in the answer's column.

The result of a solution is what follows `####` (GSM8K) or is in its last boxes (MATH). Both are compared as scorer
`math` compares a response. Rows without both are kept.
"""

from __future__ import annotations

from controller.preflight.dataset.port import Finding, NoOptions, Row, RowStage
from controller.preflight.dataset.text import excerpt
from controller.wiring.gold_checks import result_of, results_differ


class SolutionDisagrees(RowStage[NoOptions]):
    """See the module."""

    name = "solution_disagrees"

    def check(self, row: Row) -> Finding | None:
        if not row.solution or not row.stated_answer:
            return None
        result = result_of(row.solution)
        if not result:
            return Finding("no result", "the solution marks an empty text as its final result")
        if not results_differ(row.stated_answer, row.solution):
            return None
        return Finding(
            "different result",
            f"the answer is {excerpt(row.stated_answer, 60)}, but the solution gives {excerpt(result, 60)}",
        )
