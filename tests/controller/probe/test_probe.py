"""`areal-like probe` with its real processes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from probe_here import run_here

import controller.probe.probe
from areal_like.errors import OperationError, UserError
from areal_like.probe_files import TrySpec
from areal_like.store_owner import OWNER_FILE, Owner, claim
from controller.cli.main import main
from controller.launch.short_process import run_module


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Runs the modules in this process. Those named here die."""
    dying: set[str] = set()

    def run(arguments: Sequence[str], limit_s: float) -> None:
        if arguments[0] in dying:
            raise OperationError(f"{arguments[0]} ended with status -9: no memory")
        run_here(arguments, limit_s)

    monkeypatch.setattr(controller.probe.probe, "run_module", run)
    return dying


@pytest.mark.processes
def test_shipped_config_is_probed_without_a_finding_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lost: set[str]
) -> None:
    assert main(["probe", "own_data", f"runs_dir={tmp_path}", "-m", "2", "-n", "4", "--json"]) == 0
    page = json.loads(capsys.readouterr().out)
    assert page["findings"] == []
    assert page["gold_reward"] == 1.0
    assert page["num_samples"] == 8
    assert page["logprob_difference"]["max"] < 1e-3
    assert not list(tmp_path.iterdir())


@pytest.mark.processes
def test_trainer_that_cannot_hold_the_model_costs_only_its_log_probs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lost: set[str]
) -> None:
    lost.add("trainer.probe_logprobs")
    assert main(["probe", "own_data", f"runs_dir={tmp_path}", "-m", "2", "-n", "4"]) == 0
    said = capsys.readouterr().out
    assert "engine and trainer differ by  not measured" in said
    assert "log-probs of the trainer are not available: trainer.probe_logprobs ended with status -9" in said


@pytest.fixture(autouse=True)
def _ctrl_c() -> Iterator[None]:
    """A shell starts commands in the background with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_a_probe_and_leaves_no_folder(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: Sequence[str], limit_s: float) -> None:
        assert len(list(tmp_path.iterdir())) == 1
        signal.raise_signal(number)

    monkeypatch.setattr(controller.probe.probe, "run_module", interrupted)
    assert main(["probe", "quickstart", f"runs_dir={tmp_path}"]) == 130
    assert not list(tmp_path.iterdir())


def test_folder_of_a_killed_probe_is_removed_when_the_next_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(arguments: Sequence[str], limit_s: float) -> None:
        signal.raise_signal(signal.SIGINT)

    def left_by(pid: int, name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        claim(folder)
        owner = msgspec.json.decode((folder / OWNER_FILE).read_bytes(), type=Owner)
        (folder / OWNER_FILE).write_bytes(msgspec.json.encode(msgspec.structs.replace(owner, pid=pid)))
        (folder / "model.safetensors").write_bytes(b"x")
        return folder

    dead, alive = left_by(2**22 - 1, ".probe-dead"), left_by(os.getpid(), ".probe-alive")
    run = left_by(2**22 - 1, "a_run")
    monkeypatch.setattr(controller.probe.probe, "run_module", interrupted)
    assert main(["probe", "quickstart", f"runs_dir={tmp_path}"]) == 130
    assert not dead.exists()
    assert alive.exists()
    assert run.exists()


def test_folder_of_a_probe_carries_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owners: list[Owner] = []

    def interrupted(arguments: Sequence[str], limit_s: float) -> None:
        (record,) = tmp_path.glob(f".probe-*/{OWNER_FILE}")
        owners.append(msgspec.json.decode(record.read_bytes(), type=Owner))
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(controller.probe.probe, "run_module", interrupted)
    assert main(["probe", "quickstart", f"runs_dir={tmp_path}"]) == 130
    assert [one.pid for one in owners] == [os.getpid()]


@pytest.mark.processes
def test_refusal_of_a_process_is_the_users_error_and_its_death_is_not(tmp_path: Path) -> None:
    order = TrySpec(settings={"scorers": [{"kind": "maths"}]}, answers=[])
    (tmp_path / "in.json").write_bytes(msgspec.json.encode(order))
    with pytest.raises(UserError, match="no such scorer"):
        run_module(["services.reward.try_answers", str(tmp_path / "in.json"), str(tmp_path / "out.json")], 60.0)
    with pytest.raises(OperationError, match="exited with status 1"):
        run_module(["services.reward.try_answers", str(tmp_path / "none.json"), str(tmp_path / "out.json")], 60.0)


def test_emulated_devices_are_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "emulated"]) == 2
    assert "emulated devices compute nothing" in capsys.readouterr().err


@pytest.mark.processes
def test_warm_start_that_the_config_lacks_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "own_data", "--warm-start"]) == 2
    assert "has no supervised warm start" in capsys.readouterr().err
