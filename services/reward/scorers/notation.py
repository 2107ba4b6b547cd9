r"""Normalises notations of the same mathematics before answers are compared.

It normalises characters and commands (`normal`), words, choices among options and decimals, and detects answers with
several candidates (`is_hedged`). Equivalence is in maths.py, numbers and units in quantities.py, inequalities in
regions.py, extraction in final_answer.py.
"""

from __future__ import annotations

import re
import unicodedata

_INVISIBLE = re.compile(r"[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff]")
_SAME = (
    (re.compile(r"[\u2010-\u2015\u2212\ufe63\uff0d]"), "-"),
    (re.compile("\u00d7"), r"\\times "),
    (re.compile("\u00f7|" + r"\\div(?![a-zA-Z])"), "/"),
    (re.compile("\u03c0"), r"\\pi "),
    (re.compile("\u221e"), r"\\infty "),
    (re.compile("\u2264|<=|=<"), r"\\le "),
    (re.compile("\u2265|>="), r"\\ge "),
    (re.compile("\u2260|!="), r"\\ne "),
    (re.compile("\u222a"), r"\\cup "),
    (re.compile("\u2205"), r"\\emptyset "),
    (re.compile("\u221a\\(([^()]*)\\)"), r"\\sqrt{\1}"),
    (re.compile("\u221a(\\w+)"), r"\\sqrt{\1}"),
    (re.compile("\u00b0"), r"^\\circ"),
    (re.compile(r"\\(?:leqslant|leq)(?![a-zA-Z])"), r"\\le "),
    (re.compile(r"\\(?:geqslant|geq)(?![a-zA-Z])"), r"\\ge "),
    (re.compile(r"\\neq(?![a-zA-Z])"), r"\\ne "),
    (re.compile(r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}"), r"\\emptyset "),
    (re.compile(r"\\log_(?:e|\{e\})(?![a-zA-Z])"), r"\\ln "),
    (re.compile(r"\\(?:displaystyle|textstyle|limits|left|right|bigl?|bigr?|Bigl?|Bigr?)(?![a-zA-Z])"), ""),
    (re.compile(r"\\(?:tiny|small|large|Large|LARGE|huge|Huge|bf|it|rm|sf)(?![a-zA-Z])\s*"), ""),
    (re.compile(r"\\(?:textcolor|colorbox|color)\s*\{[\w!]*\}"), ""),
    (re.compile(r"\\(?:underline|boldsymbol|bm|mathbf|mathit|mathsf|mathnormal|emph)\s*\{([^{}]*)\}"), r"{\1}"),
    (re.compile(r"\\mathrm\s*\{\s*([a-zA-Z])\s*\}(?=\s*$|\s*[-+)}])"), r"\1"),
    (re.compile(r"\{:\}|\\!:\\!|\\colon(?![a-zA-Z])"), ":"),
    (re.compile(r"(?<=\d)(?:\\[,;:! ]|\{,\})(?=\d{3}(?!\d))"), ""),
    (re.compile(r"(?<=\d),\\!(?=\d)"), ","),
    (re.compile(r"(?<=\d)\s*(?:\\text\s*\{\s*to\s*\}|\bto\b)\s*(?=\d)"), ":"),
    (re.compile(r"\\lvert\s*|\s*\\rvert"), "|"),
    (re.compile(r"\\langle\s*([^<>\\]*?)\s*\\rangle"), r"(\1)"),
)
_FRACTIONS = {"\u00bd": "1/2", "\u2153": "1/3", "\u2154": "2/3", "\u00bc": "1/4", "\u00be": "3/4"}
_RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-", strict=True))
_LOWERED = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_ENDING = re.compile(r"(?:\\[,;:! ]|[\s.,;~])+$")
_BEGINNING = re.compile(r"^(?:\\[,;:! ]|[\s~])+")
_LABEL = re.compile(
    r"^\\text\s*\{[A-Za-z ]*(?:[:=]|\b(?:is|are|equals))\s*\}\s*(?=\S)|^(?!lambda)[A-Za-z][A-Za-z ]+:\s*(?=\S)"
)
_APPROXIMATELY = re.compile(r"^\\(?:approx|simeq|sim|cong)(?![a-zA-Z])\s*")


def normal(text: str) -> str:
    r"""The text with one character for each meaning: ASCII minus and digits, `\le`, `\emptyset`, no invisible ones."""
    text = _INVISIBLE.sub("", text)
    for character, written in _FRACTIONS.items():
        text = re.sub(rf"(\d){character}", rf"\1 {written}", text).replace(character, written)
    text = _shifted(_shifted(text, _RAISED, "^"), _LOWERED, "_")
    text = unicodedata.normalize("NFKC", text)
    for pattern, replacement in _SAME:
        text = pattern.sub(replacement, text)
    text = _BEGINNING.sub("", _ENDING.sub("", text.strip()))
    text = _APPROXIMATELY.sub("", _LABEL.sub("", text))
    return _worded(text)


def _shifted(text: str, characters: dict[str, str], command: str) -> str:
    """Convert superscript or subscript digits to a power or an index: they are not digits of the number before them."""
    group = re.escape("".join(characters))
    return re.sub(f"[{group}]+", lambda found: f"{command}{{{''.join(map(characters.__getitem__, found[0]))}}}", text)


# ---------------------------------------------------------------- words

_WRAPPING = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_WORDS = (
    (re.compile(r"(?:there (?:is|are) )?no (?:real |integer )?(?:solutions?|roots?)|(?:the )?empty set"), r"\emptyset"),
    (re.compile(r"all (?:the )?real(?: numbers?|s)?|(?:any|every) real number"), r"(-\infty, \infty)"),
)  # fmt: skip


def only_letters(text: str) -> str:
    r"""A choice or a word without formatting: `(B)`, `\text{B}`, `\textbf{(B)}` are `b`; "" for anything else."""
    bare = _WRAPPING.sub(r"\1", _WRAPPING.sub(r"\1", text)).strip("$ .:(){}").lower()
    return " ".join(bare.split()) if bare.replace(" ", "").isalpha() and "\\" not in bare else ""


def plain_words(text: str) -> str:
    r"""Words, possibly with numbers, without formatting: `\text{June 20}` is `june 20`; "" if there is no word."""
    bare = " ".join(_WRAPPING.sub(r" \1 ", text).strip("$ .").lower().split())
    return bare if re.search(r"[a-z]{3}", bare) and re.fullmatch(r"[a-z0-9 ,.'-]+", bare) else ""


def _worded(text: str) -> str:
    """Convert words with a mathematical meaning to notation."""
    words = only_letters(text)
    for pattern, meaning in _WORDS:
        if words and pattern.fullmatch(words):
            return meaning
    return text


# ---------------------------------------------------------------- choices

_CHOICE = re.compile(
    r"(?:(?:option|choice|answer)\s+)?(?:\(\s*([A-J])\s*\)|([A-J])(?:\)|(?=[.:]\s|[.:]?$)))[.:]?", re.I
)
_LATER_CHOICE = re.compile(r"\(\s*[A-J]\s*\)|\b[B-HJ]\b")


def choice_of(text: str) -> tuple[str, str]:
    r"""Letter and rest of a choice among options: `\text{(B)} 12` is ("B", "12"), `Option C` ("C", "").

    ("", text) for anything else: a lower-case letter without brackets is a variable, and several letters are not a
    choice.
    """
    bare = _WRAPPING.sub(r" \1 ", _WRAPPING.sub(r" \1 ", text)).replace("\\ ", " ").replace("~", " ").strip("$ {}")
    match = _CHOICE.match(bare)
    if match is None or (match[2] or "A").islower():
        return "", text
    rest = bare[match.end() :].strip()
    if _LATER_CHOICE.search(rest) or is_hedged(rest):
        return "", text
    return (match[1] or match[2]).upper(), rest


# ---------------------------------------------------------------- several candidates

_OR = re.compile(r"\\(?:lor|vee)(?![a-zA-Z])|\|\||(?<![a-zA-Z\\])x?or(?![a-zA-Z])", re.IGNORECASE)
_UNSURE = re.compile(
    r"\?|(?<![a-zA-Z\\])(?:maybe|perhaps|either|probably|possibly|anything|whichever|not|isn't|unless)(?![a-zA-Z])",
    re.I,
)
_OVERPRINTED = re.compile(r"\\(?:[hv]?phantom|[rl]lap|[mh]?kern|hspace\s*\{\s*-|hskip\s*-)")
"""Commands that make the displayed text differ from the written one."""
_ENVIRONMENT = re.compile(r"\\begin\{(\w+\*?)\}.*?\\end\{\1\}", re.DOTALL)


def is_hedged(text: str) -> bool:
    """Whether a text contains alternatives or doubts: `5 or 6`, `5?`, `5 | 6`, several lines."""
    bare = _ENVIRONMENT.sub("", text)
    num_bars = bare.count("|") + len(re.findall(r"\\mid(?![a-zA-Z])", bare))
    if _OVERPRINTED.search(bare):
        return True
    return bool(_OR.search(bare) or _UNSURE.search(bare) or "\\\\" in bare or (num_bars % 2 and "\\{" not in bare))


def as_list(text: str) -> str:
    """Alternatives of a gold answer as a list: `2 or 3` is `2, 3`."""
    return _OR.sub(", ", _WRAPPING.sub(r" \1 ", text))


# ---------------------------------------------------------------- forms

_DECIMAL = re.compile(r"(?<![\w.])(\d*)\.(\d{1,9})(?![\d.]|\\overline|\\bar)")
_REPEATING = re.compile(r"(\d*)\.(\d{0,9})\\(?:overline|bar)\s*\{(\d{1,9})\}")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\^\s*\{?\s*\\circ\s*\}?")
_COLUMN = re.compile(r"\\begin\{[pb]?matrix\}\s*([^&]*?)\s*\\end\{[pb]?matrix\}", re.DOTALL)
_RELATION = re.compile(r"^(?:[<>]|\\(?:le|ge|lt|gt|ne|not|in)(?![a-zA-Z]))")
_IN_BASE = re.compile(r"([0-9A-Za-z]+)_\{?\s*(?:\\(?:text|mathrm)\s*\{\s*)?(\w+)\s*\}*")
_BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9"}


def with_exact_decimals(text: str) -> str:
    r"""Every decimal number as a fraction: `2^{0.5}` becomes `2^{\frac{5}{10}}`, so that it can be compared exactly.

    Degrees become multiples of pi in a sine or cosine.
    """
    if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text):
        text = _DEGREES.sub(r"(\1 \\pi / 180)", text)
    return _DECIMAL.sub(lambda found: rf"\frac{{{int(found[1] + found[2])}}}{{{10 ** len(found[2])}}}", text)


