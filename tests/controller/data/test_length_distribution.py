"""Where the lengths of simulated answers come from: a word, a number, a file of groups, a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from areal_like.errors import UserError
from controller.data import length_distribution
from controller.data.length_distribution import parse_lengths
from controller.ledger.ledger import LEDGER_FILE, Ledger


def written(path: Path, content: object) -> str:
    path.write_text(json.dumps(content))
    return str(path)


@pytest.mark.parametrize("key", ["groups", None])
def test_a_file_gives_its_groups_of_lengths_without_the_empty_ones(tmp_path: Path, key: str | None) -> None:
    groups = [[7, 7], [], [1, 12]]
    found = parse_lengths(written(tmp_path / "a.json", {key: groups} if key else groups), cap=50)
    assert (found.name, found.groups, found.cap, found.scale) == ("a.json", ((7, 7), (1, 12)), 50, 1.0)


def test_a_mean_behind_a_file_scales_its_lengths(tmp_path: Path) -> None:
    text = written(tmp_path / "a.json", [[10, 20], [30]]) + "@5"
    found = parse_lengths(text, cap=50)
    assert (found.name, found.scale) == (text, 0.25)


@pytest.mark.parametrize("content", [[], [[]], [[0, 3]], [[-1]], {"other": [[3]]}, [3], [["many"]], None])
def test_a_file_without_lengths_is_refused_by_name(tmp_path: Path, content: object) -> None:
    text = written(tmp_path / "a.json", content)
    with pytest.raises(UserError, match="the lengths cannot be read") as caught:
        parse_lengths(text, cap=50)
    assert caught.value.where == text


def test_a_number_is_the_mean_of_a_log_normal_distribution_with_its_spread_behind_it() -> None:
    plain, wide = parse_lengths("300", cap=50), parse_lengths("300:1.5", cap=50)
    assert (plain.name, plain.mean, plain.cv, plain.cap) == ("log-normal 300", 300.0, 0.9, 50)
    assert (wide.name, wide.mean, wide.cv) == ("log-normal 300:1.5", 300.0, 1.5)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "many", "300:0", "300:x", "thinking@0"])
def test_what_is_neither_a_file_nor_a_positive_number_is_refused_with_the_setting(text: str) -> None:
    with pytest.raises(UserError, match="is neither a file nor a positive number") as caught:
        parse_lengths(text, cap=50, where="sampling.forced_lengths")
    assert caught.value.where == "sampling.forced_lengths"


def test_the_shipped_distribution_has_a_mean_of_its_own_or_the_one_that_is_asked_for() -> None:
    assert parse_lengths("thinking", cap=1000) == length_distribution.thinking(1000, None)
    assert parse_lengths("thinking@30", cap=1000) == length_distribution.thinking(1000, 30.0)


def test_a_run_gives_the_lengths_of_the_samples_that_its_steps_used(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the ledger cannot be read: the file is missing"):
        parse_lengths(str(tmp_path), cap=50)
    with Ledger(tmp_path, run_id="r") as ledger:
        ledger._db.execute("INSERT INTO groups VALUES (3, 0, 1, 1, 'live', '', '', NULL, NULL, NULL)")
    with pytest.raises(UserError, match="no step of this run has used any samples"):
        parse_lengths(str(tmp_path), cap=50)
    with Ledger(tmp_path, run_id="r") as ledger:
        ledger._db.execute("UPDATE groups SET fate = 'consumed', step = 1")
        ledger._db.execute("INSERT INTO groups VALUES (4, 0, 1, 1, 'consumed', '', '', 2, NULL, NULL)")
        for group, index, tokens in ((3, 0, 9), (3, 1, 0), (4, 0, 5)):
            ledger._db.execute(
                "INSERT INTO samples VALUES (?, ?, 1, ?, 0, 0, 'scored', 1.0, 1, '', '{}', NULL, 0, 0)",
                [group, index, tokens],
            )
    assert (tmp_path / LEDGER_FILE).exists()
    found = parse_lengths(str(tmp_path), cap=50)
    assert (found.name, found.groups) == (tmp_path.name, ((9, 1), (5,)))
