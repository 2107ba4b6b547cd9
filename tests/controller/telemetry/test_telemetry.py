"""Claims about what a running job writes down of itself: pulses, process events, status.json; whole small runs."""

from __future__ import annotations

import json
import threading

import pytest
from small_run import Trainer, Worker, bounded, concurrently, small_run, until

from controller.config.loading import load_config
from controller.runtime.supervisor import Loss
from controller.telemetry import pulse
from controller.telemetry.journal import Journal, newest_row
from controller.telemetry.pulse import ProcessNow, interval_s
from controller.telemetry.status import StatusFile
from controller.wiring.process_specs import trace_settings

COUNTS = {"drawn", "consumed", "filtered", "dropped", "running", "ready"}


def test_pulse_says_what_every_process_does_who_waits_and_where_groups_are(tmp_path, monkeypatch):
    monkeypatch.setattr(pulse, "FIRST_INTERVAL_S", 0.01)

    async def test():
        async with small_run(tmp_path) as run:
            run.supervisor.now = {
                "rollout-0": ProcessNow("rollout", "generate", None, "i1", {"tokens": 7.123456, "busy_s": 1.0}),
                "trainer": ProcessNow("trainer", "starting"),
            }
            async with concurrently(Worker(run).work(), Trainer(run).work()):
                await run.go()
                await run.server.farewell(1.0)
            pulses = run.rows("pulse")
            assert len(pulses) >= 2
            first, last = pulses[0], pulses[-1]
            assert first["wall_s"] == 0.0, "before the first lease"
            assert "trainer" in " ".join(first["waits"])
            assert last["version"] == 3
            assert last["wall_s"] > 0
            assert last["counts"].keys() == COUNTS
            assert last["counts"]["consumed"] == 6
            assert last["processes"]["rollout-0"] == {
                "role": "rollout", "state": "generate", "pid": None, "incarnation": "i1", "rss_mb": None,
                "counters": {"tokens": 7.1235, "busy_s": 1.0},
            }  # fmt: skip
            assert last["processes"]["trainer"]["incarnation"] == "", "it has not said Hello"
            assert all(
                row.keys() >= {"time_s", "wall_s", "version", "waits", "counts", "processes", "processor"}
                for row in pulses
            )
            assert last["processor"]["cpu_s"] == {"rollout-0": 1.0, "trainer": 1.0}
            assert last["processor"]["cores"] > 0

    bounded(test())


@pytest.mark.parametrize("num_processes", [3, 16, 80])
def test_number_of_pulses_of_a_run_of_any_length_is_bounded(num_processes):
    now_s, num, at_a_day = 0.0, 0, 0
    while now_s < 30 * 86400:
        now_s += interval_s(now_s, num_processes)
        num += 1
        at_a_day += now_s <= 86400
    factor = max(1.0, num_processes / 16)
    assert at_a_day * factor < 2900
    assert num * factor < 4600, "a month"
    assert interval_s(0.0, 3) == 2.0


def test_lost_process_its_return_and_its_end_are_rows(tmp_path):
    async def test():
        async with small_run(tmp_path, num_workers=2) as run:
            run.supervisor.losses += [
                Loss("rollout-0", "rollout", "silent for 15 s", False),
                Loss("rollout-9", "rollout", "ended with status 1", True, 1),
            ]
            async with concurrently(Trainer(run).work()):
                ending = run.go()
                async with concurrently(ending):
                    await until(lambda: len(run.rows("process")) == 2)
                    first = Worker(run, "rollout-0", capacity=0)
                    async with concurrently(first.work()):
                        await until(lambda: len(run.rows("process")) == 3)
                        async with concurrently(Worker(run, "rollout-1").work()):
                            await until(lambda: run.parts.end.outcome is not None)
            rows = [(row["name"], row["event"], row["reason"]) for row in run.rows("process")]
            assert rows[:2] == [
                ("rollout-0", "lost", "silent for 15 s"), ("rollout-9", "gone", "ended with status 1"),
            ]  # fmt: skip
            assert rows[2:] == [("rollout-0", "restarted", "")], "rollout-1 came for the first time"

    bounded(test())


def test_status_file_of_a_running_job_says_where_it_stands(tmp_path):
    async def test():
        async with small_run(tmp_path) as run:
            run.tally.add_history([0, 1])  # steps of an earlier stretch
            run.tally.add_evaluation(0, [1.0, 0.0])
            async with concurrently(Worker(run).work(), Trainer(run).work()):
                await run.go()
                await run.server.farewell(1.0)
            status = json.loads((tmp_path / "status.json").read_text())
            assert (status["format"], status["run"], status["status"]) == (1, "small", "running")
            assert (status["step"], status["num_steps"], status["version"]) == (4, 3, 3)
            assert status["accuracy"] == {"0": 0.5}
            assert status["last_step"]["step"] == 3
            assert status["eta_s"] == 0.0
            assert status["counts"].keys() == COUNTS

    bounded(test())


