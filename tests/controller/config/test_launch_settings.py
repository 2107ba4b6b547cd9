"""Claims about the settings of a launch."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from controller.config.launch_settings import LaunchSettings

TIMES = ("heartbeat_s", "silence_s", "controller_silence_s", "startup_timeout_s", "stall_after_s", "stop_grace_s")


def test_port_is_any_free_one_unless_it_is_chosen():
    assert LaunchSettings().port == 0


@pytest.mark.parametrize("name", TIMES)
def test_any_time_above_0_s_is_accepted_and_0_s_is_not(name):
    assert getattr(LaunchSettings.model_validate({name: 0.01}), name) == 0.01
    with pytest.raises(ValidationError, match="greater than 0"):
        LaunchSettings.model_validate({name: 0.0})


@pytest.mark.parametrize(("port", "is_valid"), [(-1, False), (0, True), (65535, True), (65536, False)])
def test_port_is_one_that_exists(port, is_valid):
    if is_valid:
        assert LaunchSettings(port=port).port == port
    else:
        with pytest.raises(ValidationError):
            LaunchSettings(port=port)
