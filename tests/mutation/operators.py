"""Sites of one module that can be mutated, and the mutated source: spans are replaced, so the layout is kept."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeGuard

COMPARE = {
    ast.Lt: (r"<(?!=)", "<="), ast.LtE: (r"<=", "<"), ast.Gt: (r">(?!=)", ">="), ast.GtE: (r">=", ">"),
    ast.Eq: (r"==", "!="), ast.NotEq: (r"!=", "=="), ast.In: (r"\bin\b", "not in"), ast.NotIn: (r"\bnot\s+in\b", "in"),
    ast.Is: (r"\bis\b", "is not"), ast.IsNot: (r"\bis\s+not\b", "is"),
}  # fmt: skip
OPPOSITES = {"min": "max", "amin": "amax", "minimum": "maximum"}
OPPOSITES |= {second: first for first, second in OPPOSITES.items()}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Mutant:
    """One change of one module."""

    operator: str
    line: int
    """Of the change."""
    statement: tuple[int, int]
    """First and last line of the statement it is in, without the body of a compound statement."""
    start: int
    stop: int
    replacement: str
    """Of the bytes from `start` to `stop` of the source."""

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.replacement.encode() + source[self.stop :]


def mutants(source: bytes) -> list[Mutant]:
    """All changes of a module in the order of their places; a few may not parse or change nothing (`is_real`)."""
    return sorted(_Sites(source).of_module(ast.parse(source)), key=lambda mutant: (mutant.start, mutant.operator))


def is_real(mutant: Mutant, source: bytes) -> bool:
    """Whether the mutated source parses and is another program."""
    try:
        return ast.dump(ast.parse(mutant.apply(source))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


def _is_text(node: ast.AST) -> bool:
    """Whether `+` joins sequences here: minus in its place raises in every run, which tests nothing."""
    return isinstance(node, ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )


def _is_number(node: ast.AST) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float)


def _is_log_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[0] in ("log", "print", "warnings")


def _span(statement: ast.stmt) -> tuple[int, int]:
    """Lines of a statement, up to its body where it has one."""
    inner = [first.lineno for first in getattr(statement, "body", [])[:1]]
    inner += [case.pattern.lineno for case in getattr(statement, "cases", [])[:1]]
    last = min(inner) - 1 if inner else statement.end_lineno or statement.lineno
    return statement.lineno, max(statement.lineno, last)


class _Sites:
    def __init__(self, source: bytes) -> None:
        self.source = source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._statement = (1, 1)

    def of_module(self, tree: ast.Module) -> Iterator[Mutant]:
        for statement in tree.body:
            yield from self._of_statement(statement)

    def _of_statement(self, statement: ast.stmt) -> Iterator[Mutant]:
        if isinstance(statement, ast.Import | ast.ImportFrom | ast.Assert | ast.Raise) or self._is_typing(statement):
            return
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            return  # docstring
        self._statement = _span(statement)
        yield from self._whole(statement)
        for name, value in ast.iter_fields(statement):
            if name in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.stmt):
                    yield from self._of_statement(child)
                elif isinstance(child, ast.ExceptHandler | ast.match_case):
                    for inner in child.body:
                        yield from self._of_statement(inner)
                elif isinstance(child, ast.AST):
                    self._statement = _span(statement)
                    yield from self._of_expression(child)

    def _is_typing(self, statement: ast.stmt) -> bool:
        return isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test)

    def _whole(self, statement: ast.stmt) -> Iterator[Mutant]:
        """Mutants that replace a statement or its body."""
        match statement:
            case ast.Expr(value=ast.Call() | ast.Await(value=ast.Call())) if not _is_log_call(statement.value):
                yield self._replaced("delcall", statement, "pass")
            case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
                yield self._replaced("return", statement, "return None")
            case ast.If(body=[first, *_] as body) if not all(isinstance(part, ast.Pass | ast.Raise) for part in body):
                yield self._between("ifbody", first, body[-1], "pass")
            case ast.AugAssign(op=ast.Add() | ast.Sub(), value=value) if not _is_text(value):
                old, new = ("+=", "-=") if isinstance(statement.op, ast.Add) else ("-=", "+=")
                yield from self._token("plusminus", statement.target, value, re.escape(old), new)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from self._emptied(statement)

    def _emptied(self, function: Function) -> Iterator[Mutant]:
        """A function that returns nothing, without its body."""
        body = function.body[1:] if ast.get_docstring(function) is not None else function.body
        returns = any(isinstance(node, ast.Return | ast.Yield | ast.YieldFrom) for node in ast.walk(function))
        if body and not returns and not all(isinstance(part, ast.Pass | ast.Raise | ast.Expr) for part in body):
            self._statement = _span(body[0])  # not the header, which runs at import
            yield self._between("return", body[0], body[0], "return")

    def _of_expression(self, node: ast.AST) -> Iterator[Mutant]:
        match node:
            case ast.Compare():
                sides = [node.left, *node.comparators]
                for left, op, right in zip(sides, node.ops, node.comparators, strict=False):
                    yield from self._token("compare", left, right, *COMPARE[type(op)])
            case ast.BoolOp():
                old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
                for left, right in zip(node.values, node.values[1:], strict=False):
                    yield from self._token("andor", left, right, rf"\b{old}\b", new)
            case ast.UnaryOp(op=ast.Not()):
                start = self._offset(node.lineno, node.col_offset)
                yield self._mutant("dropnot", node.lineno, start, start + len("not "), "")
            case ast.BinOp(op=ast.Add() | ast.Sub()) if not (_is_text(node.left) or _is_text(node.right)):
                old, new = ("+", "-") if isinstance(node.op, ast.Add) else ("-", "+")
                yield from self._token("plusminus", node.left, node.right, re.escape(old), new)
            case ast.Call(func=ast.Name(id=name) as func) if name in OPPOSITES:
                yield self._replaced("minmax", func, OPPOSITES[name])
            case ast.Call(func=ast.Attribute(attr=name) as func) if name in OPPOSITES:
                stop = self._offset(func.end_lineno or func.lineno, func.end_col_offset or 0)
                yield self._mutant("minmax", func.lineno, stop - len(name), stop, OPPOSITES[name])
            case ast.Constant() if _is_number(node):
                value = (not node.value) if isinstance(node.value, bool) else node.value + 1
                yield self._replaced("constant", node, repr(value))
            case ast.JoinedStr():
                return  # text
        yield from self._inside(node)

    def _inside(self, node: ast.AST) -> Iterator[Mutant]:
        for name, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and name not in ("annotation", "returns"):
                    yield from self._of_expression(child)

    def _offset(self, line: int, column: int) -> int:
        return self._starts[line - 1] + column

    def _mutant(self, operator: str, line: int, start: int, stop: int, replacement: str) -> Mutant:
        return Mutant(operator, line, self._statement, start, stop, replacement)

    def _replaced(self, operator: str, node: ast.stmt | ast.expr, replacement: str) -> Mutant:
        return self._between(operator, node, node, replacement)

    def _between(
        self, operator: str, first: ast.stmt | ast.expr, last: ast.stmt | ast.expr, replacement: str
    ) -> Mutant:
        start = self._offset(first.lineno, first.col_offset)
        stop = self._offset(last.end_lineno or last.lineno, last.end_col_offset or 0)
        decorators = getattr(first, "decorator_list", [])
        if decorators:
            start = self._offset(decorators[0].lineno, decorators[0].col_offset - 1)
        return self._mutant(operator, first.lineno, start, stop, replacement)

    def _token(self, operator: str, left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[Mutant]:
        """The first `old` between two operands."""
        start = self._offset(left.end_lineno or left.lineno, left.end_col_offset or 0)
        stop = self._offset(right.lineno, right.col_offset)
        if found := re.search(old, self.source[start:stop].decode()):
            line = self.source[: start + found.start()].count(b"\n") + 1
            yield self._mutant(operator, line, start + found.start(), start + found.end(), new)
