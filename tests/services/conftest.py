"""Makes the helpers next to these tests importable (`--import-mode=importlib` does not); the tests' code scorer."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "support"))

from code_harness import CodeBench, layers_here


@pytest.fixture(scope="session")
def bench() -> Iterator[CodeBench]:
    """A code scorer with the strongest sandbox there is."""
    if not layers_here().chosen:
        pytest.skip(f"no sandbox here: {layers_here().words}")
    bench = CodeBench(require="limits")
    yield bench
    bench.close()


@pytest.fixture(scope="session")
def namespaces(bench: CodeBench) -> CodeBench:
    """The same, where it has namespaces of its own."""
    if layers_here().chosen != "namespaces":
        pytest.skip(f"no namespaces here: {layers_here().parts.get('namespaces')}")
    return bench
