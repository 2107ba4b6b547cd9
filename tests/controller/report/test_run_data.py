"""Claims about reading a run's folder: whole, half-written, damaged, newer, and while it is written."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path

import msgspec
import numpy as np
import pytest
from example_counts import num_examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_run import made_run, pulse_rows, step_rows, write_ledger, write_run

from areal_like.errors import UserError
from areal_like.trajectory import Segment, Trajectory
from areal_like.verdict import Verdict
from controller.coordinator.effects import RecordGroup, StoreFinished
from controller.coordinator.sample_outcome import SampleOutcome
from controller.ledger.ledger import Ledger
from controller.ledger.sample_reader import read_samples
from controller.ledger.transaction import LedgerEntry
from controller.report.data import KINDS, RunData, number, series
from controller.report.diagnosis import diagnose
from controller.report.run_charts import failures as failures_chart
from controller.run_folder.run_folder import RunFolder

FILES = ("state.json", "config.yaml", "metrics.jsonl", "summary.json", "status.json", "ledger.sqlite")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run of 10 steps, 3 groups of 4; not to be changed."""
    return write_run(tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture
def folder(tmp_path):
    """The same, to be damaged."""
    return write_run(tmp_path / "run", num_steps=4)


def append(folder: RunFolder, *rows: dict) -> None:
    with folder.metrics.open("ab") as file:
        file.writelines(msgspec.json.encode(row) + b"\n" for row in rows)


def test_whole_run_is_read_without_a_problem(whole):
    data = RunData.load(whole)
    assert data.problems == []
    assert [row["step"] for row in data.steps] == list(range(1, 11))
    assert [row["version"] for row in data.evals] == [0, 10]
    assert len(data.pulses) == 11
    assert data.setting("rollout.engine.num_slots") == 128
    assert data.where is not None
    assert data.where.kind == "finished"


def test_samples_carry_step_length_reward_staleness_and_components(whole):
    stats = RunData.load(whole).samples
    assert stats is not None
    assert len(stats.step) == 10 * 3 * 4
    assert list(stats.step[:13]) == [1] * 12 + [2]
    assert list(stats.length[:4]) == [5, 6, 7, 8]
    assert list(stats.value[:4]) == [0.0, 1.0, 0.0, 1.0]
    assert list(stats.is_cut[:4]) == [False, False, False, True]
    assert set(stats.staleness[stats.step > 1]) == {1}, "one version behind, from the second step on"
    assert stats.verdicts == {"scored": 120}
    assert stats.components_by_step["correct"] == [(step, 0.5) for step in range(1, 11)]
    assert stats.timings_s == pytest.approx({"generate_s": 0.3, "score_s": 0.1})
    assert stats.zero_signal_late[0] == 0.0


def test_too_many_samples_are_thinned_by_whole_groups_evenly_over_the_steps(whole):
    stats = read_samples(whole.ledger, max_samples=41)
    assert stats is not None
    assert len(stats.step) == 40
    assert stats.share == pytest.approx(1 / 3)
    assert set(stats.step) == set(range(1, 11))
    assert set(np.bincount(stats.group)) == {0, 4}


def test_ledger_is_read_while_its_run_writes_it(folder):
    with Ledger(folder.root, run_id="r") as ledger:
        ledger._db.execute("BEGIN IMMEDIATE")
        ledger._db.execute("DELETE FROM groups")
        stats = read_samples(folder.ledger, max_samples=1000)
        ledger._db.execute("ROLLBACK")
    assert stats is not None
    assert stats.fates == {"consumed": 12}, "what is not committed is not seen, and does not hold the reader up"


def test_ledger_that_another_program_has_locked_is_a_problem_and_no_failure(folder, monkeypatch):
    monkeypatch.setattr("controller.ledger.sample_reader.LOCK_WAIT_S", 0.05)
    db = sqlite3.connect(folder.ledger, isolation_level=None)
    db.execute("PRAGMA locking_mode = EXCLUSIVE")
    db.execute("BEGIN EXCLUSIVE")
    data = RunData.load(folder)
    db.close()
    assert data.samples is None
    assert "locked" in data.problems[0]


def test_ledger_in_a_folder_that_cannot_be_written_is_read(folder):
    folder.root.chmod(0o500)
    try:
        assert RunData.load(folder).samples is not None
    finally:
        folder.root.chmod(0o700)


def test_strange_characters_in_the_path_do_not_hide_the_ledger(tmp_path):
    folder = write_run(tmp_path / "100 % of #1?", num_steps=2)
    assert RunData.load(folder).problems == []


def test_slow_ledger_is_given_up(whole, monkeypatch):
    monkeypatch.setattr("controller.ledger.sample_reader.READ_S", -1.0)
    monkeypatch.setattr("controller.ledger.sample_reader.HANDLER_STEPS", 1)
    data = RunData.load(whole)
    assert data.samples is None
    assert "takes too long" in data.problems[0]


def test_ledger_of_another_schema_is_left_out_with_its_number(folder):
    db = sqlite3.connect(folder.ledger)
    db.execute("UPDATE meta SET value = '99' WHERE key = 'schema'")
    db.commit()
    db.close()
    data = RunData.load(folder)
    assert data.samples is None
    assert "schema version 99" in data.problems[0]


def test_newer_layout_is_refused_and_a_newer_status_file_left_out(folder):
    (folder.root / "status.json").write_text('{"format": 99}')
    data = RunData.load(folder)
    assert data.status is None
    assert "newer version" in data.problems[0]
    folder.state.write_text(json.dumps({"format": 2}))
    with pytest.raises(UserError, match="newer version"):
        RunData.load(folder)


def test_folder_without_anything_of_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="no readable run data"):
        RunData.load(RunFolder(tmp_path))
    with pytest.raises(UserError, match="no such folder"):
        RunData.load(RunFolder(tmp_path / "none"))


