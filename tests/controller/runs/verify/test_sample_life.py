"""The life of a sample comes from what the ledger has, for every fate, and for older ledgers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import run_zoo as zoo
from old_ledger import make_old

from controller.cli.main import main
from controller.run_folder.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return zoo.make_sampled_run(tmp_path)


def life_of(folder: RunFolder, name: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["samples", str(folder.root), "--life", name]) == 0
    return capsys.readouterr().out


def test_a_trained_sample(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    text = life_of(folder, "1.1", capsys)
    assert "Group 1 was drawn at position 1 of the draw order.\nIts row cannot be identified: " in text
    assert "It was admitted at version 0 as started group number 2 (fact 3)." in text
    assert "Sample 1.1 was finished by rollout-0: " in text
    assert "versions 0 to 2" in text
    assert "New weights interrupted it: tokens 1 to 2 are of version 0, tokens 3 to 4 are of version 1 and " in text
    assert "It was generated for 0.5 s." in text
    assert "It was scored: reward 0.5 (correct 0.5, format 1)." in text
    assert "Step 2 used its group at staleness 1 (fact " in text
    assert ", done at " in text
    assert "The digest of its tokens is " in text


def test_other_fates_and_a_whole_group(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    text = life_of(folder, "2.0", capsys)
    assert "It has no score: timed out (after 10 s); it was excluded from its group." in text
    assert "Its group was dropped: verdict_timed_out (fact " in text
    assert "No step has used its group yet." in life_of(folder, "g3.0", capsys)
    assert life_of(folder, "0", capsys).count("was finished by") == 2


def test_a_sample_that_does_not_exist_is_the_users_mistake(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["samples", str(folder.root), "--life", "99.0"]) == 2
    assert "there is no group 99" in capsys.readouterr().err
    assert main(["samples", str(folder.root), "--life", "1.7"]) == 2
    assert "its samples are 0, 1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["samples", str(folder.root), "--life", "one"])
    assert "write GROUP.SAMPLE, for example 12.3" in capsys.readouterr().err


def test_the_life_of_a_run_without_token_files_creates_none(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(folder.root / "segments")
    assert "Its tokens cannot be read: " in life_of(folder, "1.1", capsys)
    assert not (folder.root / "segments").exists()


def test_an_older_ledger_has_a_life_without_digest(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    before = life_of(folder, "1.1", capsys)
    make_old(folder.ledger)
    after = life_of(folder, "1.1", capsys)
    assert after.splitlines() == [line for line in before.splitlines() if "digest" not in line]
