"""The ledger on a real disk: crashes, damage, locks, retention."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path

import msgspec
import numpy as np
import pytest
from ledger_entries import admit, checkpoint, finished, lineage, partial, shipped

from areal_like.errors import LedgerError, UserError
from areal_like.turn_checkpoint import TurnCheckpoint
from areal_like.verdict import Verdict
from controller.coordinator.effects import DropGroup, FilterGroup, RecordEval, RecordIncident
from controller.coordinator.snapshot import BatchGroup
from controller.ledger.audit import audit
from controller.ledger.ledger import LEDGER_FILE, Ledger, LedgerEntry, PurgeReport
from tests.open_descriptors import open_below

REPO = Path(__file__).resolve().parents[3]


def test_what_was_applied_is_there_after_reopening(tmp_path: Path) -> None:
    with Ledger(tmp_path, run_id="r") as ledger:
        assert ledger.load().num_lives == 0
        ledger.apply([lineage(), *(admit(i) for i in range(4)), partial(3, 0, [0, 0]), finished(0, [0, 0, 1])])
        ledger.apply([partial(3, 2, [0, 1, 1], skip=1), finished(1, [0])])
        ledger.apply([shipped(1, 0), LedgerEntry(effect=DropGroup(group_id=2, reason="timeout")), checkpoint(1)])
        before = ledger.load()
        assert ledger.seq == 12, "each fact counts once"
    with Ledger(tmp_path, must_exist=True) as ledger:
        assert ledger.load() == before
        assert ledger.seq == 12
        assert (before.num_drawn, before.dropped, [group.group_id for group in before.live]) == (
            4,
            {"timeout": 1},
            [1, 3],
        )
        (record,) = before.live[1].samples
        assert (record.num_tokens, record.first_version, record.last_version, record.is_finished) == (4, 0, 1, False)
        prefix = ledger.prefix(3, 0)
        assert prefix.tokens_R.tolist() == [0, 1, 2, 3]
        assert prefix.versions_R.tolist() == [0, 0, 1, 1]
        assert len(ledger.prefix(1, 0)) == 0
        (sample,) = ledger.batch_samples(before.batches[0].groups)
        assert (sample.group_id, sample.reward) == (0, 1.0)
        assert sample.trajectory.versions_T.tolist() == [-1, -1, -1, 0, 0, 1]


def test_finishing_supersedes_partial_tokens_and_a_failed_burst_leaves_nothing(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.apply([lineage(), admit(0), partial(0, 0, [0, 0])])
        ledger.apply([finished(0, [0, 0, 0])])
        assert len(ledger.prefix(0, 0)) == 0
        with pytest.raises(LedgerError, match="cannot be written"):
            ledger.apply([admit(1), finished(0, [0])])
        assert ledger.load().num_drawn == 1
        ledger.apply([admit(1), finished(1, [0])])
        assert ledger.trajectories(1, 0)[0].num_sampled == 1
        assert ledger.trajectories(0, 0)[0].num_sampled == 3
    assert audit(tmp_path).num_drawn == 2


def test_samples_after_half_a_write_are_read_from_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.writev

    def half(fd: int, buffers: list[bytes]) -> int:
        whole(fd, buffers[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    with Ledger(tmp_path) as ledger:
        ledger.apply([lineage(), admit(0), finished(0, [0, 0])])
        with monkeypatch.context() as full:
            full.setattr(os, "writev", half)
            with pytest.raises(LedgerError, match="whether the disk is full"):
                ledger.apply([admit(1), finished(1, [0])])
        ledger.apply([admit(1), finished(1, [0, 0, 0])])
    with Ledger(tmp_path, cache_bytes=0) as ledger:
        assert [ledger.trajectories(number, 0)[0].num_sampled for number in (0, 1)] == [2, 3]
    assert audit(tmp_path).is_clean


def test_a_fall_back_disowns_later_checkpoints_and_the_newest_recording_of_a_step_counts(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.apply([lineage(), *(admit(i) for i in range(3)), *(finished(i, [0]) for i in range(3))])
        ledger.apply([shipped(1, 0), checkpoint(1), shipped(2, 1), checkpoint(2), shipped(3, 2), checkpoint(3)])
        ledger.apply([lineage("l1", checkpoint=1), shipped(2, 1, "l1", is_replay=True)])
        state = ledger.load()
    assert [record.version for record in state.checkpoints] == [1]
    assert [(batch.step, batch.lineage) for batch in state.batches] == [(1, "l0"), (2, "l1"), (3, "l0")]
    assert state.num_lives == 2


@pytest.mark.processes
def test_kill_9_at_any_moment_leaves_exactly_the_committed_bursts(tmp_path: Path) -> None:
    script = textwrap.dedent(
        f"""
        import sys
        sys.path[:0] = [{str(REPO)!r}, {str(Path(__file__).parents[1] / "support")!r}]
        from pathlib import Path
        import ledger_entries as t
        from controller.ledger.ledger import Ledger
        ledger = Ledger(Path({str(tmp_path)!r}), segment_bytes=4000)
        ledger.apply([t.lineage()])
        for i in range(10**6):
            ledger.apply([t.admit(i), t.partial(i, 0, [0] * 20)])
            ledger.apply([t.finished(i, [0] * 50), t.shipped(i + 1, i)])
            print(i, flush=True)
        """
    )
    for _ in range(3):
        for path in [*tmp_path.glob("ledger*"), *(tmp_path / "segments").glob("*")]:
            path.unlink()
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            committed = [int(process.stdout.readline()) for _ in range(20)]
            process.send_signal(signal.SIGKILL)
            committed += [int(line) for line in process.stdout.read().split()]
        newest = max((tmp_path / "segments").glob("*.seg"))
        with newest.open("ab") as orphan:
            orphan.write(b"half a record that no row names")
        with Ledger(tmp_path) as ledger:
            state = ledger.load()
            assert len(state.batches) >= len(committed), "what was committed is there"
            assert len(ledger.batch_samples([g for b in state.batches for g in b.groups])) == len(state.batches)
            ledger.apply([admit(state.num_drawn, started=state.num_drawn + 1)])
        assert audit(tmp_path).is_clean


def test_a_second_controller_is_refused_and_a_dead_ones_lock_is_not_in_the_way(tmp_path: Path) -> None:
    with Ledger(tmp_path), pytest.raises(UserError, match=f"process {os.getpid()}"):
        Ledger(tmp_path)
    Ledger(tmp_path).close()


def test_folders_that_cannot_work_are_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="contains no ledger"):
        Ledger(tmp_path, must_exist=True)
    with pytest.raises(UserError, match="the folder is not writable"):
        Ledger(tmp_path / "absent")
    if os.geteuid() != 0:
        tmp_path.chmod(0o500)
        with pytest.raises(UserError, match="the folder is not writable"):
            Ledger(tmp_path)
        tmp_path.chmod(0o700)


def filled(folder: Path, num_groups: int = 6) -> None:
    with Ledger(folder, segment_bytes=1) as ledger:
        ledger.apply([lineage()])
        for i in range(num_groups):
            ledger.apply([admit(i), finished(i, [0] * 30)])


@pytest.mark.parametrize("damage", ["garbage", "middle"])
def test_a_damaged_database_is_a_ledger_error_with_a_remedy(tmp_path: Path, damage: str) -> None:
    filled(tmp_path, num_groups=200)
    path = tmp_path / LEDGER_FILE
    content = bytearray(path.read_bytes())
    if damage == "garbage":
        content = bytearray(b"not a database at all" * 100)
    else:
        content[4096 : len(content) - 4096] = os.urandom(len(content) - 8192)
    path.write_bytes(bytes(content))
    with pytest.raises(LedgerError, match="start a new run"):
        Ledger(tmp_path)
    with pytest.raises(UserError), Ledger(tmp_path / "elsewhere"):
        pass


def test_missing_or_cut_payload_files_are_found_at_opening_and_flipped_bits_at_reading(tmp_path: Path) -> None:
    filled(tmp_path)
    file = sorted((tmp_path / "segments").glob("*.seg"))[2]
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(LedgerError, match="truncated"):
        Ledger(tmp_path)
    file.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    with Ledger(tmp_path) as ledger:
        assert ledger.trajectories(0, 0)[0].num_sampled == 30
        with pytest.raises(LedgerError, match="damaged"):
            ledger.trajectories(2, 0)
    with pytest.raises(LedgerError, match="damaged"):
        audit(tmp_path)
    file.unlink()
    with pytest.raises(LedgerError, match="missing"):
        Ledger(tmp_path)


def test_retention_keeps_what_a_checkpoint_does_not_cover_and_frees_the_rest(tmp_path: Path) -> None:
    filled(tmp_path)
    with Ledger(tmp_path, segment_bytes=1, cache_bytes=0) as ledger:
        ledger.apply([shipped(1, 0), shipped(2, 1), LedgerEntry(effect=FilterGroup(group_id=2, value=1.0))])
        ledger.apply([checkpoint(1), admit(6, started=6), partial(6, 0, [0, 0])])
        report = ledger.purge(covered_step=1)
        assert (report.num_files, report.num_samples) == (2, 2), "step 1 and the filtered group"
        assert report.freed_bytes > 0
        with pytest.raises(LedgerError, match="sample 0 of group 0 was deleted"):
            ledger.trajectories(0, 0)
        assert ledger.trajectories(1, 0)[0].num_sampled == 30
        assert ledger.trajectories(3, 0)[0].num_sampled == 30
        assert len(ledger.prefix(6, 0)) == 2
        assert ledger.purge(covered_step=1).num_files == 0
    assert audit(tmp_path).findings == ()
    with Ledger(tmp_path) as ledger:
        assert ledger.load().num_drawn == 7


def test_retention_keeps_used_payloads_as_far_as_configured(tmp_path: Path) -> None:
    filled(tmp_path)
    size = next((tmp_path / "segments").glob("*.seg")).stat().st_size
    nothing = PurgeReport(num_samples=0, num_files=0, freed_bytes=0)
    for keep_bytes, num_files in ((None, 0), (10 * size, 0), (3 * size, 0), (3 * size - 1, 1), (0, 2)):
        with Ledger(tmp_path, keep_bytes=keep_bytes) as ledger:
            if keep_bytes is None:
                ledger.apply([shipped(step, step - 1) for step in (1, 2, 3)])
            report = ledger.purge(covered_step=3)
            assert report == nothing if not num_files else report.num_files == report.num_samples == num_files


def test_payloads_leave_memory_once_their_group_is_given_for_training_or_ends(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.apply([lineage(), *(admit(group_id) for group_id in range(4))])
        stored = [finished(group_id, [0, 0]) for group_id in range(4)]
        ledger.apply(stored)
        held = [weakref.ref(one.tokens_T) for entry in stored for one in entry.trajectories]
        del stored
        ledger.apply([shipped(1, 0), LedgerEntry(effect=FilterGroup(group_id=1, value=1.0))])
        ledger.apply([LedgerEntry(effect=DropGroup(group_id=2, reason="stale"))])
        batch = [BatchGroup(group_id=0, sample_indices=(0,), first_version=0)]
        assert ledger.batch_samples(batch)[0].trajectory.num_sampled == 2
        assert [ref() is None for ref in held] == [True, True, True, False]
        assert ledger.batch_samples(batch)[0].trajectory.num_sampled == 2, "a second time it comes from disk"


def test_an_evaluation_row_never_takes_the_place_of_the_training_sample_of_the_same_number(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.apply([lineage(), admit(0), finished(0, [0, 0])])
        row = finished(0, [7, 7, 7])
        ledger.apply([msgspec.structs.replace(row, effect=msgspec.structs.replace(row.effect, purpose="eval"))])
        assert ledger.trajectories(0, 0)[0].last_version == 0


def test_a_ledger_of_a_newer_schema_is_refused(tmp_path: Path) -> None:
    filled(tmp_path)
    with sqlite3.connect(tmp_path / "ledger.sqlite") as db:
        db.execute("UPDATE meta SET value = '99' WHERE key = 'schema'")
    db.close()
    with pytest.raises(UserError, match="schema version 99"):
        Ledger(tmp_path)


def test_a_sample_without_a_score_is_stored_with_who_failed_how_often_and_what_followed(tmp_path: Path) -> None:
    verdict = Verdict(kind="crashed", reason="no answer", failed_in="judge", scorer="judge", attempts=3)
    entries = [
        msgspec.structs.replace(
            entry, verdict=verdict, effect=msgspec.structs.replace(entry.effect, policy=policy), timings={"score": 2.0}
        )
        for entry, policy in ((finished(0, [0]), "drop_sample"), (finished(1, [0]), ""))
    ]
    with Ledger(tmp_path) as ledger:
        ledger.apply([lineage(), admit(0), admit(1), *entries])
    with sqlite3.connect(tmp_path / "ledger.sqlite") as db:
        facts = [msgspec.json.decode(fact) for (fact,) in db.execute("SELECT facts FROM samples ORDER BY group_id")]
    db.close()
    usual = {
        "components": {}, "reason": "no answer", "timings": {"score": 2.0}, "finish_reason": "stop", "scorer": "judge",
    }  # fmt: skip
    assert facts == [{**usual, "failed_in": "judge", "attempts": 3, "policy": "drop_sample"}, usual]


def test_incidents_are_kept_in_order(tmp_path: Path) -> None:
    said = [("trainer_died", "signal SIGKILL"), ("disk_full", "")]
    with Ledger(tmp_path) as ledger:
        ledger.apply([LedgerEntry(effect=RecordIncident(kind=kind, text=text)) for kind, text in said])
        assert ledger.seq == 2
    db = sqlite3.connect(tmp_path / LEDGER_FILE)
    assert db.execute("SELECT kind, text FROM incidents ORDER BY seq").fetchall() == said


def test_a_purge_that_fails_removes_nothing_and_the_ledger_goes_on(tmp_path: Path) -> None:
    filled(tmp_path)
    files = sorted((tmp_path / "segments").glob("*.seg"))
    with Ledger(tmp_path) as ledger:
        ledger.apply([shipped(1, 0)])
        other = sqlite3.connect(tmp_path / LEDGER_FILE)
        other.execute("CREATE TRIGGER no BEFORE UPDATE ON samples BEGIN SELECT RAISE(ABORT, 'broken'); END")
        with pytest.raises(LedgerError, match=r"old tokens cannot be removed from .* \(broken\)"):
            ledger.purge(covered_step=1)
        other.execute("DROP TRIGGER no")
        other.close()
        assert sorted((tmp_path / "segments").glob("*.seg")) == files
        ledger.apply([admit(9)])
        assert ledger.purge(covered_step=1).num_samples == 1


def test_what_is_read_of_a_run_besides_its_samples(tmp_path: Path) -> None:
    given = TurnCheckpoint(
        given_places_G=np.zeros(1, np.int32), given_tokens_G=np.ones(1, np.int32), num_turns=1, state=b"s"
    )
    with Ledger(tmp_path) as ledger:
        ledger.apply([lineage(), admit(0), admit(1)])
        first, second = partial(0, 0, [0, 0]), partial(0, 2, [0])
        ledger.apply([first, msgspec.structs.replace(second, checkpoint=given), lineage("l1", checkpoint=3)])
        for version, values in ((0, (1.0, None)), (3, (0.5,)), (0, (0.25,))):
            ledger.apply([
                LedgerEntry(effect=RecordEval(version=version, lineage="l0", kind="periodic", values=values))
            ])  # fmt: skip
        assert ledger.lineages() == {"l0": 0, "l1": 3}
        assert ledger.evaluations() == {0: (0.25,), 3: (0.5,)}
        found = ledger.turn_checkpoint(0, 0)
        assert found is not None
        assert (found.num_turns, found.state, found.given_tokens_G.tolist()) == (1, b"s", [1])
        assert ledger.turn_checkpoint(1, 0) is None


def test_a_closed_ledger_holds_no_file_open_and_leaves_no_log_to_its_readers(tmp_path: Path) -> None:
    filled(tmp_path)
    ledger = Ledger(tmp_path, cache_bytes=0)
    ledger.apply([admit(9), finished(9, [0])])
    assert ledger.trajectories(0, 0)
    reader = sqlite3.connect(tmp_path / LEDGER_FILE)
    assert reader.execute("SELECT COUNT(*) FROM samples").fetchone()[0] > 0
    ledger.close()
    assert (tmp_path / f"{LEDGER_FILE}-wal").stat().st_size == 0
    reader.close()
    assert open_below(tmp_path) == []


def test_a_ledger_that_cannot_be_opened_holds_no_file_open(tmp_path: Path) -> None:
    filled(tmp_path)
    for path in (tmp_path / "segments").glob("*.seg"):
        path.unlink()
    with pytest.raises(LedgerError) as refused:
        Ledger(tmp_path)
    assert open_below(tmp_path) == [], refused.value


def test_the_number_of_a_purged_file_is_not_used_by_a_later_session(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.apply([lineage(), admit(0), finished(0, [0]), shipped(1, 0), checkpoint(1)])
    with Ledger(tmp_path) as ledger:
        assert ledger.purge(covered_step=1).num_files == 1
    with Ledger(tmp_path) as ledger:
        ledger.apply([admit(1), finished(1, [0])])
    assert [path.name for path in (tmp_path / "segments").iterdir()] == ["000002.seg"]


def test_a_burst_that_fails_in_an_unexpected_way_is_rolled_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise TypeError("no row")

    with Ledger(tmp_path) as ledger:
        ledger.apply([lineage()])
        with monkeypatch.context() as patch:
            patch.setattr("controller.ledger.transaction.read_fact", fail)
            with pytest.raises(TypeError, match="no row"):
                ledger.apply([admit(0), finished(0, [0])])
        ledger.apply([admit(0), finished(0, [0])])
        assert ledger.load().num_drawn == 1
    assert sorted(path.name for path in (tmp_path / "segments").iterdir()) == ["000001.seg", "000002.seg"]


def test_a_ledger_that_another_program_locks_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / LEDGER_FILE
    connect = sqlite3.connect
    with contextlib.closing(connect(path, isolation_level=None)) as other:
        other.execute("CREATE TABLE meta (key, value)")
        other.execute("BEGIN EXCLUSIVE")
        monkeypatch.setattr(sqlite3, "connect", lambda *args, **options: connect(*args, **{**options, "timeout": 0}))
        with pytest.raises(LedgerError, match="is locked by another program"):
            Ledger(tmp_path)
