r"""Checks gold answers of data rows before any response exists: can scorer `math` compare with them at all?

Most answers are recognised by their form: numbers with units, choices, words, and formulas of known commands. Only
others are given to math-verify's parser, which takes a fifth of a second for each.
"""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable
from functools import lru_cache
from types import FrameType
from typing import Any, TypeVar

from services.reward.scorer_options import MathOptions
from services.reward.scorers import final_answer, maths, notation, quantities, regions

MAX_CHARS = 400
"""A longer gold answer is compared only literally (`max_answer_chars` of scorer `math`)."""
PARSE_LIMIT_S = 10.0
AGAIN_S = 0.5
"""Processor time after which work that caught the interruption is interrupted again."""
T = TypeVar("T")

_NO_ANSWER = re.compile(
    r"n/?a|nan|null|todo|tbd|(?:i )?(?:do not|don't) know.*|unknown|unanswered|missing|pending|no answer"
    r"|not (?:given|available|provided|sure)|(?:see|refer to|as|cf) .*|answers? (?:may |will )?var(?:y|ies)"
    r"|error.*|[-_.?*x]{2,}"
)
"""Texts that stand where an answer should be."""
_SIGNS = re.compile(r"[\s\d+\-*/=<>(),.:;|!'^_&%$\[\]{}~]+")
_COMMAND = re.compile(r"\\(?:[a-zA-Z]+|.)", re.DOTALL)
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{[^{}]*\}")
_LARGE_POWER = re.compile(r"\^\s*(?:\{\s*\d{4,5}\s*\}|\d{4,5})")
"""A single power that is quickly compared, unlike a power of a power."""
_KNOWN = frozenset(
    [
        r"\frac",
        r"\dfrac",
        r"\tfrac",
        r"\cfrac",
        r"\sqrt",
        r"\pi",
        r"\theta",
        r"\alpha",
        r"\beta",
        r"\gamma",
        r"\delta",
        r"\lambda",
        r"\mu",
        r"\phi",
        r"\varphi",
        r"\omega",
        r"\sigma",
        r"\rho",
        r"\cdot",
        r"\times",
        r"\div",
        r"\pm",
        r"\mp",
        r"\infty",
        r"\cup",
        r"\cap",
        r"\in",
        r"\notin",
        r"\le",
        r"\ge",
        r"\lt",
        r"\gt",
        r"\ne",
        r"\emptyset",
        r"\sin",
        r"\cos",
        r"\tan",
        r"\cot",
        r"\sec",
        r"\csc",
        r"\arcsin",
        r"\arccos",
        r"\arctan",
        r"\log",
        r"\ln",
        r"\exp",
        r"\lfloor",
        r"\rfloor",
        r"\lceil",
        r"\rceil",
        r"\circ",
        r"\degree",
        r"\binom",
        r"\dbinom",
        r"\tbinom",
        r"\overline",
        r"\begin",
        r"\end",
        r"\ldots",
        r"\dots",
        r"\cdots",
        r"\%",
        r"\$",
        r"\{",
        r"\}",
        r"\,",
        r"\;",
        r"\:",
        r"\!",
        r"\\",
        r"\mathbb",
        r"\to",
        r"\mid",
        r"\vec",
        r"\mathbf",
        r"\angle",
        r"\triangle",
        r"\quad",
        r"\text",
        r"\left",
        r"\right",
        r"\ell",
        r"\prime",
        r"\bar",
        r"\hat",
        r"\sim",
        r"\approx",
        r"\equiv",
        r"\pmod",
        r"\bmod",
        r"\setminus",
        r"\subset",
        r"\subseteq",
    ]
) | {"\\ "}
"""Commands that the parser reads."""
_WORD = re.compile(r"[a-zA-Z]{4,}")
_FUNCTIONS = frozenset(
    [
        "sqrt",
        "frac",
        "matrix",
        "pmatrix",
        "bmatrix",
        "vmatrix",
        "cases",
        "array",
        "infty",
        "alpha",
        "beta",
        "theta",
        "lambda",
        "arcsin",
        "arccos",
        "arctan",
        "sinh",
        "cosh",
        "tanh",
    ]
)


def gold_fault(text: str, *, max_words: int = 6) -> tuple[str, str] | None:
    """(reason, evidence) why scorer `math` cannot compare a response with this gold answer, or None.

    max_words: an answer in words is a usable one if it has at most this many.
    """
    text = text.strip()
    if not text:
        return "no answer", "the final answer is empty"
    if len(text) > MAX_CHARS:
        return (
            "long answer",
            f"{len(text)} characters; answers with more than {MAX_CHARS} characters are compared only literally",
        )
    return _fault(text, max_words)


