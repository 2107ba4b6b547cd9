"""Claims about a folder that appears whole or not at all: what is flushed, put back and spared, and a full disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from areal_like.errors import OperationError, UserError
from tests.open_descriptors import no_new_descriptors
from trainer.checkpoints import atomic_folder as module
from trainer.checkpoints.atomic_folder import atomic_folder, remove_folder, sweep

ME = os.getpid()
LIVING, DEAD = 41, 42


@pytest.fixture
def living(monkeypatch: pytest.MonkeyPatch) -> None:
    """LIVING is a process of another user, DEAD is none."""

    def kill(pid: int, number: int) -> None:
        assert number == 0
        if pid == LIVING:
            raise PermissionError
        if pid == DEAD:
            raise ProcessLookupError

    monkeypatch.setattr(module.os, "kill", kill)


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def fill(folder: Path, content: str = "new") -> Path:
    folder.mkdir(parents=True)
    (folder / "file").write_text(content)
    return folder


def test_folder_is_hidden_until_it_is_complete_and_its_parents_are_made(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "target"
    with atomic_folder(target) as partial:
        assert partial == target.parent / f".target.{ME}.partial"
        (partial / "file").write_text("x")
        assert names(target.parent) == {partial.name}
    assert names(target.parent) == {"target"}
    assert (target / "file").read_text() == "x"


def test_what_this_process_left_before_is_thrown_away(tmp_path: Path) -> None:
    fill(tmp_path / f".target.{ME}.partial", "old")
    with atomic_folder(tmp_path / "target") as partial:
        assert names(partial) == set()


def test_target_that_was_there_is_replaced_unless_another_writers_is_to_stay(tmp_path: Path) -> None:
    target = fill(tmp_path / "target", "old")
    for replaces, content in ((False, "old"), (True, "new")):
        with atomic_folder(target, replaces=replaces) as partial:
            (partial / "file").write_text("new")
        assert (target / "file").read_text() == content
        assert names(tmp_path) == {"target"}


def test_empty_target_or_a_file_of_its_name_is_no_other_writers_work(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    with atomic_folder(tmp_path / "target", replaces=False) as partial:
        (partial / "file").write_text("new")
    assert names(tmp_path / "target") == {"file"}


def test_every_file_and_both_folders_are_flushed_before_and_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    monkeypatch.setattr(module.os, "fsync", lambda fd: flushed.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name))
    with no_new_descriptors(), atomic_folder(tmp_path / "target") as partial:
        (partial / "one").write_text("1")
        fill(partial / "inner")
    assert flushed == ["file", "one", f".target.{ME}.partial", tmp_path.name]


def test_target_is_put_back_where_the_second_rename_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = fill(tmp_path / "target", "old")
    rename = os.rename

    def refuse(source: Any, goal: Any) -> None:
        if str(source).endswith("partial"):
            raise OSError(errno.EDQUOT, "quota")
        rename(source, goal)

    monkeypatch.setattr(module.os, "rename", refuse)
    with pytest.raises(OperationError, match="the disk is full; the previous contents are unchanged"):  # noqa: SIM117
        with atomic_folder(target) as partial:
            (partial / "file").write_text("new")
    assert names(tmp_path) == {"target"}
    assert (target / "file").read_text() == "old"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "x"), "the disk is full"), (OSError(errno.EDQUOT, "x"), "the disk is full"),
        (SafetensorError("No space left on device"), "the disk is full"), (SafetensorError("odd"), ": odd;"),
        (OSError(errno.EIO, "bad sector"), "bad sector"),
    ],
)  # fmt: skip
def test_disk_that_refuses_is_one_sentence(error: Exception, words: str, tmp_path: Path) -> None:
    with pytest.raises(OperationError, match=words) as raised:  # noqa: SIM117
        with atomic_folder(tmp_path / "target"):
            raise error
    assert str(tmp_path / "target") in str(raised.value)
    assert names(tmp_path) == set()


def test_error_of_the_writers_own_passes_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):  # noqa: SIM117
        with atomic_folder(tmp_path / "target"):
            raise ZeroDivisionError
    assert names(tmp_path) == set()


def test_parent_that_cannot_be_written_is_the_users_to_change_and_a_full_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="the folder cannot be written") as raised:  # noqa: SIM117
        with atomic_folder(tmp_path / "file" / "target"):
            pytest.fail("there is no such folder")
    assert raised.value.where == str(tmp_path / "file")

    def full(parent: Path) -> None:
        raise OSError(errno.ENOSPC, "x")

    monkeypatch.setattr(module, "sweep", full)
    with pytest.raises(OperationError, match="the disk is full"):  # noqa: SIM117
        with atomic_folder(tmp_path / "target"):
            pytest.fail("there is no room")


# ---------------------------------------------------------------- sweeping


@pytest.mark.usefixtures("living")
def test_leftovers_of_the_dead_and_our_own_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    for pid in (ME, LIVING, DEAD):
        fill(tmp_path / f".target.{pid}.partial")
    fill(tmp_path / ".hidden")
    fill(tmp_path / "target")
    sweep(tmp_path)
    assert names(tmp_path) == {f".target.{LIVING}.partial", ".hidden", "target"}
    sweep(tmp_path, are_writers_gone=True)
    assert names(tmp_path) == {".hidden", "target"}


@pytest.mark.usefixtures("living")
@pytest.mark.parametrize(("is_there", "content"), [(False, "old"), (True, "new")])
def test_replaced_target_comes_back_where_it_is_missing_and_goes_where_it_is_not(
    is_there: bool, content: str, tmp_path: Path
) -> None:
    fill(tmp_path / f".step.1.{DEAD}.replaced", "old")
    fill(tmp_path / f".step.1.{DEAD}.partial", "half")
    if is_there:
        fill(tmp_path / "step.1", "new")
    sweep(tmp_path)
    assert names(tmp_path) == {"step.1"}
    assert (tmp_path / "step.1" / "file").read_text() == content


@pytest.mark.parametrize(
    ("answer", "is_alive"), [(None, True), (PermissionError(), True), (ProcessLookupError(), False)]
)
def test_process_is_alive_unless_the_system_knows_none_of_its_number(
    answer: Exception | None, is_alive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one of somebody else's, which may not be asked."""

    def kill(pid: int, number: int) -> None:
        assert (pid, number) == (4711, 0), "a question, no signal"
        if answer is not None:
            raise answer

    monkeypatch.setattr(module.os, "kill", kill)
    assert module._is_alive(4711) is is_alive


def test_name_of_a_removed_folder_is_gone_before_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fill(tmp_path / "target")
    fill(tmp_path / f".target.{ME}.partial", "trash of a removal before")
    remove = module.shutil.rmtree
    seen: list[set[str]] = []
    monkeypatch.setattr(
        module.shutil, "rmtree", lambda path, **more: (seen.append(names(tmp_path)), remove(path, **more))
    )
    remove_folder(folder)
    assert seen[-1] == {f".target.{ME}.partial"}
    assert names(tmp_path) == set()
