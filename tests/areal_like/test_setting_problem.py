"""What an implementation has against settings."""

from __future__ import annotations

from areal_like.setting_problem import SettingProblem


def test_problem_is_one_of_the_settings_everywhere_unless_it_says_that_this_machine_lacks_something() -> None:
    problem = SettingProblem(("trainer.device",), "no GPU")
    assert not problem.is_local
    assert problem.remedy == ""
