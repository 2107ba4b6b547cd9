"""How classes of msgspec are declared: what travels or is recorded never changes, and its fields are named.

Owns the rule for all packages; what a class's fields mean is tested with its module.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("areal_like", "rollout", "trainer", "services", "controller")
MUTABLE = {
    "areal_like/trace.py": "one event per slice, made on hot paths and encoded at once",
    "controller/report/timeline.py": "the same events, read for one report",
    "services/reward/scorers/remote.py": "another program's reply, read once",
}
"""Files whose structures may change after they were made."""
BY_POSITION = {
    *MUTABLE,
    "areal_like/token_source.py",
    "areal_like/trajectory.py",
    "areal_like/weights/tensor_parts.py",
    "controller/coordinator/effects.py",
    "controller/coordinator/events.py",
    "controller/ledger/segment_store.py",
    "rollout/engine/server/answer.py",
    "rollout/engine/server/environment.py",
}
"""Files whose structures may be made without naming their fields: none of them is a message."""
HAS_BASES = re.compile(rb"^\s*class\s+\w+[^:(]*\(", re.MULTILINE)
"""A class that derives from another: other files are not parsed."""


def structures() -> Iterator[tuple[str, ast.ClassDef]]:
    """Every class that derives from `msgspec.Struct`, with its file; base classes are known by their names."""
    classes = [
        (file.relative_to(REPOSITORY).as_posix(), node)
        for package in PACKAGES
        for file in sorted((REPOSITORY / package).rglob("*.py"))
        if HAS_BASES.search(source := file.read_bytes())
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
    ]
    known = {"Struct"}
    size = 0
    while len(known) > size:
        size = len(known)
        known |= {node.name for _, node in classes if known & set(bases(node))}
    return ((file, node) for file, node in classes if known & set(bases(node)))


def bases(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(base).rsplit(".", 1)[-1] for base in node.bases]


def is_given(node: ast.ClassDef, option: str) -> bool:
    return any(word.arg == option and ast.unparse(word.value) == "True" for word in node.keywords)


FOUND = list(structures())


def test_structures_of_messages_events_and_records_are_found() -> None:
    files = {file for file, _ in FOUND}
    assert {"areal_like/wire/messages.py", "controller/coordinator/events.py", "services/reward/job.py"} <= files
    assert files >= BY_POSITION, "no exception for files without structures"


def test_what_was_made_never_changes() -> None:
    assert [(file, node.name) for file, node in FOUND if file not in MUTABLE and not is_given(node, "frozen")] == []


def test_fields_of_a_message_are_named_where_it_is_made() -> None:
    found = [(file, node.name) for file, node in FOUND if file not in BY_POSITION and not is_given(node, "kw_only")]
    assert found == []
