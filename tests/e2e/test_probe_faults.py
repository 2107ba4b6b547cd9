"""`areal-like probe` in set-ups with one planted fault each.

Three of the ten, each seen by another process of the probe. The one that all processes must have worked for is looked
for as a user types it, the others in this process. `python -m benchmarks.probe_faults` runs all of them, and
tests/controller/probe/test_findings.py plants them without a model.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from probe_here import run_here

from benchmarks.folders import RESULTS
from benchmarks.probe_faults import QUICK, SET_UPS, command_words, look, make_model, plant
from controller.cli.main import main

pytestmark = pytest.mark.e2e
TYPED = "log-probs differ"


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start") / "start"
    make_model(folder)
    return folder


@pytest.mark.thorough
def test_planted_fault_is_named_by_the_command(start: Path, tmp_path: Path) -> None:
    plant(SET_UPS[TYPED], start, tmp_path / "job")
    row = look(SET_UPS[TYPED], tmp_path / "job")
    assert not row["fault"], row
    assert row["named"] == [SET_UPS[TYPED].kind]


@pytest.mark.parametrize("name", [name for name in QUICK if name not in ("sound", TYPED)])
def test_planted_fault_is_named(
    name: str, start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up = SET_UPS[name]
    plant(set_up, start, tmp_path / "job")
    monkeypatch.chdir(tmp_path / "job")
    monkeypatch.setattr("controller.probe.probe.run_module", run_here)
    status = main(command_words(set_up))
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert (status, found["kind"]) == (1, set_up.kind)
    assert set_up.words in found["sentence"]


def test_published_result_names_every_fault_and_no_other() -> None:
    rows = json.loads((RESULTS / "probe_faults.json").read_text())["rows"]
    assert [row["set_up"] for row in rows] == list(SET_UPS)
    assert [row["named"] for row in rows] == [[one.kind] if one.kind else [] for one in SET_UPS.values()]
    assert not any(row["fault"] for row in rows)
