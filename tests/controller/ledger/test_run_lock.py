"""Who holds a run's folder."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from areal_like.errors import UserError
from controller.ledger.run_lock import LOCK_FILE, lock_folder, lock_holder
from tests.open_descriptors import no_new_descriptors


def test_holder_is_known_from_outside_until_it_lets_go(tmp_path: Path) -> None:
    assert lock_holder(tmp_path) is None, "nobody ever had it"
    lock = lock_folder(tmp_path)
    assert lock_holder(tmp_path) == os.getpid()
    os.close(lock)
    assert lock_holder(tmp_path) is None, "its number is in the file still"
    assert (tmp_path / LOCK_FILE).read_text() == f"{os.getpid()}\n"


def test_to_ask_takes_the_lock_from_nobody_and_leaves_nothing_open(tmp_path: Path) -> None:
    with no_new_descriptors():
        os.close(lock_folder(tmp_path))
        for _ in range(3):
            assert lock_holder(tmp_path) is None
        lock = lock_folder(tmp_path)
        for _ in range(3):
            lock_holder(tmp_path)
            with pytest.raises(UserError):
                lock_folder(tmp_path)
        os.close(lock)


def test_number_of_an_earlier_holder_is_replaced_whole(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text("1234567890123\n")
    os.close(lock_folder(tmp_path))
    assert (tmp_path / LOCK_FILE).read_text() == f"{os.getpid()}\n"


@pytest.mark.parametrize(("text", "holder", "shown"), [("", None, "unknown"), ("odd", None, "odd"), ("42\n", 42, "42")])
def test_holder_that_wrote_no_number_is_unknown(tmp_path: Path, text: str, holder: int | None, shown: str) -> None:
    lock = lock_folder(tmp_path)
    (tmp_path / LOCK_FILE).write_text(text)
    assert lock_holder(tmp_path) == holder
    with pytest.raises(UserError, match=rf"another controller \(process {shown}\) has this run open") as raised:
        lock_folder(tmp_path)
    assert (raised.value.where, raised.value.remedy) == (str(tmp_path), "wait for that controller to exit, or stop it")
    os.close(lock)


def test_link_in_the_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("1\n")
    (tmp_path / LOCK_FILE).symlink_to(tmp_path / "elsewhere")
    assert lock_holder(tmp_path) is None


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the folder is not writable") as raised:
        lock_folder(tmp_path / "none")
    assert raised.value.where == str(tmp_path / "none")


def test_file_system_without_locks_is_not_taken_for_another_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (
        no_new_descriptors(),
        pytest.raises(UserError, match=r"files cannot be locked in this folder \(No locks available\)") as raised,
    ):
        lock_folder(tmp_path)
    assert (raised.value.where, "local disk" in raised.value.remedy) == (str(tmp_path), True)
