"""Prompts made out of several columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from areal_like.errors import UserError
from controller.config.run_config import RunConfig
from controller.config.validation.run import cross_check
from controller.data.table import Table, load_train

TASK = {"text": "Add one.", "test_list": ["assert f(1) == 2", "assert f(2) == 3"], "code": "def f(x): return x + 1"}


def config_of(**train: Any) -> RunConfig:
    return RunConfig.model_validate({"data": {"train": train}})


def rows_of(tmp_path: Path, *rows: object, **train: Any) -> Table:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_train(config_of(path=str(file), columns={"answer": None}, **train))


def test_a_prompt_of_several_columns_and_the_columns_stay(tmp_path: Path) -> None:
    row = rows_of(tmp_path, TASK, template="{{ text }}\n{{ test_list | join('\n') }}\n")[0]
    assert row == {"prompt": "Add one.\nassert f(1) == 2\nassert f(2) == 3\n", **TASK}


def test_a_column_prompt_may_be_wrapped(tmp_path: Path) -> None:
    assert rows_of(tmp_path, {"prompt": "why?"}, template="Say {{ prompt }}")[0] == {"prompt": "Say why?"}


def test_a_column_named_like_a_method_is_the_column(tmp_path: Path) -> None:
    row = {"task": {"items": "a, b", "keys": "c"}}
    assert rows_of(tmp_path, row, template="{{ task.items }} {{ task.keys }}")[0]["prompt"] == "a, b c"


def test_a_template_reaches_no_python(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be filled in"):
        rows_of(tmp_path, TASK, template="{{ text.__class__.__mro__[1].__subclasses__() }}")


def test_what_a_row_holds_is_not_read_as_a_template(tmp_path: Path) -> None:
    row = {"text": "{{ secret }} {% for %}", "test_list": []}
    assert rows_of(tmp_path, row, template="{{ text }}")[0]["prompt"] == "{{ secret }} {% for %}"


@pytest.mark.parametrize("template", ["{{ question }}", "{{ test_list[7] }}", "{{ text.a.b }}", "{{ text + 1 }}"])
def test_a_row_that_does_not_fit_is_refused_with_its_place(tmp_path: Path, template: str) -> None:
    with pytest.raises(
        UserError,
        match=r"rows.jsonl:1: the template cannot be filled in .* use only the columns of the row: text, test_list",
    ):
        rows_of(tmp_path, TASK, template=template)


def test_an_empty_prompt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is empty"):
        rows_of(tmp_path, TASK, template="{{ '' }}")


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"template": "{{ text"}, "is not a valid Jinja template"),
        ({"template": "{{ text }}", "columns": {"prompt": "text"}}, "defines the prompt, but"),
    ],
)
def test_a_template_that_cannot_work_is_reported_before_the_rows_are_read(train: dict[str, Any], words: str) -> None:
    problems = cross_check(config_of(path="/nowhere/rows.jsonl", **train))
    assert any(words in problem.what and problem.keys[0] == "data.train.template" for problem in problems), problems
