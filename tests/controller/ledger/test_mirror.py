"""Claims about a ledger that is written on a local disk and mirrored in the run folder."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from ledger_entries import admit, finished, lineage, partial

from areal_like.errors import LedgerError, UserError
from controller.ledger import mirror
from controller.ledger.audit import audit
from controller.ledger.ledger import Ledger, LedgerEntry
from controller.ledger.mirror import HOME_FILE, LedgerHome


def home_of(root: Path, machine: str = "a") -> LedgerHome:
    (root / "run").mkdir(exist_ok=True)
    return LedgerHome(root / "run", root / machine, "r1")


def leave(home: LedgerHome) -> None:
    """The controller's machine is gone: nothing was copied, the lock goes with the process."""
    import os

    assert home._run_lock is not None
    os.close(home._run_lock)


def test_mirror_is_a_whole_ledger_that_can_be_audited_while_the_run_goes_on(tmp_path):
    home = home_of(tmp_path)
    with Ledger(home.open(), run_id="r1") as ledger:
        ledger.apply([lineage(), admit(0), finished(0, [0, 0, 0]), admit(1), partial(1, 0, [0, 0])])
        home.copy()
        assert audit(tmp_path / "run").is_clean
        assert audit(tmp_path / "run").num_payloads == 1
        ledger.apply([admit(2), finished(2, [0])])
        assert audit(tmp_path / "run").num_drawn == 2, "a copy is as old as it is"
        home.copy()
        assert audit(tmp_path / "run").num_drawn == 3
    assert not list((tmp_path / "run").glob("*-wal")), "no write-ahead log on a network file system"


def test_last_copy_leaves_nothing_on_the_machine(tmp_path):
    home = home_of(tmp_path)
    with Ledger(home.open(), run_id="r1") as ledger:
        ledger.apply([lineage(), admit(0), finished(0, [0])])
    home.close()
    assert not home.folder.exists()
    assert not (tmp_path / "run" / HOME_FILE).exists()
    again = home_of(tmp_path)
    with Ledger(again.open(), run_id="r1", must_exist=True) as ledger:
        assert ledger.trajectories(0, 0)[0].num_sampled == 1


def test_crash_on_the_same_machine_loses_nothing(tmp_path):
    home = home_of(tmp_path)
    with Ledger(home.open(), run_id="r1") as ledger:
        ledger.apply([lineage(), admit(0)])
        home.copy()
        ledger.apply([finished(0, [0, 0])])
    leave(home)
    with Ledger(home_of(tmp_path).open(), run_id="r1") as ledger:
        assert ledger.trajectories(0, 0)[0].num_sampled == 2


def test_another_machine_goes_on_from_the_mirror_and_the_first_ones_copy_is_void(tmp_path):
    first = home_of(tmp_path, "a")
    with Ledger(first.open(), run_id="r1") as ledger:
        ledger.apply([lineage(), admit(0), finished(0, [0])])
        first.copy()
        ledger.apply([admit(1), admit(2), admit(3)])
    leave(first)
    second = home_of(tmp_path, "b")
    with Ledger(second.open(), run_id="r1") as ledger:
        assert ledger.trajectories(0, 0)[0].num_sampled == 1
        ledger.apply([admit(1), finished(1, [0])])
        second.copy()
    leave(second)
    back = home_of(tmp_path, "a")
    with Ledger(back.open(), run_id="r1") as ledger:
        assert ledger.load().num_drawn == 2, "not the four that machine a believed in"
        assert ledger.trajectories(1, 0)[0].num_sampled == 1


def test_two_controllers_of_one_run_folder_are_refused_wherever_they_write(tmp_path):
    home = home_of(tmp_path, "a")
    home.open()
    with pytest.raises(UserError, match="another controller"):
        home_of(tmp_path, "b").open()


def test_tokens_that_were_purged_leave_the_mirror_too(tmp_path):
    home = home_of(tmp_path)
    with Ledger(home.open(), run_id="r1", segment_bytes=1) as ledger:
        ledger.apply([lineage(), admit(0), finished(0, [0])])
        ledger.apply([admit(1), finished(1, [0])])
        home.copy()
        segments = tmp_path / "run" / "segments"
        assert len(list(segments.iterdir())) == 2
        with sqlite3.connect(home.folder / "ledger.sqlite") as db:
            db.execute("UPDATE groups SET fate = 'dropped', reason = 'timeout', end_seq = 9 WHERE group_id = 0")
        assert ledger.purge(0).num_samples == 1
        home.copy()
        assert len(list(segments.iterdir())) == 1


