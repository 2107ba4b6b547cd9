"""Resolves the names in a test: the test's own, a trusted copy, a built-in, or the program's.

Tests are run in assertions.py.

A test that was written to follow a program in one file uses the program's names as its own: the tested function and
classes, but also modules that the program imported. Here each name is taken from the most trusted source that has it:

1. what the tests define or import themselves;
2. helpers of the task's own prompt (HumanEval's `poly`), run here from the prompt, whatever the program's versions are
   (these must pass the tests as well: see assertions.py);
3. built-ins of this process; the name of a built-in means the program's object only if the task's reference solution
   defines it (MBPP has a task whose function is called `sum`), or if the tests use no other name of the program;
4. the judge's own copy of a module or function of the standard library, if the program's name refers to one, or to an
   object that the reference imports, that the tests use as a module, or that tests commonly compare with;
5. the program's object, as a stand-in.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import symtable
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from services.reward.judging.program import TESTS
from services.reward.judging.remote import RemoteObject, World, identity_of
from services.reward.sandbox.inside_answering import PLAIN_MODULES

BUILT_IN = frozenset(dir(builtins))
COMMON = {
    "isclose": "math", "sqrt": "math", "gcd": "math", "deepcopy": "copy", "Counter": "collections",
    "deque": "collections", "defaultdict": "collections", "OrderedDict": "collections", "namedtuple": "collections",
}  # fmt: skip
"""Names of the standard library that tests compare with, often without importing them."""


@dataclass(frozen=True)
class Hints:
    """What the task defines about the program. entry_point: the tested function; reference: names its solution defines.

    trusted: names that tests may use, with values from the task itself; they come before the program's, or with
    `prefers_own` after. entry_point and reference may be empty.
    """

    entry_point: str = ""
    reference: frozenset[str] = frozenset()
    reference_classes: frozenset[str] = frozenset()
    library: dict[str, Any] = field(default_factory=dict)
    """Names that the reference imports from plain modules, with the judge's own copies."""
    trusted: dict[str, Any] = field(default_factory=dict)
    prefers_own: bool = False


def make_hints(entry_point: str, reference: str, prompt: str, prefers_own: bool = False) -> Hints:
    """Create hints from a task's row. The prompt is run here, with an empty body for its unfinished function."""
    names, classes, library = names_of_reference(reference)
    trusted: dict[str, Any] = {"__name__": TESTS}
    for code in (prompt, f"{prompt}\n    pass\n"):
        try:
            exec(compile(code, "<prompt>", "exec"), trusted)
            break
        except SyntaxError:
            continue
        except Exception:  # a prompt that cannot run defines no names
            break
    trusted = {name: value for name, value in trusted.items() if not name.startswith("__") and name != entry_point}
    return Hints(entry_point, names, classes, library, trusted, prefers_own)


def names_of_reference(code: str) -> tuple[frozenset[str], frozenset[str], dict[str, Any]]:
    """Top-level names of a task's own solution: functions and classes; the classes among them; and imports from plain
    modules, by name.
    """
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError):
        return frozenset(), frozenset(), {}
    functions = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    classes = {node.name for node in body if isinstance(node, ast.ClassDef)}
    imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    return frozenset(functions | classes), frozenset(classes), _imported(imports)


