"""Rewrites a test's code before it runs: float tolerance, and counting the asserts of a `check` function."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from typing import Any

from services.reward.judging.problem import Findings
from services.reward.judging.program import ProgramOver

EQUAL, RECORD = "__judge_equal__", "__judge_record__"


def with_tolerance(tree: ast.Module, namespace: dict[str, Any], tolerance: float) -> ast.Module:
    """Make `a == b` and `a != b` compare floats, also within lists, tuples and dicts, with a tolerance.

    The tolerance is absolute up to 1 and relative above.
    """
    namespace[EQUAL] = lambda left, right: are_close(left, right, tolerance)
    return ast.fix_missing_locations(_Tolerant().visit(tree))


class _Tolerant(ast.NodeTransformer):
    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        if len(node.ops) != 1 or not isinstance(node.ops[0], ast.Eq | ast.NotEq):
            return node
        call = ast.Call(ast.Name(EQUAL, ast.Load()), [node.left, node.comparators[0]], [])
        return call if isinstance(node.ops[0], ast.Eq) else ast.UnaryOp(ast.Not(), call)


def are_close(left: Any, right: Any, tolerance: float) -> bool:
    """Whether two values are equal, with the tolerance wherever one side is a float."""
    if left == right:
        return True
    if type(left) in (int, float) and type(right) in (int, float) and float in (type(left), type(right)):
        if not (math.isfinite(left) and math.isfinite(right)):
            return False
        return abs(left - right) <= tolerance * max(1.0, min(abs(left), abs(right)))
    if type(left) is not type(right):
        return False
    if type(left) in (list, tuple):
        return len(left) == len(right) and all(are_close(a, b, tolerance) for a, b in zip(left, right, strict=True))
    if type(left) is dict:
        return left.keys() == right.keys() and all(are_close(left[key], right[key], tolerance) for key in left)
    return False


def with_counted_asserts(tree: ast.Module, namespace: dict[str, Any], findings: Findings) -> ast.Module:
    """Make asserts in `check` count instead of ending it; other exceptions still end it.

    Asserts that run are counted; one in a loop counts each time.
    """
    namespace[RECORD] = _recorder(findings)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "check":
            _Counting().visit(node)
    return ast.fix_missing_locations(tree)


def num_asserts_in_check(tree: ast.Module) -> int:
    """Number of assert statements in the source of `check`."""
    checks = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"]
    return sum(isinstance(node, ast.Assert) for check in checks for node in ast.walk(check))


class _Counting(ast.NodeTransformer):
    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        inner = list(ast.walk(node.test))
        if any(isinstance(part, ast.Await | ast.Yield | ast.YieldFrom | ast.NamedExpr) for part in inner):
            return node
        nothing = ast.arguments([], [], None, [], [], None, [])
        return ast.Expr(ast.Call(ast.Name(RECORD, ast.Load()), [ast.Lambda(nothing, node.test)], []))


def _recorder(findings: Findings) -> Callable[[Callable[[], Any]], None]:
    def record(holds: Callable[[], Any]) -> None:
        findings.num_tests += 1
        try:
            if holds():
                findings.num_passed += 1
                return
            why = "AssertionError"
        except ProgramOver:
            raise
        except Exception as error:
            why = type(error).__name__
        findings.add_failure(findings.num_tests, why)

    return record
