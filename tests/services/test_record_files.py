"""The files in which judges record answers: named for a run, next to verdicts, and not for a shared service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from odd_server import OddServer, chat, reply

from services.reward.config import RewardSettings
from services.reward.record_files import with_file_next_to, with_record_files
from services.reward.score_file import ScoreSpec, ScoreStatus, score_file

OPTIONS = {"base_url": "http://h/v1", "model": "m", "rubric": "{{ response }}"}
JUDGE: dict[str, Any] = {"kind": "llm_judge", "options": OPTIONS}


def settings(*scorers: dict[str, Any]) -> RewardSettings:
    return RewardSettings.model_validate({"scorers": scorers})


def options_of(reward: RewardSettings) -> list[dict[str, Any]]:
    return [dict(scorer.options) for scorer in reward.scorers]


def test_each_judge_of_a_run_has_a_file_of_its_own_and_others_have_none(tmp_path: Path) -> None:
    named = {**JUDGE, "options": {**JUDGE["options"], "records": "mine.jsonl"}}
    made = options_of(with_record_files(settings(JUDGE, {"kind": "math"}, JUDGE, named), tmp_path))
    folder = tmp_path / "external"
    assert [one.get("records") for one in made] == [
        str(folder / "llm_judge.jsonl"), None, str(folder / "llm_judge-2.jsonl"), "mine.jsonl",
    ]  # fmt: skip


def test_a_shared_service_records_nothing_by_itself_and_ends_no_run() -> None:
    (made,) = options_of(with_record_files(settings(JUDGE), None))
    assert "records" not in made
    assert made["on_exhausted"] == "fail"


def test_a_file_of_verdicts_has_its_answers_next_to_it(tmp_path: Path) -> None:
    made = options_of(with_file_next_to(settings(JUDGE, {"kind": "math"}), tmp_path / "v.jsonl"))
    assert [one.get("records") for one in made] == [str(tmp_path / "v.jsonl.external.jsonl"), None]


@pytest.mark.processes
def test_a_file_is_scored_again_from_its_records_without_the_server(tmp_path: Path) -> None:
    server = OddServer(lambda n, h, asked: reply(h, chat(f'{{"score": {len(asked["messages"][0]["content"])}}}')))
    (tmp_path / "rows.jsonl").write_text('{"response": "abc"}\n{"response": "abcd"}\n')
    options = {**JUDGE["options"], "base_url": f"{server.url}/v1"}

    def scored(name: str, **more: Any) -> ScoreStatus:
        spec = ScoreSpec("llm_judge", tmp_path / "rows.jsonl", tmp_path / name, 1, {**options, **more})
        return score_file(spec, lambda status: None)

    first = scored("one.jsonl")
    server.close()
    again = scored("two.jsonl", record="replay", records=str(tmp_path / "one.jsonl.external.jsonl"))
    assert first.totals.mean_value == again.totals.mean_value == 0.35
    assert len(server.asked) == 2
