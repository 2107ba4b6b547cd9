"""Stage `language`: prompts in another language than the wanted ones, as detected by `py3langid`.

Formulas, commands and program text are left out first. A text with few letters is kept, because its language cannot be
detected reliably, and so is one of whose language the library is not sure.
"""

from __future__ import annotations

from pydantic import Field, field_validator

from areal_like.settings import Settings
from controller.preflight.dataset.languages import Detector
from controller.preflight.dataset.port import Finding, Row, RowStage


class LanguageOptions(Settings):
    """Options of stage `language`."""

    allowed: tuple[str, ...] = Field(("en",), min_length=1)
    """ISO 639-1 codes of the languages that are kept."""
    min_letters: int = Field(20, ge=1)
    """A prompt with fewer letters outside of formulas is kept."""
    min_probability: float = Field(0.5, ge=0.0, le=1.0)
    """A prompt is removed only if its language is at least this probable."""

    @field_validator("allowed")
    @classmethod
    def _are_codes(cls, allowed: tuple[str, ...]) -> tuple[str, ...]:
        for code in allowed:
            if not (2 <= len(code) <= 3 and code.isascii() and code.islower()):
                raise ValueError(f"`{code}` is not a valid language code; use a code such as en or de")
        return allowed


class Language(RowStage[LanguageOptions]):
    """See the module."""

    name = "language"
    Options = LanguageOptions

    def prepare(self) -> None:
        self._detector = Detector(self.options.min_letters)
        self._detector.check_known(self.options.allowed)

    def check(self, row: Row) -> Finding | None:
        language, probability = self._detector.detect(row.prompt)
        if not language or language in self.options.allowed or probability < self.options.min_probability:
            return None
        return Finding("other language", f"{language} (probability {probability:.2f})")
