"""Claims about the processor time of processes: how it is read, and what pulses tell of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from made_run import config, made_run, pulse_rows
from small_run import bounded, until

from controller.launch.launcher import CONTROLLER, Child
from controller.launch.local import LocalLauncher
from controller.launch.processor import cpu_seconds, machine_busy_s, queue_seconds, rss_mb
from controller.report.cores import available, between, used
from controller.report.flow_charts import processor_time

HAS_QUEUES = os.path.exists("/proc/self/schedstat")
SPIN = "import time; t = time.process_time() + 0.4\nwhile time.process_time() < t: pass\n"
FAMILY = f"""
import subprocess, sys
subprocess.run([sys.executable, "-S", "-c", {SPIN!r}])
child = subprocess.Popen([sys.executable, "-S", "-c", {SPIN!r} + "print('spun', flush=True); time.sleep(60)"])
child.wait()
"""


@pytest.mark.processes
def test_a_process_is_reported_with_what_it_started_dead_or_alive(tmp_path):
    async def test():
        launcher = LocalLauncher(tmp_path)
        await launcher.start("family", ["-S", "-c", FAMILY], dict(os.environ))
        await until(lambda: "spun" in launcher.log_of("family").read_text())
        found = launcher.cpu_seconds()
        assert found["family"] <= (launcher.cpu_s_of("family") or 0.0) + 0.01
        assert found["family"] >= (0.7 if sys.platform == "linux" else 0.35), "of 0.4 s each, in hundredths"
        assert found[CONTROLLER] >= time.process_time() - 0.1
        if HAS_QUEUES:
            assert launcher.queue_seconds().keys() == {"family", CONTROLLER}
        await launcher.stop_all(0.0)

    bounded(test())


@pytest.mark.processes
def test_what_an_ended_process_has_spent_is_not_booked_to_the_one_that_started_it(tmp_path):
    async def test():
        launcher = LocalLauncher(tmp_path)
        before = launcher.cpu_seconds()[CONTROLLER]
        began = time.process_time()
        await launcher.start("spinner", ["-S", "-c", SPIN], dict(os.environ))
        await until(lambda: not launcher.is_running("spinner"))
        launcher.reap()
        own = time.process_time() - began
        assert launcher.cpu_seconds()[CONTROLLER] - before <= own + 0.05, "0.4 s were the spinner's"
        await launcher.stop_all(0.0)

    bounded(test())


def test_a_process_on_another_machine_has_what_its_seat_reported(tmp_path):
    launcher = LocalLauncher(tmp_path)
    far: Any = SimpleNamespace(pid=os.getpid(), cpu_s=7.5, rss_mb=12.0)
    unknown: Any = SimpleNamespace(pid=0, cpu_s=None, rss_mb=None)
    launcher._children = {"far": Child("far", far), "new": Child("new", unknown)}
    found = launcher.cpu_seconds()
    assert found.keys() == {"far", CONTROLLER}
    assert found["far"] == 7.5, "not that of a process here with the same id"
    assert (launcher.rss_mb_of("far"), launcher.rss_mb_of("new"), launcher.rss_mb_of("nobody")) == (12.0, None, None)


@pytest.mark.processes
def test_a_process_that_is_not_there_is_left_out():
    gone = subprocess.Popen([sys.executable, "-S", "-c", ""])
    gone.wait()
    assert cpu_seconds([gone.pid]) == {}
    assert rss_mb(gone.pid) is None
    here = cpu_seconds([os.getpid()])
    assert here[os.getpid()] >= sum(psutil.Process().cpu_times()[:2]) - 1.0
    assert (rss_mb(os.getpid()) or 0.0) > 1.0


@pytest.mark.processes
@pytest.mark.skipif(not HAS_QUEUES, reason="no scheduler statistics here")
def test_a_process_that_has_to_share_a_core_waits_for_it_and_one_that_sleeps_does_not():
    core = min(os.sched_getaffinity(0))
    pin = f"import os; os.sched_setaffinity(0, {{{core}}})\n"
    programs = {name: pin + program for name, program in {
        "spins": SPIN, "too": SPIN, "sleeps": "import time; time.sleep(0.3)\n",
    }.items()}  # fmt: skip
    ask = "print(flush=True); input()\n"
    found = {
        name: subprocess.Popen([sys.executable, "-S", "-c", ask + program + ask], stdin=-1, stdout=-1, bufsize=0)
        for name, program in programs.items()
    }
    before = machine_busy_s()
    try:
        for is_ready in (True, False):
            for process in found.values():
                assert process.stdout is not None
                process.stdout.readline()  # it is ready, and then its work is done
            for process in found.values() if is_ready else ():
                assert process.stdin is not None
                process.stdin.write(b"\n")
        queued = queue_seconds([process.pid for process in found.values()])
        both = queued[found["spins"].pid] + queued[found["too"].pid]
        assert both > 0.3, "one of them waits while the other one spins for 0.4 s"
        assert queued[found["sleeps"].pid] < both
        assert machine_busy_s() - before >= 0.6
    finally:
        for process in found.values():
            process.communicate(b"\n")
    assert queue_seconds([found["spins"].pid]) == {}


def test_cores_are_the_growth_of_processor_time_over_the_time_between_pulses():
    pulses = pulse_rows(3, step_s=2.0, used={"trainer": 0.9, "rollout-0": 0.5})
    assert used(pulses) == pytest.approx({"trainer": 0.9, "rollout-0": 0.5})
    later = {**pulses[2], "processor": {"cores": 2, "cpu_s": {"trainer": 0.0}}}
    found = list(between([pulses[0], pulses[1], later]))
    assert [(place, seconds) for place, seconds, _ in found] == [(1, 2.0), (2, 2.0)]
    assert found[1][2] == {"trainer": 0.0}, "what fell has not grown; rollout-0 is not there any more"


def test_a_process_that_began_again_has_what_its_new_life_has_spent():
    before, after = pulse_rows(1, step_s=2.0, used={"trainer": 0.9, "controller": 0.1})
    before["processor"]["cpu_s"] = {"trainer": 100.0, "controller": 1.0}
    after["processor"]["cpu_s"] = {"trainer": 150.0, "controller": 1.5}
    assert next(between([before, after]))[2] == {"trainer": 50.0, "controller": 0.5}
    after["processes"]["trainer"]["pid"] = 2
    assert next(between([before, after]))[2] == {"trainer": 150.0, "controller": 0.5}


def test_the_rest_between_two_stretches_is_no_time():
    first, second = pulse_rows(2, used={"trainer": 1.0}), pulse_rows(2, used={"trainer": 0.5})
    later = [{**row, "time_s": row["time_s"] + 3600.0} for row in second]
    assert used([*first, *later]) == pytest.approx({"trainer": 0.75})


@pytest.mark.parametrize("reported", [None, 3, {}, {"cpu_s": 1}, {"cpu_s": {"trainer": "x"}, "cores": "y"}])
def test_pulses_that_tell_no_processor_time_give_none(reported):
    pulses = [{**row, "processor": reported} for row in pulse_rows(3)]
    data = made_run(pulses=pulses)
    assert used(pulses) == {}
    assert not available(data) > 0
    assert processor_time(data).is_empty


def test_the_chart_says_how_many_cores_there_are_where_all_is_on_one_machine():
    chart = processor_time(made_run(pulses=pulse_rows(3, cores=2.0)))
    assert {series.name for series in chart.series} == {"trainer", "rollout-0", "controller"}
    assert "may use 2 cores" in chart.caption
    far = made_run(pulses=pulse_rows(3, cores=2.0), settings=config(launch__kind="ray"))
    assert "may use" not in processor_time(far).caption
