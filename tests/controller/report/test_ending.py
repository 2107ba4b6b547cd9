"""How a run ended that went wrong: the cause comes first, and only what explains it is added."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from made_run import made_run, pulse_rows, step_rows, titles

from controller.report.diagnosis import diagnose
from controller.report.ending import CAUSES, EXPLAINED
from controller.report.finding import KINDS, Finding
from controller.run_folder.owner_host import Whereabouts

STALLED = {"wait": 1.0, "busy": 0.1, "for_scores": 0.85, "queue": 40.0, "scoring": 1.0, "waiting": 60.0}
TOO_FEW = {"wait": 0.6, "busy": 0.97, "slots_full": 0.98}
UNSTABLE = {"ess": np.where(np.arange(40) >= 3, 0.9, 0.99)}


def failed(reason: str, **more: object) -> list[Finding]:
    """Findings of a run that failed after 20 of 40 steps."""
    return diagnose(made_run(kind="failed", reason=reason, **{"steps": step_rows(**UNSTABLE)[:20], **more}))


def test_failed_run_says_why_with_its_cause_in_the_first_line():
    found = diagnose(
        made_run(
            kind="failed",
            reason="480 groups in a row ended without a usable one",
            steps=[],
            summary=None,
            pulses=pulse_rows(8, verdicts={"timed_out": 10.0}, makes_steps=False, **STALLED),
        )
    )
    assert found[0].title.startswith("The run failed after 0 of 40 steps. Scoring slows down the run")
    assert "480 groups in a row" in found[0].detail
    assert "Fix the scorer first" in found[0].advice
    assert "areal-like resume" in found[0].advice
    assert found[0].cause == "scoring"


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("data.eval: no such file -> give its path", "mistake"),
        ("trainer: /runs/a/checkpoints: No space left on device -> free some disk space", "disk"),
        ("trainer: /runs/a/checkpoints: Input/output error (5)", "disk"),
        ("model.path: /models/verdict-7b is not a model folder -> give its path", "mistake"),
        ("rollout-0: the budget of `scoring` (runs/scoring-ablation/ledger/a) is used up -> raise it", "mistake"),
        ("rollout-0: http://127.0.0.1/v1 rejected the key LEDGER_KEY -> check it", "mistake"),
        ("reward: the scorer cannot be started", "scoring"),
        ("trainer: ended with signal 9", "process"),
        ("waited 600 s for any progress (trainer: waits for a batch) (expected from the processes named)", "stall"),
        ("no rollout worker is left for batch 4 (rollout-0: lost)", "process"),
        ("no rollout worker is left for batch 4 (rollout-0: lost; rollout-1: lost)", "process"),
        ("no rollout worker is left for batch 4 (rollout-0: bad checksum; rollout-1: lost)", "version"),
        ("32 groups in a row ended without a usable one (32 filtered); most were filtered (32): all equal", "signal"),
        ("32 groups in a row ended without a usable one (32 timeout); most were timeout (32): raise it", "lengths"),
        ("all of the first 8 prompts were rejected: too long", "prompts"),
        ("32 groups in a row ended without a usable one (32 refused); most were refused (32): change it", "prompts"),
        ("something that nobody foresaw", "unknown"),
    ],
)
def test_cause_is_in_the_first_sentence_and_the_learning_rate_is_not_blamed_for_it(reason, cause):
    found = failed(reason)
    what = reason.partition(" -> ")[0]
    assert (found[0].kind, found[0].cause) == ("failed", cause)
    assert found[0].title == f"The run failed after 20 of 40 steps: {what}"
    assert "optimizer" not in found[0].advice
    assert ("Fix the cause given in the reason" in found[0].advice) is ("->" in reason)


def test_long_reason_is_shortened_in_the_title_and_whole_below_it():
    reason = "a word " * 100
    first = failed(reason)[0]
    assert first.title.endswith("...")
    assert len(first.title) < 250
    assert reason.strip() in first.detail


def test_run_that_died_of_its_policy_is_explained_by_it():
    reason = "loss or gradient not finite in 10 steps in a row"
    found = failed(reason)
    assert "Updates are unstable" in found[0].title
    assert "trainer.optimizer.lr" in found[0].advice
    assert found[0].cause == "policy"


def test_crash_of_the_controller_is_not_blamed_on_the_policy():
    found = diagnose(made_run(kind="crashed", steps=step_rows(**UNSTABLE)[:20]))
    assert found[0].title == "The run crashed after 20 of 40 steps"
    assert "lr" not in found[0].advice


def test_crashed_run_says_so_before_all_else():
    found = diagnose(made_run(kind="crashed", steps=step_rows()[:20], pulses=pulse_rows(**TOO_FEW)[:21]))[0]
    assert found.title == "The run crashed after 20 of 40 steps"


def test_stopped_run_keeps_its_diagnosis_first():
    found = diagnose(made_run(kind="stopped", steps=step_rows()[:20], pulses=pulse_rows(**TOO_FEW)[:21]))
    assert found[0].title.startswith("The trainer waited for samples during 60 %")
    assert found[-1].title == "The run was stopped after 20 of 40 steps"


@pytest.mark.parametrize(
    ("words", "title", "cause"),
    [
        ("crashed: its controller (process 7) is no longer running; the last message of the controller was 3 s ago",
         "The run crashed after 20 of 40 steps: its controller (process 7) is no longer running", "controller"),
        ("crashed: this machine has been restarted since; the controller sent no message",
         "The run crashed after 20 of 40 steps: this machine has been restarted since", "machine"),
    ],
)  # fmt: skip
def test_crash_says_what_is_gone(words, title, cause):
    run = made_run(kind="crashed", steps=step_rows()[:20])
    first = diagnose(replace(run, where=Whereabouts("crashed", words, {})))[0]
    assert (first.title, first.cause) == (title, cause)


def test_findings_that_explain_an_end_have_known_kinds_and_causes():
    assert {kind for one in EXPLAINED for kind in one.kinds} <= set(KINDS)
    assert {one.cause for one in EXPLAINED} <= set(CAUSES)


def test_early_end_is_explained_though_it_is_below_the_minimum_and_nothing_else_is_said():
    reason = "16 groups in a row ended without a usable one (16 verdict drop_group); most were verdict drop_group (16)"
    pulses = pulse_rows(8, makes_steps=False, verdicts={"crashed": 10.0}, **STALLED)[:3]
    found = failed(reason, steps=[], summary=None, pulses=pulses)
    assert found[0].cause == "scoring"
    assert "got no score" in found[0].title
    assert "waited" not in titles(found[1:])
