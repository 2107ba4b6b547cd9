"""Claims about the training answers that the report shows."""

from __future__ import annotations

import pytest
import run_zoo as zoo

from controller.run_folder.run_folder import RunFolder
from controller.runs.answer_pairs import training_answers


def test_of_the_newest_step_the_answers_of_highest_and_lowest_reward_are_shown(tmp_path):
    (pair,) = training_answers(zoo.make_sampled_run(tmp_path))
    assert [(answer.label, answer.score) for answer in pair.answers] == [
        ("g1.1, step 2, version 0-2", "scored 0.5"), ("g1.0, step 2, version 0", "scored -1")
    ]  # fmt: skip
    assert pair.answers[1].text.endswith("x…")


@pytest.mark.parametrize("damage", [None, b"no ledger at all" * 100])
def test_a_ledger_that_is_missing_or_damaged_gives_no_answers(tmp_path, damage):
    folder = RunFolder.create(tmp_path, "mine")
    if damage is not None:
        folder.ledger.write_bytes(damage)
    assert training_answers(folder) == []
