"""What the configuration asks the engine's descriptor."""

from __future__ import annotations

from typing import Any

import pytest

from controller.config.engines import written_devices_per_worker


@pytest.mark.parametrize(
    ("section", "devices"),
    [
        ({"kind": "embedded"}, 1),
        ({"kind": "sglang", "sglang": {"tp_size": 2}}, 2),
        ({"kind": "no_such_engine"}, 1),
        ({"kind": "sglang", "sglang": {"tp_size": "many"}}, 1),
        ("embedded", 1),
    ],
)
def test_an_engine_that_is_written_wrongly_counts_as_one_device(section: Any, devices: int) -> None:
    assert written_devices_per_worker(section) == devices
