"""Claims about answers as the page shows them."""

from __future__ import annotations

import pytest
import run_zoo as zoo

from controller.dashboard.sample_view import answers_content, cut, groups_content
from controller.runs.sample_groups import GroupReader
from controller.runs.sample_page import MAX_CHARS


@pytest.fixture(scope="module")
def reader(tmp_path_factory) -> GroupReader:
    return GroupReader(zoo.make_sampled_run(tmp_path_factory.mktemp("runs")))


def test_an_answer_is_cut_by_version_and_carries_its_facts(reader):
    content = answers_content(reader, 0)
    assert content["prompt"] == "<bos>2+2="
    answer = content["answers"][1]
    assert answer["parts"] == [{"title": "", "spans": [["0", "東京"], ["1", " five"]]}]
    assert answer["components"] == [["correct", "0.25"], ["format", "1"]]
    assert {"version 0-1", "12 tokens", "stop", "stale by 0", "rollout-0"} <= set(answer["facts"])


def test_groups_can_be_sent_as_json(reader):
    (row,) = groups_content(reader, 2)["groups"]
    assert row == {"group_id": 1, "step": 2, "fate": "consumed", "num_samples": 2, "mean": row["mean"],
                   "lowest": row["lowest"], "highest": row["highest"], "is_stored": True}  # fmt: skip


def test_text_of_a_model_is_printable_and_bounded(reader):
    texts = [
        span
        for answer in answers_content(reader, 1)["answers"]
        for part in answer["parts"]
        for _, span in part["spans"]
    ]
    assert any(zoo.NASTY[:5] in one or "\\x" in one for one in texts)
    assert all(character.isprintable() or character in "\n\t" for one in texts for character in one)
    long = cut("x" * (MAX_CHARS + 500))
    assert len(long) < MAX_CHARS + 200
    assert "500 characters more" in long
