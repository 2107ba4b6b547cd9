"""Which processes are below a process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from areal_like import descendants
from areal_like.descendants import children_of, descendants_of

NO_PROCESS = 2**22 + 1
"""Above the largest process id that Linux gives."""


def test_all_generations_are_listed_parents_before_children(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {1: [2, 3], 3: [4], 4: [5], 9: [10]}
    monkeypatch.setattr(descendants, "children_of", lambda pid: list(tree.get(pid, ())))
    found = descendants_of(1)
    assert sorted(found) == [2, 3, 4, 5]
    assert found.index(3) < found.index(4) < found.index(5)
    assert descendants_of(2) == []


def test_a_process_that_is_gone_has_no_children() -> None:
    assert children_of(NO_PROCESS) == []
    assert descendants_of(NO_PROCESS) == []


def test_children_are_asked_of_the_system_where_there_is_no_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(folder: str) -> list[str]:
        raise FileNotFoundError(folder)

    class Played:
        def __init__(self, pid: int) -> None:
            if pid == NO_PROCESS:
                raise descendants.psutil.NoSuchProcess(pid)

        def children(self) -> list[Played]:
            return [self]

        pid = 7

    monkeypatch.setattr(os, "listdir", missing)
    monkeypatch.setattr(Path, "exists", lambda path: False)
    monkeypatch.setattr(descendants.psutil, "Process", Played)
    assert children_of(1) == [7]
    assert children_of(NO_PROCESS) == []


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_children_of_all_threads_count_and_a_thread_that_ends_meanwhile_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = {"1": "11 12 ", "2": "", "3": "13 "}
    for name, content in listed.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "children").write_text(content)
    (tmp_path / "4").mkdir()
    opened = open
    monkeypatch.setattr(os, "listdir", lambda folder: ["1", "2", "3", "4"])
    monkeypatch.setattr(
        descendants,
        "open",
        lambda path, mode: opened(tmp_path / Path(path).parts[-2] / "children", mode),
        raising=False,
    )
    assert children_of(1) == [11, 12, 13]