def test_any_single_missing_file_leaves_the_rest(folder):
    for name in FILES:
        kept = (folder.root / name).read_bytes()
        (folder.root / name).unlink()
        data = RunData.load(folder)
        assert data.problems or name == "status.json", "older runs have no status file"
        assert diagnose(data)
        (folder.root / name).write_bytes(kept)


def test_last_line_of_a_running_run_may_be_half_written(folder):
    with folder.metrics.open("ab") as file:
        file.write(b'{"kind":"step","st')
    assert RunData.load(folder).problems == ["the last line of metrics.jsonl is truncated"]
    folder.state.write_text(json.dumps({**json.loads(folder.state.read_text()), "status": "running"}))
    assert RunData.load(folder).problems == []


def test_damaged_lines_and_unknown_kinds_are_counted(folder):
    with folder.metrics.open("ab") as file:
        file.write(b'\x00\x00\x00\n[1, 2]\n{"kind": 3}\n{"kind":"telepathy"}\n{"kind":"step","step":"one"}\n')
    problems = RunData.load(folder).problems
    assert any(problem.startswith("3 of") for problem in problems)
    assert any("telepathy" in problem for problem in problems)
    assert any("have no step number" in problem for problem in problems)


def test_step_done_again_replaces_its_row_and_disowns_the_later_ones_of_the_old_life(folder):
    """The run fell back to the checkpoint of version 1 and came as far as step 2."""
    append(folder, {"kind": "step", "step": 2, "loss": 7.0, "is_replay": True})
    steps = RunData.load(folder).steps
    assert [row["step"] for row in steps] == [1, 2]
    assert steps[1]["loss"] == 7.0


def test_numbers_that_are_none_become_nan():
    rows = [{"a": 1}, {"a": None}, {"a": "x"}, {"a": True}, {}, {"a": 10**400}, {"a": float("inf")}]
    assert series(rows, "a")[0] == 1.0
    assert np.isnan(series(rows, "a")[1:]).all()
    assert number(None, "a", 3.0) == 3.0


def test_pulse_with_a_strange_shape_keeps_what_is_right_in_it(folder):
    append(
        folder, {"kind": "pulse", "processes": {"trainer": 3, "reward": {"counters": []}}, "waits": "?", "counts": 1}
    )
    pulse = RunData.load(folder).pulses[-1]
    assert pulse["processes"] == {"reward": {"counters": {}}}
    assert (pulse["waits"], pulse["counts"]) == ([], {})


def test_ledger_without_a_consumed_sample_gives_empty_arrays(tmp_path):
    write_ledger(tmp_path, num_steps=0, groups_per_step=1, group_size=1)
    assert read_samples(tmp_path / "ledger.sqlite", max_samples=10) is None


