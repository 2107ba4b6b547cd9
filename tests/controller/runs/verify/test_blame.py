"""`blame` counts what a version was trained on, and names rows if their data is still the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import run_zoo as zoo
from old_ledger import make_old
from recorded_run import make_recorded_run

from controller.cli.main import main
from controller.run_folder.run_folder import RunFolder
from controller.runs.verify.blame import blame


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return zoo.make_sampled_run(tmp_path)


def give_rows(folder: RunFolder, tmp_path: Path, num: int) -> None:
    rows = [json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) for n in range(num)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    folder.config.write_text(
        "name: sampled\nmodel: {init: {model_type: qwen3}, tokenizer: bytes}\n"
        f"data: {{train: {{path: {tmp_path}/rows.jsonl}}, shuffle: false}}\n"
    )


def test_what_went_into_a_version_is_counted(folder: RunFolder) -> None:
    found = blame(folder)
    assert (found.version, found.num_groups, found.num_samples, found.num_mixed) == (2, 2, 4, 2)
    assert found.lineages == {"l0": 2}
    assert found.workers == {"rollout-0": 4}
    assert found.verdicts == {"scored": 4}
    assert found.versions == {0: 4}
    assert found.staleness == {0: 1, 1: 1}
    assert len(found.policy_digest) == 64
    first = blame(folder, 1)
    assert (first.version, first.num_samples, first.staleness) == (1, 2, {0: 1})
    assert first.policy_digest != found.policy_digest
    assert found.num_tokens > first.num_tokens > 0


def test_rows_are_named_by_source_while_their_data_is_the_same(
    folder: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    give_rows(folder, tmp_path, 1)
    found = blame(folder)
    assert found.rows == {"data.train": 1}
    assert found.draws == {"data.train": 2}
    assert list(found.most_used.values()) == [2]
    assert main(["blame", str(folder.root)]) == 0
    assert "rows          1 of data.train, in 2 groups" in capsys.readouterr().out
    zoo.edit_state(folder, data={"data.train": "another fingerprint"})
    assert blame(folder).rows_note == "the data has changed since the run was started"


def test_a_checkpoint_and_a_final_model_name_their_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_recorded_run(tmp_path)
    assert main(["blame", str(run.final), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == 6
    checkpoint = sorted(run.checkpoints.glob("step_*"))[0]
    assert main(["blame", str(checkpoint), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == int(checkpoint.name[5:])


@pytest.mark.parametrize("error", [AttributeError("x"), MemoryError(), PermissionError("x")])
def test_damage_of_any_kind_is_the_users_to_look_at(
    folder: RunFolder, error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise error

    for module in ("blame", "sample_life"):
        monkeypatch.setattr(f"controller.runs.verify.{module}.open_ledger", fail)
    assert main(["blame", str(folder.root)]) == 2
    assert main(["samples", str(folder.root), "--life", "1.1"]) == 2
    assert capsys.readouterr().err.count("run areal-like verify to see what is damaged") == 2


def test_an_older_ledger_has_no_digest(folder: RunFolder) -> None:
    before = blame(folder)
    make_old(folder.ledger)
    after = blame(folder)
    assert after.policy_digest == ""
    assert after.staleness == before.staleness
    assert after.num_draws == before.num_draws
