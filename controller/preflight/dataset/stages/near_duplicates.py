"""Stage `near_duplicates`: a prompt that differs from an earlier one in a few words.

Candidates are found by MinHash signatures (`rensa`) in bands, and compared exactly: the Jaccard similarity of the sets
of all runs of three tokens (Broder 1997, "On the resemblance and containment of documents"). Problems that differ in a
number or in their final answer are different problems, however similar their texts are, unless the options say
otherwise.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from areal_like.settings import Settings
from controller.preflight.dataset.index import SimilarTexts
from controller.preflight.dataset.port import Finding, Row, SetStage
from controller.preflight.dataset.sketches import Sketch, Sketcher


class NearOptions(Settings):
    """Options of stage `near_duplicates`."""

    threshold: float = Field(0.6, ge=0.5, le=1.0)
    """Similarity from which a row is removed."""
    numbers: Literal["same", "any"] = "same"
    """With `same`, only a prompt with the same numbers in the same order is a duplicate."""
    answers: Literal["same", "any"] = "same"
    """With `same`, only a row with the same answer is a duplicate."""


class NearDuplicates(SetStage[NearOptions]):
    """See the module."""

    name = "near_duplicates"
    Options = NearOptions

    def prepare(self) -> None:
        options = self.options
        self._sketcher = Sketcher(with_numbers=options.numbers == "same")

    def sketch(self, row: Row) -> Sketch | None:
        return self._sketcher.sketch(row.prompt_tokens, row.answer if self.options.answers == "same" else "")

    def open(self) -> None:
        self._seen = SimilarTexts(self.options.threshold)

    def decide(self, number: int, where: str, sketch: Any) -> Finding | None:
        found = self._seen.find_or_add(sketch, where)
        return None if found is None else Finding("similar prompt", f"the similarity to {found[0]} is {found[1]:.2f}")

    def close(self) -> None:
        self._seen.close()