@settings(max_examples=num_examples(50), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FILES), data=st.data())
def test_damage_anywhere_in_any_file_is_no_failure_of_reading_or_diagnosis(folder, name, data):
    path = folder.root / name
    kept = path.read_bytes()
    start = data.draw(st.integers(0, len(kept)))
    end = data.draw(st.integers(start, len(kept)))
    path.write_bytes(kept[:start] + data.draw(st.binary(max_size=40)) + kept[end:])
    try:
        words = diagnose(RunData.load(folder))[0].title
    except UserError as error:
        words = error.what if "newer version" in error.what else ""
    finally:
        path.write_bytes(kept)
        for log in ("-wal", "-shm"):
            (folder.root / f"ledger.sqlite{log}").unlink(missing_ok=True)
    assert words


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_diagnosis_never_raises_whatever_the_rows_hold(data):
    run = made_run(steps=step_rows(12), pulses=pulse_rows(12))

    def spoilt(rows):
        rows = [dict(row) for row in rows]
        for _ in range(data.draw(st.integers(0, 12))):
            row = rows[data.draw(st.integers(0, len(rows) - 1))]
            key = data.draw(st.sampled_from(sorted(row)))
            if key not in ("step", "processes", "waits", "counts"):  # these are checked when they are read
                row[key] = data.draw(JSON)
            elif key == "processes":
                row[key] = {name: {**one, "counters": data.draw(COUNTERS)} for name, one in row[key].items()}
        return rows

    config = {**run.config}
    for key in data.draw(st.lists(st.sampled_from(sorted(config)), max_size=6)):
        config[key] = data.draw(JSON)
    spoilt_run = made_run(
        steps=spoilt(run.steps), pulses=spoilt(run.pulses), settings=config,
        summary=data.draw(st.none() | st.dictionaries(st.sampled_from(["audit", "steps", "dropped_by_reason"]), JSON)),
        sinks=[{"sink": data.draw(JSON), "event": "down", "lost": data.draw(JSON)}],
        notes=[{"note": "quarantined", "text": data.draw(JSON)}],
        processes=[{"event": "gone", "name": data.draw(JSON)}],
        swaps=[{"stage_s": data.draw(JSON), "pause_s": data.draw(JSON)}],
    )  # fmt: skip
    assert all(finding.title for finding in diagnose(spoilt_run))


COUNTERS = st.dictionaries(
    st.sampled_from(["wait_s", "busy_s", "idle_s", "steps", "tokens", "queue"]), JSON, max_size=4
)


def test_answers_without_a_score_are_counted_by_scorer_verdict_and_policy(tmp_path):
    write_ledger(tmp_path, num_steps=2, groups_per_step=1, group_size=4)
    segment = Segment(np.arange(3, dtype=np.int32), np.zeros(3, np.float32), np.zeros(3, np.int32))
    failures = [
        ("judge", "crashed", "value", 0.5), ("judge", "crashed", "value", 0.5), ("", "invalid", "drop_sample", None),
    ]  # fmt: skip
    entries = [LedgerEntry(effect=RecordGroup(group_id=50, version=0, started=3))]
    entries += [
        LedgerEntry(
            effect=StoreFinished(
                purpose="train", value=value, is_kept=value is not None, policy=policy,
                outcome=SampleOutcome(
                    group_id=50, sample_index=index, lease_id=index, num_tokens=3, first_version=0, last_version=0,
                    verdict_kind=kind,
                ),
            ),
            trajectories=(Trajectory.from_prompt(np.arange(3, dtype=np.int32), segment, "stop"),),
            verdict=Verdict(kind=kind, reason="x", failed_in=scorer, attempts=2),
            worker="rollout-0",
        )
        for index, (scorer, kind, policy, value) in enumerate(failures)
    ]  # fmt: skip
    with Ledger(tmp_path, run_id="r") as ledger:
        ledger.apply(entries)
    stats = read_samples(tmp_path / "ledger.sqlite", max_samples=100)
    assert stats is not None
    assert stats.failures == {("judge", "crashed", "value"): 2, ("", "invalid", "drop_sample"): 1}
    chart = failures_chart(made_run(samples=stats))
    assert chart.series[0].xs == ["judge: crashed → a configured value", "invalid → sample dropped"]


def test_every_kind_of_row_that_a_controller_writes_is_known_to_the_reader():
    sources = Path(__file__).parents[3].joinpath("controller").rglob("*.py")
    written = {kind for path in sources for kind in re.findall(r"\.measure\(\s*\"(\w+)\"", path.read_text())}
    assert {"swap", "release", "checkpoint"} <= written, "the search finds them"
    assert written <= KINDS


@pytest.mark.parametrize("odd", [[], {}, 3])
def test_status_file_with_values_of_another_kind_is_reported_and_the_rest_is_read(folder, odd):
    folder.state.write_text(json.dumps({**json.loads(folder.state.read_text()), "status": odd, "host": odd}))
    data = RunData.load(folder)
    assert data.steps
    assert not data.is_over
    assert any(
        "state.json is damaged: invalid values of status, host are ignored" in problem for problem in data.problems
    )
