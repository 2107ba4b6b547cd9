"""Names of devices: `auto` is never compared."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from areal_like.device_names import AUTO, index_of, is_device, names_cpu, names_gpu, resolved

ROOT = Path(__file__).parents[2]
PACKAGES = ("areal_like", "controller", "rollout", "services", "trainer")
COMPARED = re.compile(
    r"""device\w*(?:\(\))?\s*(?:==|!=)\s*"(?:cpu|cuda)"|\.startswith\("cuda|"(?:cpu|cuda)"\s*(?:==|!=)\s*\S*device"""
)
NOT_OF_SETTINGS = {
    "controller/config/run_config.py": ['if device != "cuda" or count * width == 1:'],  # after `resolved`
    "trainer/backends/choice.py": ['if is_fitting or device_type != "cuda":'],  # torch's
    "trainer/weights/group_rounds.py": [
        'on_gpus = all(request.device == "cuda" for request in round_.joined.values())'
    ],
}
"""Comparisons that cannot see a setting."""


@pytest.mark.parametrize("read", [names_cpu, names_gpu, index_of, resolved])
def test_auto_is_an_error_and_not_something_other_than_a_cpu(read: object) -> None:
    assert callable(read)
    with pytest.raises(AssertionError, match="auto"):
        read(AUTO)


@pytest.mark.parametrize(
    ("device", "index", "cpu", "gpu"),
    [("cpu", None, True, False), ("cuda", 0, False, True), ("cuda:11", 11, False, True)],
)
def test_names_are_read(device: str, index: int | None, cpu: bool, gpu: bool) -> None:
    assert (index_of(device), names_cpu(device), names_gpu(device)) == (index, cpu, gpu)
    assert is_device(device)
    assert resolved(device) == device


@pytest.mark.parametrize("name", [AUTO, "gpu", "cuda:", "cuda:x", "CPU", ""])
def test_other_names_are_no_devices(name: str) -> None:
    assert not is_device(name)


def test_all_comparisons_of_device_names_are_in_one_module() -> None:
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            lines = [line for line in path.read_text().splitlines() if COMPARED.search(line) and ".type" not in line]
            plain = [line.strip() for line in lines if "resolved(" not in line]
            if plain:
                found[path.relative_to(ROOT).as_posix()] = plain
    assert found == NOT_OF_SETTINGS
