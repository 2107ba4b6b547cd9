"""Stages that look at prompts and answers: they refuse, mask or count what a pattern, a list or the user's code finds.

Rollout workers apply them in training, the server of `areal-like serve` to requests and answers. What a refusal means
there is decided in rollout/pool.py and rollout/agent/endpoint.py.
"""

from __future__ import annotations

import inspect
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pydantic
from pydantic import Field, model_validator

from areal_like.errors import UserError
from areal_like.import_path import import_object, is_import_path
from areal_like.private_text import SECRETS, cards, emails, ibans
from areal_like.regular_file import check_regular
from areal_like.settings import Settings

Part = Literal["prompts", "answers"]
Span = tuple[int, int]
"""Beginning and end of a place in a text, in characters."""
Find = Callable[[str], Iterable[Span]]
MASK = "[masked]"
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3130-\u318f\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff\uff66-\uffdc\U00020000-\U0003ffff"
)
"""Characters of scripts without spaces between words, or, in Korean, with particles that follow a word: Thai, Lao,
Burmese, Korean, Khmer, Japanese and Chinese. Entries with one of them are found within words, too."""
_MARKS = "".join(one for one in map(chr, range(0x300, 0x1E00)) if unicodedata.category(one)[0] == "M") + "\u3099\u309a"
"""Combining characters, which `\\w` does not match."""
_UNSPACED_CHAR = re.compile(f"[{_UNSPACED}]")
_WORD = re.compile(f"(?:[^\\W{_UNSPACED}][{_MARKS}]*)+|[{_UNSPACED}]")
_CHAR = re.compile(f".[{_MARKS}\u1160-\u11ff\uff9e\uff9f]*", re.DOTALL)
"""A character with those that Unicode may combine with it."""


class RegexOptions(Settings):
    """Options of stage `regex`."""

    patterns: tuple[str, ...] = Field(min_length=1)
    """Regular expressions (Python's `re`)."""
    ignore_case: bool = False
    """Upper and lower case are the same."""

    @model_validator(mode="after")
    def _compile(self) -> RegexOptions:
        for pattern in self.patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"`{pattern}` is not a regular expression ({error})") from error
        return self


class WordsOptions(Settings):
    """Options of stage `words`: whole words, in upper or lower case. Chinese, Japanese, Korean, Thai, Lao, Burmese and
    Khmer words are found within a text without spaces, too."""

    words: tuple[str, ...] = ()
    """Words or phrases."""
    file: str | None = None
    """File with one word or phrase in each line (UTF-8)."""

    @model_validator(mode="after")
    def _has_one(self) -> WordsOptions:
        if not self.words and self.file is None:
            raise ValueError("set `words`, or set `file` to a file with one word or phrase per line")
        return self


class PersonalDataOptions(Settings):
    """Options of stage `personal_data`."""

    kinds: tuple[Literal["email", "iban", "card"], ...] = Field(("email", "iban", "card"), min_length=1)
    """What is looked for."""


class NoOptions(Settings):
    """Options of stage `secrets`."""


_OPTIONS: Mapping[str, type[Settings]] = {
    "regex": RegexOptions, "words": WordsOptions, "secrets": NoOptions, "personal_data": PersonalDataOptions,
}  # fmt: skip


class SafetyStage(Settings):
    """One stage."""

    kind: str
    """`regex`, `words`, `secrets`, `personal_data`, or your own `module:function`: text to True or False, or to a list
    of [start, end]."""
    action: Literal["refuse", "mask", "count"] = "refuse"
    """`refuse`: the prompt or answer is not used; `mask`: what was found is replaced; `count`: only counted."""
    look_at: Literal["prompts", "answers", "both"] = "both"
    """Which texts it looks at."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the stage, or keyword arguments of your function."""

    @model_validator(mode="after")
    def _check(self) -> SafetyStage:
        if self.kind in _OPTIONS:
            _checked_options(self)
        elif not is_import_path(self.kind):
            raise ValueError(f"there is no safety stage `{self.kind}`; use {', '.join(_OPTIONS)}, or module:function")
        return self


