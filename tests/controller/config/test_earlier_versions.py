"""Resolved configurations of an earlier version: what was nobody's choice becomes today's default."""

from __future__ import annotations

import copy

import pytest

from controller.config.earlier_versions import CHANGED_DEFAULTS, REMOVED, upgrade
from controller.config.run_config import RunConfig

OLD = {
    "group_size": 8,
    "launch": {"curve": True, "stall_after_s": 300.0, "silence_s": 15.0},
    "rollout": {"engine": {"kind": "sglang", "sglang": {"load_timeout_s": 600.0, "stall_timeout_s": 300.0}}},
}


def test_the_removed_key_and_defaults_that_have_changed_are_left_out_and_all_else_stays() -> None:
    before = copy.deepcopy(OLD)
    assert upgrade(OLD) == {
        "group_size": 8, "launch": {"silence_s": 15.0}, "rollout": {"engine": {"kind": "sglang", "sglang": {}}},
    }  # fmt: skip
    assert before == OLD, "the caller's is not changed"


def test_what_a_user_chose_then_stays() -> None:
    sglang = {"load_timeout_s": 601.0, "stall_timeout_s": 299.0}
    chosen = {"launch": {"curve": False, "stall_after_s": 40.0}, "rollout": {"engine": {"sglang": sglang}}}
    assert upgrade(chosen) == {"launch": {"stall_after_s": 40.0}, "rollout": {"engine": {"sglang": sglang}}}


@pytest.mark.parametrize(
    "data", [{}, {"launch": None}, {"launch": {"stall_after_s": 300.0}}, {**OLD, "launch": {"stall_after_s": 300.0}}]
)
def test_a_configuration_of_todays_version_is_unchanged(data: dict[str, object]) -> None:
    assert upgrade(data) == data


@pytest.mark.parametrize("rollout", [None, {}, {"engine": None}, {"engine": {"sglang": "default"}}])
def test_sections_that_are_not_there_do_not_matter(rollout: object) -> None:
    assert upgrade({"launch": {"curve": True}, "rollout": rollout}) == {"launch": {}, "rollout": rollout}


def test_changed_defaults_are_others_today_and_removed_keys_are_gone() -> None:
    today = RunConfig.model_validate({"data": {"train": {"path": "rows.jsonl"}}}).model_dump()
    for path, old in CHANGED_DEFAULTS.items():
        section = today
        for key in path[:-1]:
            section = section[key]
        assert section[path[-1]] != old
    for name in REMOVED:
        section_name, key = name.split(".")
        assert key not in today[section_name]