def _imported(statements: list[ast.Import | ast.ImportFrom]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for statement in statements:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                if alias.name in PLAIN_MODULES:
                    found[alias.asname or alias.name] = importlib.import_module(alias.name)
        elif statement.module in PLAIN_MODULES and not statement.level:
            module = importlib.import_module(statement.module)
            for alias in statement.names:
                if hasattr(module, alias.name):
                    found[alias.asname or alias.name] = getattr(module, alias.name)
    return found


def needed_names(source: str) -> set[str]:
    """Names that a piece of test code reads from outside itself. Raises SyntaxError."""
    needed: set[str] = set()
    top = symtable.symtable(source, "test", "exec")
    waiting = [top]
    while waiting:
        table = waiting.pop()
        waiting += table.get_children()
        for symbol in table.get_symbols():
            is_outside = symbol.is_global() or table is top
            if is_outside and symbol.is_referenced():
                needed.add(symbol.get_name())
    return needed - made_names(source)


def made_names(source: str) -> set[str]:
    """Names that a piece of test code binds at its top level. Raises SyntaxError."""
    symbols = symtable.symtable(source, "test", "exec").get_symbols()
    return {symbol.get_name() for symbol in symbols if symbol.is_imported() or symbol.is_assigned()}


@dataclass(frozen=True)
class Meanings:
    """Names whose meaning depends on all tests of a task together.

    own_built_ins: names of built-ins by which the tests mean the program's objects. library: names that are not the
    program's even if it defines them, with the judge's values.
    """

    own_built_ins: frozenset[str] = frozenset()
    library: dict[str, Any] = field(default_factory=dict)


def meanings_of(sources: Iterable[str], world: World, hints: Hints) -> Meanings:
    """Determine the meanings. Raises SyntaxError, ProgramOver."""
    needed: set[str] = set()
    made: set[str] = set()
    bases: set[str] = set()
    for source in sources:
        needed |= needed_names(source)
        made |= made_names(source)
        bases |= attribute_bases(source)
    programs = hints.reference | {hints.entry_point}
    candidates = (needed & BUILT_IN) - made
    common = needed & COMMON.keys() - made - programs
    library = {name: importlib.import_module(name) for name in (needed & bases & PLAIN_MODULES) - made - programs}
    others = needed - BUILT_IN - made - common - library.keys()
    has_own = any(_resolved(name, world)[0] in ("own", "other") for name in others)
    if has_own:
        library |= {name: getattr(importlib.import_module(COMMON[name]), name) for name in common}
    if hints.reference or hints.entry_point:
        own = candidates & programs
    else:
        own = set() if has_own else {name for name in candidates if _resolved(name, world)[0] == "own"}
    return Meanings(frozenset(own), library)


def attribute_bases(source: str) -> set[str]:
    """Names of which only attributes are used: `math` in `math.pi`. Raises SyntaxError."""
    nodes = list(ast.walk(ast.parse(source)))
    bases = [node.value for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    others = {node.id for node in nodes if isinstance(node, ast.Name) and not any(node is base for base in bases)}
    return {base.id for base in bases} - others


def bind(source: str, namespace: dict[str, Any], world: World, hints: Hints, meanings: Meanings) -> None:
    """Add every name to `namespace` that `source` needs and that can be resolved. Raises SyntaxError, ProgramOver."""
    for name in sorted(needed_names(source) - set(namespace)):
        if name in BUILT_IN and name not in meanings.own_built_ins:
            continue
        if name not in hints.trusted or hints.prefers_own:
            _bind_from_program(name, namespace, world, hints, meanings)
        if name in hints.trusted and name not in namespace:
            namespace[name] = hints.trusted[name]


def _resolved(name: str, world: World) -> tuple[str, Any]:
    """The program's value of a name: kind and value."""
    reply = world.program.ask("resolve", name)
    return (str(reply[0]), reply[1]) if type(reply) is list and len(reply) == 2 else ("missing", None)


def _bind_from_program(name: str, namespace: dict[str, Any], world: World, hints: Hints, meanings: Meanings) -> None:
    kind, value = _resolved(name, world)
    library = hints.library | meanings.library
    if kind == "missing":
        return
    if name in library:
        namespace[name] = library[name]
    elif kind == "module" and type(value) is str and value in PLAIN_MODULES:
        namespace[name] = importlib.import_module(value)
    elif kind == "library" and type(value) is list and len(value) == 2:
        module, attribute = value
        is_plain = type(module) is str and module in PLAIN_MODULES and module != "sys"
        if is_plain and type(attribute) is str and attribute.isidentifier() and not attribute.startswith("_"):
            found = getattr(importlib.import_module(module), attribute, None)
            if found is not None:
                namespace[name] = found
    elif kind in ("own", "other"):
        namespace[name] = _own(name, value, world, hints)


def _own(name: str, value: Any, world: World, hints: Hints) -> Any:
    if not isinstance(value, RemoteObject):
        return value
    identity = identity_of(value)
    if identity.what == "exception":  # so that a test can catch it
        return world.program.exceptions.setdefault(identity.type_name, type(name, (Exception,), {}))
    is_class = name in hints.reference_classes if hints.reference else name[:1].isupper()
    if is_class and name != hints.entry_point:
        world.classes.add(identity.number)
    return value
