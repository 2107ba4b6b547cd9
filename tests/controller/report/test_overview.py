"""Key numbers of a report that other tests of the page do not show."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from areal_like.external.records import AnswerRecords, records_file
from controller.report.overview import _external
from controller.run_folder.run_folder import RunFolder


def test_requests_tokens_and_costs_of_each_external_model_are_shown(tmp_path: Path) -> None:
    data: Any = SimpleNamespace(folder=RunFolder(tmp_path))
    assert _external(data) == []
    for name, cost in (("llm_judge", 0.25), ("llm_judge", 0.5), ("model-helper", 0.0)):
        AnswerRecords(records_file(tmp_path, name)).add(
            f"{name}{cost}", model="m", tokens_in=1000, tokens_out=50, cost=cost, seconds=1.0, request=None, reply=None
        )
    assert [(one.label, one.value, one.note) for one in _external(data)] == [
        ("llm_judge", "2", "answers of an external model; 2,100 tokens, cost 0.75"),
        ("model-helper", "1", "answers of an external model; 1,050 tokens"),
    ]
