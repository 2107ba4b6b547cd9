"""Counting GPUs without torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.config import machine_gpus


@pytest.fixture(autouse=True)
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm")
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [Path("/dev") / name for name in names])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, 3), ("", 0), ("-1", 0), ("0", 1), ("2,0", 2), ("0,-1,1", 1), ("0,1,2,3,4", 3), ("GPU-1a, GPU-2b", 2)],
)
def test_visible_devices_bound_the_count(monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: int) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine_gpus.count_gpus() == expected


@pytest.mark.parametrize(("build", "expected"), [("2.9.0+cpu", 0), ("2.9.0", 3), ("2.9.0+cu128", 3), ("", 3)])
def test_gpus_are_not_usable_with_a_cpu_build(monkeypatch: pytest.MonkeyPatch, build: str, expected: int) -> None:
    monkeypatch.setattr(machine_gpus, "torch_build", lambda: build)
    assert _usable() == expected


_usable = machine_gpus.usable_gpus  # tests/controller/conftest.py replaces it
