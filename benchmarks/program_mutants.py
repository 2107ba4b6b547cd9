"""Mutants of reference solutions, and an oracle without a sandbox: plain Python with program and tests in one file."""

from __future__ import annotations

import ast
import copy
import random
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

COMPARISONS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)
ORACLE_MEMORY_BYTES = 2 << 30
ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)


def _variants(node: ast.AST) -> Iterator[ast.AST]:
    """Small changes of one node, each as a new node."""
    if isinstance(node, ast.Compare):
        for kind in COMPARISONS:
            if not isinstance(node.ops[0], kind):
                yield ast.Compare(node.left, [kind(), *node.ops[1:]], node.comparators)
    elif isinstance(node, ast.BinOp):
        for kind in ARITHMETIC:
            if not isinstance(node.op, kind):
                yield ast.BinOp(node.left, kind(), node.right)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield from (ast.Constant(node.value + 1), ast.Constant(node.value - 1), ast.Constant(0))
    elif isinstance(node, ast.Constant) and type(node.value) is str:
        yield from (ast.Constant(node.value + "x"), ast.Constant(""))
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.If | ast.While):
        changed = copy.copy(node)
        changed.test = ast.UnaryOp(ast.Not(), node.test)
        yield changed
    elif isinstance(node, ast.Return):
        yield from (ast.Return(None), ast.Return(ast.List([], ast.Load())))
        if node.value is not None:
            yield ast.Return(ast.Tuple([node.value], ast.Load()))
            yield ast.Return(ast.Call(ast.Name("iter", ast.Load()), [node.value], []))
    elif isinstance(node, ast.Assign | ast.AugAssign | ast.Expr):
        yield ast.Pass()
    elif isinstance(node, ast.Raise):
        yield ast.Return(ast.Constant(None))
    elif isinstance(node, ast.Call) and len(node.args) > 1:
        yield ast.Call(node.func, node.args[::-1], node.keywords)
        yield ast.Call(node.func, node.args[:-1], node.keywords)
    elif isinstance(node, ast.List):
        yield ast.Tuple(node.elts, node.ctx)


def mutants_of(source: str, num_wanted: int, seed: int) -> list[str]:
    """Different programs, each with one small change of `source`."""
    tree = ast.parse(source)
    places = [(node, number) for node in ast.walk(tree) for number, _ in enumerate(_variants(node))]
    random.Random(seed).shuffle(places)
    found: dict[str, None] = {}
    for node, number in places:
        if len(found) >= num_wanted:
            break
        new = list(_variants(node))[number]
        memo: dict[int, object] = {id(node): new}  # copies everything except this node, which is replaced
        text = ast.unparse(ast.fix_missing_locations(copy.deepcopy(tree, memo)))
        if text != ast.unparse(tree):
            found[text] = None
    return list(found)


def _bound_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (ORACLE_MEMORY_BYTES, ORACLE_MEMORY_BYTES))


def bare_verdict(program: str, tests: str, folder: Path, timeout_s: float) -> bool:
    """Whether the file of program and tests runs to its end. Nothing except this machine's memory is protected."""
    file = folder / "oracle.py"
    file.write_text(f"{program}\n\n{tests}\nprint('\\nthe last line was reached')\n")
    try:
        done = subprocess.run(
            [getattr(sys, "_base_executable", sys.executable), "-I", "-S", str(file)],
            capture_output=True, text=True, timeout=timeout_s, cwd=folder, stdin=subprocess.DEVNULL,
            preexec_fn=_bound_memory,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0 and done.stdout.endswith("the last line was reached\n")