def test_status_is_replaced_once_a_second_and_never_half(tmp_path):
    now_s = 0.0
    status = StatusFile(tmp_path / "status.json", run="a", num_steps=9, clock=lambda: now_s)
    assert status.is_due()
    status.write("running", step=1)
    assert not status.is_due()
    seen: list[int] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            seen.append(json.loads((tmp_path / "status.json").read_text())["step"])

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(2, 200):
        now_s += 1.0
        assert status.is_due()
        status.write("running", step=step, waits=["x" * 5000])
    stop.set()
    reader.join()
    assert seen == sorted(seen)
    assert json.loads((tmp_path / "status.json").read_text())["elapsed_s"] == 198.0


def test_ended_run_has_no_living_process_and_nobody_waits(tmp_path):
    status = StatusFile(tmp_path / "status.json", run="a", num_steps=9)
    row = ProcessNow("trainer", "wait:batch", 1, "i", {"steps": 3.0}).row()
    status.write("running", waits=["trainer waits"], processes={"trainer": row}, eta_s=5.0)
    status.end("stopped")
    found = json.loads((tmp_path / "status.json").read_text())
    assert (found["status"], found["waits"], found["eta_s"]) == ("stopped", [], None)
    assert found["processes"]["trainer"]["state"] == "ended"
    assert found["processes"]["trainer"]["counters"] == {"steps": 3.0}


def test_resumed_run_begins_with_what_the_stretch_before_had_reached(tmp_path):
    StatusFile(tmp_path / "status.json", run="a", num_steps=9).write("running", step=5, version=5, accuracy={"0": 0.5})
    StatusFile(tmp_path / "status.json", run="a", num_steps=9).write("preparing")
    found = json.loads((tmp_path / "status.json").read_text())
    assert (found["status"], found["step"], found["accuracy"]) == ("preparing", 5, {"0": 0.5})
    (tmp_path / "status.json").write_text('{"step": ')
    StatusFile(tmp_path / "status.json", run="a", num_steps=9).write("preparing")
    assert json.loads((tmp_path / "status.json").read_text())["step"] == 0


def test_status_that_cannot_be_written_is_no_end(tmp_path, caplog):
    status = StatusFile(tmp_path / "gone" / "status.json", run="a", num_steps=9)
    status.write("running")
    status.end("finished")
    assert len(caplog.records) == 1


def test_newest_step_row_of_an_earlier_stretch_is_found_and_half_lines_are_not(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert newest_row(path, "step") is None
    journal = Journal(path)
    journal.append({"loss": 1.0, "kind": "step", "step": 1})
    journal.append({"loss": 0.5, "kind": "step", "step": 2})
    journal.measure("pulse", wall_s=1.0)
    journal.close()
    with path.open("ab") as file:
        file.write(b'{"kind":"step","step":3')
    assert Journal(path).last_step == {"loss": 0.5, "kind": "step", "step": 2}


def test_what_is_drawn_of_a_step_does_not_grow_with_it():
    def every_group(**changes):
        overrides = [f"{key}={value}" for key, value in changes.items()]
        return trace_settings(load_config("quickstart", overrides).config).every_group

    assert every_group(groups_per_step=8) == 1, "64 samples a step: all of them"
    assert every_group(groups_per_step=9) == 2
    assert every_group(groups_per_step=512, group_size=16) == 128, "four groups of a step of 8,192 samples"
    assert every_group(groups_per_step=48, **{"metrics.trace_samples_per_step": 4}) == 96, (
        "fewer than a group: not one in every step"
    )
    assert every_group(**{"metrics.trace_samples_per_step": "null"}) == 1


def test_short_run_is_drawn_whole_and_a_long_one_by_whole_groups_within_its_bound():
    def settings(**changes):
        overrides = [f"{key}={value}" for key, value in changes.items()]
        fixed = ["groups_per_step=48", "group_size=8", "metrics.trace_samples_per_step=null"]
        return trace_settings(load_config("quickstart", [*fixed, *overrides]).config)

    whole = settings(num_steps=80)
    assert (whole.every_group, whole.max_events) == (1, 200_000)
    long = settings(num_steps=10_000)
    samples = 10_000 * 48 * 8
    assert samples * 4 / long.every_group <= 0.75 * 200_000
    assert samples * 4 / (long.every_group - 1) > 0.75 * 200_000, "no thinner than it must be"
    spread = settings(**{"num_steps": 10_000, "rollout.num_workers": 8})
    assert samples * 2 / spread.every_group <= 0.75 * 200_000, "the reward service sees all samples"
    off = settings(**{"metrics.trace": "false"})
    assert off.max_events == 0
