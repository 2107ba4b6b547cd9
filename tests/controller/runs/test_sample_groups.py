"""Claims about samples by prompt."""

from __future__ import annotations

import pytest
import run_zoo as zoo

from areal_like.errors import UserError
from controller.run_folder.run_folder import RunFolder
from controller.runs.sample_groups import GroupReader


@pytest.fixture(scope="module")
def reader(tmp_path_factory) -> GroupReader:
    return GroupReader(zoo.make_sampled_run(tmp_path_factory.mktemp("runs")))


def test_groups_come_newest_first_with_their_rewards(reader):
    groups = reader.groups()
    assert [row.group_id for row in groups] == [3, 2, 1, 0]
    first = groups[-1]
    assert (first.num_samples, first.mean, first.lowest, first.highest) == (2, 0.625, 0.25, 1.0)
    assert (first.step, first.fate, first.is_stored) == (1, "consumed", True)
    assert [(row.step, row.mean) for row in groups if row.fate == "dropped"] == [(None, None)]


def test_groups_of_a_step_are_those_that_it_used(reader):
    assert [row.group_id for row in reader.groups(2)] == [1]
    assert reader.groups(99) == []


def test_all_answers_of_a_group_come_in_order_with_text_and_versions(reader):
    answers = reader.answers(0)
    assert [sample.name for sample in answers] == ["g0.0", "g0.1"]
    assert answers[1].pieces == [(0, "東京"), (1, " five")]
    assert reader.problems == []


def test_a_group_without_a_finished_sample_is_a_mistake_in_words(reader):
    with pytest.raises(UserError, match="group 77 has no finished sample"):
        reader.answers(77)


@pytest.mark.parametrize("damage", [None, b"no ledger at all" * 100])
def test_a_ledger_that_is_missing_or_damaged_is_a_problem_in_words(tmp_path, damage):
    folder = RunFolder.create(tmp_path, "mine")
    if damage is not None:
        folder.ledger.write_bytes(damage)
    with pytest.raises(UserError, match=r"has no ledger|cannot be read"):
        GroupReader(folder).groups()


def test_reading_leaves_nothing_next_to_the_ledger(tmp_path):
    folder = zoo.make_sampled_run(tmp_path)
    before = sorted(path.name for path in folder.root.iterdir())
    reader = GroupReader(folder)
    reader.groups()
    reader.answers(0)
    assert sorted(path.name for path in folder.root.iterdir()) == before
