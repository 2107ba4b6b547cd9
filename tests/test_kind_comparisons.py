"""Nobody but an implementation's own package compares its name, or reads its section of the configuration.

Other code asks its descriptor (docs/extending.md), so that a new engine or launcher needs no edit there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.config.launchers import LAUNCHERS
from rollout.engine.emulated_descriptor import EMULATED
from rollout.engine.registry import ENGINES

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("areal_like", "rollout", "trainer", "services", "controller", "benchmarks")
NAMES = {*ENGINES, EMULATED.name, *(name for name in LAUNCHERS if name != "local")}
"""`local` is an ordinary word: it is found by what it is compared with."""
SECTIONS = {
    "sglang": ("rollout/engine/sglang/",),
    "vllm": ("rollout/engine/vllm/",),
    "ray": ("controller/launch/cluster/", "ray_descriptor.py"),
}
"""Attributes that are sections of one implementation, and the files that may read them."""
KIND = re.compile(r"\b(engine|launch)(\.kind\b|\.get\(['\"]kind['\"])")
SUSPECT = re.compile(rf"\b(engine|launch)\s*\.\s*(kind|get)\b|['\"]local['\"]|{'|'.join(sorted({*NAMES, *SECTIONS}))}")
"""What a file contains that can have such a comparison or reading."""


def comparisons(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Lines on which the kind of an engine or launcher is compared, with the expression."""
    for node in nodes:
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.Match):
            sides = [node.subject, *(case.pattern for case in node.cases)]
        else:
            continue
        parts = [inner for side in sides for inner in ast.walk(side)]
        words = {inner.value for inner in parts if isinstance(inner, ast.Constant)}
        attributes = {inner.attr for inner in parts if isinstance(inner, ast.Attribute)}
        # Most of the time would go into texts that cannot match.
        text = [ast.unparse(side) for side in sides] if {"kind", "local"} & (words | attributes) else []
        if words & NAMES or any(KIND.search(each) for each in text) or ("local" in words and "kind" in " ".join(text)):
            yield node.lineno if isinstance(node, ast.Compare) else node.subject.lineno, ast.unparse(node)


def readings(nodes: list[ast.AST], path: str) -> Iterator[tuple[int, str]]:
    """Lines on which another implementation's section is read."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in SECTIONS:
            owner = ast.unparse(node.value)
            is_module = owner.startswith("rollout")
            if not is_module and not any(part in path for part in SECTIONS[node.attr]):
                yield node.lineno, ast.unparse(node)


def nodes_of(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    """Comparisons and readings in all sources; those that can have any are parsed, once."""
    lines: dict[str, list[str]] = {"comparisons": [], "readings": []}
    for path in (path for package in PACKAGES for path in sorted((REPOSITORY / package).rglob("*.py"))):
        source, name = path.read_text(), path.relative_to(REPOSITORY)
        if not SUSPECT.search(source):
            continue
        nodes = nodes_of(source)
        if "benchmarks" not in path.parts:
            lines["comparisons"] += [f"{name}:{line}: {text}" for line, text in comparisons(nodes)]
        lines["readings"] += [f"{name}:{line}: {text}" for line, text in readings(nodes, path.as_posix())]
    return lines


def test_no_kind_of_an_engine_or_launcher_is_compared(found: dict[str, list[str]]) -> None:
    assert found["comparisons"] == []


def test_no_section_of_an_implementation_is_read_outside_its_package(found: dict[str, list[str]]) -> None:
    assert found["readings"] == []


@pytest.mark.parametrize(
    "source",
    [
        "if config.rollout.engine.kind == other: pass",
        "is_here = config.launch.kind != 'local'",
        "width = 2 if name in ('sglang', 'vllm') else 1",
        "if engine.get('kind') == wanted: pass",
        "match settings.kind:\n    case 'ray': pass",
    ],
)
def test_such_a_comparison_would_be_found(source: str) -> None:
    assert SUSPECT.search(source)
    assert len(list(comparisons(nodes_of(source)))) == 1


def test_such_a_reading_would_be_found_but_in_its_own_package() -> None:
    source = "print(config.rollout.engine.sglang.tp_size)"
    assert SUSPECT.search(source)
    nodes = nodes_of(source)
    assert [line for line, _ in readings(nodes, "controller/wiring/x.py")] == [1]
    assert list(readings(nodes, "rollout/engine/sglang/x.py")) == []
