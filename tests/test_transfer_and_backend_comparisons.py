"""Nobody but its own package compares the name of a weight transfer or a trainer backend, or reads its section.

Other code asks its descriptor (docs/extending.md), so that another one needs no edit there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_like.weights.registry import TRANSFERS
from trainer.backends.registry import BACKENDS

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("areal_like", "rollout", "trainer", "services", "controller", "benchmarks")
OWN = ("areal_like/weights/", "trainer/weights/", "rollout/weights/", "trainer/backends/")
"""Where transfers and backends are implemented."""
NAMES = {*TRANSFERS, *BACKENDS, "emulated"}
ORDINARY = {"shm", "disk", "torch", "auto", "emulated"}
"""Names that are also words for other things: found by what they are compared with."""
CHOSEN = re.compile(
    r"\bweights?[._]kind\b|\bsettings\.kind\b|\btransfer\b|\bweight_transfer\b|\bbackend\b|\bbackend_name\b|\bchoice\.name\b"
)
"""What holds the name of a transfer or backend."""
SECTIONS = ("fsdp", "deepspeed")


def comparisons(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Lines on which the name of a transfer or backend is compared with a literal, with the expression."""
    for node in nodes:
        if isinstance(node, ast.Compare):
            sides, line = [node.left, *node.comparators], node.lineno
        elif isinstance(node, ast.Match):
            sides, line = [node.subject, *(case.pattern for case in node.cases)], node.subject.lineno
        else:
            continue
        words = {inner.value for side in sides for inner in ast.walk(side) if isinstance(inner, ast.Constant)} & NAMES
        if words - ORDINARY or (words and any(CHOSEN.search(ast.unparse(side)) for side in sides)):
            yield line, ast.unparse(node)


def readings(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Lines on which a backend's section is read."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in SECTIONS:
            yield node.lineno, ast.unparse(node)


def nodes_of(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    """Comparisons and readings in every file outside the packages that implement transfers and backends; a file that
    names none of them is not parsed, and the others once."""
    lines: dict[str, list[str]] = {"comparisons": [], "readings": []}
    for path in (path for package in PACKAGES for path in sorted((REPOSITORY / package).rglob("*.py"))):
        name, source = path.relative_to(REPOSITORY).as_posix(), path.read_text()
        if not name.startswith(OWN) and any(word in source for word in {*NAMES, *SECTIONS}):
            nodes = nodes_of(source)
            lines["comparisons"] += [f"{name}:{line}: {text}" for line, text in comparisons(nodes)]
            lines["readings"] += [f"{name}:{line}: {text}" for line, text in readings(nodes)]
    return lines


def test_no_name_of_a_transfer_or_backend_is_compared(found: dict[str, list[str]]) -> None:
    assert found["comparisons"] == []


def test_no_section_of_a_backend_is_read_outside_its_package(found: dict[str, list[str]]) -> None:
    assert found["readings"] == []


@pytest.mark.parametrize(
    "source",
    [
        "if weights.kind == 'shm': pass",
        "is_sent = settings.kind in ('stream', 'distributed')",
        "is_disk = data.setting('trainer.weights.kind') != 'disk'",
        "if name == 'fsdp' or x: pass",
        "if 'deepspeed' == given: pass",
        "is_plain = trainer.backend == 'torch' and fits",
        "match settings.backend:\n    case 'auto': pass",
    ],
)
def test_such_a_comparison_would_be_found(source: str) -> None:
    assert len(list(comparisons(nodes_of(source)))) == 1


@pytest.mark.parametrize(
    "source", ["if place == 'shm': pass", "if settings.threads == 'auto': pass", "if manifest.kind == 'disk': pass"]
)
def test_other_meanings_of_those_words_are_left_alone(source: str) -> None:
    assert list(comparisons(nodes_of(source))) == []


def test_such_a_reading_would_be_found() -> None:
    assert [line for line, _ in readings(nodes_of("print(config.trainer.deepspeed.stage)"))] == [1]
