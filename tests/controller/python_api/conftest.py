"""A stand-in for the child process of the Python API."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import run_zoo as zoo

from areal_like.import_check import USER_PATH
from controller.python_api import controller_process


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Replaces the child process; holds the arguments of each start."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(USER_PATH, raising=False)
    calls: list[SimpleNamespace] = []

    def start(arguments, *, config_text=None):
        calls.append(SimpleNamespace(arguments=list(arguments), data=json.loads(config_text or "null")))
        return SimpleNamespace(folder=zoo.make_run(tmp_path / "runs"), is_alive=False)

    monkeypatch.setattr(controller_process, "start", start)
    return calls
