"""Claims about what the coordinator receives of a configuration."""

from __future__ import annotations

import pytest
from valid_config import SMALL, make

from controller.config.loading import load_config
from controller.config.stall_limit import stall_limit_s
from controller.coordinator.rewriting import PATIENCE
from controller.coordinator.settings import CoordinatorSettings
from controller.wiring.coordinator_settings import LOAD_GRACE_S, coordinator_settings


@pytest.mark.parametrize("interruption", ["recompute", "drain"])
def test_a_rewrite_that_does_not_come_is_given_up_before_the_run_is(interruption: str) -> None:
    config = load_config("quickstart", [*SMALL, f"rollout.interruption={interruption}"]).config
    settings = coordinator_settings(config, max_draws=None, num_eval_rows=0, num_periodic_rows=0)
    assert PATIENCE * settings.idle_load_deadline_s < stall_limit_s(config)
    assert settings.drain_s == (config.staleness.group_timeout_s if interruption == "drain" else 0.0)
    assert settings.load_deadline_s > settings.drain_s + config.trainer.weights.deadline_s


def test_defaults_of_the_settings_are_those_of_the_configuration() -> None:
    """The coordinator may not import the configuration, and its defaults are for tests and benchmarks."""
    derived = coordinator_settings(make(), max_draws=None, num_eval_rows=0, num_periodic_rows=0)
    plain = CoordinatorSettings(groups_per_step=derived.groups_per_step, group_size=derived.group_size, num_steps=9)
    differing = {
        name for name in CoordinatorSettings.__struct_fields__ if getattr(plain, name) != getattr(derived, name)
    }
    assert differing == {"num_steps", "num_periodic_eval_rows", "load_deadline_s"}
    assert derived.load_deadline_s == plain.load_deadline_s + LOAD_GRACE_S


def test_samples_that_wait_for_clients_have_no_deadline_of_the_group() -> None:
    config = load_config("traffic_sum", ["staleness.group_timeout_s=5"]).config
    assert config.client_addresses == {"rollout-0": "http://127.0.0.1:8001"}
    settings = coordinator_settings(config, max_draws=None, num_eval_rows=0, num_periodic_rows=0)
    assert settings.group_timeout_s == float("inf")


@pytest.mark.parametrize(
    ("name", "overrides", "has_one"),
    [
        ("quickstart", SMALL, True),
        ("environment_tool_sum", (), True),
        ("traffic_sum", (), False),
        ("quickstart", (*SMALL, "reward.addresses=[tcp://127.0.0.1:7001]"), True),
    ],
)
def test_a_run_with_scorers_or_an_environment_has_a_reward_service(
    name: str, overrides: tuple[str, ...], has_one: bool
) -> None:
    config = load_config(name, [*overrides]).config
    settings = coordinator_settings(config, max_draws=None, num_eval_rows=0, num_periodic_rows=0)
    assert settings.has_reward_service == has_one


def test_draining_leaves_time_to_load() -> None:
    counts = {"groups_per_step": 1, "group_size": 1, "num_steps": 1}
    assert CoordinatorSettings(**counts, load_deadline_s=8.0, drain_s=7.5).idle_load_deadline_s == 0.5
    for drain_s in (8.0, -0.5):
        with pytest.raises(ValueError, match="drain_s must not be negative, and must be less than load_deadline_s"):
            CoordinatorSettings(**counts, load_deadline_s=8.0, drain_s=drain_s)
