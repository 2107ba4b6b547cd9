"""Detects the language of a text with `py3langid`, which contains its model and downloads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from areal_like.errors import UserError
from controller.config.problems import nearest
from controller.preflight.dataset.libraries import library
from controller.preflight.dataset.text import prose

_ENGLISH = frozenset(
    {
        "and", "are", "does", "each", "find", "from", "has", "have", "he", "her", "his", "how", "if", "many", "of",
        "she", "than", "that", "the", "their", "then", "there", "they", "this", "to", "what", "when", "where", "which",
        "who", "will", "with", "would", "you", "your",
    }
)  # fmt: skip
"""Words that are frequent in English and, several of them together, in no other language."""
_NO_LANGUAGE = ("zxx", "und")
"""Codes of a text without linguistic content, and of an undetermined language."""
MIN_ENGLISH, MIN_ENGLISH_SHARE = 3, 0.15
MAX_CHARS = 300
"""Number of characters of prose that are read."""


class Detector:
    """Detects languages. min_letters: a text with fewer letters has no detectable language."""

    def __init__(self, min_letters: int) -> None:
        module: Any = library("py3langid.langid")
        self._identifier = module.LanguageIdentifier.from_model_file(module.MODEL_FILE, norm_probs=True)
        self._min_letters = min_letters

    def check_known(self, codes: Sequence[str]) -> None:
        """Raise UserError for a language that the library does not know."""
        known = self._identifier.labels
        for code in codes:
            if code not in known:
                near = nearest(code, known, count=2, cutoff=0.5)
                remedy = f"did you mean {' or '.join(near)}?" if near else "use an ISO 639 language code, such as en"
                raise UserError(
                    f"`{code}` is not the code of a supported language", where="language: allowed", remedy=remedy
                )

    def detect(self, text: str) -> tuple[str, float]:
        """Code of the language and its probability; an empty code if there are too few letters."""
        plain = prose(text, MAX_CHARS)
        if sum(map(str.isalpha, plain)) < self._min_letters:
            return "", 0.0
        if is_english(plain):
            return "en", 1.0
        language, probability = self._identifier.classify(plain)
        return ("", 0.0) if language in _NO_LANGUAGE else (str(language), float(probability))


def check_library() -> None:
    """Raise UserError if the library is not installed."""
    library("py3langid.langid")


def is_english(plain: str) -> bool:
    """Whether prose is English beyond doubt; a tenth of the library's time."""
    found = plain.casefold().split() if plain.isascii() else []
    known = [word for word in found if word in _ENGLISH]
    return len(set(known)) >= MIN_ENGLISH and len(known) >= MIN_ENGLISH_SHARE * len(found)
