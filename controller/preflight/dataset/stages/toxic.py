"""Stage `toxic`: texts with words of a list that the user gives, or that a classifier of the user rejects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from areal_like.errors import OperationError, UserError
from areal_like.import_path import import_factory
from areal_like.regular_file import check_regular
from areal_like.settings import Settings
from controller.preflight.dataset.port import Finding, Row, RowStage
from controller.preflight.dataset.text import words


class ToxicOptions(Settings):
    """Options of stage `toxic`: `words`, `classifier`, or both."""

    words: str | None = None
    """File with one word or phrase in each line (UTF-8). Whole words count, without case."""
    classifier: str | None = None
    """`module:function` that returns a probability from 0 to 1 for a text."""
    threshold: float = Field(0.5, ge=0.0, le=1.0)
    """Probability from which a row is removed."""

    @model_validator(mode="after")
    def _has_one(self) -> ToxicOptions:
        if self.words is None and self.classifier is None:
            raise ValueError("set `words` to a file, or `classifier` to module:function")
        return self


class Toxic(RowStage[ToxicOptions]):
    """See the module."""

    name = "toxic"
    Options = ToxicOptions
    is_private = True

    def prepare(self) -> None:
        self._phrases: dict[int, frozenset[tuple[str, ...]]] = {}
        self._classify: Callable[[str], Any] | None = None
        if self.options.words is not None:
            self._phrases = _read_phrases(Path(self.options.words).expanduser())
        if self.options.classifier is not None:
            self._classify = import_factory(self.options.classifier, "toxic: classifier")

    def check(self, row: Row) -> Finding | None:
        for name, text in row.texts:
            parts = words(text) if self._phrases else []
            for length, phrases in self._phrases.items():
                for start in range(len(parts) - length + 1):
                    if tuple(parts[start : start + length]) in phrases:
                        return Finding("listed word", f"word {start + 1} of `{name}`")
            if (
                self._classify is not None
                and text.strip()
                and (value := self._probability(text)) >= self.options.threshold
            ):
                return Finding("classifier", f"`{name}`: probability {value:.2f}")
        return None

    def _probability(self, text: str) -> float:
        assert self._classify is not None
        value = self._classify(text)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
            raise OperationError(f"the classifier returned {value!r:.80}, not a probability from 0 to 1")
        return float(value)


def _read_phrases(path: Path) -> dict[int, frozenset[tuple[str, ...]]]:
    """The phrases of a file by their number of words. Raises UserError."""
    where = f"toxic: words: {path}"
    check_regular(path, where=where)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(
            f"the file cannot be read ({error.strerror})", where=where, remedy="check the path and its permissions"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError("the file is not UTF-8 text", where=where, remedy="convert the file to UTF-8") from error
    by_length: dict[int, set[tuple[str, ...]]] = {}
    for line in lines:
        if parts := tuple(words(line)):
            by_length.setdefault(len(parts), set()).add(parts)
    if not by_length:
        raise UserError("the file contains no words", where=where, remedy="write one word or phrase per line")
    return {length: frozenset(phrases) for length, phrases in by_length.items()}
