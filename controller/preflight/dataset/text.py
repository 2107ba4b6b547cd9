r"""Texts in the form in which they are compared: tokens, shingles, numbers, and prose without formulas."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from hashlib import blake2b

_TOKEN = re.compile(
    r"\d+(?:\.\d+)?|[^\W\d_]+"
    r"|(?<=[\d)\]}])!+|(?<=(?<![^\W\d_])[^\W\d_])!+"
    r"|(?<=[^\W\d_])'+(?=\()|(?<=(?<![^\W\d_])[^\W\d_])'+(?![^\W\d_])"
    r"|[^\w\s.,;:!?\"'`´’‘“”$。、「」『』]|_"
)
"""Numbers, words, factorials (after a digit, a bracket or a single letter), derivatives (before a bracket or after a
single letter), and signs of formulas. Other punctuation does not make two problems different and is left out."""
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_BARE_DECIMAL = re.compile(r"(?<![\w.])\.(?=\d)")
_WITHOUT_SPACES = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
"""Signs of Chinese and Japanese, which have no spaces between words: each is a token."""
_NUMBER_WORDS = frozenset(
    {
        "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
        "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty", "thirty", "forty", "fifty",
        "sixty", "seventy", "eighty", "ninety", "hundred", "thousand", "half", "third", "quarter", "twice", "double",
        "triple", "dozen",
    }
)  # fmt: skip
_DRAWING = re.compile(r"\[asy\].*?\[/asy\]", re.DOTALL)
_FORMULA = re.compile(
    r"\$\$.*?\$\$|\$[^$]*\$|\\\[.*?\\\]|\\\(.*?\\\)|\[asy\].*?\[/asy\]"
    r"|\\begin\{(align|asy|equation|array|tabular|[pbv]?matrix)\*?\}.*?\\end\{\1\*?\}"
    r"|```.*?```|\\[a-zA-Z]+|<<[^>]*>>|https?://\S+|[\d_^{}&%#@*=+<>|~`\\/()\[\]]",
    re.DOTALL,
)


def tokens(text: str) -> list[str]:
    """Words, numbers and signs of formulas, without case, spaces and punctuation."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    if not folded.isascii():
        folded = _WITHOUT_SPACES.sub(r" \g<0> ", folded)
    return _TOKEN.findall(_BARE_DECIMAL.sub("0.", _THOUSANDS.sub("", folded)))


def words(text: str) -> list[str]:
    """The tokens that are words or numbers."""
    return [token for token in tokens(text) if token[0].isalnum()]


def without_drawings(text: str) -> str:
    """The text without the programs of drawings, which have many lines in common."""
    return _DRAWING.sub(" ", text) if "[asy]" in text else text


def numbers(parts: Sequence[str]) -> tuple[str, ...]:
    """The tokens that are numbers, in digits or words, in their order."""
    return tuple(part for part in parts if part[0].isdigit() or part in _NUMBER_WORDS)


def shingles(parts: Sequence[str], length: int) -> set[str]:
    """All runs of `length` tokens; of a shorter text its only run."""
    if not parts:
        return set()
    return {" ".join(parts[start : start + length]) for start in range(max(1, len(parts) - length + 1))}


def prose(text: str, max_chars: int) -> str:
    """The beginning of a text without formulas, commands, program text and addresses, on one line."""
    return " ".join(_FORMULA.sub(" ", text[: 4 * max_chars]).split())[:max_chars]


def digest(text: str, num_bytes: int = 16) -> bytes:
    """A hash of a text."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=num_bytes).digest()


def excerpt(text: str, max_chars: int = 120) -> str:
    """The beginning of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= max_chars else f"{line[: max_chars - 3]}..."
