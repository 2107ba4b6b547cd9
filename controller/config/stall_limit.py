"""The time without progress after which a run is stopped. It is longer than every automatic recovery. Pure.

The run is monitored in runtime/watchdog.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from areal_like.setting_problem import Recovery
from controller.config.engines import engine_job, engine_of
from controller.config.problems import Problem
from controller.config.run_config import RunConfig

MARGIN_S = 60.0
"""Margin between the end of the longest recovery and the run's limit, for detection, restart back-off and the first
tokens.
"""
REWRITE_PATIENCE = 2.0
"""Number of load deadlines for which the coordinator waits until a damaged version is rewritten
(coordinator/rewriting.py).
"""
KEY = "launch.stall_after_s"


def recoveries(config: RunConfig) -> list[Recovery]:
    """Each way in which a run may make no progress and then recover automatically."""
    launch, rollout = config.launch, config.rollout
    found = [
        Recovery(
            "a lost process is detected and restarted",
            ("launch.silence_s", "launch.startup_timeout_s"),
            launch.silence_s + launch.startup_timeout_s,
        ),
        Recovery("the verdict on a sample arrives", ("rollout.score_timeout_s",), rollout.score_timeout_s),
        Recovery(
            "a worker that does not load a version is quarantined",
            ("trainer.weights.deadline_s",),
            config.trainer.weights.deadline_s,
        ),
        Recovery(
            "workers have retried loading a damaged version that was not rewritten",
            ("trainer.weights.deadline_s",),
            (1 + REWRITE_PATIENCE) * config.trainer.weights.deadline_s,
        ),
    ]
    if config.is_colocated:  # an engine first ends the load under way, then has as long to release its memory
        found.append(
            Recovery(
                "a rollout worker that does not release its device memory is replaced",
                ("trainer.weights.deadline_s", "launch.startup_timeout_s"),
                2 * config.trainer.weights.deadline_s + launch.startup_timeout_s,
            )
        )
    if config.trainer.ranks > 1:
        found.append(
            Recovery("a lost trainer rank is detected", ("trainer.rank_timeout_s",), config.trainer.rank_timeout_s)
        )
    found += engine_of(config).recoveries(engine_job(config))
    return found


def longest_recovery(config: RunConfig) -> Recovery:
    """The longest recovery, which determines the limit."""
    return max(recoveries(config), key=lambda recovery: recovery.longest_s)


def stall_limit_s(config: RunConfig) -> float:
    """launch.stall_after_s, or else the longest recovery + MARGIN_S."""
    given_s = config.launch.stall_after_s
    return given_s if given_s is not None else longest_recovery(config).longest_s + MARGIN_S


def stall_problems(config: RunConfig) -> Iterator[Problem]:
    """Problem of a limit that would stop the run before a recovery has finished."""
    given_s, longest = config.launch.stall_after_s, longest_recovery(config)
    if given_s is not None and given_s <= longest.longest_s:
        yield Problem(
            (KEY, *longest.keys),
            f"this limit would end the run after {given_s:g} s without progress, but {longest.longest_s:g} s may pass "
            f"before {longest.what}",
            f"remove {KEY} (its default is then {longest.longest_s + MARGIN_S:g}), or lower "
            f"{' or '.join(longest.keys)}",
        )