def test_a_failed_last_copy_keeps_the_ledger_here(tmp_path, caplog):
    home = home_of(tmp_path)
    with Ledger(home.open(), run_id="r1") as ledger:
        ledger.apply([lineage(), admit(0)])
    (tmp_path / "run" / "segments").write_text("in the way")
    home.close()
    assert (home.folder / "ledger.sqlite").exists()
    assert "the ledger is stored in" in caplog.text


def test_a_local_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "run").mkdir()
    with pytest.raises(UserError, match=r"launch\.ray\.local_dir"):
        LedgerHome(tmp_path / "run", tmp_path / "file", "r1").open()


def test_folder_of_ledgers_that_another_user_made_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "run").mkdir()
    base = tmp_path / f"areal-like-ledgers-{os.getuid()}"
    base.mkdir(mode=0o777)
    home = LedgerHome(tmp_path / "run", None, "r1")
    home.open()
    assert base.stat().st_mode & 0o777 == 0o700
    home.unlock()
    base.rename(tmp_path / "theirs")
    base.symlink_to(tmp_path / "theirs")  # what a user without our rights can make
    with pytest.raises(UserError, match="not a folder that belongs to you"):
        LedgerHome(tmp_path / "run", None, "r1").open()
    base.unlink()
    base.mkdir()
    if os.getuid() == 0:
        os.chown(base, 65534, 65534)
        with pytest.raises(UserError, match="not a folder that belongs to you"):
            LedgerHome(tmp_path / "run", None, "r1").open()


def test_the_mirror_is_renewed_after_its_interval_and_a_second_after_a_saved_checkpoint(tmp_path, monkeypatch):
    """Looked at every second; a copy that fails is said and tried again an interval later."""
    home, now_s = home_of(tmp_path), [100.0]
    copied: list[float] = []
    said: list[str] = []

    async def sleep(seconds: float) -> None:
        assert seconds == 1.0
        now_s[0] += seconds
        if now_s[0] == 121.0:
            raise asyncio.CancelledError

    def copy() -> None:
        copied.append(now_s[0] - 100.0)
        if len(copied) == 1:
            raise LedgerError("damaged")
        if len(copied) == 2:
            raise OSError("disk full")

    async def to_thread(work: Callable[[], None]) -> None:
        work()

    monkeypatch.setattr(mirror, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(mirror, "asyncio", SimpleNamespace(sleep=sleep, to_thread=to_thread))
    monkeypatch.setattr(home, "copy", copy)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(home.keep_up(lambda: 4 if now_s[0] >= 107.0 else 0, 5.0, said.append))
    assert copied == [5.0, 7.0, 12.0, 17.0]
    assert said == [
        "the ledger's copy in the run folder is out of date: damaged",
        "the ledger's copy in the run folder is out of date: disk full",
    ]


# ---------------------------------------------------------------- which of the two ledgers a session begins with


def begun(home: LedgerHome, *entries: LedgerEntry) -> None:
    """A session that applied these and whose machine is then gone; the run folder has no copy of them."""
    with Ledger(home.open(), run_id="r1") as ledger:
        ledger.apply(entries)
    leave(home)


def num_drawn(home: LedgerHome) -> int:
    with Ledger(home.open(), run_id="r1") as ledger:
        return ledger.load().num_drawn


def test_a_session_knows_whether_its_ledger_is_as_old_as_the_last_copy(tmp_path: Path) -> None:
    first = home_of(tmp_path)
    begun(first, lineage(), admit(0))
    assert not first.is_restored, "there was no copy"
    first.copy()
    again = home_of(tmp_path)
    assert num_drawn(again) == 1
    assert not again.is_restored, "what was left here is whole"
    leave(again)
    elsewhere = home_of(tmp_path, "b")
    assert num_drawn(elsewhere) == 1
    assert elsewhere.is_restored
    elsewhere.unlock()


def test_a_newer_ledger_here_is_not_thrown_away_because_the_note_of_its_place_is_missing(tmp_path: Path) -> None:
    home = home_of(tmp_path)
    with Ledger(home.open(), run_id="r1") as ledger:
        ledger.apply([lineage(), admit(0)])
        home.copy()
        ledger.apply([admit(1)])
    leave(home)
    (tmp_path / "run" / HOME_FILE).unlink()
    lost = home_of(tmp_path)
    with pytest.raises(
        UserError, match=r"is newer \(3 records\) than the one in the run folder \(2 records\)"
    ) as raised:
        lost.open()
    assert raised.value.where == str(tmp_path / "run")
    assert raised.value.remedy == (
        f"restore ledger.home, or remove {lost.folder} to continue with the copy in the run folder"
    )
    assert (lost.folder / "ledger.sqlite").exists()
    assert lost._run_lock is None, "another controller may have the run"


def test_without_the_note_an_equal_ledger_here_is_made_again_from_the_copy(tmp_path: Path) -> None:
    home = home_of(tmp_path)
    begun(home, lineage(), admit(0))
    home.copy()
    (tmp_path / "run" / HOME_FILE).unlink()
    again = home_of(tmp_path)
    assert num_drawn(again) == 1
    assert again.is_restored
    again.unlock()


@pytest.mark.parametrize("note", ["", "[]", "{}", '{"token": "another"}'])
def test_what_lies_here_is_void_where_the_note_names_another_place(tmp_path: Path, note: str) -> None:
    home = home_of(tmp_path)
    begun(home, lineage(), admit(0))
    home.copy()
    begun(home_of(tmp_path), admit(1))
    (tmp_path / "run" / HOME_FILE).write_text(note)
    again = home_of(tmp_path)
    assert num_drawn(again) == 1, "the run went on elsewhere from the copy"
    assert again.is_restored
    again.unlock()


# ---------------------------------------------------------------- copies


def segments_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (folder / "segments").glob("*.seg")}


