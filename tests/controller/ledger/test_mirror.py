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
from controller.ledger.ledger import Ledger
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
    assert "remains in" in caplog.text


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
    with pytest.raises(UserError, match="belongs to another user"):
        LedgerHome(tmp_path / "run", None, "r1").open()
    base.unlink()
    base.mkdir()
    if os.getuid() == 0:
        os.chown(base, 65534, 65534)
        with pytest.raises(UserError, match="belongs to another user"):
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