def with_repeating_decimals(text: str) -> str:
    r"""Convert `0.1\overline{6}` to a fraction."""

    def fraction(found: re.Match[str]) -> str:
        before, fixed, again = found.groups()
        high, low = int(before + fixed + again), int(before + fixed or "0")
        return rf"\frac{{{high - low}}}{{{10 ** len(fixed) * (10 ** len(again) - 1)}}}"

    return _REPEATING.sub(fraction, text)


def as_tuple(text: str) -> str:
    r"""A column `\begin{pmatrix} 1 \\ 2 \end{pmatrix}` as `(1, 2)`; any other text unchanged."""
    match = _COLUMN.fullmatch(text.strip("$ "))
    if match is None or "\\\\" not in match[1]:
        return text
    return "(" + ", ".join(part.strip() for part in match[1].split("\\\\") if part.strip()) + ")"


def is_one_sided(text: str) -> bool:
    r"""Whether a text is a relation without its left side: `\le 42`, `\ne 42`."""
    return bool(_RELATION.match(text.strip("$ ")))


def is_unfinished(text: str) -> bool:
    r"""Whether a text ends with dots: `1, 2, \ldots`."""
    return bool(re.search(r"\\(?:[lcv]?dots)(?![a-zA-Z])|\.\.\.|\u2026", text))


def in_base(text: str) -> tuple[str, str] | None:
    """Digits and base of `1011_2`, `2A_{16}`, `11_{two}`; None for anything else."""
    match = _IN_BASE.fullmatch(text.strip("$ "))
    if match is None or not (match[2].isdecimal() or match[2] in _BASES) or match[1].isalpha():
        return None
    return match[1].lower().lstrip("0"), _BASES.get(match[2], match[2])