def test_every_copy_brings_the_bytes_that_are_new_and_no_others(tmp_path: Path) -> None:
    home = home_of(tmp_path)
    with Ledger(home.open(), run_id="r1") as ledger:
        home.copy()
        assert list((tmp_path / "run" / "segments").iterdir()) == []
        for number in range(4):
            ledger.apply([*([lineage()] if number == 0 else []), admit(number), finished(number, [0] * (number + 1))])
            home.copy()
            assert segments_of(tmp_path / "run") == segments_of(home.folder)
            home.copy()
            assert segments_of(tmp_path / "run") == segments_of(home.folder), "a second copy adds nothing"
    home.unlock()


def test_nothing_is_copied_before_there_is_a_ledger(tmp_path: Path) -> None:
    home = home_of(tmp_path)
    home.open()
    home.copy()
    assert not (tmp_path / "run" / "ledger.sqlite").exists()
    home.unlock()


@pytest.mark.parametrize(("num_gone", "is_copied"), [(1, True), (2, True), (3, False)])
def test_a_copy_that_a_purge_disturbs_begins_again_and_the_old_one_stays_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_gone: int, is_copied: bool
) -> None:
    home = home_of(tmp_path)
    tries: list[int] = []
    append = mirror._append_rest

    def append_rest(source: Path, target: Path) -> None:
        tries.append(audit(tmp_path / "run").num_drawn)
        if len(tries) <= num_gone:
            raise FileNotFoundError(source)
        append(source, target)

    with Ledger(home.open(), run_id="r1") as ledger:
        ledger.apply([lineage(), admit(0)])
        home.copy()
        ledger.apply([finished(0, [0]), admit(1)])
        monkeypatch.setattr(mirror, "_append_rest", append_rest)
        if is_copied:
            home.copy()
        else:
            with pytest.raises(LedgerError, match="the run deleted sampled tokens during the copy"):
                home.copy()
    assert tries == [1] * min(num_gone + 1, 3), "what readers see is the old copy until the new one is whole"
    assert audit(tmp_path / "run").num_drawn == (2 if is_copied else 1)
    home.unlock()


def test_a_ledger_that_cannot_be_read_counts_as_none(tmp_path: Path) -> None:
    assert mirror._num_facts(tmp_path / "none") == 0
    (tmp_path / "odd").write_text("no database" * 100)
    assert mirror._num_facts(tmp_path / "odd") == 0
    with sqlite3.connect(tmp_path / "empty") as db:
        db.execute("CREATE TABLE meta (key TEXT, value TEXT)")
    db.close()
    assert mirror._num_facts(tmp_path / "empty") == 0
    with Ledger(tmp_path, run_id="r1") as ledger:
        ledger.apply([lineage(), admit(0), admit(1)])
    assert mirror._num_facts(tmp_path / "ledger.sqlite") == 3


def test_another_controller_may_have_the_run_after_the_end_and_not_before(tmp_path: Path) -> None:
    home = home_of(tmp_path)
    home.open()
    with pytest.raises(UserError, match="another controller"):
        home_of(tmp_path).open()
    home.unlock()
    home.unlock()
    other = home_of(tmp_path)
    other.open()
    other.close()
    home_of(tmp_path).open()
