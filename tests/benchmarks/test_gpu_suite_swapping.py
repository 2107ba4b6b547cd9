"""benchmarks/gpu_suite/swapping.py in its tiny form, on a CPU: which rows it leaves, and what becomes of its files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_suite import swapping
from benchmarks.gpu_suite.case import Context
from benchmarks.gpu_suite.tables import render


def rows_of(folder: Path, budget_s: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name in ("scratch", "shared"):
        (folder / name).mkdir()
    context = Context(
        device="cpu", is_quick=True, is_tiny=True, scratch=folder / "scratch", shared_memory=folder / "shared",
        deadline_s=time.monotonic() + budget_s, write=rows.append,
    )  # fmt: skip
    swapping.run(context)
    return rows


def test_a_version_goes_by_every_kind_of_file_as_a_row_of_its_own(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, 300)
    assert [(row["case"], row["status"]) for row in rows] == [
        ("tiny, shm: recompute", "ok"), ("tiny, shm: keep_kv", "ok"), ("tiny, disk: recompute", "ok"),
    ]  # fmt: skip
    assert [row["kind"] for row in rows] == ["shm", "shm", "disk"]
    assert all(row["publish_s"] > 0 and row["pause_ms"] >= 0 for row in rows)
    assert "tiny, disk: recompute" in render(rows)
    assert not list((tmp_path / "shared").iterdir()), "a store is removed with its versions"
    assert not list((tmp_path / "scratch").glob("versions-*"))


def test_disk_is_cut_where_no_time_is_left_and_skipped_where_no_room_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swapping, "ROWS", (("shm", "keep_kv"), ("disk", "recompute")))
    monkeypatch.setattr(swapping, "DISK_TIMES", 1e9)
    (tmp_path / "cut").mkdir()
    shm, disk = rows_of(tmp_path / "cut", 300)
    assert (shm["status"], disk["status"]) == ("ok", "cut")
    assert "s needed" in disk["reason"]
    room = swapping.shutil.disk_usage
    monkeypatch.setattr(
        swapping.shutil, "disk_usage", lambda path: room(path)._replace(free=0 if path.name == "scratch" else 1 << 40)
    )
    (tmp_path / "full").mkdir()
    assert [row["status"] for row in rows_of(tmp_path / "full", 300)] == ["ok", "skipped"]