@dataclass
class Looked:
    """A text after all stages. refused_by: kind of the stage that refuses it; empty: none does."""

    text: str
    refused_by: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    """Found places by counter, such as `safety_words_refuse`."""


class SafetyFilter:
    """All stages of a configuration."""

    def __init__(self, stages: Sequence[SafetyStage], where: str) -> None:
        """where: the setting that lists them. Raises UserError: a file cannot be read, or a function cannot be
        imported.
        """
        self._stages = [(stage, _finder(stage, f"{where}.{place}")) for place, stage in enumerate(stages)]

    def looks_at(self, part: Part) -> bool:
        """Whether a stage looks at prompts, or at answers."""
        return any(stage.look_at in (part, "both") for stage, _ in self._stages)

    def look(self, text: str, part: Part) -> Looked:
        """Apply the stages in their order. After one that refuses, only masks apply, because the text is stored. A
        function of the user may raise anything."""
        looked = Looked(text)
        for stage, find in self._stages:
            if stage.look_at not in (part, "both") or (looked.refused_by and stage.action != "mask"):
                continue
            spans = _joined(find(looked.text))
            if not spans:
                continue
            looked.counts[f"safety_{stage.kind.rpartition(':')[2]}_{stage.action}"] += len(spans)
            if stage.action == "refuse":
                looked.refused_by = stage.kind
            if stage.action == "mask":
                looked.text = _masked(looked.text, spans)
        return looked


def _checked_options(stage: SafetyStage) -> Any:
    try:
        return _OPTIONS[stage.kind].model_validate(stage.options)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        place = "".join(f".{part}" for part in first["loc"])
        raise ValueError(
            f"options{place} of stage {stage.kind}: {first['msg'].removeprefix('Value error, ')}"
        ) from None


def _finder(stage: SafetyStage, where: str) -> Find:
    if stage.kind not in _OPTIONS:
        return _of_user(stage, where)
    options = _checked_options(stage)
    if isinstance(options, RegexOptions):
        flags = re.IGNORECASE if options.ignore_case else 0
        patterns = [re.compile(one, flags) for one in options.patterns]
        return lambda text: (match.span() for one in patterns for match in one.finditer(text))
    if isinstance(options, WordsOptions):
        lines = [*options.words, *(_lines(Path(options.file).expanduser(), where) if options.file else [])]
        return _word_finder(lines, where)
    if isinstance(options, PersonalDataOptions):
        kinds = {"email": emails, "iban": ibans, "card": cards}
        finders = [kinds[kind] for kind in options.kinds]
        return lambda text: (match.span() for one in finders for match in one(text))
    return lambda text: (match.span() for _, pattern in SECRETS for match in pattern.finditer(text))


def _of_user(stage: SafetyStage, where: str) -> Find:
    function = import_object(stage.kind, f"{where}.kind")
    if not callable(function):
        raise UserError(f"{stage.kind} is not a function", where=f"{where}.kind", remedy="specify a function")
    _check_call(function, stage, where)

    def find(text: str) -> Iterator[Span]:
        found = function(text, **stage.options)
        truth = _truth(found)
        if truth is not None:
            yield from [(0, len(text))] if truth else []
            return
        if isinstance(found, str) or not isinstance(found, Iterable):
            raise TypeError(f"{stage.kind} returned {found!r:.80} instead of True, False or a list of [start, end]")
        for start, end in found:
            if not 0 <= start < end <= len(text):
                raise ValueError(
                    f"{stage.kind} returned the range [{start}, {end}], which is empty or outside the text of "
                    f"{len(text)} characters"
                )
            yield start, end

    return find


