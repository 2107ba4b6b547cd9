"""No verdict below the stated minimum of steps and pulses, and every kind has one or needs none."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from made_run import config, made_run, pulse_rows, stats, step_rows, titles

from controller.report import minimum, upkeep, waits
from controller.report.diagnosis import diagnose
from controller.report.ending import CAUSES
from controller.report.finding import KINDS, Finding
from controller.report.minimum import MIN_PULSES, MIN_STEPS

TOO_FEW = {"wait": 0.6, "busy": 0.97, "slots_full": 0.98}
NOTHING_LEARNED = {"reward_mean": 0.0, "reward_std": 0.0, "advantage_abs_mean": 0.0, "cut_share": 1.0}


def short(num_steps: int, num_pulses: int, **more: object) -> list[Finding]:
    """Findings of a run in which everything is wrong that can be, ended after so many steps and pulses."""
    rows = step_rows(**NOTHING_LEARNED)[:num_steps]
    return diagnose(made_run(**{"steps": rows, "pulses": pulse_rows(**TOO_FEW)[:num_pulses], "summary": None, **more}))


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5, MIN_STEPS - 1])
def test_run_of_a_few_steps_gets_no_verdict(num_steps):
    (only,) = short(num_steps, 41)
    assert (only.kind, only.severity) == ("too_short", "info")
    assert only.advice == "A diagnosis requires at least 8 steps"


def test_run_at_the_minimum_is_judged():
    assert [one.kind for one in short(MIN_STEPS, MIN_PULSES)][:2] == ["answers_cut", "no_signal"]
    assert "rollouts_too_few" in [one.kind for one in short(MIN_STEPS, MIN_PULSES)]


def test_who_waits_is_not_judged_by_a_few_pulses_but_what_is_learned_is():
    few = short(20, MIN_PULSES - 1)
    assert few[0].kind == "answers_cut"
    assert "waited" not in titles(few)
    sound = diagnose(made_run(pulses=pulse_rows(**TOO_FEW)[: MIN_PULSES - 1]))
    assert [one.kind for one in sound] == ["too_short"]
    assert sound[0].title == "Too few measurements (4 of 5) to determine which process waits for which: 40 of 40 steps"


def test_run_that_goes_on_says_that_it_is_too_early():
    (only,) = short(3, 4, kind="running")
    assert only.title == "No problem has been found so far, but it is too early for a diagnosis: 3 of 40 steps"


def test_events_are_reported_however_short_the_run_is():
    lost = [{"name": "rollout-0", "event": "lost", "reason": "ended with signal 9"}]
    assert short(1, 1, processes=lost)[0].kind == "processes_lost"
    assert short(1, 1, summary={"audit": "step 1: group 7 used twice"})[0].kind == "audit_broken"


def test_groups_that_are_all_thrown_away_make_no_step_and_are_judged_by_their_number():
    settings = config(groups_per_step=4)
    for drawn, kind in ((MIN_STEPS * 4 - 1, "too_short"), (MIN_STEPS * 4, "groups_filtered")):
        summary = {"groups_drawn": drawn, "groups_filtered": drawn - 1}
        steps = step_rows()[:7]
        assert diagnose(made_run(steps=steps, settings=settings, summary=summary))[0].kind == kind


def test_a_few_answers_without_a_score_are_an_accident():
    for counts, kind in (
        ({"scored": 30.0, "crashed": 2.0}, "healthy"),
        ({"scored": 30.0, "crashed": 3.0}, "scoring_fails"),
        ({"scored": 10.0, "crashed": 5.0}, "healthy"),
    ):
        run = made_run(pulses=[], samples=stats(np.arange(320) % 2, verdicts=counts))
        assert diagnose(run)[0].kind == kind


def test_kinds_with_a_minimum_are_known_and_have_one_each():
    sets = [minimum.STEPS, minimum.GROUPS, minimum.PULSES, minimum.BOTH]
    assert set().union(*sets) <= set(KINDS)
    assert sum(map(len, sets)) == len(set().union(*sets))


def test_documentation_names_the_minimum_every_kind_and_every_cause():
    text = (Path(__file__).parents[3] / "docs" / "diagnosis.md").read_text()
    named = set(re.findall(r"`(\w+)`", text))
    assert set(KINDS) <= named
    assert set(CAUSES) <= named
    assert f"{MIN_STEPS} steps and {MIN_PULSES} pulses" in text
    assert f"{waits.MIN_VERDICTS} verdicts, {waits.MIN_FAILED} of them failures" in text
    assert f"{upkeep.MIN_MEMORY_PULSES} pulses" in text
