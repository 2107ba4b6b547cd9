"""Decides which answers may be passed to a task that evaluates them as Python.

It detects such tasks of reasoning-gym, and checks that an answer is plain.

Several tasks call `eval` or sympy's `parse_expr` (which calls it) on the answer. An answer comes from a language model
and could call anything in this process. Only literals without a call are passed to `eval`, and to the parser only
arithmetic over numbers, single letters and a list of functions, without strings, attributes or items.
"""

from __future__ import annotations

import inspect
import re
import sys
from functools import lru_cache

from services.reward.scorers.maths import is_explosive

_EVALUATES = re.compile(r"(?<![\w.])(?:eval|exec|compile)\(")
_PARSES = re.compile(r"\b(?:parse_expr|sympify)\b")
_ARITHMETIC = re.compile(r"[\w\s+\-*/^().,=]*")
_ATTRIBUTE = re.compile(r"[A-Za-z_)]\s*\.|\.\s*[A-Za-z_]")
_NAME = re.compile(r"[A-Za-z_]\w*")
_FUNCTION = re.compile(r"(?:a?(?:sin|cos|tan)h?|sec|csc|cot|exp|log|ln|sqrt|pi|Abs)")


def is_plain(answer: str, task_class: type) -> bool:
    """Whether this answer may be passed to the task's own judge."""
    evaluates, parses = _habits(task_class)
    if (evaluates or parses) and is_explosive(answer):
        return False
    if evaluates and ("(" in answer or "__" in answer):  # no call without a parenthesis
        return False
    return not parses or _is_arithmetic(answer)


def _is_arithmetic(answer: str) -> bool:
    if not answer.isascii() or "__" in answer or not _ARITHMETIC.fullmatch(answer) or _ATTRIBUTE.search(answer):
        return False
    return all(len(name) == 1 or _FUNCTION.fullmatch(name) for name in _NAME.findall(answer))


@lru_cache(maxsize=256)
def _habits(task_class: type) -> tuple[bool, bool]:
    """Whether the module of the task calls `eval`, and sympy's parser. An unreadable module counts as both."""
    try:
        source = inspect.getsource(sys.modules[task_class.__module__])
    except (OSError, TypeError, KeyError):
        return True, True
    return bool(_EVALUATES.search(source)), bool(_PARSES.search(source))
