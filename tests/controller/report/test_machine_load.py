"""Claims about a machine that other programs use: its waits are not blamed on the run, and the run's own still are."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from made_run import config, made_run, pulse_rows

from controller.report.diagnosis import diagnose
from controller.report.machine_load import MachineLoad, measure
from controller.report.shares import measure as shares_of

RECORDED = Path(__file__).parents[2] / "fixtures" / "busy_machine.jsonl"
"""Pulses of runs on two cores on which a dozen processes of other programs were ready to run."""
SMALL = config(groups_per_step=8, num_steps=40, staleness__max_staleness=4, rollout__num_workers=2)
LIGHT = {"trainer": 0.05, "rollout-0": 0.05, "reward": 0.02, "controller": 0.03}
"""Processor time of processes that mostly sleep."""
WAITS = {
    "no_overlap": {"wait": 0.3, "busy": 0.7, "paused": 0.0},
    "scoring_stalls": {"wait": 0.3, "busy": 0.55, "for_scores": 0.35, "scoring": 0.35, "waiting": 60.0},
    "rollouts_too_few": {"wait": 0.3, "busy": 0.97, "slots_full": 0.98},
}


def recorded(name: str) -> list[dict[str, Any]]:
    (found,) = [row["pulses"] for row in map(json.loads, RECORDED.read_text().splitlines()) if row["name"] == name]
    return found


def without_queues(pulses: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same pulses as an older version recorded them."""
    return [row | {"processor": {key: row["processor"][key] for key in ("cores", "cpu_s")}} for row in pulses]


def pulses_on(others: float, queued: float, kind: str, **more: Any) -> list[dict[str, Any]]:
    """A run of processes that mostly sleep, each of which waits for a core during the share `queued`."""
    waits = dict.fromkeys(("trainer", "rollout-0", "reward", "controller"), queued)
    return pulse_rows(cores=2.0, used=LIGHT, queued=waits, others=others, **{**WAITS[kind], **more})


# ------------------------------------------------------------ recorded


def test_a_fast_scorer_is_not_blamed_for_a_machine_that_others_use():
    pulses = recorded("own_data")
    (verdict,) = diagnose(made_run(pulses=pulses, settings=SMALL))
    assert (verdict.kind, verdict.severity) == ("machine_busy", "info")
    assert "Other programs used 1.9 of the 2 cores" in verdict.title
    assert "are therefore not evaluated" in verdict.detail
    assert diagnose(made_run(pulses=without_queues(pulses), settings=SMALL))[0].kind == "scoring_stalls"


def test_a_scorer_that_sleeps_is_blamed_on_the_same_machine():
    run = made_run(pulses=recorded("slow scorer"), settings=SMALL)
    assert shares_of(run).load.is_partial, "the time in which others kept most of the machine is left out"
    assert diagnose(run)[0].kind == "scoring_stalls"


# ------------------------------------------------------------ made up


@pytest.mark.parametrize("kind", WAITS)
def test_a_wait_is_the_runs_own_where_no_process_waits_for_a_core(kind):
    assert diagnose(made_run(pulses=pulses_on(1.85, 0.0, kind)))[0].kind == kind


@pytest.mark.parametrize("kind", WAITS)
def test_a_wait_that_other_programs_explain_is_a_remark(kind):
    verdict, remark = diagnose(made_run(pulses=pulses_on(1.85, 0.12, kind)))
    assert verdict.kind == "healthy"
    assert (remark.kind, remark.severity) == ("machine_busy", "info")
    assert "Without them the trainer would have waited during " in remark.detail


@pytest.mark.parametrize("kind", WAITS)
def test_processes_that_wait_for_the_cores_of_their_own_run_are_not_held_up_by_others(kind):
    used = {"trainer": 0.9, "rollout-0": 0.9, "reward": 0.1, "controller": 0.1}
    pulses = pulses_on(0.0, 0.12, kind)
    for row in pulses:
        spent = {name: share * row["wall_s"] for name, share in used.items()}
        row["processor"] |= {"cpu_s": spent, "machine": {"cores": 2, "busy_s": sum(spent.values())}}
    assert diagnose(made_run(pulses=pulses))[0].kind == kind


@pytest.mark.parametrize("kind", WAITS)
def test_a_machine_with_idle_cores_holds_nobody_up(kind):
    pulses = pulses_on(1.0, 0.12, kind)
    assert diagnose(made_run(pulses=pulses))[0].kind == kind


def test_a_long_wait_is_found_next_to_other_programs():
    slow = {"wait": 0.8, "busy": 0.15, "for_scores": 0.8, "scoring": 0.95, "waiting": 60.0}
    assert diagnose(made_run(pulses=pulses_on(1.85, 0.12, "scoring_stalls", **slow)))[0].kind == "scoring_stalls"
    assert diagnose(made_run(pulses=pulses_on(1.85, 0.12, "no_overlap", wait=0.7, busy=0.6)))[0].kind == "no_overlap"


def test_the_formula():
    used, queued = {"trainer": 0.5, "rollout-0": 0.25}, {"trainer": 0.3, "rollout-0": 2.0}
    pulses = pulse_rows(4, cores=2.0, used=used, queued=queued, others=1.25)
    load = measure(list(pairwise(pulses)))
    part = 1.25 / 2.0
    assert load.others == pytest.approx(1.25)
    assert load.of("trainer") == pytest.approx(0.3 * part)
    assert load.of("rollout") == pytest.approx(2.0 / 2.25 * part), "two threads that wait at the same time"
    assert load.on_the_way == pytest.approx(2.0 / 2.25 * part)
    assert load.is_too_much


def test_the_controller_and_the_mean_of_the_workers_are_on_the_way():
    held_up = {"controller": 0.1, "rollout-0": 0.1, "rollout-1": 0.3, "reward": 0.2, "trainer": 0.1}
    roles = {"rollout-0": "rollout", "rollout-1": "rollout", "reward": "reward", "trainer": "trainer"}
    load = MachineLoad(1.0, held_up, roles)
    assert load.on_the_way == pytest.approx(0.1 + 0.2 + 0.2)
    assert load.trainer_wait(0.4) == pytest.approx(0.0), (
        "it worked for half of the time, which is all that would remain"
    )
    assert load.trainer_wait(0.5) == pytest.approx(1 - 0.4 / 0.5)
    assert load.trainer_wait(0.95) == 0.95, "never more than was measured"
    assert load.without(0.3, "reward") == pytest.approx(0.1 / 0.5)
    assert load.without(0.9, "reward") == 0.9


def test_without_records_nothing_is_held_up():
    for pulses in (without_queues(recorded("own_data")), pulse_rows(3)[:1], []):
        assert measure(list(pairwise(pulses))) == MachineLoad()
    assert shares_of(made_run(pulses=recorded("own_data"), settings=config(launch__kind="ray"))).load == MachineLoad()
