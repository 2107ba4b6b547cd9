"""Stage `contamination`: rows whose prompt is in an evaluation set, or nearly.

A row is compared with each evaluation prompt in three ways: the share of the evaluation prompt's n-grams of words that
are in the row (the evaluation prompt is part of a longer row), the share of the row's n-grams that are in the
evaluation prompt (the row is part of a longer one), and the similarity of both as in stage `near_duplicates`. The first
two follow Tulu 3 (arXiv 2411.15124, section 3.2: 8-grams, half of them). By default the numbers of the shorter text
must all be in the longer one: a problem with other numbers is another problem.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from typing import Literal
from zlib import crc32

from pydantic import Field

from areal_like.errors import UserError
from areal_like.settings import Settings
from controller.preflight.dataset.columns import Columns
from controller.preflight.dataset.index import SimilarTexts
from controller.preflight.dataset.port import Finding, Row, RowStage
from controller.preflight.dataset.reading import Source, find_sources, first_rows, lines_of, parse
from controller.preflight.dataset.sketches import Sketcher
from controller.preflight.dataset.text import digest, numbers, shingles, without_drawings, words
from controller.wiring.gold_checks import are_same_answers

MAX_COMPARED = 20
"""Number of evaluation prompts, those with the most n-grams in common, that a row is compared with."""
CHOICE_SHARE = 0.9
"""Share that two texts must have in common if their answer is the letter of a choice."""
_CHOICE = re.compile(r"[\s$]*(?:\\text\s*\{)?[\s(]*[A-Ja-j][\s).]*\}?[\s$]*")
MIN_GRAMS = 3
"""A text with fewer n-grams is compared as a whole."""
MIN_SHORT = 5
"""An evaluation prompt with fewer n-grams is looked for inside of rows if it has at least this many words."""
ANSWERS_LIMIT_S = 10.0
"""Processor time for the comparison of answers of one row."""
_CONTINUES = re.compile(r" (?:[-+*/^=<>!_%\\])")
"""A formula goes on: `3 + 4` is in `3 + 4 + 5`, which is another problem."""


class ContaminationOptions(Settings):
    """Options of stage `contamination`."""

    files: tuple[str, ...] = Field(min_length=1)
    """Files of evaluation rows, or patterns."""
    prompt_column: str | None = None
    """Column of the prompt in these files; None: the first known name."""
    ngram: int = Field(8, ge=3, le=50)
    """Number of words in an n-gram."""
    share: float = Field(0.5, gt=0.0, le=1.0)
    """Share of the n-grams of one text that are in the other from which a row is removed."""
    threshold: float = Field(0.6, ge=0.5, le=1.0)
    """Similarity from which a row is removed."""
    numbers: Literal["same", "any"] = "same"
    """With `any`, problems that differ only in their numbers are removed too."""
    answers: Literal["same", "any"] = "same"
    """With `any`, problems that have much text in common but different answers are removed too."""


class _EvalTexts:
    """Evaluation prompts by n-gram. A text with few n-grams is in `whole`, and in `short` by its first tokens."""

    def __init__(self) -> None:
        self.places: list[str] = []
        self.answers: list[str] = []
        self.tokens: list[str] = []
        self.num_grams: list[int] = []
        self.numbers: list[Counter[str]] = []
        self.by_gram: dict[int, list[int]] = {}
        self.short: dict[str, list[int]] = {}
        self.whole: dict[bytes, int] = {}


class Contamination(RowStage[ContaminationOptions]):
    """See the module."""

    name = "contamination"
    Options = ContaminationOptions

    def prepare(self) -> None:
        options = self.options
        self._with_numbers = options.numbers == "same"
        self._sketcher = Sketcher(with_numbers=self._with_numbers)
        self._similar = SimilarTexts(options.threshold)
        self._texts = _EvalTexts()
        for source in find_sources(options.files):
            for row in _rows(source, options.prompt_column):
                self._add(row)

    def _add(self, row: Row) -> None:
        parts = _words(row)
        if not parts:
            return
        texts, index = self._texts, len(self._texts.places)
        grams = self._grams(parts)
        texts.places.append(row.where)
        texts.answers.append(row.answer)
        texts.tokens.append(f" {' '.join(row.prompt_tokens)} ")
        texts.num_grams.append(len(grams))
        texts.numbers.append(Counter(numbers(parts)))
        texts.whole.setdefault(_whole(row.prompt_tokens), index)
        if len(grams) >= MIN_GRAMS:
            for gram in grams:
                texts.by_gram.setdefault(gram, []).append(index)
        elif len(parts) >= MIN_SHORT:
            texts.short.setdefault(" ".join(row.prompt_tokens[:MIN_SHORT]), []).append(index)
        sketch = self._sketcher.sketch(row.prompt_tokens)
        if sketch is not None:
            self._similar.add(sketch, str(index))

    def _grams(self, parts: list[str]) -> set[int]:
        return {crc32(gram.encode("utf-8", "surrogatepass")) for gram in shingles(parts, self.options.ngram)}

    def check(self, row: Row) -> Finding | None:
        parts = _words(row)
        if not parts:
            return None
        texts = self._texts
        if (same := texts.whole.get(_whole(row.prompt_tokens))) is not None:
            return Finding("evaluation prompt", f"same text as {texts.places[same]}")
        self._until_s = time.process_time() + ANSWERS_LIMIT_S
        if (found := self._overlap(row, parts) or self._short(row)) is not None:
            return found
        sketch = self._sketcher.sketch(row.prompt_tokens)
        similar = self._similar.find(sketch) if sketch is not None else None
        if similar is None or not self._has_answer_of(row, int(similar[0]), similar[1]):
            return None
        return Finding(
            "similar evaluation prompt", f"the similarity to {texts.places[int(similar[0])]} is {similar[1]:.2f}"
        )

    def _has_answer_of(self, row: Row, index: int, share: float) -> bool:
        """Whether the answers do not show that the row is another problem than an evaluation row. The letter of a
        choice shows little, so the texts must have more in common."""
        answer = self._texts.answers[index]
        if self.options.answers == "any" or not row.answer or not answer:
            return True
        if _CHOICE.fullmatch(answer) and share < CHOICE_SHARE:
            return False
        return are_same_answers(answer, row.answer, self._until_s - time.process_time())

    def _short(self, row: Row) -> Finding | None:
        """A finding if the row contains all of an evaluation prompt that has few n-grams."""
        texts, whole = self._texts, f" {' '.join(row.prompt_tokens)} "
        if not texts.short:
            return None
        for start in sorted(shingles(row.prompt_tokens, MIN_SHORT) & texts.short.keys()):
            for index in texts.short[start]:
                other = texts.tokens[index]
                place = whole.find(other)
                if place < 0 or _CONTINUES.match(whole, place + len(other) - 1):
                    continue
                if self._has_answer_of(row, index, 1.0):
                    return Finding("the prompt contains an evaluation prompt", f"all of {texts.places[index]}")
        return None

    def _overlap(self, row: Row, parts: list[str]) -> Finding | None:
        grams = self._grams(parts)
        if len(grams) < MIN_GRAMS:
            return None
        texts, mine, least = self._texts, Counter(numbers(parts)), self.options.share
        whole = f" {' '.join(row.prompt_tokens)} "
        common = Counter(index for gram in grams for index in texts.by_gram.get(gram, ()))
        for index, count in common.most_common(MAX_COMPARED):
            other, theirs, place = texts.tokens[index], texts.numbers[index], texts.places[index]
            of_theirs, of_mine = count / texts.num_grams[index], count / len(grams)
            if other in whole:
                return Finding("the prompt contains an evaluation prompt", f"all of {place}")
            if whole in other:
                return Finding("the prompt is part of an evaluation prompt", f"of {place}")
            is_inside = of_theirs >= least and (not self._with_numbers or theirs <= mine)
            is_part = of_mine >= least and (not self._with_numbers or mine <= theirs)
            if not (is_inside or is_part) or not self._has_answer_of(row, index, max(of_theirs, of_mine)):
                continue
            if is_inside:
                return Finding(
                    "the prompt contains an evaluation prompt", f"{of_theirs:.0%} of the {self._names()} of {place}"
                )
            return Finding(
                "the prompt is part of an evaluation prompt",
                f"{of_mine:.0%} of the row's {self._names()} are in {place}",
            )
        return None

    def _names(self) -> str:
        return f"{self.options.ngram}-grams"


def _words(row: Row) -> list[str]:
    if "[asy]" in row.prompt:
        return words(without_drawings(row.prompt))
    return [token for token in row.prompt_tokens if token[0].isalnum()]


def _whole(parts: list[str]) -> bytes:
    return digest(" ".join(parts))


def _rows(source: Source, column: str | None) -> Iterator[Row]:
    """The rows of an evaluation file. Raises UserError."""
    mapped = {"prompt": column} if column is not None else {}
    rows, where, lines = first_rows(lines_of([source]), str(source.path))
    columns = Columns.plan(rows, mapped, where, needs_answer=False)
    for line in lines:
        fields, fault = parse(line)
        if fault:
            raise UserError(
                fault, where=line.where, remedy="correct the file; all lines of an evaluation file must be readable"
            )
        row = Row(0, line.where, fields, columns)
        if not row.prompt.strip():
            raise UserError(f"the row has no prompt in `{columns.prompt}`", where=line.where, remedy="remove the row")
        yield row