def _check_call(function: Callable[..., Any], stage: SafetyStage, where: str) -> None:
    """Raise UserError if the function is asynchronous, or cannot be called with a text and the stage's options."""
    called = function if inspect.isroutine(function) else type(function).__call__
    kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    if any(is_kind(one) for is_kind in kinds for one in (function, called)):
        raise UserError(
            f"{stage.kind} is asynchronous",
            where=f"{where}.kind",
            remedy="define the function with `def`, not `async def`",
        )
    try:
        signature = inspect.signature(function)
    except ValueError:  # of some functions in C there is none
        return
    try:
        signature.bind("", **stage.options)
    except TypeError as error:
        what = f"{stage.kind} cannot be called with a text and these options ({error})"
        raise UserError(
            what, where=f"{where}.options", remedy=f"use options that match its signature, {signature}"
        ) from error


def _truth(found: Any) -> bool | None:
    """Whether a function has found something, if it returned only that, also as a number of NumPy or PyTorch."""
    if found is None or isinstance(found, bool):
        return bool(found)
    is_bool = str(getattr(found, "dtype", "")).removeprefix("torch.") == "bool"
    return bool(found) if is_bool and not getattr(found, "shape", True) else None


def _lines(path: Path, where: str) -> list[str]:
    check_regular(path, where=where)
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})", where=where) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text", where=where, remedy="convert the file to UTF-8") from error


def _word_finder(lines: Iterable[str], where: str) -> Find:
    phrases: dict[str, set[tuple[str, ...]]] = {}
    parts_of_words: set[str] = set()
    for line in lines:
        entry = line.strip()
        if _UNSPACED_CHAR.search(entry):
            parts_of_words.add(_folded(entry))
        elif parts := tuple(_folded(match[0]) for match in _WORD.finditer(entry)):
            phrases.setdefault(parts[0], set()).add(parts)
    if not phrases and not parts_of_words:
        raise UserError("the word list contains no words", where=where, remedy="add at least one word or phrase")

    def find(text: str) -> Iterator[Span]:
        found = [_forms(text, *match.span()) for match in _WORD.finditer(text)]
        for place, (forms, _) in enumerate(found):
            for form, start in forms.items():
                for phrase in phrases.get(form, ()):
                    rest = found[place + 1 : place + len(phrase)]
                    if len(rest) == len(phrase) - 1 and all(
                        one in more for one, (more, _) in zip(phrase[1:], rest, strict=True)
                    ):
                        yield start, found[place + len(phrase) - 1][1]
        if parts_of_words and _UNSPACED_CHAR.search(text):
            yield from _places_in(text, parts_of_words)

    return find


def _folded(text: str) -> str:
    """The text as it is compared: in one case, and in one form of the characters that Unicode has several times."""
    if text.isascii():
        return text.lower()
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


def _forms(text: str, start: int, end: int) -> tuple[dict[str, int], int]:
    """A word as it is compared, with its beginning; its end. After a backslash also without its first character, which
    may belong to an escape as in JSON: `\\nword`.
    """
    forms = {_folded(text[start:end]): start}
    if start and text[start - 1] == "\\" and text[start] in "nrtbf" and end - start > 1:
        forms[_folded(text[start + 1 : end])] = start + 1
    return forms, end


def _places_in(text: str, entries: Iterable[str]) -> Iterator[Span]:
    """Places of the entries, also within words."""
    folded, spans = "", list[Span]()
    for match in _CHAR.finditer(text):
        one = _folded(match[0])
        folded += one
        spans += [match.span()] * len(one)
    for entry in entries:
        place = folded.find(entry)
        while place >= 0:
            yield spans[place][0], spans[place + len(entry) - 1][1]
            place = folded.find(entry, place + 1)


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Spans in order, with overlapping ones joined."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start < joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        elif end > start:
            joined.append((start, end))
    return joined


def _masked(text: str, spans: Sequence[Span]) -> str:
    parts, place = [], 0
    for start, end in spans:
        parts += [text[place:start], MASK]
        place = end
    return "".join([*parts, text[place:]])
