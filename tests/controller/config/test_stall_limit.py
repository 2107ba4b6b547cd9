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
    assert "remove launch.stall_after_s (its default is then 1240)" in problem.remedy
    fitting = config(launch={"stall_after_s": longest_recovery(config()).longest_s + 1})
    assert not list(stall_problems(fitting))


def test_every_recovery_takes_what_the_settings_that_it_names_add_up_to() -> None:
    """Each setting a different power of ten, so that a sum says what it is made of."""
    made = config(
        launch={"silence_s": 3, "startup_timeout_s": 20},
        rollout={"score_timeout_s": 500, "engine": {
            "kind": "sglang", "sglang": {"stall_timeout_s": 6000, "load_timeout_s": 70_000}
        }},
        trainer={"ranks": 2, "rank_timeout_s": 100, "weights": {"deadline_s": 400}, "backend": "torch"},
        placement="colocated",
    )  # fmt: skip
    launch, sglang = "launch.startup_timeout_s", "rollout.engine.sglang."
    assert {(one.keys, one.longest_s) for one in recoveries(made)} == {
        (("launch.silence_s", launch), 23),
        (("rollout.score_timeout_s",), 500),
        (("trainer.weights.deadline_s",), 400),
        (("trainer.weights.deadline_s",), 1200),
        (("trainer.weights.deadline_s", launch), 820),
        (("trainer.rank_timeout_s",), 100),
        ((sglang + "stall_timeout_s", launch), 6020),
        ((sglang + "load_timeout_s", launch), 140_020),
    }
    assert longest_recovery(made).longest_s == 140_020
    assert stall_limit_s(made) == 140_080


def test_a_server_of_somebody_else_is_asked_for_its_control_timeout_and_not_started() -> None:
    sglang = {
        "attach": ["http://127.0.0.1:30000"], "control_timeout_s": 7, "stall_timeout_s": 6000, "load_timeout_s": 100,
    }  # fmt: skip
    made = config(rollout={"engine": {"kind": "sglang", "sglang": sglang}}, launch={"startup_timeout_s": 20})
    assert {6007, 207} <= {recovery.longest_s for recovery in recoveries(made)}


def test_an_embedded_engine_that_hangs_is_among_the_recoveries() -> None:
    made = config(rollout={"engine": {"stall_timeout_s": 6000}}, launch={"startup_timeout_s": 20})
    longest = longest_recovery(made)
    assert longest.keys == ("rollout.engine.stall_timeout_s", "launch.startup_timeout_s")
    assert longest.longest_s == 6020


def test_a_run_on_one_rank_and_devices_of_its_own_has_five_recoveries() -> None:
    assert len(recoveries(config())) == 5
    assert len(recoveries(config(trainer={"ranks": 2}))) == 6


def test_a_limit_that_equals_the_longest_recovery_is_too_short_and_half_a_second_more_is_not() -> None:
    longest_s = longest_recovery(config()).longest_s
    assert len(list(stall_problems(config(launch={"stall_after_s": longest_s})))) == 1
    enough = config(launch={"stall_after_s": longest_s + 0.5})
    assert not list(stall_problems(enough))
    assert stall_limit_s(enough) == longest_s + 0.5
