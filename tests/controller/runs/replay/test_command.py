"""Claims about the two commands: what they pass on, and mistakes on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controller.cli.main import main
from controller.run_folder.run_folder import RunFolder
from controller.runs.replay import capsule, regenerate, replay


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    folder.write_state("finished", command="train")
    return folder


def test_run_and_its_steps_are_passed_on(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(replay, "replay_run", lambda folder, **options: calls.append((folder.root, options)) or 1)
    assert main(["replay", str(run.root)]) == 1
    assert main(["replay", str(run.root), "--from", "3", "--to", "7"]) == 1
    assert calls == [
        (run.root.resolve(), {"first": None, "last": None}),
        (run.root.resolve(), {"first": 3, "last": 7}),
    ]


def test_file_is_a_capsule(run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(capsule, "replay_capsule", lambda file: calls.append(file) or 0)
    monkeypatch.setattr(capsule, "make_capsule", lambda folder, step, out: calls.append((step, out)) or 0)
    file = tmp_path / "step.capsule"
    file.write_bytes(b"")
    assert main(["replay", str(file)]) == 0
    assert main(["capsule", str(run.root), "--step", "4", "-o", str(tmp_path / "new")]) == 0
    assert calls == [file, (4, tmp_path / "new")]
    assert main(["replay", str(file), "--to", "4"]) == 2
    assert "a capsule contains only one step" in capsys.readouterr().err


def test_answers_are_chosen_by_options_that_only_engine_takes(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(regenerate, "regenerate_run", lambda folder, **options: calls.append(options) or 1)
    assert main(["replay", str(run.root), "--engine"]) == 1
    assert main(["replay", str(run.root), "--engine", "--from", "3", "--to", "7", "--samples", "9", "--json"]) == 1
    assert calls == [
        {"first": None, "last": None, "num_samples": None, "as_json": False},
        {"first": 3, "last": 7, "num_samples": 9, "as_json": True},
    ]
    for options in (["--samples", "9"], ["--json"]):
        assert main(["replay", str(run.root), *options]) == 2
        assert "add --engine to compare answers, or remove these options" in capsys.readouterr().err
    file = tmp_path / "step.capsule"
    file.write_bytes(b"")
    assert main(["replay", str(file), "--engine"]) == 2
    assert "no weights of the versions that sampled its answers" in capsys.readouterr().err


def test_run_without_a_trainer_and_a_full_disk_are_user_errors(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert main(["replay", str(run.root)]) == 2
    assert "the run never started a trainer" in capsys.readouterr().err

    def full(*_: Any, **__: Any) -> int:
        raise OSError(28, "No space left on device", "/tmp/x")

    monkeypatch.setattr(replay, "replay_run", full)
    assert main(["replay", str(run.root)]) == 2
    assert "/tmp/x: No space left on device" in capsys.readouterr().err