@lru_cache(maxsize=1 << 16)
def _fault(text: str, max_words: int) -> tuple[str, str] | None:
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    if not _is_balanced(text):
        return "unbalanced braces", shown
    words = notation.plain_words(text) or notation.only_letters(text)
    if _NO_ANSWER.fullmatch(words or text.strip("$ .").lower()):
        return "not an answer", shown
    if "?" in text:
        return "not an answer", shown
    normal = notation.normal(text)
    if quantities.quantity_of(normal) is not None or quantities.time_of_day(normal) is not None:
        return None
    if words:
        return None if len(words.split()) <= max_words else ("prose", shown)
    if notation.choice_of(normal)[0] or notation.in_base(normal) is not None:
        return None
    if maths.is_explosive(_LARGE_POWER.sub("^2", normal)):
        return "too large to evaluate", shown
    if _is_known_form(normal):
        return None
    try:
        is_read = _within(PARSE_LIMIT_S, lambda: _is_read(normal))
    except TimeoutError:
        return "too slow to parse", f"more than {PARSE_LIMIT_S:g} s of processor time: {shown}"
    return None if is_read else ("not parsed", shown)


def _is_balanced(text: str) -> bool:
    depth = 0
    for sign in re.findall(r"\\.|[{}]", text, re.DOTALL):
        depth += (sign == "{") - (sign == "}")
        if depth < 0:
            return False
    return depth == 0


def _is_known_form(text: str) -> bool:
    """Whether a formula has only commands, letters and signs that the parser is known to read."""
    bare = _TEXT.sub(" 1 ", text)
    if any(command not in _KNOWN for command in _COMMAND.findall(bare)):
        return False
    bare = _COMMAND.sub(" ", bare)
    if any(word not in _FUNCTIONS for word in _WORD.findall(bare)):
        return False
    rest = _SIGNS.sub("", re.sub(r"[a-zA-Z]", "", bare))
    has_content = bool(re.search(r"[0-9a-zA-Z]", bare)) or "\\" in text
    return not rest and has_content and not re.search(r"[-+*/=^<>_]\s*$|[*/=^_]\s*[*/=^_]", text.strip("$ "))


def _is_read(text: str) -> bool:
    """Whether math-verify makes an expression of the text; otherwise it compares the text itself."""
    parsed = maths.parsed(notation.with_repeating_decimals(regions.as_interval(text)))
    return any(not isinstance(part, str) for part in parsed)


def result_of(solution: str) -> str:
    r"""The final result that a solution states after `####` or in its last boxes; empty if there is none."""
    if "####" in solution:
        return final_answer.after_marker(solution) or ""
    return final_answer.boxed(solution) or ""


def stated_answer(response: str) -> str | None:
    """The final answer of a response, as scorer `math` finds it: boxes, marker, last number; None: there is none."""
    return final_answer.boxed(response) or final_answer.after_marker(response) or final_answer.last_number(response)


def results_differ(answer: str, solution: str) -> bool:
    """Whether the result of a solution is not the answer. Several boxes at its end may each be the answer, in different
    notations."""
    if are_same_answers(answer, result_of(solution)):
        return False
    boxes = [] if "####" in solution else final_answer.boxes_side_by_side(solution)
    return not boxes or not all(are_same_answers(answer, box) for box in boxes)


_SCORER = maths.MathScorer(MathOptions())


def are_same_answers(gold: str, other: str, limit_s: float = PARSE_LIMIT_S) -> bool:
    """Whether scorer `math` would accept `other` for this gold answer. Two answers that take more than `limit_s` of
    processor time are different; with a limit of 0, all answers in different notations are."""
    if maths.squeezed(gold) == maths.squeezed(other):
        return True
    if limit_s <= 0:
        return False
    try:
        return _within(limit_s, lambda: _SCORER.is_equivalent(gold, other))
    except TimeoutError:
        return False


class _TimeIsUp(BaseException):
    """Raised inside the work by the signal; derived from BaseException, so that `except Exception` of a library does
    not catch it."""


def _within(limit_s: float, work: Callable[[], T]) -> T:
    """Do work that may take unbounded time. Raises TimeoutError after this much processor time, so that the result does
    not depend on how busy the machine is. Outside of the main thread there is no limit."""
    if threading.current_thread() is not threading.main_thread():
        return work()

    def end(_number: int, _frame: FrameType | None) -> Any:
        raise _TimeIsUp

    handler = signal.signal(signal.SIGVTALRM, end)
    try:
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, limit_s, AGAIN_S)
            return work()
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except _TimeIsUp:
        raise TimeoutError from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)
