"""Notes and tags of a run: kept, changed, shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import run_zoo as zoo
from rich.console import Console

from areal_like.errors import UserError
from controller.dashboard.cards import header
from controller.dashboard.run_list import RunList, row_of
from controller.run_folder.run_notes import MAX_NOTES_CHARS, NOTES_FILE, RunNotes, read_notes, write_notes
from controller.runs.note import note
from controller.runs.ps import ps


def test_what_is_given_is_replaced_and_the_rest_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = zoo.make_run(tmp_path, "finished")
    assert note(folder, None, tags=None) == 0
    assert capsys.readouterr().out == "no notes and no tags\n"
    note(folder, "first try\nof it", tags=None)
    note(folder, None, tags=["base", "lr", "base"])
    assert read_notes(folder.root) == RunNotes("first try\nof it", ("base", "lr"))
    assert capsys.readouterr().out.splitlines()[-1] == "[base] [lr] first try of it"
    note(folder, "", tags=None)
    note(folder, None, tags=[""])
    assert read_notes(folder.root) == RunNotes()


def test_a_text_that_is_too_long_is_refused_and_a_damaged_file_is_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="10,001 characters"):
        write_notes(tmp_path, "x" * (MAX_NOTES_CHARS + 1), ())
    with pytest.raises(UserError, match="` ` is not a valid tag"):
        write_notes(tmp_path, "", (" ",))
    with pytest.raises(UserError, match="33 tags"):
        write_notes(tmp_path, "", [str(one) for one in range(33)])
    for damaged in ("{", "[]", '{"notes": 3}', '{"tags": "x"}'):
        (tmp_path / NOTES_FILE).write_text(damaged)
        assert read_notes(tmp_path) == RunNotes()
    (tmp_path / NOTES_FILE).write_text(json.dumps({"notes": "x", "tags": [1, "a"]}))
    assert read_notes(tmp_path) == RunNotes("x", ("a",))


def test_ps_and_dashboard_show_them(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    folder = zoo.make_run(tmp_path, "finished")
    runs = RunList(folder.root.parent)
    runs.refresh()
    write_notes(folder.root, "smaller \x1b[31m rate", ("lr",))
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    ps(show_all=True, runs_dirs=[str(folder.root.parent)], console=console)
    words = console.export_text()
    assert "[lr] smaller" in words
    assert "\x1b" not in words
    (changed,) = [row for row in runs.refresh()["runs"] if row["name"] == folder.root.name]
    assert changed == row_of(folder.root)
    assert changed["note"].startswith("[lr] smaller")
    assert header(folder, None)["note"] == changed["note"]
