"""Claims about the limit after which a run without progress is given up."""

from __future__ import annotations

import pytest

from controller.config.run_config import RunConfig
from controller.config.stall_limit import (
    MARGIN_S,
    REWRITE_PATIENCE,
    longest_recovery,
    recoveries,
    stall_limit_s,
    stall_problems,
)
from controller.coordinator import rewriting

BASE = {"data": {"train": {"path": "rows.jsonl"}}}


def config(**sections):
    return RunConfig.model_validate({**BASE, **sections})


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"trainer": {"ranks": 2}},
        {"rollout": {"engine": {"kind": "sglang"}}},
        {"rollout": {"engine": {"kind": "sglang", "sglang": {"attach": ["http://127.0.0.1:30000"]}}}},
        {"rollout": {"engine": {"kind": "sglang", "sglang": {"stall_timeout_s": 5000}}}},
        {"rollout": {"score_timeout_s": 2000}},
        {"launch": {"startup_timeout_s": 4000}},
    ],
)
def test_the_derived_limit_is_longer_than_every_recovery_below_it(sections):
    made = config(**sections)
    assert stall_limit_s(made) >= max(recovery.longest_s for recovery in recoveries(made)) + MARGIN_S
    assert not list(stall_problems(made))


def test_a_server_that_hangs_in_generation_or_in_a_load_is_among_the_recoveries():
    sglang = {"stall_timeout_s": 70, "load_timeout_s": 50}
    made = config(
        rollout={"engine": {"kind": "sglang", "sglang": sglang}}, launch={"startup_timeout_s": 30, "silence_s": 15}
    )
    assert {70 + 30, 2 * 50 + 30} <= {recovery.longest_s for recovery in recoveries(made)}


def test_a_rewrite_that_is_not_answered_and_a_worker_that_keeps_shared_memory_are_among_the_recoveries():
    trainer = {"weights": {"deadline_s": 1000}}
    plain = config(trainer=trainer)
    assert stall_limit_s(plain) >= (1 + rewriting.PATIENCE) * 1000 + MARGIN_S
    sections = {"trainer": trainer, "launch": {"startup_timeout_s": 4000}}
    assert stall_limit_s(config(**sections, placement="colocated")) >= 2 * 1000 + 4000 + MARGIN_S
    assert REWRITE_PATIENCE == rewriting.PATIENCE


def test_a_limit_that_would_end_a_run_before_it_has_recovered_is_refused_with_the_settings_that_bound_it():
    made = config(
        rollout={"score_timeout_s": 10, "engine": {"kind": "sglang", "sglang": {"stall_timeout_s": 1000}}},
        launch={"stall_after_s": 1000},
    )
    (problem,) = stall_problems(made)
    assert problem.keys[:2] == ("launch.stall_after_s", "rollout.engine.sglang.stall_timeout_s")
    assert "leave launch.stall_after_s out (then 1240)" in problem.remedy
    fitting = config(launch={"stall_after_s": longest_recovery(config()).longest_s + 1})
    assert not list(stall_problems(fitting))
